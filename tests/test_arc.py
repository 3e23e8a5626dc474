"""The order "arc": what is its own."""

from radixkv import PrefixCache


def serve(cache: PrefixCache, *tokens: int) -> int:
    request = cache.allocate(tokens, min_prefill_tokens=0)
    cache.commit(request)
    cache.free(request)
    return request.num_cached_tokens


def test_what_was_used_again_survives_a_scan() -> None:
    """Four prompts are used twice, then two hundred new ones pass: LRU would lose all four."""
    cache = PrefixCache(8, 1, policy="arc")
    for _ in range(2):
        for number in range(4):
            serve(cache, number)
    for number in range(100, 300):
        serve(cache, number)
    assert [cache.match([number]) for number in range(4)] == [1, 1, 1, 1]
    cache.check()


def test_what_was_used_once_gets_room_when_it_is_missed() -> None:
    """Eight blocks hold four that are used again; new prompts come back after six others, again and again."""
    cache = PrefixCache(8, 1, policy="arc")
    for _ in range(2):
        for number in range(8):
            serve(cache, number)
    hits = []
    for number in range(100, 400):
        serve(cache, number)
        hits.append(serve(cache, number - 3))
    assert sum(hits[:4]) == 0
    assert sum(hits[-100:]) == 100


def test_a_leaf_goes_from_its_tail_and_its_prefix_stays() -> None:
    cache = PrefixCache(6, 1, policy="arc")
    serve(cache, 1, 2, 3, 4)
    serve(cache, 5, 6, 7)
    assert cache.match([1, 2, 3, 4]) == 3
    assert serve(cache, 1, 2, 3, 4) == 3
    assert cache.match([5, 6, 7]) == 2
    cache.check()


def test_what_it_remembers_is_bounded_by_the_cache() -> None:
    cache = PrefixCache(20, 1, policy="arc")
    for number in range(500):
        serve(cache, number, number + 1000, number + 2000)
        serve(cache, number // 2, number // 2 + 1000, 7)
        policy = cache.policy
        blocks = policy._num_blocks, policy._num_ghost_blocks  # type: ignore[attr-defined]
        assert sum(blocks[0]) == cache.num_cached_blocks
        assert sum(blocks[1]) == policy._ghosts.num_blocks  # type: ignore[attr-defined]
        assert sum(blocks[0]) + sum(blocks[1]) <= 40
        assert blocks[0][0] + blocks[1][0] <= 20 or not blocks[1][0]
    cache.reset()
    assert policy._num_blocks == policy._num_ghost_blocks == [0, 0]  # type: ignore[attr-defined]
