"""What a scrape shows is what the cache did; who watches changes nothing of it."""

import gc
import json
import re
import subprocess
import sys
import threading
from bisect import bisect_left
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

prometheus_client = pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest  # noqa: E402
from prometheus_client.openmetrics import exposition as openmetrics  # noqa: E402
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from radixkv import OutOfBlocksError, PrefixCache  # noqa: E402
from radixkv.metrics import Metrics  # noqa: E402
from radixkv.observer import BOUNDS, REASONS, Observer, missed_tokens  # noqa: E402
from radixkv.reuse import Reuse, ReuseStats  # noqa: E402

DOCS = Path(__file__).parents[1] / "docs"
SIZE = 4


@pytest.fixture
def registry():
    return CollectorRegistry(auto_describe=True)


@pytest.fixture
def metrics(registry):
    return Metrics(registry)


def scraped(registry):
    """Samples by name and label values, `name` left out where it is the default."""
    samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = tuple(value for value in sample.labels.values() if value != "default")
            assert (sample.name, labels) not in samples, f"{sample} stands there twice"
            samples[sample.name, labels] = sample.value
    return samples


def of(samples, name):
    """Label value -> value, of a metric with one label beside `name`."""
    return {labels[0]: value for (key, labels), value in samples.items() if key == name}


def run(cache, tokens, **options):
    request = cache.allocate(tokens, **options)
    cache.commit(request)
    cache.free(request)
    return request


# What a cache counts anyway


def test_a_scrape_shows_the_counters(registry, metrics):
    cache = PrefixCache(10, SIZE)
    metrics.watch(cache)
    run(cache, range(9))
    run(cache, [*range(8), 99, 98])
    run(cache, range(9), resumed=True)
    holds = cache.allocate(range(40))
    with pytest.raises(OutOfBlocksError):
        cache.allocate([7] * 4)
    samples = scraped(registry)
    expected = {
        "radixkv_lookups_total": 3,
        "radixkv_lookup_tokens_total": 9 + 10 + 40,
        "radixkv_hit_tokens_total": 0 + 8 + 8,
        "radixkv_resumed_lookups_total": 1,
        "radixkv_resumed_lookup_tokens_total": 9,
        "radixkv_resumed_hit_tokens_total": 8,
        "radixkv_failed_allocations_total": 1,
        "radixkv_duplicate_blocks_total": 0,
        "radixkv_block_size_tokens": 4,
        "radixkv_running_requests": 1,
    }
    assert {name: samples[name, ()] for name in expected} == expected
    assert holds.num_cached_tokens == 8


def test_duplicates_are_counted(registry, metrics):
    cache = PrefixCache(10, SIZE)
    metrics.watch(cache)
    first, second = cache.allocate(range(8)), cache.allocate(range(8))
    cache.commit(first)
    cache.commit(second)
    assert scraped(registry)["radixkv_duplicate_blocks_total", ()] == 2


def test_each_block_is_in_one_state(registry, metrics):
    cache = PrefixCache(10, SIZE)
    metrics.watch(cache)
    states = lambda: of(scraped(registry), "radixkv_blocks")  # noqa: E731
    assert states() == {"free": 10, "cached": 0, "pinned": 0, "private": 0}
    request = cache.allocate(range(10))
    assert states() == {"free": 7, "cached": 0, "pinned": 0, "private": 3}
    cache.commit(request)
    assert states() == {"free": 7, "cached": 0, "pinned": 2, "private": 1}
    cache.free(request)
    assert states() == {"free": 8, "cached": 2, "pinned": 0, "private": 0}


def test_evicted_blocks_are_told_apart_by_why_they_went(registry, metrics):
    cache = PrefixCache(10, SIZE)
    metrics.watch(cache)
    run(cache, range(40))
    run(cache, range(100, 112))
    assert cache.evict(2)
    run(cache, range(200, 208), namespace="adapter")
    evicted = lambda: of(scraped(registry), "radixkv_evicted_blocks_total")  # noqa: E731
    assert evicted() == {"capacity": 3, "call": 2, "reset": 0}
    assert cache.stats.evicted_blocks == 5
    cache.clear("adapter")
    assert evicted() == {"capacity": 3, "call": 2, "reset": 2}
    held = cache.allocate(range(16))
    cached = cache.num_cached_blocks
    cache.reset()
    assert evicted() == {"capacity": 3, "call": 2, "reset": 2 + cached}
    cache.free(held)
    assert evicted() == {"capacity": 3, "call": 2, "reset": 2 + cached}


