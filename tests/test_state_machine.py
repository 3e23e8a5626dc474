"""The test kit on the caches at hand: radixkv's own under every policy, and another engine's through an adapter."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from naive_cache import QueueManager

from radixkv import OutOfBlocksError, PrefixCache
from radixkv.policy import POLICIES
from radixkv.reuse import Reuse
from radixkv.testing import TOKEN_FORMS, PrefixCacheMachine, overwrite, prompts

PAGE = Path(__file__).parents[1] / "docs" / "testing.md"


def names_in_docs() -> dict[str, Any]:
    """What the example in docs/testing.md defines: the adapter for `naive_cache`, and its machine."""
    (code,) = re.findall(r"^```python\n(.*?)^```\n", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "docs"}
    exec(compile(code, str(PAGE), "exec", dont_inherit=True), names)
    return names


class MostRecentFirst:
    """A policy of one's own: the leaf that was let go last is the first to go."""

    def __init__(self) -> None:
        self.leaves: list[int] = []

    def add(self, leaf: int) -> None:
        self.leaves.append(leaf)

    def discard(self, leaf: int) -> None:
        self.leaves.remove(leaf)

    def victim(self) -> int:
        return self.leaves[-1]


class MergesAtOnce(Reuse):
    """Whatever was used by the same request becomes one node, not only what was used 32 times."""

    max_uses = 1


class RadixKVMachine(PrefixCacheMachine):
    """All that radixkv promises."""

    swaps_duplicates = True
    token_forms = tuple(TOKEN_FORMS)
    appends_int = True
    rejects_misuse = True
    policy: Callable[[], Any] = staticmethod(lambda: "lru")

    def make(self, num_blocks: int, block_size: int) -> PrefixCache:
        return PrefixCache(num_blocks, block_size, policy=self.policy(), swap_duplicates=bool(self.swaps_duplicates))


@pytest.mark.parametrize("swap", [True, False], ids=["swap", "append-only"])
@pytest.mark.parametrize("policy", [*POLICIES, MostRecentFirst, MergesAtOnce])
def test_radixkv_behaves_like_the_model(policy: Any, swap: bool) -> None:
    class Machine(RadixKVMachine):
        eviction = "lru" if policy == "lru" else "as needed"
        swaps_duplicates = swap

    Machine.policy = staticmethod(policy if callable(policy) else lambda: policy)
    run_state_machine_as_test(Machine)


@pytest.mark.parametrize("promise", ["any", "as needed", "lru"])
def test_another_engines_cache_behaves_like_the_model(promise: Any) -> None:
    """The example in the docs runs, and weaker promises hold where a stronger one does."""

    class Machine(names_in_docs()["Machine"]):
        eviction = promise

    run_state_machine_as_test(Machine)


def test_a_cache_without_a_tree_behaves_like_the_model() -> None:
    names = names_in_docs()
    names["Adapter"].manager_class = QueueManager

    class Machine(names["Machine"]):
        eviction = "any"

    run_state_machine_as_test(Machine)


@pytest.mark.parametrize("hidden", ["match", "match counts"])
def test_a_cache_that_shows_less_is_tested_as_well(hidden: str) -> None:
    """Without `match` the hits of `allocate` are all there is to see, without counts what fits and what does not."""

    class Blind:
        def __init__(self, cache: PrefixCache) -> None:
            self.allocate, self.commit, self.free, self.append = cache.allocate, cache.commit, cache.free, cache.append
            if hidden == "match":
                self.evict, self.check = cache.evict, cache.check

    class Machine(PrefixCacheMachine):
        eviction = "lru" if hidden == "match" else "any"

        def make(self, num_blocks: int, block_size: int) -> Any:
            return Blind(PrefixCache(num_blocks, block_size))

    run_state_machine_as_test(Machine)


@given(st.data())
def test_two_engines_agree_block_for_block(data: st.DataObject) -> None:
    """radixkv and the naive cache have the same hits and refusals in any order of calls, so evict the same prefixes."""
    size, num_blocks = data.draw(st.sampled_from((1, 2, 4))), data.draw(st.integers(2, 10))
    caches = PrefixCache(num_blocks, size), names_in_docs()["Adapter"](num_blocks, size)
    running: list[tuple[list[int], tuple[Any, Any]]] = []
    earlier: list[tuple[int, ...]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        if running and data.draw(st.booleans()):
            tokens, pair = running.pop(data.draw(st.integers(0, len(running) - 1)))
            num_tokens = data.draw(st.integers(0, len(tokens)))
            for cache, request in zip(caches, pair, strict=True):
                cache.commit(request, num_tokens)
                cache.free(request)
            continue
        tokens = list(data.draw(prompts(size, max_blocks=num_blocks // 2, earlier=earlier)))
        requests = [allocate_or_none(cache, tokens) for cache in caches]
        assert len({request and request.num_cached_tokens for request in requests}) == 1, requests
        if requests[0]:
            running.append((tokens, (requests[0], requests[1])))
        earlier = [*earlier, tuple(tokens)][-6:]


def allocate_or_none(cache: Any, tokens: list[int]) -> Any:
    try:
        return cache.allocate(tokens)
    except (OutOfBlocksError, ValueError):
        return None


@pytest.mark.parametrize("form", TOKEN_FORMS)
def test_overwrite_turns_tokens_into_other_valid_ones(form: str) -> None:
    cache = PrefixCache(4, 1)
    buffer = TOKEN_FORMS[form]((0, 1, 1))
    cache.match(buffer)
    overwrite(buffer)
    cache.match(buffer)
    mutable = form not in ("tuple", "bytes")
    assert (bytes(buffer) != bytes(TOKEN_FORMS[form]((0, 1, 1)))) == mutable
