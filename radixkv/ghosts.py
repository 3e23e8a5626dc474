"""Evicted runs that a policy remembers, found again by what they follow. Knows no tokens: a sum of each block.

A run hangs under the place that it continues, a namespace or the serial of the prefix before it, by the sum of its
first block; what was evicted behind it hangs under the serial of its own end. Serials are never used twice, so evicted
runs form chains that are as exact as those of the tree, but for blocks whose sums of 32 bits agree by chance.
"""

from array import array
from collections.abc import Iterable
from random import Random
from struct import Struct

from radixkv.evicted import Place
from radixkv.ring import Ring
from radixkv.tokens import TOKEN_BYTES

NO_GHOST = -1
_SUM_BYTES = 4
_SUM_BITS = 8 * _SUM_BYTES
_first = Struct("<I").unpack_from  # the first of many sums, in a tuple


class Ghosts:
    """Runs of evicted blocks, by number, in the order in which they went. Not thread-safe.

    4 bytes a block, and some 400 a run. Numbers are used again.
    """

    def __init__(self, width: int) -> None:
        """`width`: bytes of a block's tokens."""
        import numpy as np  # here: importing radixkv stays fast

        random = Random(0)
        self._width = width
        self._frombuffer, self._words = np.frombuffer, width // TOKEN_BYTES
        self._factors = np.array([random.getrandbits(32) | 1 for _ in range(self._words)], np.uint32)
        self.lengths = array("i")  # blocks, 0 of a number that stands for nothing
        self.ends = array("q")  # the serial of the prefix that ends with the run
        self.num_blocks = 0
        self._order = Ring()
        self._unused = array("i")
        # Ints and bytes in lists and dicts, so that garbage collections have nothing to walk
        self._keys: list[int] = []  # the place << 32 | the sum of the first block
        self._sums: list[bytes] = []
        self._numbers: dict[int, int] = {}  # key -> number
        self._nums: dict[int, int] = {}  # serial or number of a namespace -> how many runs continue it
        self._names: dict[Place, int] = {}  # of the namespaces that are places, below 0
        self._named: dict[int, Place] = {}  # the other way round
        self._last_name = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def chain(self, place: Place, key: "bytes | bytearray", pos: int, end: int) -> list[tuple[int, int]]:
        """The runs that continue `place` as `key[pos:end]`, whole blocks, does; of each, how many blocks agree.

        All but the last agree as a whole. 2 us at most where there are none, else as much again and 1 ns a token.
        """
        found: list[tuple[int, int]] = []
        number = place if type(place) is int else self._names.get(place, 0)
        if pos >= end or number not in self._nums:
            return found
        numbers, ends = self._numbers, self.ends
        first = self._sum(key, pos, pos + self._width)
        ghost = numbers.get(number << _SUM_BITS | _first(first)[0], NO_GHOST)
        if ghost == NO_GHOST:
            return found
        sums, at = self._sum(key, pos, end), 0
        while ghost != NO_GHOST:
            run = self._sums[ghost]
            if not sums.startswith(run, at):
                found.append((ghost, _num_common(sums[at : at + len(run)], run)))
                break
            found.append((ghost, len(run) // _SUM_BYTES))
            at += len(run)
            if at == len(sums):
                break
            ghost = numbers.get(ends[ghost] << _SUM_BITS | _first(sums, at)[0], NO_GHOST)
        return found

    def continues(self, ghost: int, serial: int) -> bool:
        """Whether `ghost` stands for a run that continues the prefix of that serial."""
        return self._keys[ghost] >> _SUM_BITS == serial

    def num_behind(self, place: Place) -> int:
        """How many runs continue `place`."""
        return self._nums.get(self._number_of(place), 0)

    def first(self) -> int:
        """What was evicted first; there must be one."""
        return self._order.first()

    def add(self, place: Place, run: "bytes | bytearray", end: int) -> int:
        """Remember `run`, which continued `place` and ended at serial `end`; returns its number.

        A run that stands there already, as sums agree by chance, is forgotten. About 2 us and 1 ns a token.
        """
        if self._unused:
            ghost = self._unused.pop()
        else:
            ghost = len(self.lengths)
            self.lengths.append(0)
            self.ends.append(0)
            self._keys.append(0)
            self._sums.append(b"")
        self._order.add(ghost)
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
        self._unset(ghost)
        self._set(ghost, place, self._sums[ghost][num * _SUM_BYTES :])

    def remove(self, ghost: int) -> None:
        """Forget it, or it is cached again."""
        self._unset(ghost)
        self.lengths[ghost] = self._keys[ghost] = 0
        self._sums[ghost] = b""
        self._order.discard(ghost)
        self._unused.append(ghost)

    def behind(self, places: "Iterable[Place]") -> list[int]:
        """All that continue one of `places`, or one another from there. O(all)."""
        families: dict[int, list[int]] = {}
        for key, ghost in self._numbers.items():
            families.setdefault(key >> _SUM_BITS, []).append(ghost)
        found = [ghost for place in places for ghost in families.get(self._number_of(place), ())]
        for ghost in found:  # grows meanwhile
            found += families.get(self.ends[ghost], ())
        return found

    def names(self) -> list[Place]:
        """The namespaces that evicted runs continue; all other runs are behind those."""
        return list(self._names)

    def _number_of(self, place: Place) -> int:
        """A serial, or the number of a namespace, 0 where nothing continues that."""
        return place if type(place) is int else self._names.get(place, 0)

    def _set(self, ghost: int, place: Place, sums: bytes) -> None:
        number = place if type(place) is int else self._add_name(place)
        self._nums[number] = self._nums.get(number, 0) + 1
        key = number << _SUM_BITS | _first(sums)[0]
        if key in self._numbers:
            self.remove(self._numbers[key])
        self._keys[ghost], self._sums[ghost], self._numbers[key] = key, sums, ghost
        self.lengths[ghost] = num = len(sums) // _SUM_BYTES
        self.num_blocks += num

    def _add_name(self, name: Place) -> int:
        """The number of a namespace that a run continues."""
        number = self._names.get(name, 0)
        if not number:
            self._last_name -= 1
            number = self._names[name] = self._last_name
            self._named[number] = name
        return number

    def _unset(self, ghost: int) -> None:
        key = self._keys[ghost]
        del self._numbers[key]
        self.num_blocks -= self.lengths[ghost]
        number = key >> _SUM_BITS
        num = self._nums[number]
        if num > 1:
            self._nums[number] = num - 1
            return
        del self._nums[number]
        if number < 0:
            del self._names[self._named.pop(number)]

    def _sum(self, buffer: "bytes | bytearray", start: int, end: int) -> bytes:
        """Sums of whole blocks, 4 bytes each. About 2 us and 1 ns a token; a block of one token is its own sum."""
        if self._words == 1:
            return bytes(buffer[start:end])
        tokens = self._frombuffer(buffer, "<u4", (end - start) // TOKEN_BYTES, start)
        sums: bytes = (tokens.reshape(-1, self._words) @ self._factors).tobytes()
        return sums


def _num_common(sums: bytes, others: bytes) -> int:
    """How many sums agree, from the first on."""
    size = min(len(sums), len(others))
    differ = int.from_bytes(sums[:size], "little") ^ int.from_bytes(others[:size], "little")
    if not differ:
        return size // _SUM_BYTES
    return ((differ & -differ).bit_length() - 1) // _SUM_BITS
