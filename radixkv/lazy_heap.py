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
        for _ in range(min(2, len(self._unsorted))):
            other = self._unsorted.pop()
            if self._is_alive(other):
                heappush(self._entries, other)
        if not self._unsorted and len(self._entries) > 2 * num_alive + 64:
            self._entries, self._unsorted = self._unsorted, self._entries

    def first(self) -> int:
        """The smallest that is alive; there must be one. O(log entries) amortised."""
        firsts = []
        for heap in (self._entries, self._unsorted):
            while heap and not self._is_alive(heap[0]):
                heappop(heap)
            firsts += heap[:1]
        return min(firsts)
