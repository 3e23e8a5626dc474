"""How soon cached blocks are used again, by class and age, learned as it happens. Knows nothing of trees or of time.

Age is counted in requests since the last use. Of each class and bin of ages two things are counted: blocks that were used
again at that age, and block-requests that passed at it. Their quotient is a hazard, the chance of a use per request.

What a block is worth is not its hazard now but the best that keeping it can bring: over all ages T up to which it might be
kept, the greatest chance of a use by then per request that it stays. That is its Gittins index (Gittins 1979).
"""

from array import array
from math import ceil, sqrt
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
_PRIOR = 8.0  # what a class takes from its parent counts as so many uses of average size
_HALF_LIFE = 2000.0  # requests after which what was learned counts half
_BETA = sqrt(0.5)


def class_of(uses: int, num_new: int) -> int:
    """The class of what was used so many times, last by a request that brought so many new blocks."""
    used = uses - 1 if uses < 4 else min(uses.bit_length(), NUM_USES - 1)
    return used * NUM_SIZES + min(num_new.bit_length() // 2, NUM_SIZES - 1)


def age_bin(age: int) -> int:
    """The bin of an age."""
    octave = (age + 1).bit_length() - 1
    half = (age + 1) ** 2 >> (2 * octave + 1)
    return min(2 * octave + half, NUM_BINS - 1)


_EDGES = [2 ** (b / 2) - 1 for b in range(NUM_BINS + 1)]
_WIDTHS = [end - start for start, end in zip(_EDGES, _EDGES[1:], strict=False)]


class Hazards:
    """What is known of each class. Not thread-safe.

    The same calls give the same numbers on every machine: nothing is computed but sums, products and quotients.
    """

    def __init__(self) -> None:
        size = NUM_CLASSES * NUM_BINS
        self.log = array("q")
        """What happened since the last count, five numbers each time: of a class, from an age up to which was counted
        already to another, so many blocks passed unused; then those were used again, of so many nodes, 0 if they were not,
        and will not be heard of again."""
        self._used = array("d", bytes(8 * size))  # blocks, by class and bin
        # Blocks by the bin in which what is counted ended, and the ages that they reached in it; those that were counted
        # before are taken off, so that only what came after remains.
        self._ends = array("d", bytes(8 * size))
        self._parts = array("d", bytes(8 * size))
        self._num_blocks = self._num_nodes = 0.0  # that were used again
        self._learned: "tuple[Floats, Floats] | None" = None  # blocks used, block-requests spent, by (class, bin)
        self.index: "Floats | None" = None
        """By class and bin of age; None until something was used again."""

    def pass_unused(self, kinds: "Integers", starts: "Integers", ages: "Integers", num_blocks: "Integers") -> None:
        """Blocks passed from one age to another unused. About 0.1 us each."""
        import numpy as np

        edges = np.array(_EDGES)
        for bound, sign in ((ages, 1), (starts, -1)):
            bins = _bins(bound)
            places = kinds * NUM_BINS + bins
            weights = sign * num_blocks
            for column, values in ((self._ends, weights), (self._parts, weights * (bound - edges[bins]))):
                flat = np.frombuffer(column)
                flat += np.bincount(places, values, len(flat))

    def count_log(self) -> None:
        """Count what is in the log. About 0.2 us each time."""
        import numpy as np

        kinds, starts, ages, num_blocks, num_nodes = np.array(self.log).reshape(-1, 5).T
        del self.log[:]
        self.pass_unused(kinds, starts, ages, num_blocks)
        used = num_nodes > 0
        flat = np.frombuffer(self._used)
        flat += np.bincount((kinds * NUM_BINS + _bins(ages))[used], num_blocks[used], len(flat))
        self._num_blocks += float(num_blocks[used].sum())
        self._num_nodes += float(num_nodes.sum())

    def relearn(self, elapsed: int) -> None:
        """Make the index anew from all that is known; `elapsed` requests after it was made before. About 1 ms.

        A class is taken for what all of them are like, then for what those with as many uses are like, as far as too
        little was seen of it: first how often its blocks are used, then at which ages.
        """
        import numpy as np

        self.count_log()
        shape = NUM_USES, NUM_SIZES, NUM_BINS
        widths = np.array(_WIDTHS)
        used, ends, parts = (np.array(column).reshape(shape) for column in (self._used, self._ends, self._parts))
        passed = ends[..., ::-1].cumsum(-1)[..., ::-1] - ends  # blocks that left the bin at its end
        spent = np.maximum(passed * widths + parts, 0)
        for column in (self._used, self._ends, self._parts):
            np.frombuffer(column)[:] = 0
        if self._learned is not None:
            used += self._learned[0]
            spent += self._learned[1]
        self._learned = used, spent
        if not self._num_nodes:
            return
        prior = _PRIOR * self._num_blocks / self._num_nodes
        all_used, all_spent = used.sum((0, 1)), spent.sum((0, 1))
        level = float(all_used.cumsum()[-1] / all_spent.cumsum()[-1])
        base = np.empty(NUM_BINS)
        for b, (num, time) in enumerate(zip(all_used.tolist(), all_spent.tolist(), strict=True)):
            base[b] = hazard = (num + prior) / (time + prior / level)
            level = (hazard + level) / 2
        by_uses = _fit(used.sum(1), spent.sum(1), base, prior)
        hazards = _fit(used, spent, by_uses[:, None], prior).reshape(NUM_CLASSES, NUM_BINS)
        unused = unused_share(hazards * widths)
        stays = (1 - unused) / hazards
        self.index = np.array([*map(gittins_index, unused.tolist(), stays.tolist())])
        kept = 0.5 ** (elapsed / _HALF_LIFE)
        self._learned = used * kept, spent * kept
        self._num_blocks *= kept
        self._num_nodes *= kept


def _bins(ages: "Integers") -> "Integers":
    """The bins of ages."""
    import numpy as np

    fractions, exponents = np.frexp(ages + 1.0)
    bins: Integers = np.minimum(2 * exponents - 2 + (fractions >= _BETA), NUM_BINS - 1)
    return bins


def _fit(used: "Floats", spent: "Floats", parent: "Floats", prior: float) -> "Floats":
    """Hazards by bin: those of the parent, at the level and then of the shape that was seen."""
    seen, expected = used.cumsum(-1)[..., -1:], (spent * parent).cumsum(-1)[..., -1:]
    level = (seen + prior) / (expected + prior)
    fitted: Floats = (used + prior / 2) / (spent + prior / (2 * level * parent))
    return fitted


def unused_share(hazards: "Floats") -> "Floats":
    """What stays unused through a time with so many uses a block: e^-hazards, but the same on every machine."""
    import numpy as np

    growth = 1 + hazards / 64
    with np.errstate(over="ignore"):
        for _ in range(6):
            growth = growth * growth
    return 1 / growth


def gittins_index(unused: list[float], stays: list[float]) -> list[float]:
    """By bin in which a block is now: the greatest chance of a use per request, over all bins to keep it to.

    `unused`: the share that is not used in each bin, of what gets to it; `stays`: for how many requests that is there on
    the average. A bin counts as a whole. O(bins): from the last bin to the first, keeping on through a stretch of later
    bins pays as long as it has more to give per request than what was gathered so far.
    """
    index = [0.0] * len(unused)
    stretches: list[tuple[float, float, float]] = []  # (chance of a use, requests it stays, 1 - chance), nearest last
    for b in range(len(unused) - 1, -1, -1):
        left, cost = unused[b], stays[b]
        gain = 1 - left
        while stretches and stretches[-1][0] * cost > gain * stretches[-1][1]:
            more, longer, rest = stretches.pop()
            gain += left * more
            cost += left * longer
            left *= rest
        stretches.append((gain, cost, left))
        index[b] = gain / cost
    return index
