"""Situations in which other prefix caches are known to go wrong. Block size 16 unless said."""

import gc
import random
from array import array
from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from test_state_machine import MostRecentFirst

from radixkv import OutOfBlocksError, PrefixCache, Request

B = 16


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Tokens that differ from those of every other seed from the first one on."""
    return [seed * 100_000 + i for i in range(num_tokens)]


def serve(cache: PrefixCache, tokens: Iterable[int], **options: Any) -> Request:
    """A request's whole life: prefilled, committed, freed."""
    request = cache.allocate(list(tokens), **options)
    cache.commit(request)
    cache.free(request)
    return request


def observed(cache: PrefixCache, prompts: Iterable[Iterable[int]] = ()) -> tuple[object, ...]:
    """All that a user can see of a cache but the count of failures."""
    stats = asdict(cache.stats)
    del stats["failed_allocations"]
    return repr(cache), cache.draw(max_nodes=10**6), stats, [cache.match(list(p)) for p in prompts]


@pytest.fixture
def cache() -> Iterable[PrefixCache]:
    cache = PrefixCache(64)
    yield cache
    cache.check()


def test_freed_without_commit_is_not_matched(cache: PrefixCache) -> None:
    cache.free(cache.allocate(prompt(48)))
    assert cache.match(prompt(48)) == 0
    assert cache.allocate(prompt(48)).num_cached_tokens == 0


def test_unwritten_blocks_are_not_matched_and_the_second_copy_is_freed(cache: PrefixCache) -> None:
    first, second = cache.allocate(prompt(40)), cache.allocate(prompt(40))
    assert second.num_cached_tokens == 0
    assert cache.commit(first) == range(0)
    assert cache.num_free_blocks == 64 - 6
    assert cache.commit(second) == range(0, 2)  # the table positions that were switched
    assert list(second.block_table[:2]) == list(first.block_table[:2])
    assert second.block_table[2] != first.block_table[2]
    assert (cache.num_cached_blocks, cache.num_private_blocks, cache.num_free_blocks) == (2, 2, 60)
    assert cache.stats.duplicates_freed == 2


def test_append_only_tables_keep_the_second_copy_until_it_is_freed() -> None:
    cache = PrefixCache(64, swap_duplicates=False)
    first, second = cache.allocate(prompt(40)), cache.allocate(prompt(40))
    before = list(second.block_table)
    cache.commit(first)
    assert cache.commit(second) == range(0)
    assert list(second.block_table) == before
    cache.check()
    assert (cache.num_cached_blocks, cache.num_private_blocks) == (2, 4)
    fork, copies = cache.fork(second)
    assert list(fork.block_table[:2]) == list(first.block_table[:2])
    assert copies == [(second.block_table[2], fork.block_table[2])]
    for request in (second, first, fork):
        cache.free(request)
        cache.check()
    assert (cache.num_cached_blocks, cache.num_private_blocks, cache.num_free_blocks) == (2, 0, 62)


@pytest.mark.parametrize(("num_tokens", "hit"), [(48, 32), (49, 48), (47, 32), (16, 0), (17, 16), (1, 0)])
def test_a_whole_cached_prompt_leaves_a_token_to_prefill(cache: PrefixCache, num_tokens: int, hit: int) -> None:
    serve(cache, prompt(64))
    request = cache.allocate(prompt(num_tokens))
    assert request.num_cached_tokens == hit
    assert 1 <= request.num_tokens - hit <= B
    assert cache.match(prompt(num_tokens)) == num_tokens // B * B


def test_min_prefill_tokens_can_be_zero_or_many(cache: PrefixCache) -> None:
    serve(cache, prompt(64))
    hits = {n: serve(cache, prompt(64), min_prefill_tokens=n).num_cached_tokens for n in (0, 1, 16, 17, 64, 1000)}
    assert hits == {0: 64, 1: 48, 16: 48, 17: 32, 64: 0, 1000: 0}


def test_failed_allocation_changes_nothing() -> None:
    cache = PrefixCache(10)
    serve(cache, prompt(48))
    running = cache.allocate(prompt(80, seed=1))
    long = prompt(48) + prompt(80, seed=2)
    before = observed(cache, [long])
    for tries in range(1, 1001):
        with pytest.raises(OutOfBlocksError) as error:
            cache.allocate(long)
        assert cache.stats.failed_allocations == tries
    assert (error.value.needed, error.value.free, error.value.evictable) == (5, 2, 0)
    assert observed(cache, [long]) == before
    cache.check()
    cache.free(running)
    assert cache.allocate(long).num_cached_tokens == 48