def test_the_bench_says_what_it_measured():
    command = [sys.executable, DOCS.parent / "bench" / "metrics.py", "--requests", "60", "--rounds", "1"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    row = json.loads(shown.splitlines()[-1])["rows"]["constant eviction, 512 tokens"]
    assert row.keys() == {"off", "counters", "sample=1000", "sample=100", "sample=1", "scrape"}


# Several caches


def test_the_policy_reuse_shows_what_lru_would_have_hit(registry, metrics):
    plain, cache = PrefixCache(6, SIZE), PrefixCache(6, SIZE, policy="reuse")
    metrics.watch(plain, "plain")
    assert not [name for name, _ in scraped(registry) if name.startswith("radixkv_reuse")]
    metrics.watch(cache)
    for number in range(40):
        run(cache, [number % 3] * (2 * SIZE + 1))
    stats = cache.policy.stats
    samples = scraped(registry)
    assert stats.hit_blocks > 0
    assert samples["radixkv_reuse_asked_blocks_total", ()] == stats.asked_blocks == 120
    assert samples["radixkv_reuse_hit_blocks_total", ()] == stats.hit_blocks
    assert samples["radixkv_reuse_lru_hit_blocks_total", ()] == stats.lru_hit_blocks
    assert samples["radixkv_reuse_guard_switches_total", ()] == 0
    assert samples["radixkv_reuse_guarded", ()] == 0
    assert samples["radixkv_reuse_guarded_since_lookup", ()] == stats.since


def test_figures_of_the_policy_reuse_belong_together(registry, metrics):
    torn = ReuseStats(2, 20, 10, 0, False, 0, 0)  # read in the middle of a lookup
    answers = iter([torn, *[ReuseStats(2, 20, 10, 5, False, 0, 0)] * 9])

    class Busy(Reuse):
        stats = property(lambda policy: next(answers))

    cache = PrefixCache(6, SIZE, policy=Busy())
    metrics.watch(cache)
    assert scraped(registry)["radixkv_reuse_lru_hit_blocks_total", ()] == 5


def test_caches_are_told_apart_by_name_and_leave_when_they_are_gone(registry, metrics):
    caches = {"a": PrefixCache(10, SIZE), "b": PrefixCache(20, 8)}
    for name, cache in caches.items():
        metrics.watch(cache, name, sample=1)
    run(caches["a"], range(8))
    assert of(scraped(registry), "radixkv_lookups_total") == {"a": 1, "b": 0}
    with pytest.raises(ValueError, match="a cache with the name 'a' is watched already"):
        metrics.watch(PrefixCache(1), "a")
    del cache, caches["b"]
    gc.collect()
    assert of(scraped(registry), "radixkv_lookups_total") == {"a": 1}
    metrics.watch(PrefixCache(5), "b")


def test_a_cache_can_be_left_out_and_another_take_its_name(registry, metrics):
    cache = PrefixCache(10, SIZE)
    metrics.watch(cache, sample=1)
    metrics.unwatch()
    assert scraped(registry) == {}
    run(cache, range(8))  # still works
    metrics.watch(PrefixCache(10, SIZE))
    with pytest.raises(ValueError, match="no cache with the name 'other' is watched"):
        metrics.unwatch("other")


def test_a_registry_takes_the_metrics_once(registry, metrics):
    with pytest.raises(ValueError, match="radixkv_lookups"):
        Metrics(registry)


def test_without_a_cache_there_are_families_without_samples(registry, metrics):
    assert scraped(registry) == {}
    assert b"# TYPE radixkv_blocks gauge" in generate_latest(registry)


def test_openmetrics_is_exposed_as_well(registry, metrics):
    cache = PrefixCache(10, SIZE)
    metrics.watch(cache, sample=1)
    run(cache, range(9))
    families = parse_openmetrics(openmetrics.generate_latest(registry).decode())
    assert {"radixkv_lookups", "radixkv_block_reuse_gap_ticks"} <= {family.name for family in families}


def test_without_prometheus_client_it_is_said_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("prometheus_client", "radixkv.metrics"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"prometheus_client is not installed: pip install 'radixkv\[metrics\]'"):
        import radixkv.metrics  # noqa: F401


# Why tokens were missed


def reasons(*lives, num_blocks=100, prompt, **options):
    """The missed tokens of a prompt, after the prompts of `lives`."""
    cache = PrefixCache(num_blocks, SIZE)
    for life in lives:
        run(cache, life)
    observer = Observer(cache, sample=1)
    run(cache, prompt, **options)
    return {reason: tokens for reason, tokens in observer.missed_tokens.items() if tokens}


def test_missed_tokens_have_the_reasons_of_explain():
    assert reasons(prompt=range(10)) == {"cold": 10}
    assert reasons(range(8), prompt=range(8)) == {"last_token": 4}  # a whole block, for its last token
    assert reasons(range(8), prompt=range(8), min_prefill_tokens=0) == {}
    assert reasons(range(10), prompt=range(10)) == {"block_rounding": 2}
    assert reasons(range(8), prompt=range(20)) == {"cold": 12}
    assert reasons(range(8), range(100, 137), num_blocks=10, prompt=range(8)) == {"capacity": 8}
    assert reasons(range(20), prompt=[*range(5), 99, *range(6, 20)]) == {"broken_prefix": 16}
    assert reasons(range(20), prompt=[*range(6), 99, 98, 97, 96]) == {"block_rounding": 2, "cold": 4}
    assert reasons(range(9), prompt=range(9), namespace="other") == {"namespace": 8, "cold": 1}
    assert reasons(range(9), prompt=range(9), resumed=True) == {}
    assert reasons(range(9), prompt=range(9), cacheable=False) == {}


tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@given(st.lists(st.tuples(tokens, st.sampled_from([None, "a"]), st.integers(0, 9)), max_size=20))
def test_missed_tokens_add_up_to_what_was_not_hit(lives):
    cache = PrefixCache(8, 2)
    observer = Observer(cache, sample=1)
    for prompt, namespace, spare in lives:
        run(cache, prompt, namespace=namespace, min_prefill_tokens=spare)
    stats = cache.stats
    assert sum(observer.missed_tokens.values()) == stats.prompt_tokens - stats.hit_tokens
    assert min(observer.missed_tokens.values()) >= 0


@given(tokens, tokens, st.integers(0, 7))
def test_the_parts_of_an_explanation_are_never_negative(first, second, num_hit):
    cache = PrefixCache(100, 2)
    run(cache, first)
    explanation = cache.explain(second)
    num_hit = min(num_hit * 2, explanation.num_cached_tokens)
    parts = missed_tokens(explanation, num_hit)
    assert sum(parts.values()) == len(second) - num_hit
    assert min(parts.values()) >= 0
    assert list(parts) == list(REASONS)


def test_a_sample_stands_for_all():
    """Of a load with the period of the sample as well."""
    cache = PrefixCache(400_000, SIZE)
    observer = Observer(cache, sample=10)
    for number in range(10_000):
        run(cache, [number % 5, 0, 0, 0, number, *[1] * (100 if number % 10 == 0 else 3), 2])
    missed = cache.stats.prompt_tokens - cache.stats.hit_tokens
    assert sum(observer.missed_tokens.values()) == pytest.approx(missed, rel=0.1)
    assert sum(observer.reuse_gap.counts) == pytest.approx(cache.stats.hit_tokens / SIZE, rel=0.05)


# How old blocks get


@pytest.mark.parametrize("swap", [True, False])
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("begin"), tokens, st.sampled_from([None, "a"])),
            st.tuples(st.just("grow"), st.integers(0, 9), tokens),
            st.tuples(st.just("touch"), tokens, st.sampled_from([None, "a"]), st.booleans()),
            st.tuples(st.just("end"), st.integers(0, 9)),
            st.tuples(st.just("evict"), st.integers(0, 3)),
            st.tuples(st.just("clear"), st.sampled_from([None, "a"])),
            st.tuples(st.just("reset")),
        ),
        max_size=40,
    )
)
def test_ages_are_those_of_a_model_that_knows_every_prefix(swap, calls):
    """Beside a cache that nobody watches, and that does the same."""
    cache, plain = (PrefixCache(8, 2, swap_duplicates=swap) for _ in range(2))
    observer = Observer(cache, sample=1)
    tick, idle, gaps = 1, [], []
    last_use = {}  # (namespace, prefix) -> the tick when a request that used its last block ended, 0 for not yet
    running = []  # (request, that of the plain cache, namespace, tokens), the namespace None once it was forgotten

    def note_evictions():
        for (namespace, prefix), stamp in list(last_use.items()):
            if cache.match(prefix, namespace=namespace) < len(prefix):
                idle.append(tick - stamp)
                del last_use[namespace, prefix]

    def prefixes(namespace, tokens, end):
        return [(namespace, tuple(tokens[:stop])) for stop in range(2, end + 1, 2)]

    def forget(namespaces):
        for key in [key for key in last_use if key[0] in namespaces]:
            del last_use[key]
        running[:] = [
            (request, other, "forgotten" if namespace in namespaces else namespace, tokens)
            for request, other, namespace, tokens in running
        ]

    for call, *arguments in calls:
        if call == "begin":
            tokens, namespace = arguments
            try:
                if tick % 2:
                    request = cache.allocate(tokens, namespace=namespace)
                else:
                    request = cache.allocate(cache.lookup(tokens, namespace=namespace))
            except OutOfBlocksError:
                with pytest.raises(OutOfBlocksError):
                    plain.allocate(tokens, namespace=namespace)
                continue
            other = plain.allocate(tokens, namespace=namespace)
            hit = [last_use[prefix] for prefix in prefixes(namespace, tokens, request.num_cached_tokens)]
            gaps += [tick - stamp if stamp else 0 for stamp in hit]
            note_evictions()
            tick += 1
            assert cache.commit(request) == plain.commit(other)
            for prefix in prefixes(namespace, tokens, len(tokens)):
                last_use.setdefault(prefix, 0)
            running.append((request, other, namespace, tokens))
        elif call in ("grow", "end") and running:
            at = arguments[0] % len(running)
            request, other, namespace, tokens = running.pop(at)
            if call == "grow":
                try:
                    cache.append(request, arguments[1])
                except OutOfBlocksError:
                    with pytest.raises(OutOfBlocksError):
                        plain.append(other, arguments[1])
                else:
                    plain.append(other, arguments[1])
                    tokens = tokens + arguments[1]
                note_evictions()
                assert cache.commit(request) == plain.commit(other)
                if namespace != "forgotten":
                    for prefix in prefixes(namespace, tokens, len(tokens)):
                        last_use.setdefault(prefix, 0)
                running.append((request, other, namespace, tokens))
            else:
                cache.free(request)
                plain.free(other)
                if namespace != "forgotten":
                    last_use.update(dict.fromkeys(prefixes(namespace, tokens, len(tokens)), tick))
        elif call == "touch":
            tokens, namespace, kept = arguments
            asked = cache.lookup(tokens, namespace=namespace) if kept else tokens
            num_tokens = cache.touch(asked, namespace=namespace)
            assert num_tokens == plain.touch(tokens, namespace=namespace)
            last_use.update(dict.fromkeys(prefixes(namespace, tokens, num_tokens), tick))
        elif call == "evict":
            assert cache.evict(*arguments) == plain.evict(*arguments)
            note_evictions()
        elif call == "clear":
            cache.clear(*arguments)
            plain.clear(*arguments)
            forget(arguments)
        elif call == "reset":
            cache.reset()
            plain.reset()
            forget([None, "a"])
        cache.check()
        for request, other, _, _ in running:
            assert request.block_table == other.block_table
    for histogram, ages in ((observer.idle, idle), (observer.reuse_gap, gaps)):
        counts = [0] * (len(BOUNDS) + 1)
        for age in ages:
            counts[bisect_left(BOUNDS, age)] += 1
        assert (histogram.counts, histogram.total) == (counts, sum(ages))
    assert cache.stats == plain.stats


