"""Evicted runs that a policy remembers, found again by what they follow. Knows no order, and no tokens: a sum a block.

A run hangs under the place that it continues, a namespace or the serial of the prefix before it, by the sum of its first
block; what was evicted behind it hangs under the serial of its own end. Serials are never used twice, so evicted runs
form chains that are as exact as those of the tree, but for blocks whose sums of 32 bits agree by chance.
"""

from array import array
from collections.abc import Iterable
from random import Random

from radixkv.evicted import Place
from radixkv.tokens import TOKEN_BYTES, common_units

NO_GHOST = -1
_SUM_BYTES = 4


class Ghosts:
    """Runs of evicted blocks by number; numbers are used again. 4 bytes a block and some 400 a run. Not thread-safe."""

    def __init__(self, width: int) -> None:
        """`width`: bytes of a block's tokens."""
        import numpy as np  # here: importing radixkv stays fast

        random = Random(0)
        self._width = width
        self._frombuffer, self._words = np.frombuffer, width // TOKEN_BYTES
        self._factors = np.array([random.getrandbits(32) | 1 for _ in range(self._words)], np.uint32)
        self.lengths = array("i")  # blocks, 0 of a number that is not in use
        self.ends = array("q")  # the serial of the prefix that ends with the run
        self.num_blocks = 0
        self._places: dict[int, Place] = {}
        self._sums: dict[int, bytes] = {}
        self._numbers: dict[tuple[Place, bytes], int] = {}  # (place, sum of the first block)
        self._unused = array("i")

    def __len__(self) -> int:
        return len(self._sums)

    def find(self, place: Place, key: "bytes | bytearray", pos: int, end: int) -> tuple[int, int]:
        """The run that continues `place` as `key[pos:end]` does, and how many blocks agree; (NO_GHOST, 0) for none."""
        first = self._sum(key, pos, pos + self._width)
        ghost = self._numbers.get((place, first), NO_GHOST)
        if ghost == NO_GHOST or self.lengths[ghost] == 1:
            return ghost, int(ghost != NO_GHOST)
        sums = self._sum(key, pos, min(end, pos + self.lengths[ghost] * self._width))
        return ghost, common_units(sums, 0, self._sums[ghost], _SUM_BYTES)

    def place(self, ghost: int) -> Place:
        """What the run continues."""
        return self._places[ghost]

    def occupant(self, place: Place, run: "bytes | bytearray") -> int:
        """What stands where `run` would be added, NO_GHOST for nothing: only if sums agree by chance."""
        return self._numbers.get((place, self._sum(run, 0, self._width)), NO_GHOST)

    def add(self, place: Place, run: "bytes | bytearray", end: int) -> int:
        """Remember `run`, which continued `place` and ended at serial `end`; returns its number. O(tokens)."""
        if self._unused:
            ghost = self._unused.pop()
        else:
            ghost = len(self.lengths)
            self.lengths.append(0)
            self.ends.append(0)
        self.ends[ghost] = end
        self._set(ghost, place, self._sum(run, 0, len(run)))
        return ghost

    def extend_upwards(self, ghost: int, place: Place, run: "bytes | bytearray") -> None:
        """What stood before the run was evicted too."""
        sums = self._sum(run, 0, len(run)) + self._sums[ghost]
        self._unset(ghost)
        self._set(ghost, place, sums)

    def cut(self, ghost: int, num: int, place: Place) -> None:
        """The first `num` blocks, not all, are cached again, up to `place`."""
        sums = self._sums[ghost][num * _SUM_BYTES :]
        self._unset(ghost)
        self._set(ghost, place, sums)

    def remove(self, ghost: int) -> None:
        self._unset(ghost)
        self._unused.append(ghost)

    def behind(self, places: "Iterable[Place]") -> list[int]:
        """All that continue one of `places`, or one another from there. O(all)."""
        families: dict[Place, list[int]] = {}
        for ghost, place in self._places.items():
            families.setdefault(place, []).append(ghost)
        found = [ghost for place in places for ghost in families.get(place, ())]
        for ghost in found:  # grows meanwhile
            found += families.get(self.ends[ghost], ())
        return found

    def _set(self, ghost: int, place: Place, sums: bytes) -> None:
        self._places[ghost] = place
        self._sums[ghost] = sums
        self._numbers[place, sums[:_SUM_BYTES]] = ghost
        self.lengths[ghost] = num = len(sums) // _SUM_BYTES
        self.num_blocks += num

    def _unset(self, ghost: int) -> None:
        del self._numbers[self._places.pop(ghost), self._sums.pop(ghost)[:_SUM_BYTES]]
        self.num_blocks -= self.lengths[ghost]
        self.lengths[ghost] = 0

    def _sum(self, buffer: "bytes | bytearray", start: int, end: int) -> bytes:
        """Sums of whole blocks, 4 bytes each. About 2 us and 1 ns a token."""
        tokens = self._frombuffer(buffer, "<u4", (end - start) // TOKEN_BYTES, start)
        sums: bytes = (tokens.reshape(-1, self._words) @ self._factors).tobytes()
        return sums
