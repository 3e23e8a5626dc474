"""The order "arc": adaptive replacement (Megiddo and Modha 2003), on the leaves of a prefix tree. Knows no tokens.

What was used once and what was used again are two lists, least recently used first. How many blocks the first may have
follows from which of the two has been missed: what was evicted is remembered, up to as many blocks as are cached, and a
request that asks for what was evicted from a list lets that list grow. A leaf goes from its tail, as in every order.
"""

from radixkv.evicted import Place
from radixkv.lazy_heap import LazyHeap
from radixkv.learner import Arrival
from radixkv.memory import CLASS, CLASS_BITS, NEW, Memory
from radixkv.ring import Ring
from radixkv.tree import BLOCK_BYTES

_NUMBER_BITS = 32  # an entry of a heap is a mark << 32 | a node
_NUMBER = (1 << _NUMBER_BITS) - 1


class ARC(Memory):
    """See the module; a class is 0 for what was used once, 1 for the rest. Not thread-safe. O(log leaves) a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self._room = 0
        self._target = 0.0  # blocks that what was used once may have
        self._num_blocks, self._num_ghost_blocks = [0, 0], [0, 0]  # by class
        self._leaves: set[int] = set()
        self._num_leaves = [0, 0]
        self._orders = [LazyHeap(self._is_leaf), LazyHeap(self._is_leaf)]  # by last use
        self._ghost_orders = [Ring(), Ring()]

    def begin(self, arrival: Arrival) -> int:
        self._room = arrival.room
        depth = arrival.pos // self._width
        ghosts = [] if arrival.part else self._ghosts.chain(arrival.place, arrival.key, arrival.pos, arrival.end)
        for ghost, num in ghosts:
            depth += num
            new, self._ghost_asked[ghost] = num - self._ghost_asked[ghost], max(num, self._ghost_asked[ghost])
            if new > 0:
                kind = self._ghost_marks[ghost] & CLASS
                step = new * max(1, self._num_ghost_blocks[1 - kind] / self._num_ghost_blocks[kind])
                self._target += -step if kind else step
        self._target = min(max(0, self._target), self._room)
        return depth

    def look(self, path: list[int], place: Place, key: bytes | bytearray, pos: int, end: int) -> None:
        pass

    def revive(self, ghost: int, num: int, node: int, serial: int) -> int:
        kind = self._ghost_marks[ghost] & CLASS
        end = super().revive(ghost, num, node, serial)
        self._num_blocks[kind] += num
        self._num_ghost_blocks[kind] -= num
        if not self._ghosts.lengths[ghost]:
            self._ghost_orders[kind].discard(ghost)
        return end

    def touch(self, path: list[int], num_known: int | None) -> list[int]:
        self._time += num_known is not None
        for node in path:
            length = len(self._blocks[node]) // BLOCK_BYTES
            if self._marks[node] == NEW:
                self._lengths[node] = length
            else:
                self._num_blocks[self._marks[node] & CLASS] -= length
            self._uses[node] += num_known is not None
            kind = int(self._uses[node] > 1)
            self._marks[node] = self._time << CLASS_BITS | kind
            self._num_blocks[kind] += length
        self._forget_first()
        return []

    def evicted(self, leaf: int, place: Place, run: bytearray, end: int) -> None:
        kind, num = self._marks[leaf] & CLASS, len(run) // self._width
        super().evicted(leaf, place, run, end)
        self._num_blocks[kind] -= num
        self._num_ghost_blocks[kind] += num
        self._ghost_orders[kind].discard(self._last_ghost)
        self._ghost_orders[kind].add(self._last_ghost)
        if sum(self._num_ghost_blocks) != self._ghosts.num_blocks:
            self._recount()

    def forget(self, nodes: list[int], places: list[Place]) -> None:
        for node in nodes:
            if self._marks[node] != NEW:
                self._num_blocks[self._marks[node] & CLASS] -= self._lengths[node]
                self._marks[node] = NEW
            self._tails.pop(node, None)
        for ghost in self._ghosts.behind(places):
            self._forget_ghost(ghost)

    def forget_evicted(self) -> None:
        self.forget([], self._ghosts.names())

    def add(self, leaf: int) -> None:
        kind = self._marks[leaf] & CLASS
        self._leaves.add(leaf)
        self._num_leaves[kind] += 1
        self._orders[kind].push(self._marks[leaf] << _NUMBER_BITS | leaf, self._num_leaves[kind])

    def discard(self, leaf: int) -> None:
        self._leaves.remove(leaf)
        self._num_leaves[self._marks[leaf] & CLASS] -= 1

    def victim(self) -> int:
        kind = 0 if self._num_blocks[0] > self._target else 1
        if not self._num_leaves[kind]:
            kind = 1 - kind
        return self._orders[kind].first() & _NUMBER

    def nodes(self) -> set[int]:
        """What was added and not discarded, for checks."""
        return set(self._leaves)

    def _is_leaf(self, entry: int) -> bool:
        leaf = entry & _NUMBER
        return leaf in self._leaves and self._marks[leaf] == entry >> _NUMBER_BITS

    def _forget_first(self) -> None:
        """What was used once is remembered up to as many blocks as there are, all in all up to twice as many."""
        num, num_ghosts, room = self._num_blocks, self._num_ghost_blocks, self._room
        while num_ghosts[0] and num[0] + num_ghosts[0] > room:
            self._forget_ghost(self._ghost_orders[0].first())
        while sum(num_ghosts) and sum(num) + sum(num_ghosts) > 2 * room:
            self._forget_ghost(self._ghost_orders[1 if num_ghosts[1] else 0].first())

    def _recount(self) -> None:
        """A ghost was forgotten because another one's sums agree with its own."""
        for kind, order in enumerate(self._ghost_orders):
            there = {ghost for ghost in order.numbers() if self._ghosts.lengths[ghost]}
            there = {ghost for ghost in there if self._ghost_marks[ghost] & CLASS == kind}
            for ghost in order.numbers() - there:
                order.discard(ghost)
            self._num_ghost_blocks[kind] = sum(self._ghosts.lengths[ghost] for ghost in there)

    def _forget_ghost(self, ghost: int) -> None:
        kind = self._ghost_marks[ghost] & CLASS
        self._num_ghost_blocks[kind] -= self._ghosts.lengths[ghost]
        self._ghost_orders[kind].discard(ghost)
        self._ghosts.remove(ghost)
