"""Hits at every capacity, exactly, from one pass over a trace. Knows nothing of files, tables or pictures.

A request uses its whole path, the root last, so in the order of last use every block stands before what is built on it,
and least recently used is a stack algorithm (Mattson et al. 1970): a block hits in every cache that has room for it and
for what stands before it. The blocks of which request t was the last user are a suffix of its path, and a later request
takes from the top of such suffixes: whole runs of blocks, at consecutive distances. A Fenwick tree over requests counts
what stands before a run, so the pass costs O(runs x log requests), however many blocks the runs have.

The same runs give the optimum (Belady 1966), as the next use of each block is known, and what a time to live keeps.

What is counted, in a cache of C blocks:

- a trace of ids: every id of a prompt is a block, those of answers are cached; LRU hits are those of `radixkv.replay`;
- a trace of tokens: whole blocks of prompts and answers are cached, at least one token is prefilled, and the running
  request's unfinished block is one of the C; LRU hits are those of `radixkv.replay`, but for the room that it gives to
  both copies of an answer that is cached already, until it knows.
"""

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from radixkv.reuse import Recent
from radixkv.tokens import TOKEN_BYTES
from radixkv.trace import IdTrace, Progress, TokenTrace, Trace

Counts: TypeAlias = "npt.NDArray[np.int64]"

_NONE = -1  # no block, no request

DEFINITIONS = {
    "block": "hit blocks / all blocks of the prompts, partial last ones included",
    "token": "prompt tokens in hit blocks / all prompt tokens",
    "full": "hit full blocks / all full blocks of the prompts",
    "mean": "hit blocks / blocks of a prompt, the mean over the requests",
    "warm": "prompt tokens in hit blocks / all prompt tokens, in the second half of the requests",
}


@dataclass(frozen=True, slots=True)
class Prompts:
    """What each request of a trace asks of a cache: columns, one entry a request."""

    block_size: int  # tokens
    paths: "list[array[int]]"  # chained ids of the blocks that it leaves behind: start, end, start, end, ..., half open
    path_lengths: Counts  # blocks
    times: npt.NDArray[np.float64]  # s
    num_tokens: Counts
    num_blocks: Counts  # of the prompt, a partial last one included
    num_full_blocks: Counts
    num_hittable: Counts  # how many blocks of the path a hit can have
    unfinished: npt.NDArray[np.bool_] | None  # whether it ends with a block that nobody can hit; None for ids


def prompts_of(trace: Trace) -> Prompts:
    """The requests of a trace of either kind. O(runs), or O(blocks) for tokens."""
    return _prompts_of_ids(trace) if isinstance(trace, IdTrace) else _prompts_of_tokens(trace)


@dataclass(frozen=True, slots=True)
class Rates:
    """One hit rate by each of the `DEFINITIONS`, 0 to 1; 0 where there is nothing to divide by."""

    block: float
    token: float
    full: float
    mean: float
    warm: float


