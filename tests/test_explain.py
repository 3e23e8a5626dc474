"""`explain` names the reason why a hit ended, and what it cost."""

import pytest

from radixkv import PrefixCache


def serve(cache: PrefixCache, tokens: list[int], **options: object) -> None:
    request = cache.allocate(tokens, **options)  # type: ignore[arg-type]
    cache.commit(request)
    cache.free(request)


@pytest.fixture
def cache() -> PrefixCache:
    """One prompt of 12 tokens in blocks of 4."""
    cache = PrefixCache(8, 4)
    serve(cache, list(range(12)))
    return cache


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        (range(12), "12 of 12 tokens cached: the whole prompt"),
        (range(8), "8 of 8 tokens cached: the whole prompt"),
        (range(10), "8 of 10 tokens cached: the last 2 tokens do not fill a block"),
        (range(3), "0 of 3 tokens cached: the last 3 tokens do not fill a block"),
        ([], "0 of 0 tokens cached: the last 0 tokens do not fill a block"),
        (
            [0, 1, 2, 3, 4, 5, 60, 7, 8],
            "4 of 9 tokens cached: diverged at token 6 from a cached prompt, which has 6 where this one has 60; "
            "but for that, 4 more would have matched",
        ),
        (
            [0, 1, 2, 30, 4],
            "0 of 5 tokens cached: diverged at token 3 from a cached prompt, which has 3 where this one has 30; "
            "but for that, 4 more would have matched",
        ),
        (range(20), "12 of 20 tokens cached: nothing is cached from token 12 on"),
        (range(50, 60), "0 of 10 tokens cached: nothing is cached from token 0 on"),
    ],
)
def test_reasons(cache: PrefixCache, tokens: list[int], sentence: str) -> None:
    before = (repr(cache), cache.draw(), cache.stats)
    assert str(cache.explain(tokens)) == sentence
    assert (repr(cache), cache.draw(), cache.stats) == before


def test_diverged_names_the_closest_cached_prompt(cache: PrefixCache) -> None:
    serve(cache, [0, 1, 2, 3, 4, 5, 6, 70])
    serve(cache, [0, 1, 2, 3, 40])
    found = cache.explain([0, 1, 2, 3, 4, 5, 6, 71])
    assert (found.reason, found.num_cached_tokens, found.position) == ("diverged", 4, 7)
    assert (found.prompt_token, found.cached_token) == (71, 7)


def test_a_changed_front_says_what_it_costs(cache: PrefixCache) -> None:
    """A timestamp at the front of an otherwise equal prompt."""
    serve(cache, [9, *range(100, 107)])
    found = cache.explain([99, *range(1, 12)])
    assert (found.reason, found.position, found.prompt_token, found.cached_token) == ("diverged", 0, 99, 0)
    assert found.num_lost_tokens == 12
    assert cache.explain([99, 98, *range(2, 9), 97, 10, 11]).num_lost_tokens == 8  # up to the next difference


def test_what_branches_off_is_counted_into_the_loss(cache: PrefixCache) -> None:
    serve(cache, [*range(8), 80, 81, 82, 83, 84, 85, 86, 87])
    assert cache.explain([99, *range(1, 8), 80, 81, 82, 83, 84, 85, 86, 87]).num_lost_tokens == 16


def test_evicted_says_how_much_would_have_matched(cache: PrefixCache) -> None:
    cache.evict(1)
    assert str(cache.explain(range(12))) == "8 of 12 tokens cached: the next 4 were cached, but have been evicted"
    cache.evict(1)
    cache.evict(1)
    found = cache.explain(range(14))
    assert (found.reason, found.num_cached_tokens, found.position, found.num_lost_tokens) == ("evicted", 0, 0, 12)
    assert cache.explain([0, 1, 2, 3, 4, 5, 6, 7, 80, 9, 10, 11]).num_lost_tokens == 8
    assert cache.explain([0, 1, 2, 30]).reason == "nothing cached"


def test_evicted_parts_of_a_branch_are_found_behind_what_is_left(cache: PrefixCache) -> None:
    serve(cache, [0, 1, 2, 3, 44, 45, 46, 47, 48, 49, 50, 51])
    cache.evict(3)
    assert cache.explain(range(12)).num_lost_tokens == 8
    assert cache.explain([0, 1, 2, 3, 44, 45, 46, 47, 48, 49, 50, 51]).num_lost_tokens == 4


def test_the_memory_of_what_was_evicted_is_bounded() -> None:
    cache = PrefixCache(4, 1)
    for seed in range(5000):
        serve(cache, [seed, seed])
    assert cache.explain([4990, 4990]).reason == "evicted"
    assert cache.explain([0, 0]).reason == "nothing cached"


def test_what_was_forgotten_by_reset_is_not_called_evicted(cache: PrefixCache) -> None:
    cache.evict(3)
    cache.reset()
    assert cache.explain(range(12)).reason == "nothing cached"


def test_another_namespace_is_named_with_what_it_would_give(cache: PrefixCache) -> None:
    serve(cache, list(range(4)), namespace=("lora", 7))
    assert (
        str(cache.explain(range(12), namespace=("lora", 7)))
        == "4 of 12 tokens cached: the next 8 are cached in namespace None only"
    )
    found = cache.explain(range(12), namespace="7")
    assert (found.reason, found.namespace, found.num_lost_tokens) == ("another namespace", None, 12)
    cache.evict(3)
    assert cache.explain(range(12), namespace="7").namespace == ("lora", 7)
