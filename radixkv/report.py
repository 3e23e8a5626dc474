"""What pictures show of a trace: charts of its hits, the tree of its prefixes. Knows nothing of how they are drawn."""

import heapq
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from radixkv.curve import Counts, Curve, Prompts, walk
from radixkv.plot import Chart, capacity_chart, misses_chart, ttl_chart

_NUM_POINTS = 300  # of a curve
_NUM_OPT_POINTS = 32  # each costs a pass
_MARKED_TTLS = (60, 300, 3600)  # s
_MAX_PREFIXES = 1500  # that a page draws
_MIN_SHARE = 0.0005  # of the requests: narrower prefixes are drawn together

# Charts


def charts(
    curve: Curve,
    *,
    rate: str = "block",
    kv_bytes_per_token: int | None = None,
    policies: Mapping[str, Mapping[int, Counts]] | None = None,
    name: str = "",
) -> list[Chart]:
    """Hits by capacity and, of a trace with times, by time to live. About 30 passes for the optimum.

    `policies`: of each, by capacity in blocks, the hit blocks of each request.
    """

    def share(hits: Counts) -> float:
        return float(getattr(curve.rates(hits), rate))

    def line(capacities: Iterable[int], hits: Callable[[int], Counts]) -> "tuple[Any, Any]":
        blocks = list(capacities)
        return np.array(blocks, float), np.array([share(hits(capacity)) for capacity in blocks])

    ceiling, end = share(curve.lru_hits(None)), max(curve.capacity_for(1), 1)
    low, high = max(1, end // 1000), max(2, int(end * 1.1))
    knee = max(curve.knee(), low)
    drawn = [
        capacity_chart(
            line(_spread(low, high, _NUM_POINTS), curve.lru_hits),
            line(_spread(low, high, _NUM_OPT_POINTS), curve.opt_hits),
            ceiling,
            knee=(knee, share(curve.lru_hits(knee))),
            block_size=curve.prompts.block_size,
            kv_bytes_per_token=kv_bytes_per_token,
            policies={
                policy: line(sorted(hits), hits.__getitem__) for policy, hits in (policies or {}).items() if hits
            },
            subtitle=name,
            rate=rate,
        )
    ]
    duration = float(np.ptp(curve.prompts.times))
    if duration > 1:
        seconds = np.geomspace(1, duration, _NUM_POINTS)
        drawn.append(
            ttl_chart(
                seconds,
                np.array([share(curve.ttl_hits(time)) for time in seconds.tolist()]),
                ceiling,
                marks=[(time, share(curve.ttl_hits(time)), curve.ttl_blocks(time)) for time in _MARKED_TTLS],
                subtitle="no bound on the capacity; at the points, the most blocks that are cached at once",
                rate=rate,
            )
        )
    return drawn


def over_time(curve: Curve, hits: Counts) -> Chart:
    """Where the prompt tokens went, as far as `hits`, blocks of each request, tell."""
    prompts = curve.prompts
    hit, known = (np.minimum(num * prompts.block_size, prompts.num_tokens) for num in (hits, curve.lru_hits(None)))
    classes = {"hit": hit, "capacity": known - hit, "not cached before": prompts.num_tokens - known}
    return misses_chart(prompts.times, classes)


def _spread(low: int, high: int, num: int) -> list[int]:
    return [int(capacity) for capacity in np.unique(np.geomspace(low, high, num).round())]


# The tree of prefixes


@dataclass(frozen=True, slots=True)
class Prefix:
    """Blocks [start, end) of the paths of some requests, which agree up to there; or the `num_prefixes` narrow ones
    behind `parent`, drawn together, whose `end` is `start`."""

    parent: int  # index, -1 for the root
    start: int
    end: int
    num_requests: int
    num_prefixes: int
    num_blocks: int  # of the requests' prompts in it
    num_hits: int  # of those
    request: int  # one of the requests


@dataclass(frozen=True, slots=True)
class _Place:
    """A block on a request's path: the one that comes next."""

    request: int
    run: int
    block: int


def prefix_tree(
    prompts: Prompts, hits: Counts, *, max_prefixes: int = _MAX_PREFIXES, min_share: float = _MIN_SHARE
) -> list[Prefix]:
    """The prefixes that most requests have, parents before their children, the root, without blocks, first.

    `hits`: hit blocks of each request. Prefixes of fewer than `min_share` of the requests are put together, and so is
    what exceeds `max_prefixes`. O(requests x depth of the tree that is shown).
    """
    paths, counted = prompts.paths, np.minimum(prompts.num_blocks, prompts.path_lengths)
    least = max(2, min_share * len(paths))
    tree: list[Prefix] = []

    def add(parent: int, start: int, end: int | None, places: list[_Place], num_prefixes: int = 1) -> int:
        rows = np.array([place.request for place in places], np.int64)
        stop = counted[rows].max(initial=0) if end is None else end
        blocks, hit = (np.clip(column[rows], start, stop) - start for column in (counted, hits))
        sums = int(blocks.sum()), int(hit.sum())
        tree.append(
            Prefix(parent, start, start if end is None else end, len(places), num_prefixes, *sums, places[0].request)
        )
        return len(tree) - 1

    everything = [_Place(request, 0, path[0]) for request, path in enumerate(paths) if path]
    if not everything:
        return []
    waiting = [(-len(everything), 0, -1, 0, everything)]  # most requests first
    serial = 0
    while waiting:
        _, _, parent, start, places = heapq.heappop(waiting)
        if len(tree) >= max_prefixes:
            add(parent, start, None, places)
            continue
        length = 0 if parent < 0 else min(_num_common(paths, places[0], place) for place in places)
        node = add(parent, start, start + length, places)
        families: dict[int, list[_Place]] = {}
        for place in places:
            if (following := _advance(paths[place.request], place, length)) is not None:
                families.setdefault(following.block, []).append(following)
        narrow: list[list[_Place]] = []
        for family in families.values():
            if len(family) < least:
                narrow.append(family)
                continue
            serial += 1
            heapq.heappush(waiting, (-len(family), serial, node, start + length, family))
        if narrow:
            add(node, start + length, None, [place for family in narrow for place in family], len(narrow))
    return tree


def _num_common(paths: "Sequence[array[int]]", first: _Place, second: _Place) -> int:
    """How many blocks two paths have in common, from a place on where both have the same."""
    return walk(paths[first.request], first.run, paths[second.request], second.run, first.block)[0]


def _advance(path: "array[int]", place: _Place, length: int) -> _Place | None:
    """The place so many blocks on, None at the end of the path."""
    run, block = place.run, place.block
    while length >= path[run + 1] - block:
        length -= path[run + 1] - block
        run += 2
        if run == len(path):
            return None
        block = path[run]
    return _Place(place.request, run, block + length)