class Curve:
    """What a trace hits in caches of every capacity. Immutable once made."""

    def __init__(self, trace: Trace, *, progress: Progress | None = None) -> None:
        """One pass: some 5 us and 64 bytes a request and a run that is used again, of tokens also 0.5 us a block."""
        self.prompts = prompts = prompts_of(trace)
        last, use, start, length, before = _reuses(prompts, progress)
        self._gaps = prompts.times[use] - prompts.times[last]  # s
        self._last, self._use, self._used = last, use, length
        # A run of `num` blocks hits from capacity `first` on with one, from first + 1 on with two, ...
        self._num = np.clip(prompts.num_hittable[use] - start, 0, length)
        self._first = start + before + 1 + self._num_reserved()

    @property
    def num_requests(self) -> int:
        return len(self.prompts.paths)

    @property
    def access_blocks(self) -> int:
        """Blocks of all prompts, partial last ones included."""
        return int(self.prompts.num_blocks.sum())

    def lru(self) -> Counts:
        """Hit blocks at capacity 0, 1, 2, ... up to the smallest that hits all that any can."""
        first, end = self._first[self._num > 0], (self._first + self._num)[self._num > 0]
        size = int(end.max(initial=1)) + 1
        steps = np.bincount(first, minlength=size) - np.bincount(end, minlength=size)
        return np.cumsum(np.cumsum(steps))[:-1]

    def lru_hits(self, capacity: int | None) -> Counts:
        """Hit blocks of each request, least recently used first to go; None for no bound."""
        if capacity is None:
            return self._by_request(self._num)
        return self._by_request(np.clip(capacity + 1 - self._first, 0, self._num))

    def opt_hits(self, capacity: int | None) -> Counts:
        """Hit blocks of each request, if the blocks that are used next are kept, the shallower of a path first.

        No cache can hit more: what is not worth keeping need not even be inserted. About 1 us a request and run.
        """
        if capacity is None:
            return self.lru_hits(None)
        unfinished = self.prompts.unfinished
        rooms = np.full(self.num_requests, capacity) if unfinished is None else np.maximum(capacity - unfinished, 0)
        return _optimum(self._last, self._use, self._num, rooms)

    def ttl_hits(self, seconds: float) -> Counts:
        """Hit blocks of each request, without bound, if blocks go when they were not used for so long."""
        return self._by_request(np.where(self._gaps <= seconds, self._num, 0))

    def ttl_blocks(self, seconds: float) -> int:
        """The most blocks that are cached at once, if they go when they were not used for so long."""
        lengths, times = self.prompts.path_lengths, self.prompts.times
        kept = self._gaps <= seconds
        came = lengths - self._by_request(np.where(kept, self._used, 0))
        passed_on = np.bincount(self._last, np.where(kept, self._used, 0), self.num_requests).astype(np.int64)
        # what came at an instant is there before what goes at the same
        order = np.lexsort((np.repeat([0, 1], self.num_requests), np.concatenate([times, times + seconds])))
        return int(np.cumsum(np.concatenate([came, passed_on - lengths])[order]).max(initial=0))

    def knee(self) -> int:
        """The capacity up to which a block buys more LRU hits than on the average up to the ceiling.

        Where the curve is farthest above the straight line from its start to its end (Satopaa et al. 2011); its end, if
        it is never above.
        """
        hits = self.lru()
        end = len(hits) - 1
        above = hits * end - hits[-1] * np.arange(end + 1)
        return end - int(np.argmax(above[::-1]))

    def capacity_for(self, share: float) -> int:
        """The smallest capacity whose LRU hits are at least this share, 0 to 1, of those without bound."""
        hits = self.lru()
        return int(np.searchsorted(hits, share * hits[-1] - 1e-6))  # subtle: 0.55 * 100 is above 55

    def rates(self, hits: Counts) -> Rates:
        """The rates of the hit blocks of each request."""
        prompts = self.prompts
        tokens = np.minimum(hits * prompts.block_size, prompts.num_tokens)
        full = np.minimum(hits, prompts.num_full_blocks)
        asked = prompts.num_blocks > 0
        half = self.num_requests // 2
        return Rates(
            block=_ratio(hits, prompts.num_blocks),
            token=_ratio(tokens, prompts.num_tokens),
            full=_ratio(full, prompts.num_full_blocks),
            mean=float(np.mean(hits[asked] / prompts.num_blocks[asked])) if asked.any() else 0.0,
            warm=_ratio(tokens[half:], prompts.num_tokens[half:]),
        )

    def _num_reserved(self) -> Counts:
        """Of each run: the blocks that the request before its use needed besides those that are cached.

        That is its unfinished block. Without one it computes its last block anew, a copy of what is cached, unless that
        was used longer ago than the run, or never: then it stands before the run, and is counted already.
        """
        unfinished, last, use = self.prompts.unfinished, self._last, self._use
        if unfinished is None:
            return np.zeros_like(use)
        oldest = np.full(self.num_requests, _NONE)  # the last user of its last block before
        oldest[use] = last  # subtle: of several runs the deepest is assigned last
        oldest[self._by_request(self._used) < self.prompts.path_lengths] = _NONE
        before = use - 1
        return 1 - (~unfinished[before] & (last < before) & (oldest[before] < last)).astype(np.int64)

    def _by_request(self, nums: Counts) -> Counts:
        return np.bincount(self._use, nums, self.num_requests).astype(np.int64)


def optimum(recent: Recent) -> int:
    """How many blocks the last requests of a cache with the policy "reuse" could have hit, see `Reuse.recent`.

    As `Curve.opt_hits`; what was there before them may be kept for them too. About 1 us a run.
    """
    in_use = recent.last == recent.use  # by others, all the time
    rooms = np.full(recent.num_requests + 2, recent.capacity)
    last, use, num = (column[~in_use] for column in (recent.last, recent.use, recent.num))
    return int(_optimum(last, use, num, rooms).sum() + recent.num[in_use].sum())


def _optimum(last: Counts, use: Counts, num: Counts, rooms: Counts) -> Counts:
    """Hit blocks of each request: request `use` is the next after `last` to use a run of `num` blocks."""
    nexts: list[list[tuple[int, int]]] = [[] for _ in rooms]  # of each request: (use, blocks)
    for before, after, blocks in zip(last.tolist(), use.tolist(), num.tolist(), strict=True):
        if blocks:
            nexts[before].append((after, blocks))
    waiting = [0] * len(rooms)  # blocks that are kept for each: a prefix of its path when it comes
    uses: list[int] = []  # a heap, those that come last first
    total = 0
    for request, (runs, room) in enumerate(zip(nexts, rooms.tolist(), strict=True)):
        total -= waiting[request]
        for after, blocks in runs:
            if not waiting[after]:
                heappush(uses, -after)
            waiting[after] += blocks
            total += blocks
        while total > room:
            after = -uses[0]
            kept = max(0, waiting[after] - (total - room))
            total -= waiting[after] - kept
            waiting[after] = kept
            if not kept:
                heappop(uses)
    return np.array(waiting, np.int64)


