"""Which evictable leaf goes next. Knows nothing of requests or tokens.

A policy of one's own is an object with `add(leaf)`, `discard(leaf)` and `victim()`, see `radixkv.tree.Policy`.
"""

import heapq
from array import array
from collections.abc import Callable

from radixkv.reuse import Reuse
from radixkv.tree import Policy, Usage


class LRU:
    """Least recently released first, in O(1).

    Keeps every node that nobody holds, in the order in which they were let go. A request lets go of its whole path,
    the deepest node first, so a node always stands behind its descendants, and the first is a leaf.

    The order is a ring of links in two columns, 8 bytes a node, which no garbage collection walks.
    """

    wants_inner_nodes = True

    def __init__(self) -> None:
        # node `n` has place n + 1; place 0 is where the ring begins and ends
        self._next = array("i", [0])
        self._previous = array("i", [0])  # _ABSENT of what is not in the ring

    def add(self, node: int) -> None:
        place = node + 1
        following, previous = self._next, self._previous
        while place >= len(following):
            following.append(0)
            previous.append(_ABSENT)
        last = previous[0]
        following[last] = previous[0] = place
        following[place] = 0
        previous[place] = last

    def discard(self, node: int) -> None:
        place = node + 1
        following, previous = self._next, self._previous
        if place >= len(previous) or previous[place] == _ABSENT:
            return  # subtle: the upper half of a fresh split is held before it was ever added
        before, after = previous[place], following[place]
        following[before] = after
        previous[after] = before
        previous[place] = _ABSENT

    def victim(self) -> int:
        return self._next[0] - 1

    def nodes(self) -> set[int]:
        """What was added and not discarded, for checks."""
        found = set()
        place = self._next[0]
        while place:
            found.add(place - 1)
            place = self._next[place]
        return found


_ABSENT = -1


class Ranked:
    """The leaf with the smallest key first; among equals the one that was added first. O(log leaves) amortised.

    A key is a function of the usage columns and the leaf, and does not change while the leaf is evictable. Entries of
    the heap die lazily; it is rebuilt when more than half of it is dead.
    """

    def __init__(self, key: "Callable[[Usage, int], object]") -> None:
        self._key = key
        self._usage = Usage()
        self._stamp = 0
        self._stamps: dict[int, int] = {}  # leaf -> the stamp of its live entry
        self._heap: list[tuple[object, int, int]] = []  # (key, stamp, leaf)

    def bind(self, usage: Usage) -> None:
        self._usage = usage

    def add(self, leaf: int) -> None:
        self._stamp += 1
        self._stamps[leaf] = self._stamp
        heapq.heappush(self._heap, (self._key(self._usage, leaf), self._stamp, leaf))
        if len(self._heap) > 2 * len(self._stamps) + 64:
            self._heap = [entry for entry in self._heap if self._stamps.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, leaf: int) -> None:
        del self._stamps[leaf]

    def victim(self) -> int:
        while self._stamps.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def nodes(self) -> set[int]:
        """What was added and not discarded, for checks."""
        return set(self._stamps)


POLICIES: "dict[str, Callable[[], Policy]]" = {
    "lru": LRU,
    # fewest uses first, then least recently used
    "lfu": lambda: Ranked(lambda usage, leaf: (usage.uses[leaf], usage.last_use[leaf])),
    # first cached first
    "fifo": lambda: Ranked(lambda usage, leaf: usage.created[leaf]),
    # what was used once before what was used again, least recently used first in both segments
    "slru": lambda: Ranked(lambda usage, leaf: (usage.uses[leaf] > 1, usage.last_use[leaf])),
    # lowest priority first, then least recently used
    "priority": lambda: Ranked(lambda usage, leaf: (usage.priority[leaf], usage.last_use[leaf])),
    # what is least likely to be used again per request that it would stay, learned as it happens
    "reuse": Reuse,
}


def make_policy(policy: str | Policy) -> Policy:
    """A policy by name, or the object itself. Raises: ValueError for another name, TypeError for another object."""
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
        return POLICIES[policy]()
    for name in ("add", "discard", "victim"):
        if isinstance(policy, type) or not callable(getattr(policy, name, None)):
            raise TypeError(f"policy must be a name or an object with add, discard and victim, got {policy!r}")
    return policy