def test_what_was_just_hit_is_neither_evicted_nor_counted_as_room() -> None:
    cache = PrefixCache(8)
    serve(cache, prompt(48))
    serve(cache, prompt(48, seed=1))
    cache.allocate(prompt(32, seed=3))
    with pytest.raises(OutOfBlocksError, match="needed 5 blocks, but only 0 are free and 3 evictable"):
        cache.allocate(prompt(48) + prompt(80, seed=2))
    request = cache.allocate(prompt(48) + prompt(48, seed=2))  # the older prefix was hit: the newer one has to go
    assert request.num_cached_tokens == 48
    assert cache.match(prompt(48, seed=1)) == 0
    cache.check()


def test_a_private_partly_filled_block_goes_back_and_ages_nothing_out() -> None:
    cache = PrefixCache(6)
    serve(cache, prompt(48))
    request = serve(cache, prompt(40, seed=1))
    assert (cache.num_cached_blocks, cache.num_free_blocks) == (5, 1)
    assert cache.evict(1) == [2]  # the tail of the older prefix, not what the partly filled block left
    assert request.block_table[2] not in [2]
    cache.check()


def test_the_next_turn_hits_generated_tokens(cache: PrefixCache) -> None:
    request = cache.allocate(prompt(20))
    cache.commit(request)
    for token in range(7, 27):
        cache.append(request, token)
    cache.commit(request, 39)  # the last token's KV is not written
    cache.free(request)
    history = prompt(20) + list(range(7, 27))
    assert cache.allocate(history + prompt(30, seed=1)).num_cached_tokens == 32


def test_eviction_takes_exactly_what_is_asked_from_the_tail() -> None:
    cache = PrefixCache(100)
    request = cache.allocate(prompt(1000))
    table = list(request.block_table)
    cache.commit(request)
    cache.free(request)
    for taken in range(62):
        assert cache.evict(1) == [table[61 - taken]]
        assert cache.match(prompt(1000)) == (61 - taken) * B
        cache.check()
    assert cache.evict(5) == []


def test_no_block_goes_before_what_was_built_on_it() -> None:
    cache = PrefixCache(1000, 4)
    rng = random.Random(0)
    built_on: dict[int, int] = {}  # block -> the block before it
    for seed in range(1, 31):
        request = serve(cache, prompt(rng.randrange(40)) + prompt(rng.randrange(1, 30), seed=seed))
        whole = request.block_table[: request.num_tokens // 4]
        built_on.update(zip(whole[1:], whole, strict=False))
    gone: set[int] = set()
    while cache.num_cached_blocks:
        gone.update(cache.evict(1))
        assert [block for block, before in built_on.items() if before in gone and block not in gone] == []
        cache.check()
    assert len(gone) > 100


def test_lookups_change_nothing(cache: PrefixCache) -> None:
    serve(cache, prompt(500))
    serve(cache, prompt(200) + prompt(100, seed=1))
    before = observed(cache)
    nodes = cache.draw().count("\n")
    rng = random.Random(0)
    for _ in range(1000):
        shared = rng.randrange(501)
        assert cache.match([*prompt(shared), 9, 9]) == min(shared // B * B, 496)
    assert observed(cache) == before
    assert cache.draw().count("\n") == nodes
    assert cache.match(prompt(500)) == 496


def test_lookups_do_not_refresh() -> None:
    cache = PrefixCache(2)
    serve(cache, prompt(16))
    serve(cache, prompt(16, seed=1))
    cache.match(prompt(16))
    cache.explain(prompt(16))
    cache.evict(1)
    assert (cache.match(prompt(16)), cache.match(prompt(16, seed=1))) == (0, 16)


def test_a_partial_hit_refreshes_the_part_it_used_only() -> None:
    cache = PrefixCache(9)
    serve(cache, prompt(64))
    serve(cache, prompt(64, seed=1))
    serve(cache, [*prompt(32), 5])  # uses two of the first four blocks
    assert cache.num_free_blocks == 1
    cache.evict(2)
    assert (cache.match(prompt(64)), cache.match(prompt(64, seed=1))) == (32, 64)
    cache.evict(4)
    assert (cache.match(prompt(64)), cache.match(prompt(64, seed=1))) == (32, 0)
    cache.check()


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "slru", "priority"])
def test_depth_does_not_grow_with_turns(policy: str) -> None:
    cache = PrefixCache(10_000, policy=policy)
    history: list[int] = []
    for turn in range(500):
        history += [turn, turn + 1, turn + 2]
        request = cache.allocate(history)
        cache.commit(request)
        for token in range(20):
            cache.append(request, token)
            history.append(token)
        cache.commit(request, len(history) - 1)
        cache.free(request)
    assert len(cache.draw().splitlines()) == 2  # the root and one node
    cache.check()


