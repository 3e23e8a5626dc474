"""Lookups that are kept, touches, and decode steps: each must be what the plain calls are."""

import random
import sys
from pathlib import Path

import pytest
from test_state_machine import MergesAtOnce

from radixkv import OutOfBlocksError, PrefixCache, Request
from radixkv.policy import POLICIES
from radixkv.replay import replay
from radixkv.trace import read_trace


def cached(cache: PrefixCache, tokens: list[int], **options: object) -> None:
    request = cache.allocate(tokens, **options)  # type: ignore[arg-type]
    cache.commit(request)
    cache.free(request)


# Lookups


def test_a_lookup_matches_what_is_cached_now() -> None:
    cache = PrefixCache(8, block_size=2)
    lookup = cache.lookup([1, 2, 3, 4, 5])
    assert cache.match(lookup) == 0
    cached(cache, [1, 2, 3, 4, 9, 9])
    assert cache.match(lookup) == 4
    cache.evict(2)
    assert cache.match(lookup) == 2
    cache.reset()
    assert cache.match(lookup) == 0
    cached(cache, [1, 2])
    assert cache.match(lookup) == 2


def test_a_lookup_follows_a_leaf_that_grows_and_one_that_is_split() -> None:
    cache = PrefixCache(16, block_size=1)
    lookup = cache.lookup([1, 2, 3, 4])
    request = cache.allocate([1, 2, 9])
    cache.commit(request, 1)
    assert cache.match(lookup) == 1
    cache.commit(request)
    assert cache.match(lookup) == 2
    cached(cache, [1, 8])  # cuts [1 2 9] behind the 1
    assert cache.match(lookup) == 2
    cached(cache, [1, 2, 3, 4])
    assert cache.match(lookup) == 4
    cache.check()


def test_a_lookup_that_goes_on_inside_a_node_does_not_jump_to_its_children() -> None:
    cache = PrefixCache(16, block_size=1)
    for tokens in ([1, 2, 2, 3], [1, 2, 2, 4]):  # [1 2 2] with two children
        cached(cache, tokens)
    lookup = cache.lookup([1])
    assert cache.match(lookup) == 1
    lookup.extend([2, 3])
    assert cache.match(lookup) == 2


def test_a_lookup_goes_on_with_the_chat() -> None:
    cache = PrefixCache(100, block_size=4)
    lookup = cache.lookup(b"")
    context: list[int] = []
    for turn in range(5):
        asked, said = [10 * turn + i for i in range(3)], [900 + turn] * 4
        lookup.extend(asked)
        context += asked
        assert lookup.num_tokens == len(context)
        request = cache.allocate(lookup)
        assert request.num_cached_tokens == len(context[:-3]) // 4 * 4
        lookup.extend(said)  # the request's prompt is what the lookup was
        assert request.num_tokens == len(context)
        cache.append(request, said)
        cache.commit(request)
        context += said
        cache.free(request)
        cache.check()
    assert cache.match(context) == cache.match(lookup) == len(context) // 4 * 4


def test_a_request_of_a_lookup_commits_its_own_tokens_only() -> None:
    cache = PrefixCache(100, block_size=2)
    lookup = cache.lookup([1, 2, 3])
    request = cache.allocate(lookup)
    lookup.extend([7, 7, 7])
    cache.truncate(request, 1)
    cache.append(request, [4, 5, 6])
    cache.commit(request)
    assert (cache.match([1, 4, 5, 6]), cache.match(lookup)) == (4, 0)


def test_a_fork_has_the_tokens_that_its_request_has_left_of_a_lookup() -> None:
    cache = PrefixCache(100, block_size=2)
    lookup = cache.lookup([1, 2, 3])
    request = cache.allocate(lookup)
    cache.truncate(request, 2)
    lookup.extend([7, 7])
    fork, _ = cache.fork(request)
    cache.append(fork, [4, 5])
    cache.commit(fork)
    assert (cache.match([1, 2, 4, 5]), cache.match(lookup)) == (4, 2)


def test_a_lookup_is_of_one_cache_and_one_namespace() -> None:
    cache = PrefixCache(8, block_size=1)
    cached(cache, [1, 2], namespace="a")
    lookup = cache.lookup([1, 2], namespace="a")
    assert cache.match(lookup) == cache.match(lookup, namespace="a") == 2
    with pytest.raises(ValueError, match=r"Lookup\(num_tokens=2\) is of namespace 'a', not 'b'"):
        cache.match(lookup, namespace="b")
    with pytest.raises(ValueError, match=r"Lookup\(num_tokens=2\) belongs to another cache"):
        PrefixCache(8, block_size=1).allocate(lookup)
    with pytest.raises(ValueError, match="a prompt must have at least 1 token, got 0"):
        cache.allocate(cache.lookup([]))


