"""The order "reuse": what it learns, and that it evicts what a plain model of it does."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from reuse_model import Model

from radixkv import PrefixCache, reuse


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


@pytest.mark.parametrize("remembered", [4096, 40])
@pytest.mark.parametrize("num_blocks", [5, 20, 60, 150])
@pytest.mark.parametrize("seed", range(3))
def test_it_does_what_the_model_does(seed: int, num_blocks: int, remembered: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(reuse, "_MIN_REMEMBERED", remembered)
    model = Model(num_blocks, remembered)
    cache = PrefixCache(num_blocks, 1, policy="reuse")
    for number, path in enumerate(paths(seed, 300)):
        assert serve(cache, path) == model.serve(path), number
        for prefix in model.blocks:
            assert (cache.match(list(prefix)) == len(prefix)) == model.blocks[prefix].cached, (number, prefix)
        stats = cache._policy.stats
        assert stats.lru_hit_blocks == model.lru_hits, number
    cache.check()