def test_nested_prefixes_need_no_recursion() -> None:
    cache = PrefixCache(3000, 1)
    tokens = prompt(2000)
    for end in range(2000, 0, -1):  # the longest first, so that each later one cuts it once more
        cache.free(cache.allocate(tokens[:end], min_prefill_tokens=0))
        serve(cache, tokens[:end], min_prefill_tokens=0)
    assert cache.draw(max_nodes=10**4).count("\n") == 2000
    cache.check()
    assert cache.match(tokens) == 2000
    assert str(cache.explain([*tokens, 1])).startswith("2000 of 2001")
    request = cache.allocate(tokens)
    fork, copies = cache.fork(request)
    assert len(copies) == 1
    cache.append(fork, [1, 2, 3])
    cache.commit(fork)
    cache.truncate(fork, 2003)
    cache.check()
    assert len(cache.evict(5000)) == 0
    cache.clear(None)
    cache.check()
    cache.free(request)
    cache.free(fork)
    cache.reset()
    cache.check()
    assert (repr(cache), cache.num_free_blocks) == (repr(cache), 3000)


NAMES: list[Hashable] = [
    None, "", "None", 0, False, 0.0, "0", 1, True, 1.0, "1", b"1", ("lora", 7), ("lora", "7"), "lora7", ("lora7",),
    (1,), (True,), ("a", "b,c"), ("a,b", "c"), ((), ""), ("", ()), frozenset({1}),
]  # fmt: skip


def test_namespaces_never_share() -> None:
    cache = PrefixCache(200)
    for number, name in enumerate(NAMES):
        assert cache.match(prompt(48), namespace=name) == 0, name
        assert serve(cache, prompt(48), namespace=name).num_cached_tokens == 0, name
        assert cache.num_cached_blocks == 3 * (number + 1)
    cache.check()
    cache.clear(True)
    for name in NAMES:
        assert cache.match(prompt(48), namespace=name) == (0 if name is True else 48), name
    cache.evict(3)  # the oldest: None
    assert cache.explain(prompt(48)).reason == "evicted"
    assert cache.explain(prompt(48), namespace=True).reason == "another namespace"
    assert cache.explain(prompt(48), namespace="new").reason == "another namespace"
    cache.evict(1000)
    assert cache.explain(prompt(48), namespace=1.0).reason == "evicted"
    assert cache.explain(prompt(48), namespace="new").reason == "nothing cached"
    assert cache.explain(prompt(48), namespace=True).reason == "nothing cached"
    cache.check()


def test_not_cacheable_neither_matches_nor_publishes(cache: PrefixCache) -> None:
    serve(cache, prompt(48))
    lookups = cache.stats.lookups
    request = cache.allocate(prompt(64), cacheable=False)
    assert request.num_cached_tokens == 0
    cache.commit(request)
    fork, copies = cache.fork(request)
    assert len(copies) == 4
    cache.free(request)
    cache.free(fork)
    assert cache.match(prompt(64)) == 48
    assert (cache.num_cached_blocks, cache.stats.lookups) == (3, lookups)


def test_priority_keeps_longer_but_blocks_nothing() -> None:
    cache = PrefixCache(6, policy="priority")
    serve(cache, prompt(32), priority=5)
    serve(cache, prompt(32, seed=1))
    serve(cache, prompt(32, seed=2), priority=1)
    serve(cache, prompt(32, seed=3))
    assert [cache.match(prompt(32, seed=s)) for s in range(4)] == [32, 0, 32, 32]
    request = cache.allocate(prompt(96, seed=4))  # all of the pool: priorities cannot stand in the way
    assert (request.num_cached_tokens, cache.num_cached_blocks) == (0, 0)
    cache.check()


