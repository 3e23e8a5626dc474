"""What is remembered of evicted runs, and the small containers that it and the policies are made of."""

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv import PrefixCache
from radixkv.ghosts import NO_GHOST, Ghosts
from radixkv.lazy_heap import LazyHeap
from radixkv.ring import Ring


def run(*tokens: int) -> bytearray:
    return bytearray(array("i", tokens).tobytes())


@pytest.mark.parametrize("size", [1, 2])
def test_a_chain_is_followed_as_far_as_it_agrees(size: int) -> None:
    ghosts = Ghosts(4 * size)

    def blocks(*names: int) -> bytearray:
        return run(*(100 * name + i for name in names for i in range(size)))

    tail = ghosts.add(7, blocks(4, 5, 6), 8)
    head = ghosts.add("space", blocks(1, 2, 3), 7)
    key = blocks(0, 1, 2, 3, 4, 5, 9)
    width = 4 * size
    assert ghosts.chain("space", key, width, len(key)) == [(head, 3), (tail, 2)]
    assert ghosts.chain("space", key, width, 4 * width) == [(head, 3)]
    assert ghosts.chain("space", key, width, 3 * width) == [(head, 2)]
    assert ghosts.chain("space", key, width, width) == []
    assert ghosts.chain("other", key, width, len(key)) == []
    assert ghosts.chain("space", key, 0, len(key)) == []
    assert (len(ghosts), ghosts.num_blocks) == (2, 6)
    ghosts.cut(head, 2, 99)  # its first two blocks are cached again, up to serial 99
    assert ghosts.chain(99, blocks(3, 4, 5, 6), 0, 4 * width) == [(head, 1), (tail, 3)]
    assert ghosts.chain("space", key, width, len(key)) == []
    ghosts.extend_upwards(head, 98, blocks(2))
    assert ghosts.chain(98, blocks(2, 3, 4), 0, 3 * width) == [(head, 2), (tail, 1)]
    assert sorted(ghosts.behind([98])) == sorted([head, tail])
    assert ghosts.behind([7]) == [tail]
    assert ghosts.first() == tail
    ghosts.remove(tail)
    assert (len(ghosts), ghosts.num_blocks, ghosts.first(), ghosts.lengths[tail]) == (1, 2, head, 0)
    assert not ghosts.continues(tail, 7)
    assert ghosts.continues(head, 98)


def test_of_runs_whose_sums_agree_by_chance_the_later_one_is_remembered() -> None:
    ghosts = Ghosts(4)
    first = ghosts.add("space", run(1, 2), 7)
    second = ghosts.add("space", run(1, 3), 8)
    assert ghosts.chain("space", run(1, 3), 0, 8) == [(second, 2)]
    assert (len(ghosts), ghosts.num_blocks, ghosts.lengths[first]) == (1, 2, 0)
    assert ghosts.first() == second
    third = ghosts.add("space", run(5), 9)
    assert third == first  # numbers are used again
    ghosts.remove(third)
    ghosts.remove(second)
    assert len(ghosts) == ghosts.num_blocks == 0


@pytest.mark.parametrize("policy", ["reuse", "arc"])
def test_sums_that_all_agree_break_nothing(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ghosts, "_sum", lambda self, buffer, start, end: bytes((end - start) // self._width * 4))
    rng = random.Random(0)
    cache = PrefixCache(24, 2, policy=policy)
    for number in range(800):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(2, 20))]
        request = cache.allocate(tokens, namespace=rng.choice([None, "a"]))
        cache.commit(request)
        cache.free(request)
        cache.evict(rng.randrange(3))
        if number % 100 == 99:
            cache.clear("a")
        cache.check()
    cache.reset()
    assert cache.num_free_blocks == 24


def test_blocks_that_differ_in_one_token_have_different_sums() -> None:
    ghosts = Ghosts(4 * 16)
    rng = random.Random(0)
    tokens = [rng.randrange(1 << 17) for _ in range(16)]
    ghosts.add(0, run(*tokens), 1)
    for place in range(16):
        for value in (0, tokens[place] ^ 1, tokens[place] + 1, 2**31 - 1):
            other = [*tokens[:place], value, *tokens[place + 1 :]]
            assert bool(ghosts.chain(0, run(*other), 0, 64)) == (other == tokens)
    assert ghosts.chain(0, run(*reversed(tokens)), 0, 64) == []


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_a_ring_keeps_the_order_of_adding(steps: list[tuple[bool, int]]) -> None:
    ring, order = Ring(), list[int]()
    for adds, number in steps:
        if adds and number not in order:
            ring.add(number)
            order.append(number)
        elif not adds:
            ring.discard(number)
            order = [other for other in order if other != number]
        assert ring.numbers() == set(order)
        assert ring.first() == (order[0] if order else NO_GHOST)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 300)), max_size=400))
def test_a_lazy_heap_finds_the_smallest_that_is_alive(steps: list[tuple[bool, int]]) -> None:
    alive: set[int] = set()
    heap = LazyHeap(alive.__contains__)
    for adds, entry in steps:
        if adds and entry not in alive:
            alive.add(entry)
            heap.push(entry, len(alive))
        elif not adds:
            alive.discard(entry)
        if alive:
            assert heap.first() == min(alive)


def test_a_lazy_heap_does_not_keep_the_dead() -> None:
    alive = {-1}
    heap = LazyHeap(alive.__contains__)
    heap.push(-1, 1)
    for entry in range(10_000):
        heap.push(entry, 1)
        assert len(heap._entries) + len(heap._unsorted) < 200
    assert heap.first() == -1
