"""Prompts that wait: every order of eviction keeps them, and none takes a look for a use."""

import random
from collections import Counter, deque

import pytest

from radixkv import OutOfBlocksError, PrefixCache, Request
from radixkv.arc import ARC
from radixkv.memory import NEW
from radixkv.policy import POLICIES
from radixkv.reuse import Reuse
from radixkv.ring import Ring

LEARNING = ["reuse", "arc"]


def serve(cache: PrefixCache, tokens: list[int]) -> int:
    request = cache.allocate(tokens)
    cache.commit(request)
    cache.free(request)
    return request.num_cached_tokens


def cached(cache: PrefixCache, *prompts: list[int]) -> list[int]:
    cache.check()
    return [cache.match(prompt) for prompt in prompts]


@pytest.mark.parametrize("policy", ["lru", *LEARNING])
def test_what_waits_goes_last(policy: str) -> None:
    cache = PrefixCache(12, 1, policy=policy)
    for start in range(0, 40, 10):
        serve(cache, [start, start + 1, start + 2])
    assert cache.touch([0, 1, 9]) == 2
    assert cached(cache, [0, 1, 2]) == [3]
    cache.evict(10)
    assert cached(cache, [0, 1, 2], [10], [20], [30]) == [2, 0, 0, 0]
    cache.evict(1)
    assert cached(cache, [0, 1, 2]) == [1]


@pytest.mark.parametrize("policy", LEARNING)
def test_where_all_wait_the_latest_comer_goes_first(policy: str) -> None:
    cache = PrefixCache(9, 1, policy=policy)
    prompts = [[start, start + 1, start + 2] for start in (0, 10, 20)]
    for prompt in prompts:
        serve(cache, prompt)
    for prompt in [prompts[1], prompts[2], prompts[0], *prompts]:  # in which order they came, then again and again
        cache.touch(prompt)
    gone = []
    for _ in range(3):
        cache.evict(3)
        gone += [start for start in (0, 10, 20) if not cache.match([start]) and start not in gone]
    assert gone == [0, 20, 10]
    cache.check()


@pytest.mark.parametrize("policy", LEARNING)
def test_who_gave_up_is_forgotten_when_all_has_been_cached_anew(policy: str) -> None:
    cache = PrefixCache(8, 1, policy=policy)
    serve(cache, [1, 2])
    cache.touch([1, 2])
    kept = []
    for start in range(10, 40):
        serve(cache, [start, start])
        kept.append(cache.match([1, 2]))
    assert kept[:4] == [2, 2, 2, 2]
    assert kept[5:] == [0] * 25
    cache.check()


@pytest.mark.parametrize("policy", LEARNING)
def test_a_use_ends_the_wait(policy: str) -> None:
    cache = PrefixCache(8, 1, policy=policy)
    for tokens in ([1, 2], [3, 4], [5, 6]):
        serve(cache, tokens)
    cache.touch([1, 2])
    cache.touch([3, 4])
    serve(cache, [1, 2, 7])
    serve(cache, [8])
    cache.evict(5)
    assert cached(cache, [3, 4]) == [2]


@pytest.mark.parametrize("policy", LEARNING)
def test_what_waits_and_is_gone_does_not_come_back(policy: str) -> None:
    cache = PrefixCache(8, 1, policy=policy)
    for namespace in ("a", "b"):
        request = cache.allocate([1, 2], namespace=namespace)
        cache.commit(request)
        cache.free(request)
        cache.touch([1, 2], namespace=namespace)
    cache.clear("a")
    cache.check()
    cache.evict(1)
    assert cache.match([1, 2], namespace="b") == 1
    cache.reset()
    cache.check()
    serve(cache, [1, 2, 3])  # in a node that waited before
    assert cache.evict(2)
    assert cached(cache, [1, 2, 3]) == [1]


@pytest.mark.parametrize("policy", ["lfu", "slru"])
def test_a_look_counts_for_nothing(policy: str) -> None:
    cache = PrefixCache(8, 1, policy=policy)
    for tokens in ([1, 2], [1, 2], [3, 4]):
        serve(cache, tokens)
    for _ in range(5):
        cache.touch([3, 4])
    cache.evict(2)
    assert cached(cache, [1, 2], [3, 4]) == [2, 0]


@pytest.mark.parametrize("policy", list(POLICIES))
def test_how_often_somebody_looks_makes_no_difference(policy: str) -> None:
    looked, plain = (PrefixCache(60, 2, policy=policy) for _ in range(2))
    rng = random.Random(3)
    prompts = [[rng.randrange(3) for _ in range(12)] for _ in range(40)]
    queue = deque(rng.choice(prompts) for _ in range(4))
    for _ in range(400):
        queue.append(rng.choice(prompts))
        for cache, num_looks in ((looked, 5), (plain, 1)):
            for _ in range(num_looks):
                for prompt in reversed(queue):
                    cache.touch(prompt)
        tokens = queue.popleft()
        assert serve(looked, tokens) == serve(plain, tokens)
    for cache in (looked, plain):
        cache.check()


