"""How soon cached blocks are used again, by class and age, learned as it happens. Knows nothing of trees or of time.

Age is counted in requests since the last use. Of each class and bin of ages two things are counted: blocks that were
used again at that age, and block-requests that passed at it. Their quotient is a hazard, the chance of a use a request.

What a block is worth is not its hazard now but the best that keeping it can bring: over all ages up to which it might
be kept, the greatest chance of a use by then per request that it stays. That is its Gittins index (Gittins 1979).
"""

from array import array
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Integers = npt.NDArray[np.int64]

NUM_USES = 7  # buckets: 1, 2, 3, 4-7, 8-15, 16-31, 32 and more uses
NUM_SIZES = 6  # buckets: 0-1, 2-7, 8-31, 32-127, 128-511, 512 and more new blocks
NUM_CLASSES = NUM_USES * NUM_SIZES
NUM_BINS = 34  # half octaves of age: bin b begins at age 2^(b/2) - 1, the last one, from 92,681 on, has no end
ROW = 6  # numbers of an event in the log
_PRIOR = 8.0  # uses of average size, as many as which a class is taken to be like those that it is one of
_HALF_LIFE = 2000.0  # requests after which what was learned counts half
_HALF_OCTAVE = 0.5**0.5


def class_of(uses: int, num_new: int) -> int:
    """The class of what was used so many times, last by a request that brought so many new blocks."""
    used = uses - 1 if uses < 4 else min(uses.bit_length(), NUM_USES - 1)
    return used * NUM_SIZES + min(num_new.bit_length() // 2, NUM_SIZES - 1)


def age_bins(ages: "Integers") -> "Integers":
    """The bin of each age."""
    import numpy as np

    fractions, exponents = np.frexp(ages + 1.0)
    bins: Integers = np.minimum(2 * exponents - 2 + (fractions >= _HALF_OCTAVE), NUM_BINS - 1)
    return bins


_EDGES = [2 ** (b / 2) - 1 for b in range(NUM_BINS + 1)]
_WIDTHS = [end - start for start, end in pairwise(_EDGES)]


class Hazards:
    """What is known of each class. Not thread-safe.

    The same events give the same numbers on every machine: nothing is computed but sums, products and quotients.
    """

    def __init__(self) -> None:
        size = NUM_CLASSES * NUM_BINS
        self.log = array("q")
        """Events since the last count, `ROW` numbers each: class, age up to which was counted already, age now, blocks;
        of how many nodes if they are used now, else 0 or less; and by which request."""
        self._used = array("d", bytes(8 * size))  # blocks, by class and bin
        # Blocks by the bin in which what was counted ended, and how far into it; the time in earlier bins follows. What
        # was counted before is taken off, so that only what came after remains.
        self._ends = array("d", bytes(8 * size))
        self._parts = array("d", bytes(8 * size))
        self._num_blocks = self._num_nodes = 0.0  # that were used again
        self._learned: tuple[Floats, Floats] | None = None  # blocks used, block-requests passed, by class and bin
        self.index: Floats | None = None
        """(classes, bins of age); None until something was used again."""

    def count_log(self) -> None:
        """Count the events in the log. About 0.2 us each."""
        if not self.log:
            return
        import numpy as np  # here: importing radixkv stays fast

        kinds, starts, ages, num_blocks, num_nodes, _ = np.array(self.log).reshape(-1, ROW).T.copy()
        del self.log[:]
        self.count(kinds, starts, ages, num_blocks)
        used = num_nodes > 0
        places = (kinds * NUM_BINS + age_bins(ages))[used]
        _add(self._used, places, num_blocks[used])
        self._num_blocks += float(num_blocks[used].sum())
        self._num_nodes += float(num_nodes[used].sum())

    def count(self, kinds: "Integers", starts: "Integers", ages: "Integers", num_blocks: "Integers") -> None:
        """Blocks passed from one age to another. About 0.1 us each."""
        import numpy as np

        bounds, signed = np.concatenate([ages, starts]), np.concatenate([num_blocks, -num_blocks])
        bins = age_bins(bounds)
        places = np.concatenate([kinds, kinds]) * NUM_BINS + bins
        _add(self._ends, places, signed)
        _add(self._parts, places, signed * (bounds - np.array(_EDGES)[bins]))

    def relearn(self, elapsed: int) -> None:
        """Make the index anew from all that was counted; `elapsed` requests after the last time. About 0.4 ms.

        A class is taken to be like all of them, and then like those with as many uses, as far as too little was seen of
        it: first in how often its blocks are used, then in the ages at which they are.
        """
        import numpy as np

        self.count_log()
        shape = NUM_USES, NUM_SIZES, NUM_BINS
        used, ends, parts = (np.array(column).reshape(shape) for column in (self._used, self._ends, self._parts))
        for column in (self._used, self._ends, self._parts):
            np.frombuffer(column)[:] = 0
        widths = np.array(_WIDTHS)
        beyond = ends[..., ::-1].cumsum(-1)[..., ::-1] - ends  # blocks that left the bin at its end
        passed = np.maximum(beyond * widths + parts, 0)
        if self._learned is not None:
            used += self._learned[0]
            passed += self._learned[1]
        self._learned = used, passed
        if not self._num_nodes:
            return
        prior = _PRIOR * self._num_blocks / self._num_nodes
        all_used, all_passed = used.sum((0, 1)), passed.sum((0, 1))
        level = float(all_used.cumsum()[-1] / all_passed.cumsum()[-1])
        base = np.empty(NUM_BINS)
        for b, (num, time) in enumerate(zip(all_used.tolist(), all_passed.tolist(), strict=True)):
            base[b] = hazard = (num + prior) / (time + prior / level)
            level = (hazard + level) / 2  # the next bin is like those before it
        by_uses = _fit(used.sum(1), passed.sum(1), base, prior)
        hazards = _fit(used, passed, by_uses[:, None], prior).reshape(NUM_CLASSES, NUM_BINS)
        unused = unused_share(hazards * widths)
        stays = (1 - unused) / hazards
        self.index = gittins_index(unused, stays)
        kept = 0.5 ** (elapsed / _HALF_LIFE)
        self._learned = used * kept, passed * kept
        self._num_blocks *= kept
        self._num_nodes *= kept


def gittins_index(unused: "Floats", stays: "Floats") -> "Floats":
    """By class and bin in which a block is now: the greatest chance of a use per request, over all bins up to which to
    keep it.

    `unused`: what share of the blocks that get to a bin leaves it unused; `stays`: how many requests they stay in it,
    on the average. All three (classes, bins). From the last bin to the first, the chance of a use up to each later one
    and the requests until then follow from those of the bin behind. About 0.2 ms for 42 classes and 34 bins.
    """
    import numpy as np

    left = np.ascontiguousarray(unused.T)  # else it takes three times as long
    steps = np.stack((1 - left, stays.T), axis=1)  # (bins, 2, classes): chance and requests, of a bin alone
    sums = np.zeros_like(steps)  # the same, from the bin that is looked at up to each
    index = np.empty_like(left)
    for b in range(len(left) - 1, -1, -1):
        ends = sums[b:]
        ends *= left[b, None]
        ends += steps[b]
        (ends[:, 0] / ends[:, 1]).max(0, out=index[b])
    return index.T


def unused_share(uses: "Floats") -> "Floats":
    """What share of the blocks is not used where so many uses a block are expected: e^-uses, but alike everywhere."""
    import numpy as np

    growth = 1 + uses / 64
    with np.errstate(over="ignore"):
        for _ in range(6):
            growth = growth * growth
    return 1 / growth


def _fit(used: "Floats", passed: "Floats", parent: "Floats", prior: float) -> "Floats":
    """Hazards by bin: those of the parent, at the level and then of the shape that was seen."""
    seen, expected = used.cumsum(-1)[..., -1:], (passed * parent).cumsum(-1)[..., -1:]
    level = (seen + prior) / (expected + prior)
    fitted: Floats = (used + prior / 2) / (passed + prior / (2 * level * parent))
    return fitted


def _add(column: "array[float]", places: "Integers", values: "Integers | Floats") -> None:
    import numpy as np

    flat = np.frombuffer(column)
    flat += np.bincount(places, values, len(flat))
