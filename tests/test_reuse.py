"""The order "reuse": what it learns, and that it evicts what a plain model of it does."""

import random
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
from reuse_model import Model

from radixkv import OutOfBlocksError, PrefixCache, reuse
from radixkv.curve import Curve, optimum
from radixkv.reuse import Reuse
from radixkv.shadow import Guard
from radixkv.trace import IdRequest, IdTrace


def paths(seed: int, num: int) -> Iterator[tuple[int, ...]]:
    """Sessions that grow, branch and end, system prompts that stay, one-off prompts: short, so that they collide."""
    rng = random.Random(seed)
    sessions: list[tuple[int, ...]] = []
    systems = [tuple(rng.randrange(1000) for _ in range(rng.randrange(1, 6))) for _ in range(3)]
    for _ in range(num):
        choice = rng.random()
        if choice < 0.5 and sessions:
            path = rng.choice(sessions[-6:]) if choice < 0.4 else rng.choice(sessions)
            if rng.random() < 0.2:
                path = path[: rng.randrange(len(path) + 1)]
        else:
            path = rng.choice(systems) if choice < 0.8 else ()
        path += tuple(rng.randrange(1000) for _ in range(rng.choice([0, 1, 1, 3, 10])))
        sessions.append(path)
        if path:
            yield path


def serve(cache: PrefixCache, path: tuple[int, ...]) -> int:
    request = cache.allocate(list(path[: cache.num_blocks]), min_prefill_tokens=0)
    cache.commit(request)
    cache.free(request)
    return request.num_cached_tokens