def test_what_lru_would_have_hit_counts_what_waits_too() -> None:
    shares = []
    for num_waiting in (0, 2, 8, 30):
        caches = PrefixCache(400, 1, policy="reuse"), PrefixCache(400, 1)
        rng = random.Random(num_waiting)
        systems = [[rng.randrange(1 << 30) for _ in range(8)] for _ in range(5)]
        chats = [[*rng.choice(systems)] for _ in range(40)]
        queue: deque[list[int]] = deque()
        hits = 0
        for _ in range(3000):
            chat = rng.randrange(len(chats))
            if len(chats[chat]) > 60 or rng.random() < 0.2:
                chats[chat] = [*rng.choice(systems)]
            chats[chat] += [rng.randrange(1 << 30) for _ in range(6)]
            queue.append([*chats[chat]])
            for cache in caches:
                for prompt in reversed(queue):
                    cache.touch(prompt)
            if len(queue) > num_waiting:
                tokens = queue.popleft()
                serve(caches[0], tokens)
                hits += serve(caches[1], tokens)
        policy = caches[0].policy
        assert isinstance(policy, Reuse)
        stats = policy.stats
        shares.append((hits / stats.asked_blocks, stats.lru_hit_blocks / stats.asked_blocks))
        caches[0].check()
    for real, estimate in shares:
        assert abs(real - estimate) < 0.01


def test_a_policy_that_learns_and_has_inner_nodes_is_given_anew_what_waits() -> None:
    class Recency(Reuse):
        wants_inner_nodes = True

        def __init__(self) -> None:
            super().__init__()
            self.order = Ring()

        def add(self, leaf: int) -> None:
            self.order.add(leaf)

        def discard(self, leaf: int) -> None:
            self.order.discard(leaf)

        def victim(self) -> int:
            return self.order.first()

        def nodes(self) -> set[int]:
            return self.order.numbers()

    cache = PrefixCache(12, 1, policy=Recency())
    for tokens in ([1, 2, 3], [1, 2, 4], [5, 6]):
        serve(cache, tokens)
    cache.touch([1, 2, 4])
    cache.touch([1, 2, 3])
    assert len(cache.evict(3)) == 3
    assert cached(cache, [1, 2, 3], [1, 2, 4], [5, 6]) == [3, 2, 0]


def check_shadow(policy: Reuse) -> None:
    """What is counted by tick is what nodes and evicted runs say, and of what is gone nothing is left."""
    counted: Counter[int] = Counter()
    for node, (mark, seen) in enumerate(zip(policy._marks, policy._seen, strict=True)):
        if mark != NEW and seen >= 0:
            counted[seen] += policy._lengths[node]
    for ghost, num in enumerate(policy._ghosts.lengths):
        if num:
            counted[policy._ghost_seen[ghost]] += num
    shadow = policy._shadow
    after = {tick: num for tick, num in counted.items() if tick > shadow._edge}
    assert after == {tick: num for tick, num in shadow._num_last.items() if tick > shadow._edge}
    assert shadow._num_after == sum(after.values())
    assert shadow._lengths.keys() == shadow._num_last.keys()


@pytest.mark.parametrize("max_uses", [1, 3, 32])
@pytest.mark.parametrize("seed", range(4))
def test_what_lru_is_imagined_to_have_is_counted_exactly(seed: int, max_uses: int) -> None:
    class Merging(Reuse):
        pass

    Merging.max_uses = max_uses
    policy = Merging()
    cache = PrefixCache(24, 1, policy=policy)
    rng = random.Random(seed)
    running: list[Request] = []
    for _ in range(1500):
        prompt = [rng.randrange(2) for _ in range(rng.choice([1, 3, 5, 8]))]
        call = rng.choice(
            ["allocate", "allocate", "commit", "touch", "free", "free", "fork", "append", "evict", "clear"]
        )
        namespace = rng.choice([None, "a"])
        try:
            if call == "allocate":
                running.append(cache.allocate(prompt, namespace=namespace, resumed=rng.random() < 0.1))
            elif call == "touch":
                cache.touch(prompt, namespace=namespace)
            elif call == "evict":
                cache.evict(rng.choice([1, 2, 3, 24]))
            elif call == "clear":
                if rng.random() < 0.05:
                    cache.clear("a")
            elif running:
                request = rng.choice(running)
                if call == "free":
                    running.remove(request)
                    cache.free(request)
                elif call == "fork":
                    running.append(cache.fork(request)[0])
                elif call == "append":
                    cache.append(request, rng.randrange(2))
                else:
                    cache.commit(request, rng.randrange(request.num_tokens + 1))
        except OutOfBlocksError:
            cache.free(running.pop())
        cache.check()
        check_shadow(policy)


def test_requests_of_less_than_a_block_leave_nothing_behind() -> None:
    cache = PrefixCache(8, 16, policy="reuse")
    for token in range(100):
        serve(cache, [token])
    assert isinstance(cache.policy, Reuse)
    assert len(cache.policy._shadow._num_last) <= 1


def test_a_policy_that_learns_and_cannot_say_what_it_has_is_refused() -> None:
    class Mute(ARC):
        nodes = None  # type: ignore[assignment]

    with pytest.raises(TypeError, match=r"must say with nodes\(\) what was added"):
        PrefixCache(8, policy=Mute())