def test_rejected_drafts_are_not_matchable(cache: PrefixCache) -> None:
    request = cache.allocate(prompt(30))
    cache.commit(request)
    cache.append(request, [1, 2, 3, 4, 5])
    cache.commit(request, 32)
    cache.truncate(request, 32)
    assert (request.num_tokens, request.num_committed_tokens, len(request.block_table)) == (32, 32, 2)
    cache.check()
    assert cache.match([*prompt(30), 1, 2, 3, 4, 5]) == 32
    cache.append(request, [9] * 16)
    cache.commit(request)
    assert cache.match(prompt(30) + [1, 2] + [9] * 16) == 48
    assert cache.match(prompt(30) + [1, 2, 3, 4, 5] + [9] * 13) == 32
    with pytest.raises(ValueError, match="num_tokens must be at least 48, got 47"):
        cache.truncate(request, 47)
    cache.free(request)
    assert (cache.num_cached_blocks, cache.num_free_blocks) == (3, 61)


def test_truncating_the_prompt_of_a_request_that_published_nothing(cache: PrefixCache) -> None:
    request = cache.allocate(prompt(40))
    cache.truncate(request, 20)
    cache.append(request, prompt(40, seed=1))
    cache.commit(request)
    cache.free(request)
    assert cache.match(prompt(20) + prompt(40, seed=1)) == 48


