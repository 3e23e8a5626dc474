"""Which runs of tokens came before, behind whatever prefix. Knows nothing of requests' text or of caches.

Windows of 16 tokens are hashed, and of every 16 neighbours the one with the smallest hash is remembered, so that two
equal runs of 31 tokens have a remembered window in common (winnowing: Schleimer, Wilkerson, Aiken, SIGMOD 2003).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
_Hashes = npt.NDArray[np.uint64]

MIN_RUN = 32  # tokens; shorter repeats are chance
_WINDOW = 16  # tokens
_NEIGHBOURS = 16  # windows
_REACH = _WINDOW + _NEIGHBOURS - 1  # tokens, in which a window is remembered for sure
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_INVERSE = pow(_BASE, -1, 1 << 64)


@dataclass(frozen=True, slots=True)
class Repeat:
    """Tokens [start, end) of a sequence are those of an earlier one from `offset` on."""

    start: int
    end: int
    sequence: int
    offset: int

    def __len__(self) -> int:
        return self.end - self.start


class Repeats:
    """The sequences so far, searched for runs of at least `MIN_RUN` tokens.

    What is found is compared token by token. Of equal windows the latest counts, so a run may be found in parts, or
    in the latest of several places. Memory: some 15 bytes a token that was added; a token costs about 0.1 us.
    """

    def __init__(self, sequence: Callable[[int], Ids]) -> None:
        """`sequence` gives the tokens of one that was added, by its number."""
        self._sequence = sequence
        self._places: dict[int, int] = {}  # hash of a window -> sequence << 32 | position
        self._powers = _powers(_BASE, 1024)
        self._inverses = _powers(_INVERSE, 1024)

    def add(self, number: int, tokens: Ids, start: int) -> None:
        """Remember the tokens from `start` on: those before are known from the sequences that it shares them with."""
        begin = max(0, start - _REACH + 1)
        positions, hashes = self._remembered(tokens[begin:])
        base = number << 32 | begin
        self._places.update(zip(hashes.tolist(), (positions + base).tolist(), strict=True))

    def find(self, tokens: Ids, start: int) -> list[Repeat]:
        """The runs in tokens[start:] that came before, in order, none overlapping."""
        found: list[Repeat] = []
        covered = start  # all before is settled
        positions, hashes = self._remembered(tokens[start:])
        places = self._places
        for position, window in zip((positions + start).tolist(), hashes.tolist(), strict=True):
            if position + _WINDOW <= covered or (place := places.get(window)) is None:
                continue
            number, offset = place >> 32, place & 0xFFFFFFFF
            earlier = self._sequence(number)
            if not np.array_equal(tokens[position : position + _WINDOW], earlier[offset : offset + _WINDOW]):
                continue  # another window of that hash
            begin = position - _common_end(tokens[start:position], earlier[:offset])
            end = position + common_length(tokens[position:], earlier[offset:])
            if end > covered and end - begin >= MIN_RUN:
                begin = max(begin, covered)
                found.append(Repeat(begin, end, number, offset - position + begin))
                covered = end
        return found

    def _remembered(self, tokens: Ids) -> tuple[npt.NDArray[np.int64], _Hashes]:
        """The windows to remember: where they begin, and their hashes."""
        num = len(tokens) - _WINDOW + 1
        if num < _NEIGHBOURS:
            return np.empty(0, np.int64), np.empty(0, np.uint64)
        if len(tokens) > len(self._powers):
            self._powers = _powers(_BASE, 2 * len(tokens))
            self._inverses = _powers(_INVERSE, 2 * len(tokens))
        # A window's polynomial is a difference of prefix sums, shifted down to the power of zero.
        sums = np.zeros(len(tokens) + 1, np.uint64)
        np.cumsum(_mix(tokens.astype(np.uint64)) * self._powers[: len(tokens)], out=sums[1:])
        hashes = _mix((sums[_WINDOW:] - sums[:-_WINDOW]) * self._inverses[:num])
        least = _sliding(np.minimum, hashes, _NEIGHBOURS)  # of each neighbourhood
        padding = np.zeros(_NEIGHBOURS - 1, np.uint64)
        # A window is the least of a neighbourhood iff it equals the greatest least of those that it is in.
        greatest = _sliding(np.maximum, np.concatenate([padding, least, padding]), _NEIGHBOURS)
        chosen = np.flatnonzero(greatest == hashes)
        return chosen, hashes[chosen]


def common_length(first: npt.NDArray[np.int32], second: npt.NDArray[np.int32]) -> int:
    """How many tokens both begin with. O(that number)."""
    num = min(len(first), len(second))
    start, step = 0, 64
    while start < num:
        end = min(num, start + step)
        different = np.flatnonzero(first[start:end] != second[start:end])
        if len(different):
            return start + int(different[0])
        start, step = end, 2 * step
    return num


def _common_end(first: Ids, second: Ids) -> int:
    return common_length(first[::-1], second[::-1])


def _sliding(least: np.ufunc, values: _Hashes, size: int) -> _Hashes:
    """The least (or greatest) of each `size` neighbours, a power of two."""
    width = 1
    while width < size:
        values = least(values[:-width], values[width:])
        width *= 2
    return values


def _mix(values: _Hashes) -> _Hashes:
    values = (values + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(31)
    return values * np.uint64(0x94D049BB133111EB)


def _powers(base: int, num: int) -> _Hashes:
    factors = np.full(num, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)
