"""The state machine of the test kit, with lookups in the place of tokens, and with touches and decode steps besides."""

import random
from collections.abc import Hashable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test
from test_state_machine import MergesAtOnce, MostRecentFirst, RadixKVMachine

from radixkv import OutOfBlocksError, PrefixCache, Request
from radixkv.cache import Lookup
from radixkv.testing import _NAMESPACES, _PROMPTS, Running
from radixkv.tokens import pack
from radixkv.tree import typed_name


class ByLookup(PrefixCache):
    """A cache whose callers keep lookups: one for each prompt, extended where a prompt goes on from another's end."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.kept: dict[tuple[Hashable, bytes], Lookup] = {}

    def kept_lookup(self, tokens: Any, namespace: Hashable) -> Lookup:
        key, name = pack(tokens), typed_name(namespace)
        lookup = self.kept.get((name, key))
        if lookup is None:
            shorter = [known for other, known in self.kept if other == name and known and key.startswith(known)]
            if shorter and len(self.kept) % 2:
                longest = max(shorter, key=len)
                lookup = self.kept.pop((name, longest))
                lookup.extend(key[len(longest) :])
            else:
                lookup = self.lookup(key, namespace=namespace)
            self.kept[name, key] = lookup
        return lookup

    def allocate(self, tokens: Any, *, namespace: Hashable = None, **options: Any) -> Request:
        return super().allocate(self.kept_lookup(tokens, namespace), namespace=namespace, **options)

    def match(self, tokens: Any, *, namespace: Hashable = None) -> int:
        if isinstance(tokens, Lookup):
            return super().match(tokens, namespace=namespace)
        num_tokens = super().match(self.kept_lookup(tokens, namespace))
        assert num_tokens == super().match(tokens, namespace=namespace)
        return num_tokens


class LookupMachine(RadixKVMachine):
    """What lookups, touches and decode steps are beside the plain calls, by the model."""

    cache: ByLookup

    def make(self, num_blocks: int, block_size: int) -> ByLookup:
        return ByLookup(num_blocks, block_size, policy=self.policy(), swap_duplicates=bool(self.swaps_duplicates))

    @rule(tokens=_PROMPTS, namespace=_NAMESPACES, by_lookup=st.booleans())
    def touch(self, tokens: tuple[int, ...], namespace: Hashable, by_lookup: bool) -> None:
        model, space = self.model, self.model.space(namespace)
        before = self._observe()
        prompt = self.cache.kept_lookup(tokens, namespace) if by_lookup else list(tokens)
        depth = model.depth(space, tokens, model.cached)
        assert self.cache.touch(prompt, namespace=namespace) == depth * model.block_size
        self._check_unchanged(before, "touch, which changes only what is evicted next,")
        pinned = model.pinned()
        for i in reversed(range(depth)):
            if (prefix := model.prefix(space, tokens, i)) not in pinned:
                model._tick += 1
                model.released[prefix] = model._tick

    @rule(tokens=_PROMPTS, namespace=_NAMESPACES, by_lookup=st.booleans())
    def missing(self, tokens: tuple[int, ...], namespace: Hashable, by_lookup: bool) -> None:
        model, space = self.model, self.model.space(namespace)
        before = self._observe()
        prompt = self.cache.kept_lookup(tokens, namespace) if by_lookup else list(tokens)
        num_hit = min(model.depth(space, tokens, model.cached), (len(tokens) - 1) // model.block_size)
        hits = {model.cached[model.prefix(space, tokens, i)] for i in range(num_hit)}
        used = model.used()
        expected = max(0, model.num_blocks_for(len(tokens)) - num_hit - (model.num_blocks - len(used | hits)))
        assert self.cache.num_missing_blocks(prompt, namespace=namespace) == expected
        self._check_unchanged(before, "num_missing_blocks")

    @precondition(lambda self: self.model.running)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        model, size = self.model, self.model.block_size
        batch: list[Running] = data.draw(
            st.lists(st.sampled_from(model.running), min_size=1, unique_by=id), label="batch"
        )
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=len(batch), max_size=len(batch)), label="tokens")
        growing = [request for request in batch if len(request.tokens) % size == 0]
        num_short = max(len(growing) - model.counts()["num_free_blocks"], 0)
        if self.eviction != "lru" and num_short <= model.counts()["num_evictable_blocks"]:
            self._evict(num_short)  # seen from outside; what is committed then may be the same again
            num_short = 0
        lost = model.victims(num_short)
        used = model.used()
        what = f"decode({batch}, {tokens})"
        handles = [request.handle for request in batch]
        result = self._attempt(what, lambda: (self.cache.decode(handles, tokens),), total=0, most=len(growing))
        if result is None:
            return
        self._lose(what, lost, num_short)
        changed = []
        new: list[int] = []
        for request in batch:
            table = list(request.handle.block_table)
            num_whole = len(request.tokens) // size if request.cacheable and model.is_current(request) else 0
            expected = list(request.table)
            for i in range(request.num_shared, num_whole):
                cached = model.cached.setdefault(model.prefix(request.space, request.tokens, i), expected[i])
                if self.swaps_duplicates and cached != expected[i]:
                    expected[i] = cached
                    model.stats["duplicates_freed"] += 1
            if request in growing:
                expected.append(table[-1])
                new.append(table[-1])
            assert table == expected, f"{what} made {table} of {request.table}, it should be {expected}"
            changed += [request.handle] * (table != request.table)
            request.table, request.num_shared = table, max(request.num_shared, num_whole)
            request.num_committed = len(request.tokens)
        assert len({*new}) == len(new), f"block in two hands: {what} gave {new}"
        assert not used.intersection(new), f"{what} gave {new}, of which some were in use"
        assert {*result[0]} == {*changed}, f"{what} says that {result[0]} changed, it should be {changed}"
        assert len(result[0]) == len(changed)
        for request, token in zip(batch, tokens, strict=True):
            request.tokens += (token,)
            model.write(request, len(request.tokens) - 1)
            self._remember(request.namespace, request.tokens)

    @precondition(lambda self: self.model.running)
    @rule(
        request=RadixKVMachine.requests,
        bad=st.sampled_from(("twice", "token", "number", "foreign")),
    )
    def misuse_decode(self, request: Running, bad: str) -> None:
        handles = [each.handle for each in self.model.running]
        tokens: list[Any] = [1] * len(handles)
        if bad == "twice":
            handles.append(request.handle)
            tokens.append(1)
        elif bad == "token":
            tokens[-1] = True
        elif bad == "number":
            tokens.append(1)
        else:
            handles[-1] = self.make(2, 1).allocate([0])
        self._check_rejected(f"decode with a bad {bad}", "decode", handles, tokens)


@pytest.mark.parametrize("swap", [True, False], ids=["swap", "append-only"])
@pytest.mark.parametrize("policy", ["lru", "lfu", "reuse", "arc", MostRecentFirst, MergesAtOnce])
def test_lookups_touches_and_decode_steps_behave_like_the_model(policy: Any, swap: bool) -> None:
    class Machine(LookupMachine):
        eviction = "lru" if policy == "lru" else "as needed"
        swaps_duplicates = swap

    Machine.policy = staticmethod(policy if callable(policy) else lambda: policy)
    run_state_machine_as_test(Machine)


class Moody(MostRecentFirst):
    """Fails now and then, or chooses what is no leaf."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng

    def victim(self) -> int:
        mood = self.rng.random()
        if mood < 0.2:
            raise KeyError("in no mood")
        return 10**6 if mood < 0.3 else super().victim()