CALLS: dict[str, Callable[[PrefixCache, Request], object]] = {
    "commit": lambda cache, request: cache.commit(request),
    "append": lambda cache, request: cache.append(request, 1),
    "append many": lambda cache, request: cache.append(request, [1, 2]),
    "truncate": lambda cache, request: cache.truncate(request, request.num_tokens),
    "fork": lambda cache, request: cache.fork(request),
    "free": lambda cache, request: cache.free(request),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_freed_and_foreign_requests_are_refused(cache: PrefixCache, call: Callable[..., object]) -> None:
    freed = serve(cache, prompt(40))
    foreign = PrefixCache(8).allocate(prompt(40))
    running = cache.allocate(prompt(60))
    before = observed(cache)
    with pytest.raises(ValueError, match="was freed"):
        call(cache, freed)
    with pytest.raises(ValueError, match="another cache"):
        call(cache, foreign)
    with pytest.raises((TypeError, AttributeError)):
        call(cache, None)
    assert observed(cache) == before
    cache.free(running)


@pytest.mark.parametrize("forget", [lambda c: c.reset(), lambda c: c.clear("a")], ids=["reset", "clear"])
def test_requests_outlive_a_reset_but_publish_nothing(cache: PrefixCache, forget: Callable[..., None]) -> None:
    serve(cache, prompt(64), namespace="a")
    serve(cache, prompt(16), namespace="b")
    first = cache.allocate(prompt(64) + prompt(8, seed=1), namespace="a")
    second = cache.allocate(prompt(32) + prompt(8, seed=2), namespace="a")
    forget(cache)
    cache.check()
    assert cache.match(prompt(64), namespace="a") == 0
    assert cache.num_cached_blocks == cache.match(prompt(16), namespace="b") // B
    cache.append(first, prompt(30, seed=3))
    cache.append(second, 1)
    cache.commit(first)
    cache.commit(second)
    fork, _ = cache.fork(first)
    cache.check()
    assert cache.match(prompt(64), namespace="a") == 0
    third = cache.allocate(prompt(64), namespace="a")  # the namespace starts anew
    cache.commit(third)
    assert cache.match(prompt(64), namespace="a") == 64
    for request in (second, first, third, fork):
        cache.free(request)
        cache.check()
    assert cache.num_private_blocks == 0
    assert cache.match(prompt(64) + prompt(8, seed=1), namespace="a") == 64


def test_preempted_request_finds_what_it_had_committed(cache: PrefixCache) -> None:
    request = cache.allocate(prompt(100))
    cache.commit(request, 70)
    cache.free(request)
    resumed = cache.allocate(prompt(100), resumed=True)
    assert resumed.num_cached_tokens == 64
    stats = cache.stats
    assert (stats.lookups, stats.prompt_tokens, stats.hit_tokens) == (1, 100, 0)
    assert (stats.resumed_lookups, stats.resumed_prompt_tokens, stats.resumed_hit_tokens) == (1, 100, 64)


def test_another_request_picks_up_committed_chunks(cache: PrefixCache) -> None:
    first = cache.allocate(prompt(200))
    for end in (50, 100, 150):
        cache.commit(first, end)
        second = cache.allocate(prompt(200))
        assert second.num_cached_tokens == end // B * B
        cache.free(second)
    second = cache.allocate(prompt(200))
    cache.commit(first)
    cache.commit(second)
    assert list(first.block_table[:12]) == list(second.block_table[:12])


def test_fork_shares_what_is_published_and_copies_the_rest(cache: PrefixCache) -> None:
    request = cache.allocate(prompt(40))
    cache.commit(request, 20)
    fork, copies = cache.fork(request)
    assert copies == list(zip(request.block_table[1:], fork.block_table[1:], strict=True))
    assert fork.block_table[0] == request.block_table[0]
    assert (fork.num_tokens, fork.num_cached_tokens, fork.num_committed_tokens) == (40, 16, 20)
    cache.append(request, [1] * 8)
    cache.append(fork, [2] * 8)
    cache.commit(request)
    assert cache.commit(fork) == range(1, 2)  # the second block turned out to be the same
    assert cache.match(prompt(40) + [1] * 8) == cache.match(prompt(40) + [2] * 8) == 48
    assert cache.stats.lookups == 1


def test_fork_and_append_without_room_change_nothing() -> None:
    cache = PrefixCache(4)
    request = cache.allocate(prompt(48))
    before = observed(cache)
    with pytest.raises(OutOfBlocksError):
        cache.fork(request)
    with pytest.raises(OutOfBlocksError):
        cache.append(request, prompt(33))
    assert (observed(cache), request.num_tokens) == (before, 48)
    cache.append(request, prompt(16))
    before = observed(cache)
    with pytest.raises(OutOfBlocksError, match="needed 1 blocks, but only 0 are free and 0 evictable"):
        cache.append(request, 1)
    assert (observed(cache), request.num_tokens, cache.stats.failed_allocations) == (before, 64, 3)


def test_append_evicts_when_nothing_is_free() -> None:
    cache = PrefixCache(4)
    serve(cache, prompt(48))
    request = cache.allocate(prompt(16, seed=1))
    for token in range(33):
        cache.append(request, token)
    assert (cache.match(prompt(48)), cache.num_private_blocks) == (0, 4)
    cache.check()


BAD_TOKENS: dict[str, tuple[object, str]] = {
    "negative": ([1, 2, -3], "token -3 at position 2"),
    "2^31": ([1, 2**31], "token 2147483648 at position 1"),
    "2^63": ([2**63], "token 9223372036854775808 at position 0"),
    "float": ([1, 2.0], "token 2.0 at position 1 is a float"),
    "bool": ([5, True], "token True at position 1 is a bool"),
    "false": ([0, False], "token False at position 1 is a bool"),
    "nested": ([[1, 2]], r"token \[1, 2\] at position 0 is a list"),
    "none in it": ([1, None], "token None at position 1"),
    "text": ("abc", "got str"),
    "texts": (["a"], "token 'a' at position 0 is a str"),
    "none": (None, "got NoneType"),
    "float number": (1.5, "got float"),
    "dict": ({1: 2}, "got dict"),
    "generator": ((i for i in [1]), "got generator"),
    "odd bytes": (b"\0\0\0", "got 3 bytes"),
    "negative bytes": (b"\1\0\0\0\xff\xff\xff\xff", "token -1 at position 1"),
    "negative array": (array("i", [1, -1]), "token -1 at position 1"),
    "unsigned array": (array("I", [2**31]), "token 2147483648 at position 0"),
    "float array": (array("d", [1.0]), "float64"),
    "2-D numpy": (np.zeros((2, 2), np.int32), r"shape \(2, 2\)"),
    "0-D float numpy": (np.float32(1), "shape|float32"),
    "float numpy": (np.zeros(2, np.float32), "float32"),
    "bool numpy": (np.zeros(2, bool), "bool"),
    "negative numpy": (np.array([3, -7], np.int64), "token -7 at position 1"),
    "wide numpy": (np.array([3, 2**40], np.int64), f"token {2**40} at position 1"),
    "unsigned numpy": (np.array([2**32 - 1], np.uint32), "token 4294967295 at position 0"),
}


@pytest.mark.parametrize(("tokens", "message"), BAD_TOKENS.values(), ids=BAD_TOKENS)
def test_bad_tokens_are_refused_with_value_and_place(cache: PrefixCache, tokens: Any, message: str) -> None:
    request = cache.allocate(prompt(20))
    before = observed(cache)
    for call in (cache.allocate, cache.match, cache.explain, lambda t: cache.append(request, t)):
        with pytest.raises((ValueError, TypeError), match=message):
            call(tokens)
    assert observed(cache) == before
    assert request.num_tokens == 20


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c, r: c.allocate([]), "at least 1 token, got 0"),
        (lambda c, r: c.allocate(range(2000)), "2000 tokens need 125 blocks, but the cache has 64"),
        (lambda c, r: c.allocate([1], min_prefill_tokens=-1), "min_prefill_tokens must be at least 0, got -1"),
        (lambda c, r: c.allocate([1], min_prefill_tokens=True), "min_prefill_tokens must be an int, got True"),
        (lambda c, r: c.allocate([1], priority=0.5), "priority must be an int, got 0.5"),
        (lambda c, r: c.allocate([1], priority=2**63), "priority must be at most"),
        (lambda c, r: c.allocate([1], namespace=[1]), r"namespace must be hashable, got \[1\]"),
        (lambda c, r: c.match([1], namespace=([1],)), "namespace must be hashable"),
        (lambda c, r: c.clear({}), "namespace must be hashable"),
        (lambda c, r: c.commit(r, 41), "num_tokens must be at most 40, got 41"),
        (lambda c, r: c.commit(r, -1), "num_tokens must be at least 0, got -1"),
        (lambda c, r: c.commit(r, 1.0), "num_tokens must be an int, got 1.0"),
        (lambda c, r: c.commit(r, False), "num_tokens must be an int, got False"),
        (lambda c, r: c.truncate(r, 31), "num_tokens must be at least 32, got 31"),
        (lambda c, r: c.truncate(r, 41), "num_tokens must be at most 40, got 41"),
        (lambda c, r: c.append(r, True), "token True at position 0 is a bool"),
        (lambda c, r: c.append(r, -1), "token -1 at position 0"),
        (lambda c, r: c.append(r, 2**31), "token 2147483648 at position 0"),
        (lambda c, r: c.append(r, np.int64(-5)), "token -5 at position 0"),
        (lambda c, r: c.append(r, [1, -2]), "token -2 at position 1"),
        (lambda c, r: c.append(r, [1, 2.5]), "token 2.5 at position 1 is a float"),
        (lambda c, r: c.evict(-1), "num_blocks must be at least 0, got -1"),
        (lambda c, r: c.evict(1.5), "num_blocks must be an int, got 1.5"),
        (lambda c, r: c.draw(max_nodes=-1), "max_nodes must be at least 0, got -1"),
    ],
)
def test_bad_arguments_are_refused_with_value_and_bound(
    cache: PrefixCache, call: Callable[..., object], message: str
) -> None:
    request = cache.allocate(prompt(40))
    cache.commit(request)
    before = observed(cache)
    with pytest.raises((ValueError, TypeError), match=message):
        call(cache, request)
    assert observed(cache) == before
    assert (request.num_tokens, request.num_committed_tokens) == (40, 40)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must be at least 1, got 0"),
        ({"num_blocks": -5}, "num_blocks must be at least 1, got -5"),
        ({"num_blocks": 1.5}, "num_blocks must be an int, got 1.5"),
        ({"num_blocks": True}, "num_blocks must be an int, got True"),
        ({"num_blocks": "8"}, "num_blocks must be an int, got '8'"),
        ({"num_blocks": 2**31}, "num_blocks must be at most 2147483647"),
        ({"num_blocks": 8, "block_size": 0}, "block_size must be at least 1, got 0"),
        ({"num_blocks": 8, "block_size": None}, "block_size must be an int, got None"),
        (
            {"num_blocks": 8, "policy": "mru"},
            "policy must be one of lru, lfu, fifo, slru, priority, reuse, arc, got 'mru'",
        ),
        ({"num_blocks": 8, "policy": object()}, "policy must be a name or an object with add, discard and victim"),
    ],
)
def test_a_cache_with_bad_arguments_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        PrefixCache(**arguments)


