"""One contract over every policy, then each one's own order."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from radixkv import OutOfBlocksError, PrefixCache
from radixkv.policy import POLICIES


class Newest:
    """A policy of somebody's own: the leaf that became evictable last goes first."""

    def __init__(self) -> None:
        self.leaves: list[int] = []

    def add(self, leaf: int) -> None:
        assert leaf not in self.leaves
        self.leaves.append(leaf)

    def discard(self, leaf: int) -> None:
        self.leaves.remove(leaf)

    def victim(self) -> int:
        return self.leaves[-1]


ALL: dict[str, Callable[[], Any]] = {**{name: (lambda name=name: name) for name in POLICIES}, "own": Newest}


def prompt(seed: int, num_tokens: int = 2) -> list[int]:
    return [1000 * seed + i for i in range(num_tokens)]


def serve(cache: PrefixCache, *seeds: int, **options: Any) -> None:
    for seed in seeds:
        request = cache.allocate(prompt(seed), min_prefill_tokens=0, **options)
        cache.commit(request)
        cache.free(request)


def eviction_order(cache: PrefixCache, seeds: range) -> list[int]:
    """The seeds of the two-block prompts in the order in which their last block goes."""
    order: list[int] = []
    while cache.num_evictable_blocks:
        cache.evict(1)
        cache.check()
        order += [seed for seed in seeds if cache.match(prompt(seed)) < 2 and seed not in order]
    return order


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_contract(make: Callable[[], Any]) -> None:
    """Every evictable block can be had, nothing held goes, and counts agree, whatever the order."""
    rng = random.Random(1)
    cache = PrefixCache(24, 2, policy=make())
    running: list[Any] = []
    for _ in range(1500):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 16))]
        try:
            request = cache.allocate(tokens, namespace=rng.choice([None, "a"]), priority=rng.randrange(3))
        except OutOfBlocksError as error:
            assert error.needed > error.free + error.evictable
            cache.free(running.pop(rng.randrange(len(running))))
            continue
        cache.commit(request, rng.randrange(len(tokens) + 1))
        running.append(request)
        if rng.random() < 0.3:
            cache.commit(rng.choice(running))
        if rng.random() < 0.4:
            cache.free(running.pop(rng.randrange(len(running))))
        if rng.random() < 0.1:
            want = rng.randrange(8)
            can = cache.num_evictable_blocks
            assert len(set(cache.evict(want))) == min(want, can)
        if rng.random() < 0.01:
            cache.clear("a")
        cache.check()
    for request in running:
        cache.free(request)
    assert cache.num_private_blocks == 0
    cached = cache.num_cached_blocks
    assert (len(cache.evict(99)), cache.num_cached_blocks) == (cached, 0)
    cache.check()
    assert cache.num_free_blocks == 24


@pytest.mark.parametrize("name", POLICIES)
def test_same_calls_evict_the_same_blocks(name: str) -> None:
    def run() -> list[list[int]]:
        rng = random.Random(2)
        cache = PrefixCache(30, 1, policy=name)
        evicted = []
        for _ in range(300):
            serve(cache, rng.randrange(25), priority=rng.randrange(2))
            evicted.append(cache.evict(rng.randrange(2)))
        return evicted

    assert run() == run()


def test_lru_evicts_the_least_recently_released() -> None:
    cache = PrefixCache(16, 1)
    serve(cache, 1, 2, 3, 4)
    serve(cache, 2)
    long = cache.allocate(prompt(1), min_prefill_tokens=0)  # used early, let go last
    serve(cache, 3)
    cache.free(long)
    assert eviction_order(cache, range(1, 5)) == [4, 2, 3, 1]


def test_fifo_evicts_the_first_cached() -> None:
    cache = PrefixCache(16, 1, policy="fifo")
    serve(cache, 1, 2, 3, 4, 2, 1, 1)
    assert eviction_order(cache, range(1, 5)) == [1, 2, 3, 4]


def test_lfu_evicts_the_least_often_used_then_the_oldest() -> None:
    cache = PrefixCache(16, 1, policy="lfu")
    serve(cache, 1, 2, 3, 4, 1, 1, 4)
    assert eviction_order(cache, range(1, 5)) == [2, 3, 4, 1]


def test_slru_evicts_what_was_used_once_before_what_was_used_again() -> None:
    cache = PrefixCache(16, 1, policy="slru")
    serve(cache, 1, 2, 2, 1, 1, 3, 4)
    assert eviction_order(cache, range(1, 5)) == [3, 4, 2, 1]


def test_priority_evicts_the_lowest_then_the_oldest() -> None:
    cache = PrefixCache(16, 1, policy="priority")
    serve(cache, 1, priority=2)
    serve(cache, 2, priority=-1)
    serve(cache, 3)
    serve(cache, 4)
    serve(cache, 4, priority=7)
    serve(cache, 4, priority=-7)  # the highest counts
    assert eviction_order(cache, range(1, 5)) == [2, 3, 1, 4]


def test_a_policy_of_ones_own_hears_of_leaves_only() -> None:
    policy = Newest()
    cache = PrefixCache(16, 1, policy=policy)
    serve(cache, 1, 2)
    for tail in (5, 6):
        request = cache.allocate([*prompt(1), tail])
        cache.commit(request)
        assert len(policy.leaves) == (2 if tail == 6 else 1)  # what runs is not offered
        cache.free(request)
    assert len(policy.leaves) == 3
    cache.evict(1)
    assert cache.match([*prompt(1), 6]) == 2
    assert cache.match([*prompt(1), 5]) == 3
    cache.evict(1)
    assert (cache.match(prompt(1)), len(policy.leaves)) == (2, 2)  # the parent became a leaf
