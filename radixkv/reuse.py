"""The order "reuse": evict what is least likely to be used again per request that it would stay. Knows nothing of tokens.

Each block belongs to a class, by how often it was used and by how many new blocks the last request that used it brought.
`radixkv.hazards` learns of each class how soon its blocks come back; what was evicted is remembered and goes on counting,
so that what is learned does not depend on what was evicted. The leaf whose index is smallest goes; unless that is not
much smaller than that of the least recently used one, then that one goes. Where this order hits less than LRU would, LRU
order is used for a while. See docs/policies.md.
"""

from array import array
from dataclasses import dataclass
from math import inf
from typing import Any

from radixkv.evicted import Place
from radixkv.ghosts import NO_GHOST, Ghosts
from radixkv.hazards import BINS, NUM_CLASSES, Hazards, age_bin, class_of
from radixkv.lazy_heap import LazyHeap
from radixkv.shadow import ShadowLRU
from radixkv.tree import NO_NODE, Lookup

_MARGIN = 0.7  # LRU order is left only for a victim whose index is below this share of that of LRU's victim
_NUM_REMEMBERED = 4096  # nodes, cached or evicted, or so many times the cached ones:
_REMEMBERED_PER_NODE = 4
_GHOST_BLOCKS = 1 << 20  # that are remembered, 4 bytes each, or so many times those of the cache:
_GHOSTS_PER_BLOCK = 8
_FIRST_LESSON = 32  # requests; after that when an eighth more have come, but
_MIN_LESSON, _MAX_LESSON = 32, 256
_CHUNK = 8192  # nodes that are settled in one go, so that no request waits for more

_NONE = -1


@dataclass(frozen=True, slots=True)
class ReuseStats:
    """What the order "reuse" did, beside what LRU would have done. Resumed requests are left out."""

    lookups: int
    asked_blocks: int  # of all prompts, partial last ones included
    hit_blocks: int
    lru_hit_blocks: int  # what LRU would have hit
    guarded: bool  # whether LRU order is used now, because this order lost
    since: int  # the lookup since which that is so
    switches: int  # how often LRU order was taken up


class Guard:
    """Whether LRU order is to be used, from the hits of both. Not thread-safe."""

    WINDOW = 1024  # lookups over which hits are averaged
    LOSS = 0.005  # of the blocks asked for

    def __init__(self) -> None:
        self.active = False
        self.since = self.switches = 0
        self._lead = self._asked = 0.0
        self._num = 0  # lookups since the last switch
        self._hold = 0  # how long it was active last

    def add(self, lookup: int, lead: int, asked: int) -> None:
        """A lookup hit `lead` blocks more than LRU would have."""
        keep = 1 - 1 / self.WINDOW
        self._lead = self._lead * keep + lead
        self._asked = self._asked * keep + asked
        self._num += 1
        if self.active:
            if self._num >= self._hold:
                self.active = False
                self._lead = self._asked = 0.0
                self._num = 0
                self.since = lookup
        elif self._num >= self.WINDOW // 2 and self._lead < -self.LOSS * self._asked:
            self.active = True
            self._num = 0
            self._hold = min(max(self.WINDOW, 2 * self._hold), 16 * self.WINDOW)
            self.since = lookup
            self.switches += 1
        elif self._num >= 8 * self.WINDOW:
            self._hold = 0


