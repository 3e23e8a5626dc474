"""A heap whose entries die in place. Knows nothing of what they stand for."""

from collections.abc import Callable
from heapq import heappop, heappush


class LazyHeap:
    """Ints, smallest first, of which `is_alive` tells the dead. Not thread-safe.

    At most two of three entries are dead for long: they are sorted out a few with each push, never all in one go.
    """

    __slots__ = ("_entries", "_is_alive", "_unsorted")

    def __init__(self, is_alive: Callable[[int], bool]) -> None:
        self._is_alive = is_alive
        self._entries: list[int] = []
        self._unsorted: list[int] = []  # a heap too, of entries to be sorted out from its end

    def push(self, entry: int, num_alive: int) -> None:
        """`num_alive`: of all entries, this one included. O(log entries)."""
        heappush(self._entries, entry)
        if self._unsorted:
            for _ in range(min(2, len(self._unsorted))):
                other = self._unsorted.pop()
                if self._is_alive(other):
                    heappush(self._entries, other)
        elif len(self._entries) > 2 * num_alive + 64:
            self._entries, self._unsorted = self._unsorted, self._entries

    def first(self) -> int:
        """The smallest that is alive; there must be one. O(log entries) amortised."""
        entries, is_alive = self._entries, self._is_alive
        while entries and not is_alive(entries[0]):
            heappop(entries)
        others = self._unsorted
        if not others:
            return entries[0]
        while others and not is_alive(others[0]):
            heappop(others)
        return min(entries[:1] + others[:1])
