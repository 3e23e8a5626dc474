"""What a policy that learns knows of nodes, and keeps when they are evicted. Knows no order.

A node's facts are columns: its mark, which is when it was used last and its class; its uses; its blocks. An evicted run
takes them along as a ghost, and gives them back when it is cached again. See `radixkv.learner`.
"""

from array import array

from radixkv.evicted import Place
from radixkv.ghosts import NO_GHOST, Ghosts

CLASS_BITS = 8  # a mark is the last use << 8 | the class
CLASS = (1 << CLASS_BITS) - 1
NEW = -1  # the mark of a node that nobody used yet, or that is gone
UNSEEN = ~0  # the tick of what is in use, and was not seen by LRU before


class Memory:
    """The part of a `Learner` that remembers. A time is a number of requests that ended. Not thread-safe."""

    def __init__(self) -> None:
        self._time = 0
        # Of nodes:
        self._marks = array("q")
        self._uses = array("q")
        self._lengths = array("q")  # blocks, of nodes that are not new
        self._density = array("d")  # nodes a block that there were before some became one
        # When it was used or looked at last, if LRU would have had it, by LRU's clock; ~ that while it is in use:
        self._seen = array("q")
        self._tails: dict[int, int] = {}  # node -> the ghost of its evicted tail
        self._last_ghost = NO_GHOST  # what was evicted last
        self._emptied = NEW  # the mark of the leaf that it was all of, NEW if some is left
        # Of ghosts, the same; of their first `asked` blocks it is known that they are used again:
        self._ghost_marks, self._ghost_uses, self._ghost_asked = array("q"), array("q"), array("i")
        self._ghost_density, self._ghost_seen = array("d"), array("q")

    def attach(self, width: int, holds: "array[int]", blocks: dict[int, bytearray]) -> None:
        self._width, self._holds, self._blocks = width, holds, blocks
        self._ghosts = Ghosts(width)

    def start(self, node: int) -> None:
        if node == len(self._marks):
            for column in (self._marks, self._uses, self._lengths, self._density, self._seen):
                column.append(0)
        self._marks[node] = NEW
        self._uses[node] = self._lengths[node] = 0
        self._seen[node] = UNSEEN

    def is_new(self, node: int) -> bool:
        return self._marks[node] == NEW

    def is_like(self, node: int, ghost: int) -> bool:
        return self._marks[node] == self._ghost_marks[ghost] and self._uses[node] == self._ghost_uses[ghost]

    def split(self, node: int, upper: int, part: int) -> None:
        self._marks[upper], self._uses[upper] = self._marks[node], self._uses[node]
        self._lengths[upper] = part
        self._lengths[node] -= part
        self._density[upper] = self._density[node]
        self._seen[upper] = seen = self._seen[node]
        if seen < 0 and not self._holds[node]:  # only the upper half is in use
            self._seen[node] = ~seen

    def merge(self, upper: int, node: int) -> None:
        num_nodes = self._density[upper] * self._lengths[upper] + self._density[node] * self._lengths[node]
        self._lengths[node] += self._lengths[upper]
        self._density[node] = num_nodes / self._lengths[node]
        self._marks[upper] = NEW
        self._tails.pop(upper, None)

    def num_behind(self, place: Place) -> int:
        return self._ghosts.num_behind(place)

    def find(self, place: Place, key: bytes | bytearray, pos: int, end: int) -> list[tuple[int, int]]:
        return self._ghosts.chain(place, key, pos, end)

    def revive(self, ghost: int, num: int, node: int, serial: int) -> int:
        self._marks[node], self._uses[node] = self._ghost_marks[ghost], self._ghost_uses[ghost]
        self._lengths[node] += num
        self._density[node] = self._ghost_density[ghost]
        if num < self._ghosts.lengths[ghost]:
            self._ghosts.cut(ghost, num, serial)
            self._ghost_asked[ghost] = max(0, self._ghost_asked[ghost] - num)
            return serial
        end = self._ghosts.ends[ghost]
        self._ghosts.remove(ghost)
        return end

    def evicted(self, leaf: int, place: Place, run: bytearray, end: int) -> None:
        ghosts, mark, uses = self._ghosts, self._marks[leaf], self._uses[leaf]
        ghost, seen = self._tails.get(leaf, NO_GHOST), max(0, self._seen[leaf])
        if (
            ghost != NO_GHOST
            and self._ghost_marks[ghost] == mark
            and self._ghost_uses[ghost] == uses
            and self._ghost_seen[ghost] == seen
            and not self._ghost_asked[ghost]
            and ghosts.continues(ghost, end)  # else it is another one by now
        ):
            ghosts.extend_upwards(ghost, place, run)
        else:
            ghost = ghosts.add(place, run, end)
            if ghost == len(self._ghost_marks):
                for column in (self._ghost_marks, self._ghost_uses, self._ghost_density, self._ghost_seen):
                    column.append(0)
                self._ghost_asked.append(0)
            self._ghost_marks[ghost], self._ghost_uses[ghost], self._ghost_asked[ghost] = mark, uses, 0
            self._ghost_density[ghost] = self._density[leaf]
        self._ghost_seen[ghost] = seen
        num = len(run) // self._width
        if num < self._lengths[leaf]:
            self._lengths[leaf] -= num
            self._tails[leaf] = ghost
            self._emptied = NEW
        else:
            self._marks[leaf] = NEW
            self._tails.pop(leaf, None)
            self._emptied = mark
        self._last_ghost = ghost