@pytest.mark.parametrize("tokens", [[1, -1], [2**31], [True], "ab", [[1]]])
def test_bad_tokens_leave_a_lookup_as_it_was(tokens: object) -> None:
    cache = PrefixCache(8, block_size=1)
    lookup = cache.lookup([5])
    with pytest.raises((ValueError, TypeError)):
        lookup.extend(tokens)  # type: ignore[arg-type]
    assert lookup.num_tokens == 1


def test_a_recorded_cache_records_the_whole_prompt_of_a_lookup_in_its_namespace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    cache = PrefixCache(8, block_size=1, record=path)
    for lookup in (cache.lookup([1, 2, 3]), cache.lookup([1, 2, 3], namespace="a"), cache.lookup([1, 2, 4])):
        request = cache.allocate(lookup, namespace=None)
        cache.commit(request)
        cache.free(request)
    assert cache.record is not None
    cache.record.close()
    row = replay(read_trace(path), None)
    assert (row.hit_tokens, row.prompt_tokens) == (2, 9)


def test_a_lookup_matches_on_where_a_node_was_merged_and_another_has_its_number() -> None:
    cache = PrefixCache(8, block_size=1, policy=MergesAtOnce())
    cached(cache, [1, 2, 3, 4, 6])
    cache.touch([1, 2, 3, 4])
    cache.touch([1, 2])
    lookup = cache.lookup([1, 2, 3, 4, 5])
    assert cache.match(lookup) == 4
    cached(cache, [1, 2, 3, 4, 5])
    assert cache._tree.num_nodes == 3  # 1 2 3 4 is one again
    cache.touch([1])
    assert cache._tree.num_nodes == 4
    assert cache.match(lookup) == 5
    cache.check()


@pytest.mark.parametrize("seed", range(40))
def test_lookups_match_as_their_tokens_do_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(8):
        size = rng.choice([1, 2, 3])
        policy = rng.choice([*POLICIES, MergesAtOnce])
        cache = PrefixCache(rng.randrange(8, 40), size, policy=policy if isinstance(policy, str) else policy())
        lookups: list[tuple[object, list[int], str | None]] = []
        running = []
        for _ in range(60):
            step, namespace = rng.random(), rng.choice([None, "x"])
            if step < 0.2 or not lookups:
                tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 18))]
                lookups.append((cache.lookup(tokens, namespace=namespace), tokens, namespace))
            lookup, tokens, namespace = rng.choice(lookups)
            if 0.2 <= step < 0.3:
                new = [rng.randrange(2) for _ in range(rng.randrange(1, 6))]
                lookup.extend(new)  # type: ignore[attr-defined]
                tokens += new
            elif step < 0.7:
                spare = rng.randrange(3)
                expected = min(cache.match(tokens, namespace=namespace), max(0, len(tokens) - spare) // size * size)
                try:
                    request = cache.allocate(lookup, min_prefill_tokens=spare)  # type: ignore[arg-type]
                except (OutOfBlocksError, ValueError):
                    continue
                assert request.num_cached_tokens == expected
                running.append(request)
            elif step < 0.85 and running:
                request = rng.choice(running)
                cache.commit(request, rng.randrange(request.num_tokens + 1))
                if request.num_tokens < 30 and cache.num_free_blocks:
                    cache.append(request, rng.randrange(2))
            elif step < 0.93 and running:
                cache.free(running.pop(rng.randrange(len(running))))
            elif step < 0.97:
                cache.evict(rng.randrange(6))
            elif step < 0.99:
                cache.clear(namespace)
            else:
                cache.reset()
            cache.check()
            for lookup, tokens, namespace in lookups:
                if rng.random() < 0.5:
                    expected = cache.match(tokens, namespace=namespace)
                    assert cache.match(lookup) == expected  # type: ignore[arg-type]


# Touches


def test_what_is_touched_is_evicted_later_and_nothing_is_counted() -> None:
    cache = PrefixCache(4, block_size=1)
    cached(cache, [1, 2])
    cached(cache, [3, 4])
    before = cache.stats
    assert cache.touch([1, 2, 5]) == 2
    assert cache.touch(cache.lookup([9])) == 0
    assert cache.stats == before
    cache.evict(2)
    assert (cache.match([1, 2]), cache.match([3, 4])) == (2, 0)
    cache.check()


def test_a_touch_of_part_of_a_leaf_spares_that_part() -> None:
    cache = PrefixCache(6, block_size=1)
    cached(cache, [1, 2, 3])
    cached(cache, [4, 5, 6])
    cache.touch([1])
    cache.evict(5)
    assert cache.match([1, 2]) == 1
    cache.check()


# Decode steps


def test_a_token_within_a_block_allocates_nothing() -> None:
    cache = PrefixCache(64, block_size=16)
    request = cache.allocate(range(1000, 1300))
    cache.append(request, range(20))  # room in the block, and in the array of what was generated
    tokens = [*range(5000, 5012)]
    step = iter(tokens)
    before = sys.getallocatedblocks()
    for token in step:
        cache.append(request, token)
    assert sys.getallocatedblocks() <= before + 1  # `before` itself
    assert request.num_tokens % 16 == 332 % 16
    assert len(request.block_table) == 21


def test_a_decode_step_is_commit_and_append_of_each() -> None:
    one, other = PrefixCache(64, block_size=4), PrefixCache(64, block_size=4)
    prompts = [[i] * (3 + i) for i in range(6)]
    ours, theirs = ([cache.allocate(prompt) for prompt in prompts] for cache in (one, other))
    for step in range(9):
        tokens = [step] * 6
        changed = one.decode(ours, tokens)
        for request, token in zip(theirs, tokens, strict=True):
            other.commit(request)
            other.append(request, token)
        assert changed == [request for request in ours if request.num_tokens % 4 == 1]
        assert [r.num_committed_tokens for r in ours] == [r.num_committed_tokens for r in theirs]
        assert [one.match([*p, *[0] * 9]) for p in prompts] == [other.match([*p, *[0] * 9]) for p in prompts]
        one.check()
    assert [len(r.block_table) for r in ours] == [len(r.block_table) for r in theirs]


def test_a_decode_step_switches_duplicates_to_the_cached_block() -> None:
    cache = PrefixCache(16, block_size=2)
    requests = [cache.allocate([1, 2]) for _ in range(3)]
    assert cache.decode(requests, [3, 3, 3]) == requests
    assert len({request.block_table[0] for request in requests}) == 1
    assert cache.num_free_blocks == 16 - 1 - 3
    cache.check()


def test_a_decode_step_names_who_was_switched_without_a_new_block() -> None:
    cache = PrefixCache(16, block_size=2)
    requests = [cache.allocate([1, 2, 3]) for _ in range(2)]
    assert cache.decode(requests, [4, 4]) == requests[1:]
    assert requests[0].block_table[0] == requests[1].block_table[0]
    cache.check()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1], "2 requests, but 1 tokens"),
        ([1, -1], "token -1 at position 1 is outside"),
        ([True, 1], "token True at position 0 is a bool"),
        ([1, 2**31], "token 2147483648 at position 1 is outside"),
        ([1, "a"], "token 'a' at position 1 is a str"),
    ],
)
def test_a_bad_decode_step_changes_nothing(tokens: list[int], message: str) -> None:
    cache = PrefixCache(16, block_size=2)
    requests = [cache.allocate([1, 2]), cache.allocate([3])]
    with pytest.raises((ValueError, TypeError), match=message):
        cache.decode(requests, tokens)
    assert [request.num_tokens for request in requests] == [2, 1]
    assert cache.num_cached_blocks == 0


