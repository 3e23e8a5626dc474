"""How soon cached blocks are used again, by class and age, learned as it happens. Knows nothing of trees or of time.

Age is counted in requests since the last use. Of each class and bin of ages two things are counted: blocks that were used
again at that age, and block-requests that passed at it. Their quotient is a hazard, the chance of a use per request.

What a block is worth is not its hazard now but the best that keeping it can bring: over all ages T up to which it might be
kept, the greatest chance of a use by then per request that it stays. That is its Gittins index (Gittins 1979).
"""

from array import array
from math import sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Integers = npt.NDArray[np.int64]

NUM_USES = 7  # buckets: 1, 2, 3, 4-7, 8-15, 16-31, 32 and more uses
NUM_SIZES = 6  # buckets: 0-1, 2-7, 8-31, 32-127, 128-511, 512 and more new blocks
NUM_CLASSES = NUM_USES * NUM_SIZES
_NUM_BINS = 40  # half octaves of age: bin b begins at age 2^(b/2) - 1, the last one has no end
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
    return min(2 * octave + half, _NUM_BINS - 1)


_EDGES = [2 ** (b / 2) - 1 for b in range(_NUM_BINS + 1)]
_WIDTHS = [end - start for start, end in zip(_EDGES, _EDGES[1:], strict=False)]
BINS = bytes(map(age_bin, range(1 << 14)))  # of the ages that come often


class Hazards:
    """What is known of each class. Not thread-safe.

    The same calls give the same numbers on every machine: nothing is computed but sums, products and quotients.
    """

    def __init__(self) -> None:
        size = NUM_CLASSES * _NUM_BINS
        self._used = array("d", bytes(8 * size))  # blocks, by class and bin
        # Of what was used or settled: blocks by the bin in which they ended, and the ages they reached in it. Those that
        # were accounted for before are taken off, so that only what came after remains.
        self._ends = array("d", bytes(8 * size))
        self._parts = array("d", bytes(8 * size))
        self._num_blocks = self._num_nodes = 0.0  # that were used again
        self._learned: "tuple[Floats, Floats] | None" = None  # blocks used, block-requests spent, by (class, bin)
        self.index: list[list[float]] | None = None
        """By class and bin of age; None until something was used again."""

    def spend(self, kind: int, start: int, end: int, num_blocks: int) -> None:
        """Blocks of class `kind` passed from age `start` to age `end` unused."""
        ends, parts = self._ends, self._parts
        i = kind * _NUM_BINS
        b = BINS[end] if end < len(BINS) else age_bin(end)
        ends[i + b] += num_blocks
        parts[i + b] += num_blocks * (end - _EDGES[b])
        if start:
            b = BINS[start] if start < len(BINS) else age_bin(start)
            ends[i + b] -= num_blocks
            parts[i + b] -= num_blocks * (start - _EDGES[b])

    def use(self, kind: int, start: int, age: int, num_blocks: int, num_nodes: int) -> None:
        """Blocks of class `kind`, of so many nodes, are used at `age`; they are accounted for up to age `start`."""
        self.spend(kind, start, age, num_blocks)
        b = BINS[age] if age < len(BINS) else age_bin(age)
        self._used[kind * _NUM_BINS + b] += num_blocks
        self._num_blocks += num_blocks
        self._num_nodes += num_nodes

    def settle(self, kinds: "Integers", starts: "Integers", ages: "Integers", num_blocks: "Integers") -> None:
        """As `spend`, of many at once. About 0.1 us each."""
        import numpy as np

        edges = np.array(_EDGES)
        for bound, sign in ((ages, 1), (starts, -1)):
            fractions, exponents = np.frexp(bound + 1.0)
            bins = np.minimum(2 * exponents - 2 + (fractions >= _BETA), _NUM_BINS - 1)
            places = kinds * _NUM_BINS + bins
            weights = sign * num_blocks
            for column, values in ((self._ends, weights), (self._parts, weights * (bound - edges[bins]))):
                flat = np.frombuffer(column)
                flat += np.bincount(places, values, len(flat))

    def relearn(self, elapsed: int) -> None:
        """Make the index anew from all that is known; `elapsed` requests after it was made before. About 1 ms.

        A class is taken for what all of them are like, then for what those with as many uses are like, as far as too
        little was seen of it: first how often its blocks are used, then at which ages.
        """
        import numpy as np

        shape = NUM_USES, NUM_SIZES, _NUM_BINS
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
        base = np.empty(_NUM_BINS)
        for b, (num, time) in enumerate(zip(all_used.tolist(), all_spent.tolist(), strict=True)):
            base[b] = hazard = (num + prior) / (time + prior / level)
            level = (hazard + level) / 2
        by_uses = _fit(used.sum(1), spent.sum(1), base, prior)
        hazards = _fit(used, spent, by_uses[:, None], prior)
        self.index = gittins_index(hazards.reshape(NUM_CLASSES, _NUM_BINS), widths)
        kept = 0.5 ** (elapsed / _HALF_LIFE)
        self._learned = used * kept, spent * kept
        self._num_blocks *= kept
        self._num_nodes *= kept


def _fit(used: "Floats", spent: "Floats", parent: "Floats", prior: float) -> "Floats":
    """Hazards by bin: those of the parent, at the level and then of the shape that was seen."""
    seen, expected = used.cumsum(-1)[..., -1:], (spent * parent).cumsum(-1)[..., -1:]
    level = (seen + prior) / (expected + prior)
    fitted: Floats = (used + prior / 2) / (spent + prior / (2 * level * parent))
    return fitted


def gittins_index(hazards: "Floats", widths: "Floats") -> list[list[float]]:
    """By class, and bin in which a block is now: the greatest chance of a use per request, over all bins to keep it to.

    `hazards`: (classes, bins), constant within a bin; `widths`: (bins,), in requests. A bin counts as a whole.
    O(classes x bins).
    """
    import numpy as np

    growth = 1 + hazards * widths / 64
    with np.errstate(over="ignore"):
        for _ in range(6):
            growth = growth * growth
    unused = 1 / growth  # e^(-hazard x width), but the same on every machine
    stays = (1 - unused) / hazards  # requests, of what gets to the bin
    return [_index_of_class(*columns) for columns in zip(unused.tolist(), stays.tolist(), strict=True)]


def _index_of_class(unused: list[float], stays: list[float]) -> list[float]:
    """From the last bin to the first: keeping on through a stretch of later bins pays, as long as it has more to give
    than what was gathered so far."""
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
