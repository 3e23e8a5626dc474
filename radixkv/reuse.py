"""The order "reuse": evict what is least likely to be used again per request that it would stay. Knows no tokens.

Each block belongs to a class, by how often it was used and by how many new blocks the last request that used it
brought. `radixkv.hazards` learns of each class how soon its blocks come back. What was evicted is remembered and goes
on counting, so that what is learned does not depend on what was evicted. The leaf whose index is smallest goes; but
unless that is much smaller than that of the least recently used one, that one goes. Where this order hits less than
LRU would, LRU order is used for a while. See docs/policies.md.
"""

from array import array
from dataclasses import dataclass
from math import ceil, inf
from typing import Any

from radixkv.evicted import Place
from radixkv.hazards import NUM_BINS, NUM_CLASSES, ROW, Hazards, age_bins, class_of
from radixkv.lazy_heap import LazyHeap
from radixkv.learner import Arrival
from radixkv.memory import CLASS, CLASS_BITS, NEW, UNSEEN, Memory
from radixkv.shadow import Guard, ShadowLRU
from radixkv.tree import BLOCK_BYTES, NO_NODE

_MARGIN = 0.7  # LRU order is left only for a victim whose index is below this share of that of LRU's victim
_MIN_REMEMBERED = 4096  # nodes that are remembered, cached or evicted, or so many times those that are cached:
_REMEMBERED_PER_NODE = 4
_SLACK = 64  # one part in so many may be too much for a while
_MIN_BLOCKS = 1 << 20  # evicted blocks that are remembered, 4 bytes each, or so many times those of the cache:
_BLOCKS_PER_BLOCK = 8
_FIRST_LESSON = 32  # requests; the next one comes after an eighth more, but after at least and at most so many:
_MIN_LESSON, _MAX_LESSON = 32, 256
_WINDOW = 8192  # requests of which is kept what they used again
_CHUNK = 8192  # nodes that are counted in one go, so that no request waits for more

_NEVER = 1 << 62
_NUMBER_BITS = 32  # an entry of a heap is a mark << 32 | a node
_NUMBER = (1 << _NUMBER_BITS) - 1
_NO_PLACE = -1  # in a ring
_CLASSES = [0, *(class_of(uses, 0) for uses in range(1, 33))]  # by uses, if nothing is new


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


@dataclass(frozen=True, slots=True)
class Recent:
    """What the last requests asked for that was known, for `radixkv.curve.optimum`: columns, one entry a run of blocks.

    Requests are numbered from 1 on; what was used before all of them was used by request 0. Where requests ran side by
    side, those that began between two ends have the same number.
    """

    num_requests: int
    lookups: int
    asked_blocks: int
    hit_blocks: int
    lru_hit_blocks: int
    capacity: int  # blocks
    last: Any  # the request that used it before
    use: Any  # the request that used it again, the same as before if others were using it all the time
    num: Any  # blocks


@dataclass(slots=True)
class _Chunk:
    """The requests after a time, up to the next chunk's."""

    time: int
    counts: tuple[int, int, int, int]  # at that time
    rows: Any  # of the log, what they used again