def test_a_lookup_counts_once_however_often_it_is_tried() -> None:
    cache = PrefixCache(8)
    running = cache.allocate(prompt(100))
    for _ in range(5):
        with pytest.raises(OutOfBlocksError):
            cache.allocate(prompt(50, seed=1))
    cache.free(running)
    cache.allocate(prompt(50, seed=1))
    stats = cache.stats
    assert (stats.lookups, stats.prompt_tokens, stats.hit_tokens, stats.failed_allocations) == (2, 150, 0, 5)


def test_counters_are_a_snapshot(cache: PrefixCache) -> None:
    before = cache.stats
    serve(cache, prompt(48))
    serve(cache, prompt(48))
    cache.evict(2)
    assert before.lookups == 0
    assert (cache.stats.lookups, cache.stats.hit_tokens, cache.stats.evicted_blocks) == (2, 32, 2)
    assert cache.stats.hit_rate == 32 / 96


def test_nothing_of_what_was_passed_is_kept_by_reference(cache: PrefixCache) -> None:
    packed = array("i", prompt(48)).tobytes()
    for buffer in (array("i", packed), np.frombuffer(bytearray(packed), np.int32), bytearray(packed)):
        cache.reset()
        request = cache.allocate(buffer)
        memoryview(buffer).cast("B")[:] = bytes(len(packed))
        cache.commit(request)
        assert cache.match(prompt(48)) == 48
        cache.free(request)


