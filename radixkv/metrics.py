"""Prometheus metrics of live caches. Knows names, labels and the exposition; counts nothing itself.

    metrics = Metrics()
    metrics.watch(cache, "llama-3.1-8b", sample=1000)
    prometheus_client.start_http_server(9100)

Needs the extra `metrics`.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import REGISTRY, Collector, CollectorRegistry
    from prometheus_client.utils import floatToGoString
except ModuleNotFoundError as error:
    raise ImportError("prometheus_client is not installed: pip install 'radixkv[metrics]'", name=error.name) from None

from radixkv.cache import PrefixCache
from radixkv.observer import BOUNDS, DEFAULT_NAMESPACES, Histogram, Lookups, Observer
from radixkv.reuse import Reuse
from radixkv.tree import shown_name

_Owner = TypeVar("_Owner")
_Read = TypeVar("_Read")
_TRIES = 10
_MAX_LABEL = 64  # characters

# of `Stats`, under the metric's name
_COUNTERS = {
    "lookups": ("radixkv_lookups", "Requests that looked for a cached prefix, resumed ones left out."),
    "prompt_tokens": ("radixkv_lookup_tokens", "Prompt tokens of lookups."),
    "hit_tokens": ("radixkv_hit_tokens", "Prompt tokens of lookups that were cached."),
    "resumed_lookups": ("radixkv_resumed_lookups", "Preempted requests that came back."),
    "resumed_prompt_tokens": ("radixkv_resumed_lookup_tokens", "Tokens of preempted requests that came back."),
    "resumed_hit_tokens": ("radixkv_resumed_hit_tokens", "Tokens of those that were still cached."),
    "failed_allocations": ("radixkv_failed_allocations", "Calls that found too few blocks free or evictable."),
    "duplicates_freed": ("radixkv_duplicate_blocks", "Blocks computed twice, of which the later copy was freed."),
}
# of `ReuseStats`
_REUSE_COUNTERS = {
    "asked_blocks": ("radixkv_reuse_asked_blocks", "Blocks of all prompts, under the policy reuse."),
    "hit_blocks": ("radixkv_reuse_hit_blocks", "Of those, blocks that were cached."),
    "lru_hit_blocks": ("radixkv_reuse_lru_hit_blocks", "Of those, blocks that LRU would have had."),
    "switches": ("radixkv_reuse_guard_switches", "How often LRU order was taken up because the policy was behind it."),
}


class Metrics(Collector):
    """A collector of any number of caches, told apart by the label `name`. Make one a registry.

    A scrape reads the caches from its own thread, without a lock and without slowing them: each number is one that the
    cache had during the scrape, counters never go back, and the counters of a cache, and its blocks, belong together
    unless they changed between all of ten readings. A cache that is gone leaves the scrape.
    """

    def __init__(self, registry: CollectorRegistry | None = REGISTRY) -> None:
        """Raises: ValueError where the registry has these metrics already."""
        self._watched: dict[str, tuple[weakref.ref[PrefixCache], Observer | None]] = {}
        if registry is not None:
            registry.register(self)

    def watch(
        self,
        cache: PrefixCache,
        name: str = "default",
        *,
        sample: int | None = None,
        max_namespaces: int = DEFAULT_NAMESPACES,
    ) -> None:
        """Show `cache` in every scrape from now on. Only what its `stats` count anyway, unless `sample` is given.

        With `sample`, an `Observer` is put into the cache as well, which costs each request (see docs/metrics.md):
        tokens by namespace, ages of blocks, and missed tokens by reason, of one lookup of so many. Call it from the
        cache's own thread, best before the first request, and once a cache.

        Raises: ValueError for a `name` that another live cache has, or a `sample` or `max_namespaces` out of bounds.
        """
        name = _label(name)
        taken = self._watched.get(name)
        if taken is not None and taken[0]() is not None:
            raise ValueError(f"a cache with the name {name!r} is watched already")
        observer = None
        if sample is not None:
            observer = Observer(cache, sample=sample, max_namespaces=max_namespaces)
        self._watched[name] = weakref.ref(cache), observer

    def unwatch(self, name: str = "default") -> None:
        """Leave a cache out of every scrape from now on. Its observer goes with the cache.

        Raises: ValueError for a name that is not watched.
        """
        if self._watched.pop(_label(name), None) is None:
            raise ValueError(f"no cache with the name {name!r} is watched")

    def collect(self) -> Iterator[Metric]:
        """Every metric, of all caches that are watched and alive. O(caches x labels)."""
        watched = []
        for name, (reference, observer) in self._watched.copy().items():
            cache = reference()
            if cache is None:
                self._watched.pop(name, None)
            else:
                watched.append((name, cache, observer))
        yield from _collect_caches([(name, cache) for name, cache, _ in watched])
        yield from _collect_reuse(
            [(name, cache.policy) for name, cache, _ in watched if isinstance(cache.policy, Reuse)]
        )
        yield from _collect_observers([(name, observer) for name, _, observer in watched if observer is not None])


def _collect_caches(watched: Sequence[tuple[str, PrefixCache]]) -> Iterator[Metric]:
    counters = _counters(_COUNTERS)
    evicted = CounterMetricFamily(
        "radixkv_evicted_blocks",
        "Cached blocks that went: for want of room (capacity), by evict (call), by reset or clear (reset).",
        labels=["name", "reason"],
    )
    blocks = GaugeMetricFamily(
        "radixkv_blocks",
        "Blocks now: free, cached and in nobody's use, cached and in use (pinned), of one request alone (private).",
        labels=["name", "state"],
    )
    size = GaugeMetricFamily("radixkv_block_size_tokens", "Tokens a block.", labels=["name"])
    running = GaugeMetricFamily("radixkv_running_requests", "Requests that began and were not freed.", labels=["name"])
    for name, cache in watched:
        stats = _steady(lambda cache: cache.stats, cache)
        for field, counter in counters.items():
            counter.add_metric([name], getattr(stats, field))
        evicted.add_metric([name, "capacity"], stats.evicted_for_room)
        evicted.add_metric([name, "call"], stats.evicted_by_call)
        evicted.add_metric([name, "reset"], stats.forgotten_blocks)
        for state, num in _steady(_states, cache).items():
            blocks.add_metric([name, state], num)
        size.add_metric([name], cache.block_size)
        running.add_metric([name], len(cache._running))
    yield from (*counters.values(), evicted, blocks, size, running)


def _collect_reuse(watched: Sequence[tuple[str, Reuse]]) -> Iterator[Metric]:
    counters = _counters(_REUSE_COUNTERS)
    guarded = GaugeMetricFamily("radixkv_reuse_guarded", "1 while LRU order is used instead.", labels=["name"])
    since = GaugeMetricFamily("radixkv_reuse_guarded_since_lookup", "The lookup since which it is so.", labels=["name"])
    for name, policy in watched:
        stats = _steady(lambda policy: policy.stats, policy)
        for field, counter in counters.items():
            counter.add_metric([name], getattr(stats, field))
        guarded.add_metric([name], stats.guarded)
        since.add_metric([name], stats.since)
    yield from (*counters.values(), guarded, since)


def _collect_observers(watched: Sequence[tuple[str, Observer]]) -> Iterator[Metric]:
    missed = CounterMetricFamily(
        "radixkv_misses_tokens",
        "Prompt tokens that were not hit, by reason as radixkv explain has them; an estimate where sampled.",
        labels=["name", "reason"],
    )
    by_namespace = [
        (field, CounterMetricFamily(f"radixkv_namespace_{metric}", documentation, labels=["name", "namespace"]))
        for field, metric, documentation in (
            ("num", "lookups", "Lookups of a namespace."),
            ("prompt_tokens", "lookup_tokens", "Prompt tokens of a namespace's lookups."),
            ("hit_tokens", "hit_tokens", "Prompt tokens of a namespace's lookups that were cached."),
        )
    ]
    idle = HistogramMetricFamily(
        "radixkv_block_idle_before_evict_ticks",
        "Requests that began between a block's last use and its eviction.",
        labels=["name"],
    )
    gap = HistogramMetricFamily(
        "radixkv_block_reuse_gap_ticks",
        "Requests that began between a block's last use and its next hit; 0 while its first request runs.",
        labels=["name"],
    )
    for name, observer in watched:
        for reason, tokens in observer.missed_tokens.copy().items():
            missed.add_metric([name, reason], tokens)
        for label, lookups in _by_label(observer).items():
            for field, counter in by_namespace:
                counter.add_metric([name, label], sum(getattr(each, field) for each in lookups))
        for family, histogram in ((idle, observer.idle), (gap, observer.reuse_gap)):
            family.add_metric([name], *_buckets(histogram))
    yield from (missed, *(counter for _, counter in by_namespace), idle, gap)


def _counters(names: Mapping[str, tuple[str, str]]) -> dict[str, CounterMetricFamily]:
    """A family for each counter of a snapshot."""
    return {
        field: CounterMetricFamily(name, documentation, labels=["name"])
        for field, (name, documentation) in names.items()
    }


def _steady(read: Callable[[_Owner], _Read], owner: _Owner) -> _Read:
    """What `read` says twice in a row, so that its parts belong together; after ten tries what it said last."""
    former = read(owner)
    for _ in range(_TRIES):
        latest = read(owner)
        if latest == former:
            break
        former = latest
    return former


def _states(cache: PrefixCache) -> dict[str, int]:
    """How many blocks are in each state; they add up, in the middle of a call as well."""
    free, cached, evictable = cache.num_free_blocks, cache.num_cached_blocks, cache.num_evictable_blocks
    evictable = min(evictable, cached)
    private = max(0, cache.num_blocks - free - cached)
    return {"free": free, "cached": evictable, "pinned": cached - evictable, "private": private}


def _by_label(observer: Observer) -> dict[str, list[Lookups]]:
    """The lookups of namespaces, those together that read the same."""
    labelled: dict[str, list[Lookups]] = {}
    for key, lookups in observer.namespaces.copy().items():
        namespace = key if key is None or isinstance(key, str) else shown_name(key)
        text = "(none)" if namespace is None else namespace if isinstance(namespace, str) else repr(namespace)
        labelled.setdefault(_label(text), []).append(lookups)
    if observer.other_namespaces.num:
        labelled.setdefault("(other)", []).append(observer.other_namespaces)
    return labelled


def _label(text: str) -> str:
    """As text that can be exposed: a lone surrogate would fail every scrape."""
    return text[:_MAX_LABEL].encode("utf-8", "backslashreplace").decode()


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    bounds = [*map(floatToGoString, BOUNDS), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.total
