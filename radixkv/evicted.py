"""Which prefixes were evicted lately, in bounded memory: what `explain` needs, and nothing decides by.

A record hangs under the place where the evicted run began: the serial number of the prefix it continued, and its first
block of tokens. Serial numbers are never reused, so a record cannot be taken for another prefix's. Records are only
kept in their order; they are looked up by reading all of them, since evictions are many and questions few.
"""

from collections import deque
from collections.abc import Hashable
from typing import TypeAlias

from radixkv.tokens import TOKEN_BYTES, common_units

# A prefix: the serial of the node that ends there, or the typed namespace where it is empty.
Place: TypeAlias = Hashable


class EvictedPrefixes:
    """The last `max_runs` evicted runs, `max_tokens` tokens in all at most; the oldest go first. Not thread-safe."""

    __slots__ = ("_max_bytes", "_max_runs", "_num_bytes", "_records", "_width")

    def __init__(self, width: int, *, max_runs: int = 4096, max_tokens: int = 1 << 20) -> None:
        self._width = width
        self._max_runs = max_runs
        self._max_bytes = max_tokens * TOKEN_BYTES
        self._num_bytes = 0
        self._records: deque[tuple[Place, bytearray, int]] = deque()  # (place, the run's tokens, the serial of its end)

    def record(self, leaf: int, place: Place, run: bytearray, end: int) -> None:
        """`run` of `leaf` was evicted; it continued `place`, and ended at serial `end`. O(1) amortised; keeps `run`."""
        if len(run) > self._max_bytes:
            del run[self._max_bytes - self._max_bytes % self._width :]
        records = self._records
        records.append((place, run, end))
        self._num_bytes += len(run)
        while len(records) > self._max_runs or self._num_bytes > self._max_bytes:
            self._num_bytes -= len(records.popleft()[1])

    def match(self, place: Place, key: bytes, pos: int) -> int:
        """How many whole blocks of `key` from byte `pos` on, which continues `place`, were evicted. O(records)."""
        width = self._width
        latest = {(place, bytes(run[:width])): (run, end) for place, run, end in self._records}
        num = 0
        while record := latest.get((place, key[pos : pos + width])):
            run, place = record
            common = common_units(key, pos, run, width)
            num += common
            pos += common * width
            if common * width < len(run):
                break
        return num

    def forget(self, place: Place) -> None:
        """Drop the records that continue `place`; those behind them can no longer be reached. O(records)."""
        self._records = deque(record for record in self._records if record[0] != place)
        self._num_bytes = sum(len(run) for _, run, _ in self._records)

    def clear(self) -> None:
        """Drop every record."""
        self._records.clear()
        self._num_bytes = 0