class Reuse(Memory):
    """See the module. Not thread-safe; deterministic.

    Costs and memory are in docs/policies.md.
    """

    max_uses = 32
    """More are not counted, as they make no other class: so what was used so often by the same requests stays alike."""

    def __init__(self, *, lru_blocks: int | None = None) -> None:
        """`lru_blocks`: what LRU is imagined to have; by default, what the cache has."""
        super().__init__()
        self._lru_blocks = lru_blocks
        self._hazards = Hazards()
        self._shadow = ShadowLRU()
        self._guard = Guard()
        self._now = 0  # the number of the request that evicts: the next to end, or the one that ended
        self._lookups = self._asked_blocks = self._hit_blocks = self._lru_hit_blocks = 0
        # Leaves, a ring for each class in the order in which they were added: place k is where the ring of class k
        # begins and ends, and leaf n has place n + NUM_CLASSES.
        self._after = array("i", range(NUM_CLASSES))
        self._before = array("i", range(NUM_CLASSES))  # _NO_PLACE of what is no leaf
        self._orders = [LazyHeap(self._is_leaf) for _ in range(NUM_CLASSES)]  # by last use
        self._num_leaves = [0] * NUM_CLASSES
        self._oldest = [NO_NODE] * NUM_CLASSES  # the leaf of each class that was used longest ago
        self._unknown: set[int] = set()  # but of those classes it is not known
        # When the oldest leaf of each class was used, and then the newest of each, _NEVER where there is none:
        self._end_uses = array("q", [_NEVER]) * (2 * NUM_CLASSES)
        self._last_tick = 0  # of the shadow's clock, when a request ended last
        self._follow = NO_NODE  # the next victim, where what was evicted last was all that it led to
        # Lessons: what is remembered is counted, a part of it at each request, then the index is made
        self._next_lesson = _FIRST_LESSON
        self._lesson = self._lesson_length = 0  # when the last one began, and how long after the one before
        self._uncounted: list[list[Any]] = []

    @property
    def stats(self) -> ReuseStats:
        """A snapshot."""
        return ReuseStats(*self._counts(), self._guard.active, self._guard.since, self._guard.switches)

    # What the tree tells

    def recent(self, num_requests: int = _WINDOW) -> Recent:
        """What became of the last `num_requests` requests or up to 255 more; at most some 8,192 are known. O(them)."""
        import numpy as np

        self._count_log()
        start = 0
        while start < len(self._recent) - 1 and self._recent[start + 1].time <= self._time - num_requests:
            start += 1
        first = self._recent[start]
        rows = np.concatenate([chunk.rows for chunk in self._recent[start:]])
        lookups, asked, hit, lru_hit = (now - then for now, then in zip(self._counts(), first.counts, strict=True))
        use = rows[:, 5] - first.time
        return Recent(
            self._time - first.time,
            lookups,
            asked,
            hit,
            lru_hit,
            self._shadow.room,
            np.maximum(use - rows[:, 2], 0),
            use,
            rows[:, 3],
        )

    def attach(self, width: int, holds: "array[int]", blocks: dict[int, bytearray]) -> None:
        import numpy as np  # here: importing radixkv stays fast

        super().attach(width, holds, blocks)
        self._ends = np.frombuffer(self._end_uses, np.int64)
        self._oldest_uses = self._ends[:NUM_CLASSES]
        self._end_values = array("d", bytes(8 * len(self._end_uses)))  # their indices
        self._values = np.frombuffer(self._end_values)
        last_edge = ceil(2 ** ((NUM_BINS - 1) / 2))
        self._bins = np.append(NUM_BINS, age_bins(np.arange(last_edge)))  # of an age + 1; 0 stands for no leaf
        self._nows = np.empty(2 * NUM_CLASSES, np.int64)  # a number for each end: one for all takes longer
        self._filled = NEW  # the time that they are of
        self._rows = np.arange(2 * NUM_CLASSES) % NUM_CLASSES * (NUM_BINS + 1)
        self._recent = [_Chunk(0, self._counts(), np.zeros((0, ROW), np.int64))]
        self._index: Any = None  # flat, by class and bin, and for no leaf; None before the first lesson

    def begin(self, arrival: Arrival) -> int:
        path, part, place, key, pos, end, num_asked, room, resumed = arrival
        self._now = self._time + 1
        self._follow, self._emptied = NO_NODE, NEW
        shadow, marks, ticks = self._shadow, self._marks, self._seen
        shadow.room = self._lru_blocks or room
        depth = start = pos // self._width
        num_lru, left = 0, part
        mark, tick = NEW, UNSEEN
        num = num_nodes = 0  # of nodes one after the other of which these are the same
        for node in reversed(path):
            if self._holds[node]:
                break  # in use, so in no danger of eviction, and neither is what is above
            if marks[node] != mark or ticks[node] != tick:
                self._use(mark, num, num_nodes)
                num_lru += shadow.take(tick, start, num)
                mark, tick, num, num_nodes = marks[node], ticks[node], 0, 0
            length = left or self._lengths[node]
            left = 0
            if tick >= 0:
                ticks[node] = ~tick
            start -= length
            num += length
            num_nodes += round(self._density[node] * length) or 1
        self._use(mark, num, num_nodes)
        num_lru += shadow.take(tick, start, num) + start
        if start:
            self._hazards.log.extend((0, 0, 0, start, -1, self._now))
        num_hit = depth
        for ghost, length in () if part else self._ghosts.chain(place, key, pos, end):
            num_lru += shadow.hits(self._ghost_seen[ghost], depth, length)
            num_more = length - self._ghost_asked[ghost]
            if num_more > 0:
                self._use(self._ghost_marks[ghost], num_more, round(self._ghost_density[ghost] * num_more) or 1)
                self._ghost_asked[ghost] = length
            depth += length
        if not resumed:
            self._lookups += 1
            self._asked_blocks += num_asked
            self._hit_blocks += num_hit
            self._lru_hit_blocks += num_lru
            self._guard.add(self._lookups, num_hit - num_lru, num_asked)
        return depth

    def _use(self, mark: int, num: int, num_nodes: int) -> None:
        """`num` blocks are used again."""
        if num:
            used, lesson = mark >> CLASS_BITS, self._lesson
            counted = lesson - used if used < lesson else 0
            self._hazards.log.extend((mark & CLASS, counted, self._now - used, num, num_nodes, self._now))

    def look(self, path: list[int], place: Place, key: bytes | bytearray, pos: int, end: int) -> None:
        shadow, seen = self._shadow, self._seen
        if path and seen[path[-1]] > self._last_tick:
            return
        depth = num = 0
        looked = []
        for node in path:
            length = len(self._blocks[node]) // BLOCK_BYTES
            if seen[node] >= 0:
                if shadow.hits(seen[node], depth, length) < length:
                    break
                shadow.forget(seen[node], length)
                looked.append((seen, node))
                num += length
            depth += length
        else:
            for ghost, length in self._ghosts.chain(place, key, pos, end):
                used = self._ghost_seen[ghost]
                if length < self._ghosts.lengths[ghost] or shadow.hits(used, depth, length) < length:
                    break
                shadow.forget(used, length)
                looked.append((self._ghost_seen, ghost))
                num += length
                depth += length
        if num:
            tick = shadow.use(num, depth)
            for column, number in looked:
                column[number] = tick

    def revive(self, ghost: int, num: int, node: int, serial: int) -> int:
        seen = self._seen[node]
        if seen >= 0:  # found when something was committed, not when a request began
            self._shadow.forget(seen, self._lengths[node])
            self._seen[node] = ~seen
        self._shadow.forget(self._ghost_seen[ghost], num)
        return super().revive(ghost, num, node, serial)

    def touch(self, path: list[int], num_known: int | None) -> list[int]:
        self._follow, self._emptied = NO_NODE, NEW
        if num_known is not None:
            self._time = self._now = self._time + 1
        marks, uses, lengths, seen, shadow = self._marks, self._uses, self._lengths, self._seen, self._shadow
        holds = self._holds
        num_new = num_idle = total = 0
        first_idle = len(path)  # in use by others too before that
        for node in reversed(path):
            if marks[node] == NEW:
                lengths[node] = length = len(self._blocks[node]) // BLOCK_BYTES
                self._density[node] = 1 / length
                num_new += length
            else:
                length = lengths[node]
                if seen[node] >= 0:
                    shadow.forget(seen[node], length)
            if num_idle == total and holds[node] == 1:
                first_idle -= 1
                num_idle += length
            total += length
        self._last_tick = tick = shadow.use(num_idle, total)
        if num_known is not None:
            num_new = max(0, total - num_known)
        time = self._time << CLASS_BITS
        size, max_uses = class_of(1, num_new), self.max_uses
        alike = []  # for good
        for node in path:
            if num_known is not None:
                num = uses[node]
                if num < max_uses:
                    uses[node] = num = num + 1
                if num == max_uses:
                    alike.append(node)
                marks[node] = time | size + _CLASSES[num]
            else:  # nobody looked it up, so that is no use
                marks[node] = time | (size if marks[node] == NEW else marks[node] & CLASS)
            seen[node] = tick
        for node in path[:first_idle]:
            seen[node] = ~tick
        self._forget_first()
        if self._time >= self._next_lesson or len(self._hazards.log) > ROW * _CHUNK or self._uncounted:
            self._learn()
        return alike[1:]  # the beginning of the path, as uses never grow along it

    def forget(self, nodes: list[int], places: list[Place]) -> None:
        for node in nodes:
            mark, length = self._marks[node], self._lengths[node]
            if mark != NEW:
                if not self._holds[node]:
                    self._pass(mark, length)
                self._shadow.forget(self._seen[node], length)
                self._marks[node] = NEW
            self._tails.pop(node, None)
        for ghost in self._ghosts.behind(places):
            self._shadow.forget(self._ghost_seen[ghost], self._ghosts.lengths[ghost])
            self._forget_ghost(ghost)

    def forget_evicted(self) -> None:
        self.forget([], self._ghosts.names())

    # Leaves

    def add(self, leaf: int) -> None:
        mark = self._marks[leaf]
        kind, used = mark & CLASS, mark >> CLASS_BITS
        if mark == self._emptied:
            self._follow = leaf
        place, newest = leaf + NUM_CLASSES, self._before[kind]
        while place >= len(self._after):
            self._after.append(_NO_PLACE)
            self._before.append(_NO_PLACE)
        self._after[newest] = self._before[kind] = place
        self._before[place], self._after[place] = newest, kind
        self._end_uses[NUM_CLASSES + kind] = used
        if used < self._end_uses[kind]:
            self._end_uses[kind], self._oldest[kind] = used, leaf
        self._num_leaves[kind] += 1
        self._orders[kind].push(mark << _NUMBER_BITS | leaf, self._num_leaves[kind])

    def discard(self, leaf: int) -> None:
        place, kind = leaf + NUM_CLASSES, self._marks[leaf] & CLASS
        before, after = self._before[place], self._after[place]
        self._after[before], self._before[after] = after, before
        self._before[place] = _NO_PLACE
        self._num_leaves[kind] -= 1
        if not self._num_leaves[kind]:
            self._end_uses[kind] = self._end_uses[NUM_CLASSES + kind] = _NEVER
            self._unknown.discard(kind)
        elif leaf == self._oldest[kind]:
            self._unknown.add(kind)
        if after == kind and before != kind:
            self._end_uses[NUM_CLASSES + kind] = self._marks[before - NUM_CLASSES] >> CLASS_BITS
        if leaf == self._follow:
            self._follow = NO_NODE

    def victim(self) -> int:
        """Of each class, the leaf that was used longest ago and the one that became a leaf last are compared: the index
        first rises with age, then falls, so the smallest of a class is at an end. O(classes)."""
        if self._follow != NO_NODE:
            return self._follow
        if self._unknown:
            self._find_oldest()
        oldest = int(self._oldest_uses.argmin())
        if self._index is not None and not self._guard.active:
            if self._filled != self._now:
                self._filled = self._now
                self._nows.fill(self._now + 1)
            places = self._bins.take(self._nows - self._ends, None, None, "clip")
            places += self._rows
            self._index.take(places, None, self._values, "clip")
            lowest = int(self._values.argmin())
            if self._end_values[lowest] < _MARGIN * self._end_values[oldest]:
                if lowest >= NUM_CLASSES:
                    return self._before[lowest - NUM_CLASSES] - NUM_CLASSES
                return self._oldest[lowest]
        return self._oldest[oldest]

    def _find_oldest(self) -> None:
        for kind in self._unknown:
            entry = self._orders[kind].first()
            self._oldest[kind] = entry & _NUMBER
            self._end_uses[kind] = entry >> _NUMBER_BITS + CLASS_BITS
        self._unknown.clear()

    def nodes(self) -> set[int]:
        """What was added and not discarded, for checks."""
        places = range(NUM_CLASSES, len(self._before))
        return {place - NUM_CLASSES for place in places if self._before[place] != _NO_PLACE}

    def _is_leaf(self, entry: int) -> bool:
        leaf = entry & _NUMBER
        return self._before[leaf + NUM_CLASSES] != _NO_PLACE and self._marks[leaf] == entry >> _NUMBER_BITS

    # Memory and lessons

    def _forget_first(self) -> None:
        """Forget what was evicted first where too much is remembered, many at once: that is cheaper."""
        ghosts, num_cached = self._ghosts, len(self._blocks)
        most = max(_MIN_REMEMBERED, _REMEMBERED_PER_NODE * num_cached)
        surplus = len(ghosts) + num_cached - most
        if surplus > most // _SLACK:
            for _ in range(min(surplus, len(ghosts))):
                self._forget_ghost(ghosts.first())
        most = max(_MIN_BLOCKS, _BLOCKS_PER_BLOCK * self._shadow.room)
        while ghosts.num_blocks > most:
            self._forget_ghost(ghosts.first())

    def _forget_ghost(self, ghost: int) -> None:
        ghosts = self._ghosts
        self._pass(self._ghost_marks[ghost], ghosts.lengths[ghost] - self._ghost_asked[ghost])
        ghosts.remove(ghost)

    def _pass(self, mark: int, num: int) -> None:
        """`num` blocks will not be heard of again."""
        used, lesson = mark >> CLASS_BITS, self._lesson
        counted = lesson - used if used < lesson else 0
        self._hazards.log.extend((mark & CLASS, counted, self._time - used, num, 0, 0))

    def _counts(self) -> tuple[int, int, int, int]:
        return self._lookups, self._asked_blocks, self._hit_blocks, self._lru_hit_blocks

    def _count_log(self) -> None:
        """Count what happened since the last time, and keep what was used again."""
        import numpy as np

        rows = np.array(self._hazards.log, np.int64).reshape(-1, ROW)
        self._recent[-1].rows = rows[rows[:, 4] != 0]
        self._recent.append(_Chunk(self._time, self._counts(), rows[:0]))
        while len(self._recent) > 1 and self._recent[1].time <= self._time - _WINDOW:
            del self._recent[0]
        self._hazards.count_log()

    def _learn(self) -> None:
        self._count_log()
        if not self._uncounted:
            if self._time < self._next_lesson:
                return
            self._begin_lesson()
        self._hazards.count(*self._uncounted.pop())
        if not self._uncounted:
            self._end_lesson()

    def _begin_lesson(self) -> None:
        """Note which ages all that is remembered has reached. About 0.1 us a node or ghost."""
        import numpy as np

        columns = self._marks, self._lengths, self._holds, self._ghost_marks, self._ghosts.lengths, self._ghost_asked
        marks, lengths, holds, ghost_marks, ghost_lengths, asked = (
            np.frombuffer(column, column.typecode)  # while it is alive, the column cannot grow
            for column in columns
        )
        idle, gone = ((marks != NEW) & (holds == 0)).nonzero()[0], ghost_lengths.nonzero()[0]
        all_marks = np.concatenate([marks[idle], ghost_marks[gone]])
        used = all_marks >> CLASS_BITS
        counted = np.maximum(self._lesson - used, 0)
        num = np.concatenate([lengths[idle], (ghost_lengths - asked)[gone]])
        noted = all_marks & CLASS, counted, self._time - used, num
        starts = range(0, max(1, len(num)), _CHUNK)
        self._uncounted = [[column[start : start + _CHUNK] for column in noted] for start in starts]
        self._lesson, self._lesson_length = self._time, self._time - self._lesson
        self._next_lesson = self._time + max(_MIN_LESSON, min(_MAX_LESSON, self._time // 8))

    def _end_lesson(self) -> None:
        import numpy as np

        self._hazards.relearn(self._lesson_length)
        if self._hazards.index is not None:
            self._index = np.column_stack((self._hazards.index, np.full(NUM_CLASSES, inf))).ravel()