def _reuses(prompts: Prompts, progress: Progress | None) -> list[Counts]:
    """The runs of blocks that are used again, as columns.

    Request `use` is the next after request `last` to use `length` blocks of its path, from the one at `start` on;
    `before` blocks, none of them on its path, were used since.
    """
    paths, lengths = prompts.paths, prompts.path_lengths.tolist()
    columns = [array("q") for _ in range(5)]
    add_last, add_use, add_start, add_length, add_before = (column.append for column in columns)
    counts = _Fenwick(len(paths))  # of each request: the blocks that it was the last to use, a suffix of its path
    owners: dict[int, int] = {}  # the first block of such a suffix -> the request
    runs = [0] * len(paths)  # where in its path that block's run is
    for use, path in enumerate(paths):
        if progress is not None and use % 1024 == 0:
            progress(use / len(paths))
        if not path:
            continue
        run = start = 0
        block = path[0]
        while (last := owners.pop(block, _NONE)) != _NONE:
            length, run, block, runs[last], left = walk(path, run, paths[last], runs[last], block)
            add_last(last)
            add_use(use)
            add_start(start)
            add_length(length)
            # subtle: what this request used before is its own by now, and not counted by the tree
            add_before(counts.sum_after(last))
            counts.add(last, -length)
            start += length
            if left != _NONE:
                owners[left] = last
        owners[path[0]] = use
        counts.add(use, lengths[use])
    return [np.frombuffer(column, np.int64) for column in columns]


def walk(
    path: "array[int]", run: int, other: "array[int]", other_run: int, block: int
) -> tuple[int, int, int, int, int]:
    """Walk down two paths from a `block` that is in the given run of each, as long as they agree.

    Returns how many blocks that are, and of each path the run and the block that is next, -1 at its end.
    """
    length = 0
    while True:
        end, other_end = path[run + 1], other[other_run + 1]
        stop = min(end, other_end)
        length += stop - block
        following = other_following = stop
        if stop == end:
            run += 2
            following = path[run] if run < len(path) else _NONE
        if stop == other_end:
            other_run += 2
            other_following = other[other_run] if other_run < len(other) else _NONE
        if following != other_following or following == _NONE:
            return length, run, following, other_run, other_following
        block = following


class _Fenwick:
    """Counts of which one changes and a sum is asked, both in O(log) (Fenwick 1994)."""

    def __init__(self, num: int) -> None:
        self._sums = [0] * (num + 1)
        self._total = 0

    def add(self, index: int, num: int) -> None:
        sums = self._sums
        self._total += num
        index += 1
        while index < len(sums):
            sums[index] += num
            index += index & -index

    def sum_after(self, index: int) -> int:
        """Of all counts behind that of `index`."""
        sums, total = self._sums, self._total
        index += 1
        while index:
            total -= sums[index]
            index &= index - 1
        return total


def _prompts_of_ids(trace: IdTrace) -> Prompts:
    prompts = [request.runs for request in trace.requests]
    paths = [request.runs if request.path is None else request.path for request in trace.requests]
    num_tokens = np.array([request.num_prompt_tokens for request in trace.requests], np.int64)
    times = np.array([request.time for request in trace.requests])
    num_blocks = _lengths(prompts)
    full = np.minimum(num_blocks, num_tokens // trace.block_size)
    return Prompts(trace.block_size, paths, _lengths(paths), times, num_tokens, num_blocks, full, num_blocks, None)


def _prompts_of_tokens(trace: TokenTrace) -> Prompts:
    size = trace.block_size
    width = size * TOKEN_BYTES
    numbers: dict[tuple[int, bytes], int] = {}  # (block before, tokens) -> block
    roots: dict[Hashable, int] = {}  # namespace -> what its first blocks follow, below all blocks
    paths, times, lengths, unfinished = [], array("d"), array("q"), []
    for request in trace.requests:
        tokens = request.tokens + request.output_tokens[:-TOKEN_BYTES]  # the last of an answer never has KV
        path = array("q")
        block = roots.setdefault(request.namespace, -1 - len(roots))
        for start in range(0, len(tokens) - width + 1, width):
            block = numbers.setdefault((block, tokens[start : start + width]), len(numbers))
            if path and path[-1] == block:
                path[-1] += 1
            else:
                path.extend((block, block + 1))
        paths.append(path)
        times.append(request.time)
        lengths.append(request.num_prompt_tokens)
        unfinished.append(request.num_output_tokens > 0 or request.num_prompt_tokens % size > 0)
    num_tokens = np.array(lengths)
    num_blocks, full, hittable = -(-num_tokens // size), num_tokens // size, (num_tokens - 1) // size
    columns = np.array(times), num_tokens, num_blocks, full, hittable, np.array(unfinished)
    return Prompts(size, paths, _lengths(paths), *columns)


def _lengths(paths: "Sequence[array[int]]") -> Counts:
    return np.array([sum(path[1::2]) - sum(path[::2]) for path in paths], np.int64)


def _ratio(part: Counts, whole: Counts) -> float:
    return int(part.sum()) / (int(whole.sum()) or 1)
