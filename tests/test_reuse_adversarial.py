"""Traffic that is built to mislead the order "reuse": it never hits much less than LRU."""

import random
from collections.abc import Callable, Iterator

import pytest

from radixkv import PrefixCache
from radixkv.reuse import Reuse

NUM_REQUESTS = 10_000
MAX_LOSS = 0.005  # of the blocks asked for

Stream = Iterator[tuple[str, list[int]]]  # namespace and prompt, tokens are blocks


def prompt(number: int, num: int) -> list[int]:
    return [64 * number + i for i in range(num)]


def loop(rng: random.Random) -> Stream:
    """More prompts than fit, one after the other, again and again."""
    while True:
        for number in range(60):
            yield "", prompt(number, 3)


def loops_that_change(rng: random.Random) -> Stream:
    """A loop that fits just about and one that does not, by turns."""
    first = 0
    while True:
        num, first = rng.choice([25, 30, 60, 120]), first + 1000
        for _ in range(rng.randrange(3, 12)):
            for number in range(num):
                yield "", prompt(first + number, 3)


def recent_ones(rng: random.Random) -> Stream:
    """LRU's own: what was used last is likeliest to be used again."""
    stack = list(range(200))
    while True:
        place = min(int(rng.expovariate(1 / 20)), len(stack) - 1)
        stack.insert(0, stack.pop(place))
        yield "", prompt(stack[0], 3)


def drifting(rng: random.Random) -> Stream:
    """A window of prompts that moves on: what is left behind never comes back, however often it was used."""
    for step in range(10**9):
        yield "", prompt(step // 12 + rng.randrange(30), 3)


def reversed_phases(rng: random.Random) -> Stream:
    """What came once comes back soon, for a while; then what came once never does, and what came often does."""
    number = 0
    while True:
        for _ in range(1500):  # each prompt twice, 20 requests apart
            number += 1
            yield "", prompt(number if number % 2 else max(0, number - 41), 3)
        hot = [10**6 + number + i for i in range(20)]
        for _ in range(1500):
            number += 1
            yield "", prompt(rng.choice(hot) if rng.random() < 0.5 else 10**7 + number, 3)


def swapped_classes(rng: random.Random) -> Stream:
    """Short prompts come back and long ones do not, then the other way round."""
    number, long_ones = 0, False
    while True:
        long_ones = not long_ones
        for _ in range(rng.choice([300, 1200, 2500])):
            number += 1
            length = rng.choice([1, 12])
            comes_back = (length == 12) == long_ones
            which = rng.randrange(max(1, number - 40), number + 1) if comes_back else 10**6 + number
            yield "", prompt(2 * which + length % 2, length)


def used_often_then_never(rng: random.Random) -> Stream:
    """Prompts are used many times in a row and are done with; those that were used once come back for good."""
    number = 0
    while True:
        number += 1
        if number % 3:
            for _ in range(rng.randrange(4, 40)):
                yield "", prompt(10**6 + number, 3)
        else:
            yield "", prompt(rng.randrange(40), 3)


def a_flood(rng: random.Random) -> Stream:
    """One namespace sends new prompts all the time, then none; another one's chats go on."""
    number, chats = 0, [prompt(10**6 + i, 2) for i in range(12)]
    while True:
        for share in (0.95, 0.0, 0.5):
            for _ in range(1000):
                number += 1
                if rng.random() < share:
                    yield "flood", prompt(number, rng.choice([2, 9]))
                    continue
                i = rng.randrange(len(chats))
                chats[i] = chats[i] + prompt(10**7 + number, 1) if len(chats[i]) < 8 else prompt(2 * 10**7 + number, 2)
                yield "chats", chats[i]


def chats(rng: random.Random) -> Stream:
    """Chats that grow, of a few that are alive: what was used last goes on."""
    alive: list[list[int]] = []
    number = 0
    while True:
        number += 1
        if len(alive) < 15 or rng.random() < 0.1:
            alive.append(prompt(rng.randrange(3), 4) + prompt(10 + number, 2))
        chat = alive.pop(rng.randrange(max(0, len(alive) - 15), len(alive)))
        alive.append(chat + prompt(10**6 + number, rng.randrange(1, 3)))
        alive = alive[-15:]
        yield "", alive[-1][:60]


def bait(rng: random.Random) -> Stream:
    """Just as the index has learned that a kind of prompt comes back, it stops; and begins when that is forgotten."""
    number = 0
    while True:
        for comes_back in (True, False):
            for _ in range(256):
                number += 1
                length = 2 if number % 2 else 20
                old = max(1, number - 2 * rng.randrange(1, 10))
                yield "", prompt(old if comes_back and length == 2 and rng.random() < 0.5 else number, length)


STREAMS: list[Callable[[random.Random], Stream]] = [
    loop,
    loops_that_change,
    recent_ones,
    drifting,
    reversed_phases,
    swapped_classes,
    used_often_then_never,
    a_flood,
    chats,
    bait,
]


@pytest.mark.parametrize("num_blocks", [60, 150])
@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.__name__)
def test_it_never_hits_much_less_than_lru(stream: Callable[[random.Random], Stream], num_blocks: int) -> None:
    cache = PrefixCache(num_blocks, 1, policy="reuse")
    requests = stream(random.Random(0))
    for _ in range(NUM_REQUESTS):
        namespace, tokens = next(requests)
        request = cache.allocate(tokens, namespace=namespace, min_prefill_tokens=0)
        cache.commit(request)
        cache.free(request)
    policy = cache.policy
    assert isinstance(policy, Reuse)
    stats = policy.stats
    assert stats.lookups == NUM_REQUESTS
    assert stats.hit_blocks - stats.lru_hit_blocks >= -MAX_LOSS * stats.asked_blocks, stats