@pytest.mark.parametrize("seed", range(40))
def test_a_call_in_which_the_policy_fails_changes_no_request(seed: int) -> None:
    rng = random.Random(seed)
    cache = PrefixCache(rng.randrange(4, 12), rng.choice([1, 2]), policy=Moody(rng), swap_duplicates=seed % 2 == 0)
    running: list[Request] = []
    num_failed = 0
    for _ in range(150):
        before = cache.num_private_blocks, [(repr(request), request.block_table) for request in running]
        lookups, call, request = cache.stats.lookups, rng.randrange(9), rng.choice(running or [None])
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 10))]
        try:
            if call < 3 or request is None:
                running.append(cache.allocate(cache.lookup(tokens) if call else tokens, cacheable=rng.random() < 0.9))
            elif call == 3:
                cache.append(request, tokens[:4])
            elif call == 4:
                cache.decode(batch := rng.sample(running, rng.randint(1, len(running))), [1] * len(batch))
            elif call == 5:
                running.append(cache.fork(request)[0])
            elif call == 6:
                running.remove(request)
                cache.free(request)
            elif call == 7:
                cache.evict(rng.randrange(4))
            else:
                cache.commit(request)
        except (KeyError, RuntimeError, OutOfBlocksError, ValueError):
            num_failed += 1
            assert before == (cache.num_private_blocks, [(repr(each), each.block_table) for each in running])
            assert cache.stats.lookups == lookups
        stats = cache.stats
        assert stats.evicted_blocks == stats.evicted_for_room + stats.evicted_by_call
        cache.check()
    assert num_failed > 5