def test_a_decode_step_without_room_or_of_wrong_requests_changes_nothing() -> None:
    cache = PrefixCache(2, block_size=2)
    requests = [cache.allocate([1, 2]), cache.allocate([3, 4])]
    with pytest.raises(OutOfBlocksError):
        cache.decode(requests, [5, 6])
    with pytest.raises(ValueError, match="a request is given twice"):
        cache.decode([requests[0], requests[0]], [5, 6])
    cache.free(requests[1])
    with pytest.raises(ValueError, match="was freed"):
        cache.decode(requests, [5, 6])
    with pytest.raises(TypeError, match="expected a Request, got 7"):
        cache.decode([7], [5])  # type: ignore[list-item]
    assert requests[0].num_tokens == 2
    assert cache.num_cached_blocks == 0
    assert cache.decode([], []) == []
    cache.check()


# Asking before taking


@pytest.mark.parametrize("seed", range(20))
def test_what_is_missing_is_what_allocate_would_lack(seed: int) -> None:
    rng = random.Random(seed)
    cache = PrefixCache(rng.randint(4, 20), block_size=rng.randint(1, 3))
    running: list[Request] = []
    refused = 0
    for _ in range(200):
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, cache.num_blocks * cache.block_size))]
        namespace = rng.choice([None, "a"])
        before = repr(cache), cache.stats
        missing = cache.num_missing_blocks(tokens, namespace=namespace)
        lookup = cache.lookup(tokens, namespace=namespace)
        assert cache.num_missing_blocks(lookup) == missing
        assert (repr(cache), cache.stats) == before
        try:
            running.append(cache.allocate(lookup))
        except OutOfBlocksError as error:
            assert missing == error.needed - error.free - error.evictable > 0
            refused += 1
        else:
            assert missing == 0
            cache.commit(running[-1], rng.randint(0, len(tokens)))
        if running and rng.random() < 0.6:
            cache.free(running.pop(rng.randrange(len(running))))
        cache.check()
    assert 0 < refused < 200


def test_what_can_never_fit_lacks_blocks_too() -> None:
    cache = PrefixCache(4, block_size=2)
    assert cache.num_missing_blocks(range(8)) == 0
    assert cache.num_missing_blocks(range(20)) == 6
    assert cache.num_missing_blocks(b"") == 0
    with pytest.raises(ValueError, match="outside"):
        cache.num_missing_blocks([-1])