@pytest.mark.parametrize(("remembered", "max_uses"), [(4096, 32), (40, 32), (4096, 2), (40, 3)])
@pytest.mark.parametrize("num_blocks", [5, 20, 60, 150])
@pytest.mark.parametrize("seed", range(3))
def test_it_does_what_the_model_does(
    seed: int, num_blocks: int, remembered: int, max_uses: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(reuse, "_MIN_REMEMBERED", remembered)
    monkeypatch.setattr(Reuse, "max_uses", max_uses)
    model = Model(num_blocks, remembered, max_uses)
    cache = PrefixCache(num_blocks, 1, policy="reuse")
    for number, path in enumerate(paths(seed, 300)):
        assert serve(cache, path) == model.serve(path), number
        for prefix in model.blocks:
            assert (cache.match(list(prefix)) == len(prefix)) == model.blocks[prefix].cached, (number, prefix)
        assert cache._tree.num_nodes == len({block.run for block in model.blocks.values() if block.cached}), number
        assert policy_of(cache).stats.lru_hit_blocks == model.lru_hits, number
    cache.check()


def policy_of(cache: PrefixCache) -> Reuse:
    assert isinstance(cache.policy, Reuse)
    return cache.policy


@pytest.mark.parametrize("num_blocks", [15, 80])
def test_it_knows_what_lru_would_have_hit_whatever_is_cleared(num_blocks: int) -> None:
    rng = random.Random(3)
    caches = [PrefixCache(num_blocks, 1, policy=policy) for policy in ("reuse", "lru")]
    for path in paths(3, 1500):
        namespace = rng.choice(["a", "a", "b", None])
        for cache in caches:
            request = cache.allocate(list(path[:num_blocks]), namespace=namespace, min_prefill_tokens=0)
            cache.commit(request)
            cache.free(request)
        choice = rng.random()
        for cache in caches:
            if choice < 0.01:
                cache.clear("a")
            elif choice < 0.013:
                cache.reset()
        stats = policy_of(caches[0]).stats
        assert stats.lru_hit_blocks == caches[1].stats.hit_tokens
        assert stats.hit_blocks == caches[0].stats.hit_tokens
        assert stats.asked_blocks == caches[0].stats.prompt_tokens


@pytest.mark.parametrize("policy", ["reuse", "arc"])
def test_what_was_evicted_from_an_empty_namespace_is_forgotten_too(policy: str) -> None:
    for forget in (lambda cache: cache.reset(), lambda cache: cache.clear("a")):
        cache = PrefixCache(6, 1, policy=policy)
        cache.free(cache.allocate([1, 2, 3], namespace="a"))
        request = cache.allocate([1, 2, 3], namespace="a")
        cache.commit(request)
        cache.free(request)
        cache.evict(6)
        assert cache.explain([1, 2, 3], namespace="a").reason == "evicted"
        forget(cache)
        assert cache.explain([1, 2, 3], namespace="a").reason != "evicted"
        request = cache.allocate([1, 2, 3], namespace="a")
        if policy == "reuse":
            assert policy_of(cache).stats.lru_hit_blocks == 0
        cache.free(request)
        cache.check()


def test_blocks_of_many_tokens_are_the_same_as_of_one() -> None:
    size = 16
    caches = PrefixCache(60, 1, policy="reuse"), PrefixCache(60, size, policy="reuse")
    for path in paths(4, 600):
        long = [7 * token + i for token in path[:60] for i in range(size)]
        request = caches[1].allocate(long, min_prefill_tokens=0)
        caches[1].commit(request)
        caches[1].free(request)
        assert request.num_cached_tokens == size * serve(caches[0], path)
    assert policy_of(caches[0]).stats == policy_of(caches[1]).stats


def test_prefill_in_chunks_is_the_same_as_in_one() -> None:
    rng = random.Random(5)
    caches = PrefixCache(60, 1, policy="reuse"), PrefixCache(60, 1, policy="reuse")
    for path in paths(5, 600):
        hit = serve(caches[0], path)
        request = caches[1].allocate(list(path[:60]), min_prefill_tokens=0)
        assert request.num_cached_tokens == hit
        while request.num_committed_tokens < request.num_tokens:
            caches[1].commit(request, min(request.num_tokens, request.num_committed_tokens + rng.randrange(1, 4)))
        caches[1].free(request)
    assert policy_of(caches[0]).stats == policy_of(caches[1]).stats


def test_forks_touches_and_preempted_requests_are_no_lookups() -> None:
    cache = PrefixCache(100, 1, policy="reuse")
    request = cache.allocate([1, 2, 3, 4])
    cache.commit(request)
    forks = [cache.fork(request)[0] for _ in range(5)]
    for fork in forks:
        cache.append(fork, [9, 9])
        cache.commit(fork)
        cache.free(fork)
    cache.free(request)
    cache.touch([1, 2, 3])
    cache.free(cache.allocate([1, 2, 3, 4], resumed=True))
    stats = policy_of(cache).stats
    assert (stats.lookups, stats.asked_blocks, stats.hit_blocks, stats.lru_hit_blocks) == (1, 4, 0, 0)
    assert policy_of(cache)._time == 2
    cache.check()


def test_a_prompt_may_be_touched_again_and_again_while_there_is_room_for_little() -> None:
    cache = PrefixCache(24, 2, policy="reuse")
    cache.commit(cache.allocate([0, 1, 0, 1, 0, 0, 0]))
    for num_tokens in (17, 14):
        cache.allocate([2] * num_tokens)
    for _ in range(2):
        cache.touch([0, 1, 0, 1])
    cache.allocate([3] * 7)
    assert cache.touch([0, 1, 0, 1]) == 4  # it looped for ever
    cache.check()


def test_what_is_held_is_a_hit_in_any_order() -> None:
    cache = PrefixCache(10, 1, policy="reuse")
    serve(cache, (1, 2, 3))
    long = cache.allocate([1, 2, 3], min_prefill_tokens=0)
    for number in range(20):  # in LRU order, 1, 2, 3 would be long gone if they were not held
        serve(cache, (100 + number, 200 + number))
    assert serve(cache, (1, 2, 3, 4)) == 3
    stats = policy_of(cache).stats
    assert (stats.hit_blocks, stats.lru_hit_blocks) == (6, 6)
    cache.free(long)
    recent = policy_of(cache).recent()
    assert (recent.use == recent.last).sum() == 1
    assert optimum(recent) == 6


@pytest.mark.parametrize("num_running", [4, 12])
def test_what_lru_would_have_hit_is_near_where_requests_run_side_by_side(num_running: int) -> None:
    caches = [PrefixCache(150, 1, policy=policy) for policy in ("reuse", "lru")]
    running: list[list[Any]] = []
    for path in paths(9, 3000):
        if len(running) == num_running:
            for cache, request in zip(caches, running.pop(0), strict=True):
                cache.commit(request)
                cache.free(request)
        running.append([cache.allocate(list(path[:12]), min_prefill_tokens=0) for cache in caches])
    stats, real = policy_of(caches[0]).stats, caches[1].stats
    assert abs(stats.lru_hit_blocks - real.hit_tokens) < 0.02 * real.prompt_tokens
    assert stats.hit_blocks > real.hit_tokens


def test_memory_of_what_was_evicted_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(reuse, "_MIN_REMEMBERED", 50)
    monkeypatch.setattr(reuse, "_MIN_BLOCKS", 200)
    cache = PrefixCache(40, 1, policy="reuse")
    ghosts = policy_of(cache)._ghosts
    for number in range(500):
        serve(cache, (number, 1))
        assert len(ghosts) + cache._tree.num_nodes <= 65 / 64 * max(50, 4 * cache._tree.num_nodes)
    assert len(ghosts) > 30
    for number in range(500):
        serve(cache, tuple(10 * number + i for i in range(30)))
        assert ghosts.num_blocks <= 8 * 40
    assert ghosts.num_blocks > 200
    cache.reset()
    assert len(ghosts) == ghosts.num_blocks == 0
    cache.check()


def test_lessons_may_be_spread_over_requests(monkeypatch: Any) -> None:
    """All is counted as of the same moment, so that only the index is made later."""
    counted = []
    for chunk in (3, 8192):
        monkeypatch.setattr(reuse, "_CHUNK", chunk)
        cache = PrefixCache(400, 1, policy="reuse")  # nothing is evicted, so all depends on what is counted
        for path in paths(6, 200):
            serve(cache, path)
        hazards = policy_of(cache)._hazards
        policy_of(cache)._lesson_length = 0
        while policy_of(cache)._uncounted:
            policy_of(cache)._learn()
        policy_of(cache)._begin_lesson()
        while policy_of(cache)._uncounted:
            hazards.count(*policy_of(cache)._uncounted.pop())
        hazards.relearn(0)
        assert hazards._learned is not None
        counted.append([float(table.sum()) for table in hazards._learned])
    assert counted[0] == pytest.approx(counted[1], rel=0.02)


@pytest.mark.parametrize("num_blocks", [10, 40])
def test_the_optimum_of_the_last_requests_is_that_of_the_curve(num_blocks: int) -> None:
    cache = PrefixCache(num_blocks, 1, policy="reuse")
    requests = []
    for path in paths(7, 500):
        path = path[:num_blocks]
        serve(cache, path)
        requests.append(path)
    recent = policy_of(cache).recent()
    assert recent.num_requests == recent.lookups == len(requests)
    stats = policy_of(cache).stats
    assert (recent.asked_blocks, recent.hit_blocks) == (stats.asked_blocks, stats.hit_blocks)
    ids: dict[tuple[int, ...], int] = {}
    runs = []
    for path in requests:
        numbers = [ids.setdefault(path[: i + 1], len(ids)) for i in range(len(path))]
        runs.append(IdRequest(0.0, len(path), 0, array("i", [end for i in numbers for end in (i, i + 1)])))
    curve = Curve(IdTrace("paths", runs, block_size=1, num_blocks=len(ids)))
    assert optimum(recent) == curve.opt_hits(num_blocks).sum()
    few = policy_of(cache).recent(100)
    assert 100 <= few.num_requests < 356
    assert few.hit_blocks <= optimum(few) <= few.asked_blocks


def test_the_guard_holds_longer_each_time_and_forgives() -> None:
    guard = Guard()
    lookup, lengths = 0, []
    while len(lengths) < 7:
        while not guard.active:
            lookup += 1
            guard.add(lookup, -2, 100)
        start = guard.since
        assert start == lookup
        while guard.active:
            lookup += 1
            guard.add(lookup, 0, 100)
        lengths.append(guard.since - start)
    assert lengths == [1024, 2048, 4096, 8192, 16384, 16384, 16384]
    assert guard.switches == 7
    for _ in range(8193):
        lookup += 1
        guard.add(lookup, 1, 100)
    assert not guard.active
    while not guard.active:
        lookup += 1
        guard.add(lookup, -20, 100)
    start = lookup
    while guard.active:
        lookup += 1
        guard.add(lookup, 0, 100)
    assert lookup - start == 1024


def test_while_guarded_it_is_lru() -> None:
    caches = PrefixCache(40, 1, policy="reuse"), PrefixCache(40, 1, policy="lru")
    policy_of(caches[0])._guard.active = True
    policy_of(caches[0])._guard._length = 10**6
    for path in paths(8, 800):
        assert serve(caches[0], path) == serve(caches[1], path)
    assert policy_of(caches[0]).stats.guarded


def test_a_small_loss_is_borne_and_a_large_one_is_not() -> None:
    for loss, expected in ((-0.4, False), (-0.6, True)):
        guard = Guard()
        for lookup in range(5000):
            guard.add(lookup, loss, 100)  # type: ignore[arg-type]
            if guard.active:
                break
        assert guard.active == expected


def test_a_path_that_running_requests_hold_can_be_touched_again_and_again() -> None:
    cache = PrefixCache(4, 1, policy="reuse")
    for tokens in ([1, 0, 1], [0], [0, 0]):
        try:
            cache.commit(cache.allocate(tokens))
        except OutOfBlocksError:
            continue
    for tokens in ([1], [0, 1], [1], [1, 0, 1]):
        cache.touch(tokens)
    cache.check()