def gaps_of_a_hit(make, *, num_blocks, size=SIZE, **options):
    """The ages that hit blocks had altogether, after what `make` did to a watched cache."""
    cache = PrefixCache(num_blocks, size, **options)
    observer = Observer(cache, sample=1)
    hit = make(cache)
    assert sum(observer.reuse_gap.counts) == hit.num_cached_tokens // size > 0
    return observer.reuse_gap.total


def hit_while_running(cache, num_tokens):
    """A prompt is cached by a request that still runs when another hits it: nobody let go of those blocks yet."""
    first = cache.allocate([9] * num_tokens)
    cache.commit(first)
    return cache.allocate([9] * num_tokens)


@pytest.mark.parametrize("num_blocks", [4, 400])  # evicted one by one, and with numpy
def test_an_evicted_block_begins_anew(num_blocks):
    def make(cache):
        run(cache, range(SIZE * num_blocks))
        return hit_while_running(cache, SIZE * num_blocks // 2)

    assert gaps_of_a_hit(make, num_blocks=num_blocks) == 0


@pytest.mark.parametrize("call", ["reset", "clear"])
@pytest.mark.parametrize("running", [False, True])
def test_a_forgotten_block_begins_anew(call, running):
    def make(cache):
        run(cache, range(15))
        holder = cache.allocate(range(15), resumed=True) if running else None  # no lookup, so no gap
        getattr(cache, call)(*[None] * (call == "clear"))
        if holder:
            cache.free(holder)
        return hit_while_running(cache, 12)

    assert gaps_of_a_hit(make, num_blocks=6) == 0


@pytest.mark.parametrize("call", ["reset", "clear"])
def test_a_forgotten_block_begins_anew_where_its_last_holder_has_a_copy(call):
    def make(cache):
        first, second = cache.allocate(range(12)), cache.allocate(range(12))
        cache.commit(first)
        cache.commit(second)  # keeps its own blocks beside those of the first, which it holds
        cache.free(first)
        getattr(cache, call)(*[None] * (call == "clear"))
        cache.free(second)
        assert cache.num_free_blocks == 6
        run(cache, [7])
        return hit_while_running(cache, 12)

    assert gaps_of_a_hit(make, num_blocks=6, swap_duplicates=False) == 0


@pytest.mark.parametrize("call", [None, "reset", "clear"])
def test_copies_from_before_the_watch_begin_anew(call):
    cache = PrefixCache(6, SIZE, swap_duplicates=False)
    before = [cache.allocate(range(12)) for _ in range(2)]
    for request in before:
        cache.commit(request)
    if call:
        getattr(cache, call)(*[None] * (call == "clear"))
    observer = Observer(cache, sample=1)
    for request in before:
        cache.free(request)
    hit = hit_while_running(cache, 12)
    assert (observer.reuse_gap.total, sum(observer.reuse_gap.counts)) == (0, hit.num_cached_tokens // SIZE)


def test_with_tables_that_only_grow_the_cached_copy_is_what_was_used():
    def make(cache):
        first, second = cache.allocate(range(12)), cache.allocate(range(12))
        cache.commit(first)
        cache.commit(second)
        cache.free(first)
        run(cache, [7])
        run(cache, [8])
        cache.free(second)
        return cache.allocate(range(12), min_prefill_tokens=0)

    assert gaps_of_a_hit(make, num_blocks=20, swap_duplicates=False) == 0


def test_a_touch_is_a_use():
    def make(cache, *, by_lookup):
        run(cache, range(12))
        run(cache, [7])
        assert cache.touch(cache.lookup(range(8)) if by_lookup else range(8)) == 8
        run(cache, [8])
        return cache.allocate(range(12), min_prefill_tokens=0)

    for by_lookup in (False, True):
        assert gaps_of_a_hit(lambda cache: make(cache, by_lookup=by_lookup), num_blocks=20) == 1 + 1 + 2  # noqa: B023


def test_blocks_of_a_request_from_before_the_watch_begin_anew():
    cache = PrefixCache(4, SIZE)
    before = cache.allocate(range(16))
    observer = Observer(cache, sample=1)
    run_alone = lambda: cache.free(cache.allocate([1]))  # noqa: E731
    cache.free(before)
    run_alone()
    hit = hit_while_running(cache, 8)
    assert (observer.reuse_gap.total, sum(observer.reuse_gap.counts)) == (0, hit.num_cached_tokens // SIZE)


def test_many_blocks_at_once_have_the_ages_of_each():
    cache = PrefixCache(1000, SIZE)
    observer = Observer(cache, sample=1)
    for number in range(5):
        run(cache, range(1000 * number, 1000 * number + 400))
    assert len(cache.evict(450)) == 450
    ages = {5: 0, 4: 100, 3: 100, 2: 100, 1: 100, 0: 50}  # when tick is 6, and request n ended at tick n + 2
    expected = [0] * (len(BOUNDS) + 1)
    for age, num in ages.items():
        expected[bisect_left(BOUNDS, age)] += num
    assert (observer.idle.counts, observer.idle.total) == (expected, 1000)


def test_a_histogram_is_exposed_with_all_its_buckets(registry, metrics):
    cache = PrefixCache(4, SIZE)
    metrics.watch(cache, sample=1)
    for number in (1, 2, 3):
        run(cache, [number] * 12)
    samples = scraped(registry)
    name = "radixkv_block_idle_before_evict_ticks"
    buckets = of(samples, name + "_bucket")
    assert buckets.pop("+Inf") == samples[name + "_count", ()] == 5
    assert [float(bound) for bound in buckets] == list(BOUNDS)
    # 2 of the first prompt when the second begins, its last and 2 of the second when the third does
    assert [*buckets.values()] == [4] + [5] * (len(BOUNDS) - 1)
    assert samples[name + "_sum", ()] == 1


def test_what_was_there_before_has_the_age_of_the_observer():
    cache = PrefixCache(10, SIZE)
    run(cache, range(8))
    running = cache.allocate(range(100, 110))
    observer = Observer(cache, sample=1)
    cache.free(running)
    for number in (1, 2, 3):
        cache.free(cache.allocate([number]))
    run(cache, range(9))
    assert (observer.reuse_gap.total, sum(observer.reuse_gap.counts)) == (3 + 3, 2)


# For whom


def test_namespaces_are_bounded_and_readable(registry, metrics):
    cache = PrefixCache(1000, SIZE)
    metrics.watch(cache, sample=1000, max_namespaces=7)
    names = [None, "tenant", "7", 7, True, ("lora", 7), 'a "\n\\ \ud800', *range(100, 200), "tenant"]
    for name in names:
        run(cache, range(8), namespace=name)
    samples = scraped(registry)
    assert of(samples, "radixkv_namespace_lookups_total") == {
        "(none)": 1,
        "tenant": 2,
        "7": 2,
        "True": 1,
        "('lora', 7)": 1,
        'a "\n\\ \\ud800': 1,
        "(other)": 100,
    }
    assert of(samples, "radixkv_namespace_hit_tokens_total")["tenant"] == 4
    assert sum(of(samples, "radixkv_namespace_lookup_tokens_total").values()) == 8 * len(names)


def test_a_lookup_is_counted_under_its_own_namespace():
    cache = PrefixCache(10, SIZE)
    observer = Observer(cache, sample=1)
    run(cache, cache.lookup(range(8), namespace="tenant"))
    run(cache, cache.lookup(range(8), namespace="tenant"), namespace=None)
    assert {name: lookups.num for name, lookups in observer.namespaces.items()} == {"tenant": 2}
    assert observer.missed_tokens["namespace"] == 0


def test_a_long_namespace_is_cut(registry, metrics):
    cache = PrefixCache(100, SIZE)
    metrics.watch(cache, "n" * 1000, sample=1000)
    run(cache, range(8), namespace="x" * 1000)
    assert {len(label) for labels in (key[1] for key in scraped(registry)) for label in labels} <= {*range(65)}


def test_bad_arguments_are_refused_and_change_nothing(metrics):
    cache = PrefixCache(10)
    for sample in (0, -1, 2**31):
        with pytest.raises(ValueError, match=f"sample must be from 1 to 2.30, got {sample}"):
            metrics.watch(cache, sample=sample)
    with pytest.raises(ValueError, match="max_namespaces must be from 0 to 10,000, got -1"):
        metrics.watch(cache, sample=1, max_namespaces=-1)
    assert "allocate" not in vars(cache)
    metrics.watch(cache)


def test_a_refused_request_is_not_seen():
    cache = PrefixCache(2, SIZE)
    observer = Observer(cache, sample=1)
    held = cache.allocate(range(8))
    with pytest.raises(OutOfBlocksError):
        cache.allocate(range(4), namespace="a")
    for wrong in ([], [-1], ["x"], range(100)):
        with pytest.raises((ValueError, TypeError)):
            cache.allocate(wrong, namespace="b")
    with pytest.raises(TypeError):
        cache.free("request")
    assert {*observer.namespaces} == {None}
    assert observer.missed_tokens["cold"] == 8
    cache.free(held)


# While it works


def test_scrapes_of_a_busy_cache_are_whole(registry, metrics):
    cache = PrefixCache(200, SIZE)
    metrics.watch(cache, sample=3, max_namespaces=10_000)
    done = threading.Event()
    failures = []

    def scrape():
        former = {}
        try:
            while not done.is_set():
                samples = [sample for family in metrics.collect() for sample in family.samples]
                assert sum(sample.value for sample in samples if sample.name == "radixkv_blocks") >= 200
                latest = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
                for key, value in latest.items():
                    if key[0] not in ("radixkv_blocks", "radixkv_running_requests"):
                        assert value >= former.get(key, 0), key
                former = latest
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=scrape)
    try:
        thread.start()
        for number in range(800):
            run(cache, [number % 7, *range(number % 60)], namespace=number)
            cache.evict(number % 3)
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert failures == []
    assert scraped(registry)["radixkv_lookups_total", ()] == 800


# The dashboard and the alerts


def exposed():
    """Name -> labels, of every sample that a watched cache can have."""
    registry = CollectorRegistry()
    cache = PrefixCache(10, SIZE, policy="reuse")
    Metrics(registry).watch(cache, sample=1)
    run(cache, range(9))
    return {
        sample.name: {*sample.labels}
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def asked(text):
    """(metric, labels) of what stands in PromQL."""
    for metric, matchers in re.findall(r"\b(radixkv_\w+)\b(?:\{(.*?)\})?", text):
        yield metric, set(re.findall(r"(\w+)=", matchers))


def dashboard():
    return json.loads((DOCS / "grafana.json").read_text())


def test_the_dashboard_asks_for_what_is_exposed_and_for_all_of_it():
    known = exposed()
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    queries += [variable["query"]["query"] for variable in dashboard()["templating"]["list"][1:]]
    used = set()
    for query in queries:
        assert "$name" in query or query == "label_values(radixkv_blocks, name)"
        for metric, labels in asked(query):
            assert metric in known, query
            assert labels <= known[metric], query
            used.add(metric)
        for labels in re.findall(r"by \((.*?)\)", query):
            assert all({*labels.split(", ")} <= known[metric] for metric, _ in asked(query)), query
    unused = {"_block_size_tokens", "_lookups_total", "_namespace_lookups_total"}  # counts beside tokens
    unused |= {"_resumed_lookup_tokens_total", "_resumed_hit_tokens_total"}
    unused |= {"_reuse_guarded_since_lookup", "_reuse_guard_switches_total"}
    parts = {name for name in known if name.endswith(("_count", "_sum"))}
    assert known.keys() - used - parts == {"radixkv" + name for name in unused}


def test_the_dashboard_has_panels_that_do_not_overlap():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert {str(target["datasource"]["uid"]) for target in panel["targets"]} == {"${datasource}"}


def test_the_alerts_ask_for_what_is_exposed():
    known = exposed()
    found = list(asked((DOCS / "alerts.yml").read_text()))
    assert len(found) > 10
    for metric, labels in found:
        assert labels <= known[metric], metric


def test_the_page_lists_every_metric_and_alert():
    page = (DOCS / "metrics.md").read_text()
    known = {re.sub("_(bucket|sum|count)$", "", name) for name in exposed()}
    assert set(re.findall(r"`(radixkv_\w+)(?:\{\w+\})?`", page)) == known
    alerts = re.findall(r"alert: (\w+)", (DOCS / "alerts.yml").read_text())
    assert re.findall(r"^\| `(Radixkv\w+)`", page, re.M) == alerts
