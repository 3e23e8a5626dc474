"""Which evictable leaf goes next. Knows nothing of requests or tokens.

A policy of one's own is an object with `add(leaf)`, `discard(leaf)` and `victim()`, see `radixkv.tree.Policy`.
"""

import heapq
from collections.abc import Callable

from radixkv.arc import ARC
from radixkv.reuse import Reuse
from radixkv.ring import Ring
from radixkv.tree import Policy, Usage


class LRU(Ring):
    """Least recently released first, in O(1).

    Keeps every node that nobody holds, in the order in which they were let go. A request lets go of its whole path,
    the deepest node first, so a node always stands behind its descendants, and the first is a leaf.
    """

    wants_inner_nodes = True
    victim = Ring.first
    nodes = Ring.numbers


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
    # adaptive replacement: what was used once and what was used again, in a proportion that follows the misses
    "arc": ARC,
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
    if hasattr(policy, "attach") and not callable(getattr(policy, "nodes", None)):
        raise TypeError(f"a policy that learns must say with nodes() what was added and not discarded, got {policy!r}")
    return policy
