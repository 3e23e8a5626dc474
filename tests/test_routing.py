"""A trace over several workers: the router knows what events say, and that is worth tokens."""

import random
from array import array
from pathlib import Path
from typing import Any

import pytest

from radixkv.balance import ROUTERS
from radixkv.cache import PrefixCache
from radixkv.errors import OutOfBlocksError
from radixkv.events import EventRecorder
from radixkv.replay import replay
from radixkv.router import PrefixIndex
from radixkv.routing import replay_routed
from radixkv.synthetic import synthetic_trace
from radixkv.trace import IdRequest, IdTrace, TokenRequest, TokenTrace, read_trace

TRACES = Path(__file__).parents[2] / "shared" / "traces"


def packed(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


@pytest.mark.parametrize("seed", range(5))
def test_an_index_of_real_caches_says_what_they_do(seed: int) -> None:
    """Small caches that evict all the time, in namespaces, with requests that overlap, fork, fail and are reset."""
    rng = random.Random(seed)
    index = PrefixIndex(2)
    recorders = [EventRecorder() for _ in range(3)]
    caches = [PrefixCache(12, 2, events=recorder) for recorder in recorders]
    running: list[tuple[int, Any]] = []
    for _ in range(400):
        worker = rng.randrange(3)
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
        namespace = rng.choice([None, None, "salt", ("lora", 7)])
        move = rng.random()
        if move < 0.5:
            try:
                request = caches[worker].allocate(tokens, namespace=namespace)
            except OutOfBlocksError:
                continue
            caches[worker].commit(request, rng.randint(0, len(tokens)))
            running.append((worker, request))
        elif move < 0.95 and running:
            worker, request = running.pop(rng.randrange(len(running)))
            caches[worker].commit(request)
            caches[worker].free(request)
        elif move > 0.99:
            caches[worker].reset()
        elif move > 0.97:
            caches[worker].clear(namespace)
        index.apply(worker, recorders[worker].take())
        index.check()
        assert index.match(tokens, namespace=namespace) == {
            each: found for each in range(3) if (found := caches[each].match(tokens, namespace=namespace))
        }
        assert [index.num_blocks(each) for each in range(3)] == [cache.num_cached_blocks for cache in caches]


def sessions(num: int, turns: int) -> TokenTrace:
    """Chats that take turns one after the other, of 4 new tokens each."""
    requests = [
        TokenRequest(0.0, packed(*(session * 1000 + i for i in range(4 * (turn + 1)))), b"")
        for turn in range(turns)
        for session in range(num)
    ]
    return TokenTrace("made", requests, block_size=2, num_blocks=num * turns * 2)


def test_sessions_stay_where_they_are() -> None:
    trace = sessions(num=3, turns=4)
    row = replay_routed(trace, None, num_workers=2)
    assert row.hit_tokens == replay(trace, None).hit_tokens  # as one cache of everything
    assert row.num_requests == (8, 4)
    assert row.prefill_tokens == (32, 16)
    assert row.imbalance == 32 / 24


def test_a_shared_system_prompt_makes_no_hot_spot() -> None:
    """One request after the other, so that nothing is ever in flight: every worker computes the prompt once."""
    system = packed(*range(640))
    requests = [TokenRequest(0.0, system + packed(*([1000 + number] * 64)), b"") for number in range(2_000)]
    trace = TokenTrace("made", requests, block_size=16, num_blocks=40 + 4 * 2_000)
    row = replay_routed(trace, None, num_workers=4)
    assert row.hit_tokens == (2_000 - 4) * 640
    assert max(row.num_requests) < 600


def test_round_robin_scatters_them() -> None:
    row = replay_routed(sessions(num=3, turns=4), None, num_workers=2, router="round-robin")
    assert row.num_requests == (6, 6)
    assert row.hit_tokens == 3 * (4 + 8)  # of the third turn what the first left, of the fourth what the second


@pytest.mark.parametrize("router", ROUTERS)
def test_one_worker_is_a_plain_replay(router: str) -> None:
    trace = synthetic_trace(0, num_requests=300)
    row = replay_routed(trace, 1_000, num_workers=1, router=router)
    plain = replay(trace, 1_000)
    assert (row.hit_blocks, row.access_blocks) == (plain.hit_blocks, plain.access_blocks)
    assert (row.hit_tokens, row.prompt_tokens) == (plain.hit_tokens, plain.prompt_tokens)
    assert row.num_requests == (300,)
    assert row.imbalance == 1


def test_ids_are_routed_by_prompt_and_hit_at_most_it() -> None:
    """The answer's blocks are cached too; tokens are those of the trace's blocks."""
    runs, path = array("q", [0, 2]), array("q", [0, 3])
    requests = [IdRequest(0.0, 15, 5, runs, path), IdRequest(1.0, 15, 5, runs, path)]
    row = replay_routed(IdTrace("made", requests, block_size=10, num_blocks=3), None, num_workers=2)
    assert row.num_requests == (2, 0)
    assert (row.hit_blocks, row.hit_tokens, row.prefill_tokens) == (2, 15, (15, 0))


def test_namespaces_are_routed_apart() -> None:
    requests = [TokenRequest(0.0, packed(*range(9)), b"", namespace) for namespace in ("a", "b", "a", "b")]
    row = replay_routed(TokenTrace("made", requests, block_size=2, num_blocks=8), None, num_workers=2)
    assert row.num_requests == (2, 2)
    assert row.hit_tokens == 16


def test_bad_arguments_are_named() -> None:
    trace = sessions(1, 1)
    for settings, message in (
        ({"router": "random"}, "router must be one of prefix, round-robin, least-loaded, got 'random'"),
        ({"num_workers": 0}, "num_workers must be at least 1, got 0"),
        ({"capacity": 0}, "capacity must be at least 1, got 0"),
        ({"policy": "best"}, "policy must be one of lru, lfu, fifo, slru, priority, reuse, arc, got 'best'"),
    ):
        arguments: dict[str, Any] = {"capacity": 10, "num_workers": 2, **settings}
        with pytest.raises(ValueError) as error:  # noqa: PT011
            replay_routed(trace, **arguments)
        assert str(error.value) == message


@pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not here")
def test_routing_is_worth_its_tokens_on_real_chats() -> None:
    """Four workers of 10,000 blocks: the router gets nearly what one cache of 40,000 would."""
    trace = read_trace(TRACES / "mooncake_conversation.jsonl.gz")
    rates = {router: replay_routed(trace, 10_000, num_workers=4, router=router) for router in ROUTERS}
    assert 0.15 < rates["round-robin"].token_hit_rate < 0.17
    assert 0.15 < rates["least-loaded"].token_hit_rate < 0.17
    assert rates["prefix"].token_hit_rate > 0.35
    assert all(row.imbalance < 1.05 for row in rates.values())