def test_a_block_table_in_the_callers_hands_stays_as_it_was(cache: PrefixCache) -> None:
    request = cache.allocate(prompt(40))
    table = request.block_table
    view = np.frombuffer(table, np.int32)  # would forbid an array to grow
    cache.append(request, prompt(40))
    assert (view.tolist(), len(request.block_table)) == ([0, 1, 2], 5)
    table[0] = 99
    assert request.block_table[0] == 0


def test_a_failing_policy_of_ones_own_loses_no_block() -> None:
    class Stubborn:
        chosen = -1

        def add(self, leaf: int) -> None: ...
        def discard(self, leaf: int) -> None: ...
        def victim(self) -> int:
            return self.chosen

    policy = Stubborn()
    cache = PrefixCache(4, policy=policy)
    serve(cache, prompt(48))
    for call in (lambda: cache.evict(1), lambda: cache.allocate(prompt(40, seed=1))):
        with pytest.raises(RuntimeError, match="chose -1, which is not an evictable leaf"):
            call()
        cache.check()
    assert cache.match(prompt(48)) == 48


@pytest.mark.parametrize("call", ["evict", "allocate"])
def test_what_a_policy_of_ones_own_evicts_before_it_fails_is_counted_by_why_it_went(call: str) -> None:
    class Halfway(MostRecentFirst):
        def victim(self) -> int:
            return self.leaves[0] if len(self.leaves) > 1 else -1

    cache = PrefixCache(4, policy=Halfway())
    for seed in range(2):
        serve(cache, prompt(32, seed=seed))
    with pytest.raises(RuntimeError, match="chose -1"):
        cache.evict(3) if call == "evict" else cache.allocate(prompt(48, seed=2))
    stats = cache.stats
    assert (stats.evicted_blocks, stats.evicted_by_call, stats.evicted_for_room) == (
        (2, 2, 0) if call == "evict" else (2, 0, 2)
    )
    cache.check()


def test_a_million_cached_tokens_leave_nothing_to_the_garbage_collector() -> None:
    cache = PrefixCache(4000, 4)
    for seed in range(1000):
        serve(cache, prompt(16, seed=seed))
    gc.collect()
    tracked = len(gc.get_objects())
    for seed in range(1000, 2000):
        serve(cache, prompt(16, seed=seed))
    gc.collect()
    assert cache.num_cached_blocks == 4000
    assert len(gc.get_objects()) - tracked < 100  # not even an object for every tenth of the new leaves