class Reuse:
    """See the module. A time is a number of requests that ended. Not thread-safe; deterministic.

    Cost: some 30 us a request more than LRU, and some 2 us for each node of a long path. Memory: 60 bytes a node, and
    what was evicted: the last 4,096 nodes, or 4 times as many as are cached, with about 500 bytes each and 4 a block.
    """

    def __init__(self, *, lru_blocks: int | None = None) -> None:
        """`lru_blocks`: what LRU is imagined to have; by default, what the cache has."""
        self._lru_blocks = lru_blocks
        self._hazards = Hazards()
        self._shadow = ShadowLRU()
        self._guard = Guard()
        self._now = 0  # the request that ends next
        self._time = 0  # requests that ended
        self._next_lesson, self._last_lesson = _FIRST_LESSON, 0
        self._settled = _NONE  # nodes and ghosts that are, of a lesson that has begun
        self._lookups = self._asked_blocks = self._hit_blocks = self._lru_hit_blocks = 0
        # Of nodes:
        self._last = array("q")  # the time of the last use, _NONE of a new node
        self._kinds = array("b")  # the class, _NONE of what is new or gone
        self._uses = array("q")
        self._settles = array("q")  # the age up to which is accounted for
        self._lengths = array("q")  # blocks, of nodes that are not new
        self._tails: dict[int, int] = {}  # node -> the ghost of its evicted tail
        # Of ghosts, the same; of the first `asked` blocks it is known that they are used again:
        self._ghost_last, self._ghost_kinds, self._ghost_uses = array("q"), array("b"), array("q")
        self._ghost_settles, self._ghost_asked = array("q"), array("q")
        self._ghost_order = LazyHeap(self._is_ghost)  # of last use << 32 | ghost
        # Leaves, a ring for each class in the order in which they were added: place k is where the ring of class k
        # begins and ends, and leaf n has place n + NUM_CLASSES.
        self._after = array("i", range(NUM_CLASSES))
        self._before = array("i", range(NUM_CLASSES))  # _NONE of what is no leaf
        self._orders = [LazyHeap(self._is_leaf) for _ in range(NUM_CLASSES)]  # of last use << 32 | leaf
        self._oldest = [NO_NODE] * NUM_CLASSES  # of each class, where that is known
        self._num_leaves = [0] * NUM_CLASSES
        self._seen: list[int] = []  # classes that had leaves
        self._follow = NO_NODE  # the next victim, if what was evicted last was all of its child
        self._trail = _NONE  # last use << 8 | class of what was evicted last

    @property
    def stats(self) -> ReuseStats:
        """A snapshot."""
        return ReuseStats(
            self._lookups,
            self._asked_blocks,
            self._hit_blocks,
            self._lru_hit_blocks,
            self._guard.active,
            self._guard.since,
            self._guard.switches,
        )

    # What the tree tells

    def attach(self, width: int, holds: "array[int]", blocks: dict[int, bytearray]) -> None:
        self._width, self._holds, self._blocks = width, holds, blocks
        self._ghosts = Ghosts(width)

    def begin(self, lookup: Lookup) -> int:
        path, part, place, key, pos, end, num_asked, room, resumed = lookup
        self._now = now = self._time + 1
        self._follow, self._trail = NO_NODE, _NONE
        shadow, hazards, ghosts, width = self._shadow, self._hazards, self._ghosts, self._width
        shadow.room = self._lru_blocks or room
        last, kinds, settles, lengths, holds = self._last, self._kinds, self._settles, self._lengths, self._holds
        start = depth = pos // width
        num_lru = 0
        used = kind = settled = _NONE  # of a run of nodes with the same, which are accounted for in one go
        num = num_nodes = 0
        whole = part
        for node in reversed(path):
            if holds[node]:
                break  # in use, so not in danger of eviction, and neither is what is above
            length = whole or lengths[node]
            whole = 0
            start -= length
            num_lru += shadow.hits(last[node], start, length)
            if last[node] != used or kinds[node] != kind or settles[node] != settled:
                if num:
                    hazards.use(kind, settled, now - used, num, num_nodes)
                used, kind, settled, num, num_nodes = last[node], kinds[node], settles[node], 0, 0
            num += length
            num_nodes += 1
        if num:
            hazards.use(kind, settled, now - used, num, num_nodes)
        num_lru += start
        num_hit = depth
        while pos < end and not part:
            ghost, length = ghosts.find(place, key, pos, end)
            if not length:
                break
            used = self._ghost_last[ghost]
            num_lru += shadow.hits(used, depth, length)
            num = length - self._ghost_asked[ghost]
            if num > 0:
                hazards.use(self._ghost_kinds[ghost], self._ghost_settles[ghost], now - used, num, 1)
                self._ghost_asked[ghost] = length
            depth += length
            pos += length * width
            if length < ghosts.lengths[ghost]:
                break
            place = ghosts.ends[ghost]
        if not resumed:
            self._lookups += 1
            self._asked_blocks += num_asked
            self._hit_blocks += num_hit
            self._lru_hit_blocks += num_lru
            self._guard.add(self._lookups, num_hit - num_lru, num_asked)
        return depth

    def start(self, node: int) -> None:
        if node >= len(self._last):
            for column in (self._last, self._uses, self._settles, self._lengths):
                column.append(0)
            self._kinds.append(_NONE)
            self._after.append(_NONE)
            self._before.append(_NONE)
        self._last[node] = self._kinds[node] = _NONE
        self._uses[node] = self._settles[node] = 0

    def is_new(self, node: int) -> bool:
        return self._kinds[node] == _NONE

    def split(self, node: int, upper: int, part: int) -> None:
        for column in (self._last, self._kinds, self._uses, self._settles):
            column[upper] = column[node]
        self._lengths[upper] = part
        self._lengths[node] -= part

    def find(self, place: Place, edge: bytearray, pos: int) -> tuple[int, int]:
        return self._ghosts.find(place, edge, pos, len(edge))

    def revive(self, ghost: int, num: int, node: int, serial: int) -> int:
        self._last[node] = self._ghost_last[ghost]
        self._kinds[node] = self._ghost_kinds[ghost]
        self._uses[node] = self._ghost_uses[ghost]
        self._settles[node] = self._ghost_settles[ghost]
        self._lengths[node] = num
        if num < self._ghosts.lengths[ghost]:
            self._ghosts.cut(ghost, num, serial)
            self._ghost_asked[ghost] = max(0, self._ghost_asked[ghost] - num)
            return serial
        end = self._ghosts.ends[ghost]
        self._ghosts.remove(ghost)
        return end

    def touch(self, path: list[int], num_known: int | None) -> None:
        self._time = self._now = now = self._time + 1
        self._follow, self._trail = NO_NODE, _NONE
        last, kinds, uses, settles, lengths = self._last, self._kinds, self._uses, self._settles, self._lengths
        shadow, blocks = self._shadow, self._blocks
        total = num_new = 0
        for node in path:
            length = len(blocks[node]) >> 2
            total += length
            if kinds[node] == _NONE:
                num_new += length
                lengths[node] = length
            else:
                shadow.forget(last[node], length)
        if num_known is not None:
            num_new = max(0, total - num_known)
        size = class_of(1, num_new)  # the class of what is used the first time
        for node in path:
            if num_known is not None or kinds[node] == _NONE:
                uses[node] = num = uses[node] + 1
                kinds[node] = size + (_CLASSES[num] if num < len(_CLASSES) else _CLASSES[-1])
            last[node] = now
            settles[node] = 0
        shadow.use(now, total)
        self._forget_oldest()
        if now >= self._next_lesson or self._settled != _NONE:
            self._learn()

    def evicted(self, leaf: int, place: Place, run: bytearray, end: int) -> None:
        ghosts, num = self._ghosts, len(run) // self._width
        tail = self._tails.get(leaf, NO_GHOST)
        last, kind, num_used, settled = self._last[leaf], self._kinds[leaf], self._uses[leaf], self._settles[leaf]
        if (
            tail != NO_GHOST
            and ghosts.lengths[tail]
            and ghosts.place(tail) == end
            and self._ghost_last[tail] == last
            and self._ghost_kinds[tail] == kind
            and self._ghost_uses[tail] == num_used
            and self._ghost_settles[tail] == settled
            and not self._ghost_asked[tail]
        ):
            ghosts.extend_upwards(tail, place, run)
        else:
            old = ghosts.occupant(place, run)
            if old != NO_GHOST:
                self._forget_ghost(old)
            tail = ghosts.add(place, run, end)
            if tail == len(self._ghost_last):
                for column in (self._ghost_last, self._ghost_kinds, self._ghost_uses, self._ghost_settles):
                    column.append(0)
                self._ghost_asked.append(0)
            self._ghost_last[tail], self._ghost_kinds[tail], self._ghost_uses[tail] = last, kind, num_used
            self._ghost_settles[tail], self._ghost_asked[tail] = settled, 0
            self._ghost_order.push(last << 32 | tail, len(ghosts))
        if num == self._lengths[leaf]:
            self._tails.pop(leaf, None)
            self._kinds[leaf] = _NONE
            self._trail = last << 8 | kind
        else:
            self._tails[leaf] = tail
            self._lengths[leaf] -= num

    def forget(self, nodes: list[int], places: list[Place]) -> None:
        for node in nodes:
            if self._kinds[node] != _NONE:
                age = self._time - self._last[node]
                if not self._holds[node] and age > self._settles[node]:
                    self._hazards.spend(self._kinds[node], self._settles[node], age, self._lengths[node])
                self._shadow.forget(self._last[node], self._lengths[node])
                self._kinds[node] = _NONE
            self._tails.pop(node, None)
        for ghost in self._ghosts.behind(places):
            self._shadow.forget(self._ghost_last[ghost], self._ghosts.lengths[ghost])
            self._forget_ghost(ghost)

    # Leaves

    def add(self, leaf: int) -> None:
        kind, used = self._kinds[leaf], self._last[leaf]
        if self._trail == used << 8 | kind:
            self._follow = leaf
        place, newest = leaf + NUM_CLASSES, self._before[kind]
        self._after[newest] = self._before[kind] = place
        self._before[place], self._after[place] = newest, kind
        if not self._num_leaves[kind]:
            self._oldest[kind] = leaf
            if kind not in self._seen:
                self._seen.append(kind)
        elif self._oldest[kind] != NO_NODE and used < self._last[self._oldest[kind]]:
            self._oldest[kind] = leaf
        self._num_leaves[kind] += 1
        self._orders[kind].push(used << 32 | leaf, self._num_leaves[kind])

    def discard(self, leaf: int) -> None:
        place, kind = leaf + NUM_CLASSES, self._kinds[leaf]
        before, after = self._before[place], self._after[place]
        self._after[before], self._before[after] = after, before
        self._before[place] = _NONE
        self._num_leaves[kind] -= 1
        if leaf == self._oldest[kind]:
            self._oldest[kind] = NO_NODE
        if leaf == self._follow:
            self._follow = NO_NODE

    def victim(self) -> int:
        """Of each class the leaf used longest ago and the one that became a leaf last are asked: the index first rises
        with age, then falls, so the smallest of a class is at an end. O(classes)."""
        if self._follow != NO_NODE:
            return self._follow
        last, before, now, index = self._last, self._before, self._now, self._hazards.index
        best = oldest = NO_NODE
        best_used = oldest_used = now + 1
        low = oldest_value = inf
        for kind in self._seen:
            if not self._num_leaves[kind]:
                continue
            leaf = self._oldest[kind]
            if leaf == NO_NODE:
                leaf = self._oldest[kind] = self._orders[kind].first() & _NUMBER
            used = last[leaf]
            if index is None:
                if used < oldest_used:
                    oldest, oldest_used = leaf, used
                continue
            values = index[kind]
            age = now - used
            value = values[BINS[age] if age < len(BINS) else age_bin(age)]
            if used < oldest_used:
                oldest, oldest_used, oldest_value = leaf, used, value
            if value < low or (value == low and used < best_used):
                best, best_used, low = leaf, used, value
            newest = before[kind] - NUM_CLASSES
            if newest != leaf:
                used = last[newest]
                age = now - used
                value = values[BINS[age] if age < len(BINS) else age_bin(age)]
                if value < low or (value == low and used < best_used):
                    best, best_used, low = newest, used, value
        return best if low < _MARGIN * oldest_value and not self._guard.active else oldest

    def nodes(self) -> set[int]:
        """What was added and not discarded, for checks."""
        return {place - NUM_CLASSES for place in range(NUM_CLASSES, len(self._before)) if self._before[place] != _NONE}

    def _is_leaf(self, entry: int) -> bool:
        leaf = entry & _NUMBER
        return self._before[leaf + NUM_CLASSES] != _NONE and self._last[leaf] == entry >> 32

    # Ghosts and lessons

    def _is_ghost(self, entry: int) -> bool:
        ghost = entry & _NUMBER
        return self._ghosts.lengths[ghost] != 0 and self._ghost_last[ghost] == entry >> 32

    def _forget_oldest(self) -> None:
        ghosts, num_cached = self._ghosts, len(self._blocks)
        limit = max(_NUM_REMEMBERED, _REMEMBERED_PER_NODE * num_cached) - num_cached
        max_blocks = max(_GHOST_BLOCKS, _GHOSTS_PER_BLOCK * self._shadow.room)
        while len(ghosts) > limit or ghosts.num_blocks > max_blocks:
            self._forget_ghost(self._ghost_order.first() & _NUMBER)

    def _forget_ghost(self, ghost: int) -> None:
        age, num = self._time - self._ghost_last[ghost], self._ghosts.lengths[ghost] - self._ghost_asked[ghost]
        if age > self._ghost_settles[ghost]:
            self._hazards.spend(self._ghost_kinds[ghost], self._ghost_settles[ghost], age, num)
        self._ghosts.remove(ghost)

    def _learn(self) -> None:
        """Account for all that is remembered, some of it a request, then make the index anew."""
        if self._settled == _NONE:
            self._settled = 0
        start, num_nodes = self._settled, len(self._last)
        self._settled = end = start + _CHUNK
        if start < num_nodes:
            columns = self._last, self._settles, self._kinds, self._lengths, self._holds
            last, settles, kinds, lengths, holds = (_view(column, start, end) for column in columns)
            self._settle(last, settles, kinds, lengths, (kinds != _NONE) & (holds == 0))
        start, end = max(start - num_nodes, 0), end - num_nodes
        if end > 0:
            columns = self._ghost_last, self._ghost_settles, self._ghost_kinds, self._ghosts.lengths, self._ghost_asked
            last, settles, kinds, lengths, asked = (_view(column, start, end) for column in columns)
            self._settle(last, settles, kinds, lengths - asked, lengths != 0)
        if end < len(self._ghost_last):
            return
        self._settled = _NONE
        self._hazards.relearn(self._time - self._last_lesson)
        self._last_lesson = self._time
        self._next_lesson = self._time + max(_MIN_LESSON, min(_MAX_LESSON, self._time // 8))

    def _settle(self, last: Any, settles: Any, kinds: Any, lengths: Any, there: Any) -> None:
        """Account for the ages of those that are `there`; the arguments are numpy's views of columns."""
        rows = there.nonzero()[0]
        ages = self._time - last[rows]
        self._hazards.settle(kinds[rows].astype(int), settles[rows], ages, lengths[rows])
        settles[rows] = ages


_NUMBER = (1 << 32) - 1  # of a leaf or ghost, in an entry of a heap
_CLASSES = [class_of(uses, 0) for uses in range(1, 33)]
_CLASSES.insert(0, 0)


def _view(column: "array[int]", start: int, end: int) -> Any:
    """Part of a column as numpy sees it: while it is alive, the column cannot grow."""
    import numpy as np

    return np.frombuffer(column, column.typecode)[start:end]
