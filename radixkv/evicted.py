"""Which prefixes were evicted lately, in bounded memory: what `explain` needs, and nothing decides by.

A record hangs under the place where the evicted run began: the serial number of the prefix it continued, and its first
block of tokens. Serial numbers are never reused, so a record cannot be taken for another prefix's.
"""

from collections import OrderedDict
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
        # (place, first block) -> (the run's packed tokens, the serial of its end)
        self._records: OrderedDict[tuple[Place, bytes], tuple[bytearray, int]] = OrderedDict()

    def record(self, place: Place, run: bytearray, end: int) -> None:
        """`run` was evicted; it continued `place`, and ended at serial `end`. O(1) amortised; keeps `run`."""
        if len(run) > self._max_bytes:
            del run[self._max_bytes - self._max_bytes % self._width :]
        records = self._records
        key = (place, bytes(run[: self._width]))
        known = records.pop(key, None)
        if known is not None:
            self._num_bytes -= len(known[0])
        records[key] = (run, end)
        self._num_bytes += len(run)
        while len(records) > self._max_runs or self._num_bytes > self._max_bytes:
            self._num_bytes -= len(records.popitem(last=False)[1][0])

    def match(self, place: Place, key: bytes, pos: int) -> int:
        """How many whole blocks of `key` from byte `pos` on, which continues `place`, were evicted."""
        num = 0
        width = self._width
        while record := self._records.get((place, key[pos : pos + width])):
            run, place = record
            common = common_units(key, pos, run, width)
            num += common
            pos += common * width
            if common * width < len(run):
                break
        return num

    def forget(self, place: Place) -> None:
        """Drop the records that continue `place`; those behind them can no longer be reached. O(records)."""
        for key in [key for key in self._records if key[0] == place]:
            self._num_bytes -= len(self._records.pop(key)[0])

    def clear(self) -> None:
        """Drop every record."""
        self._records.clear()
        self._num_bytes = 0
