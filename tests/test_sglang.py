"""The adapter with SGLang's own allocators, rows, requests and scheduler parts, on the CPU; `make test-sglang`."""

import json
import logging
import os
import random
import re
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang.srt")
sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import sglang_loop
import torch
from peer_stream import Stream
from peer_workloads import chats
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.events import KvEventLoraNames
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.registry import get_radix_cache_factory
from sglang_loop import Loop, run_loops
from sglang_signatures import RECORD, collect

from radixkv.integrations import sglang as plugin
from radixkv.integrations.sglang_cache import RadixKVCache

ROOT = Path(__file__).parents[1]
CONFORMANCE = ROOT.parent / "shared" / "conformance" / "sglang_tree_cache.py"
LEARNING = ["reuse", "arc"]


@pytest.fixture(scope="module", autouse=True)
def _settings() -> Iterator[None]:
    sglang_loop.publish()
    yield
    logging.disable(logging.NOTSET)


def build(
    page: int = 1, *, size: int = 256, device: str = "cpu", make: Callable[[Any], Any] = RadixKVCache, **params: Any
) -> Any:
    common = (torch.float16, device, SimpleNamespace(), False)
    slots = TokenToKVPoolAllocator(size, *common) if page == 1 else PagedTokenToKVPoolAllocator(size, page, *common)
    return make(CacheInitParams(False, ReqToTokenPool(8, 512, device, False), slots, page, **params))


def key(tokens: Any, extra: str | None = None, salt: str | None = None) -> RadixKey:
    return RadixKey(array("q", tokens), extra, cache_salt=salt)


def match(cache: Any, tokens: Any, *namespace: str) -> Any:
    return cache.match_prefix(MatchPrefixParams(key(tokens, *namespace)))


def slots_of(cache: Any, num: int) -> torch.Tensor:
    page = cache.page_size
    return cache.token_to_kv_pool_allocator.alloc(-(-num // page) * page)[:num]


def insert(cache: Any, tokens: Any, *namespace: str, **options: Any) -> torch.Tensor:
    value = slots_of(cache, len(tokens))
    cache.insert(InsertParams(key=key(tokens, *namespace), value=value, **options))
    return value


def request(cache: Any, row: int, tokens: Any, **options: Any) -> Any:
    """A request as SGLang's scheduler has it after its prompt's forward pass."""
    loop = SimpleNamespace(waiting=[])
    req = Loop.submit(loop, str(row), array("q", tokens), array("q", [0]), **options)
    req.init_next_round_input(cache)
    req.lock = cache.lock(req.last_node)
    end = len(req.full_untruncated_fill_ids)
    cache.req_to_token_pool.req_to_token[row, : req.prefix_len] = cache.prefix_device_indices(req)
    cache.req_to_token_pool.req_to_token[row, req.prefix_len : end] = slots_of(cache, end - req.prefix_len)
    req.kv.req_pool_idx, req.kv.kv_committed_len, req.kv.kv_allocated_len = row, end, end
    return req


def release(cache: Any, req: Any) -> None:
    cache.free_kv_row(req.kv, [(req.kv.cache_protected_len, req.kv.kv_committed_len)])
    cache.unlock(req.lock)
    req.lock = None


def free_and_cached(cache: Any) -> int:
    return cache.token_to_kv_pool_allocator.available_size() + cache.total_size()


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Stream:
    return Stream(chats(tmp_path_factory.mktemp("chats") / "talk", 6, 4))


# The whole


class Learning(RadixKVCache):
    """For the scenarios: they leave the policy to the factory, and their requests are not SGLang's own."""

    def __init__(self, policy: str, params: CacheInitParams) -> None:
        super().__init__(replace(params, eviction_policy=policy))

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        req.retracted_stain = False
        super().checkpoint(req, up_to=up_to, **kwargs)


with_reuse, with_arc = (partial(Learning, policy) for policy in LEARNING)


@pytest.mark.parametrize(
    "factory",
    ["radixkv.integrations.sglang_cache:RadixKVCache", "test_sglang:with_reuse", "test_sglang:with_arc"],
)
def test_conformance(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    """SGLang's upstream scenarios, the base ones and the ideal ones that its own trees fail."""
    if not CONFORMANCE.exists():
        pytest.skip(f"no {CONFORMANCE}")
    command = [sys.executable, "-B", "-m", "pytest", "-v", "-p", "no:cacheprovider", str(CONFORMANCE)]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "bench")))
    settings = {"SGL_FACTORY": factory, "PYTHONPATH": path}
    run = subprocess.run(command, cwd=CONFORMANCE.parent, env=os.environ | settings, capture_output=True, text=True)
    outcomes = re.findall(r"::(\w+)\S* (PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED)", run.stdout)
    ideal = [outcome for name, outcome in outcomes if name.startswith("test_ideal")]
    base = [outcome for name, outcome in outcomes if not name.startswith("test_ideal")]
    with capsys.disabled():
        print(
            f"\nconformance: {base.count('PASSED')} of {len(base)} base, {ideal.count('PASSED')} of {len(ideal)} ideal"
        )
    assert run.returncode == 0, run.stdout[-4000:]
    assert (len(base), len(ideal)) == (37, 6)
    assert {*base, *ideal} == {"PASSED"}


def test_sglang_is_as_recorded() -> None:
    """What the adapter relies on is what it was written against; see sglang_signatures.py for how to record."""
    assert collect() == json.loads(RECORD.read_text())


@pytest.mark.parametrize("schedule", ["fcfs", "lpm", "dfs-weight"])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("eagle", [False, True])
def test_a_scheduler_loses_no_slot_and_reads_nobody_elses_kv(
    talk: Stream, schedule: str, page: int, eagle: bool
) -> None:
    """Chats in two namespaces in a pool that is too small for them: eviction, chunks, retraction, duplicates."""
    run_talk(talk, page_size=page, schedule=schedule, is_eagle=eagle)


@pytest.mark.parametrize("policy", LEARNING)
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("eagle", [False, True])
def test_nor_does_it_with_a_policy_that_learns(talk: Stream, policy: str, page: int, eagle: bool) -> None:
    loop, num = run_talk(talk, page_size=page, schedule="lpm", is_eagle=eagle, eviction_policy=policy)
    if policy == "reuse":
        stats = loop.cache.policy.stats
        assert stats.lookups == num  # each once, whatever was matched, prefilled in chunks or retracted
        assert stats.hit_blocks * page >= loop.num_hit_tokens > 0


def run_talk(talk: Stream, **options: Any) -> tuple[Loop, int]:
    """Returns the loop, and how many requests it served."""
    loop = Loop(RadixKVCache, num_slots=4096, chunk=512, new_token_ratio=0.0, **options)
    rng = random.Random(1)
    num = 0
    for number in range(talk.num):
        prompt, output = array("q", talk.prompt(number)), array("q", talk.output(number)[:60])
        for copy in range(rng.choice([1, 1, 2])):
            namespace = {"extra_key": rng.choice([None, "a"]), "cache_salt": rng.choice([None, "s"])}
            loop.submit(f"{number}-{copy}", prompt, output, priority=number % 3, **namespace)
            num += 1
        while len(loop.waiting) > 6:
            loop.step()
            loop.cache.check()
    loop.run()
    loop.cache.check()
    loop.check_idle()
    assert loop.num_hit_tokens
    assert loop.num_retracted
    loop.cache.evict(EvictParams(num_tokens=1 << 30))
    assert (loop.cache.total_size(), loop.slots.available_size()) == (0, loop.num_slots)
    return loop, num


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "mru", "filo", "slru", "priority", *LEARNING])
def test_the_same_calls_evict_the_same_slots(talk: Stream, policy: str) -> None:
    """What tensor-parallel ranks depend on."""

    def run() -> tuple[list[int], list[int]]:
        loop = Loop(RadixKVCache, num_slots=4096, page_size=16, eviction_policy=policy)
        for number in range(talk.num):
            loop.submit(str(number), array("q", talk.prompt(number)), array("q", talk.output(number)[:20]))
        loop.run()
        loop.check_idle()
        return loop.slots.get_all_free_pages().tolist(), loop.cache.all_values_flatten().tolist()

    assert run() == run()


def test_two_thousand_requests_beside_sglangs_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = Stream(chats(tmp_path / "chats", 200, 10))
    rows = run_loops(stream, num_slots=1 << 16, page_size=16)
    with capsys.disabled():
        for name, row in rows.items():
            print(
                f"\n{name}: {row['hit_tokens']:,} of {row['prompt_tokens']:,} tokens hit, {row['us_a_request']:.0f} us"
            )
    ours, *others = rows.values()
    for other in others:
        assert ours["hit_tokens"] >= other["hit_tokens"]
        assert ours["us_a_request"] < other["us_a_request"]


# Prefixes that SGLang keeps


def test_a_matched_prefix_survives_splits_and_growth() -> None:
    cache = build(4)
    value = insert(cache, range(32))
    found = match(cache, range(20))
    match(cache, range(8))  # splits before its end
    grown = torch.cat([value, slots_of(cache, 8)])
    cache.insert(InsertParams(key=key(range(40)), value=grown, prev_prefix_len=32))  # and what is behind it grows
    lock = cache.lock(found.last_device_node)
    assert cache.protected_size() == 20
    match(cache, range(12))
    cache.evict(EvictParams(num_tokens=100))
    assert cache.total_size() == 20
    assert cache.path_device_indices(found.last_device_node).tolist() == value[:20].tolist()
    cache.unlock(lock)
    cache.check()
    assert (cache.protected_size(), cache.evictable_size()) == (0, 20)


def test_a_leaf_that_grew_is_locked_only_as_far_as_it_was_matched() -> None:
    cache = build(4)
    req = request(cache, 1, range(16))
    cache.checkpoint(req, up_to=16)
    release(cache, req)
    found = match(cache, range(16))
    longer = request(cache, 1, range(24))
    cache.checkpoint(longer, up_to=24)  # in place: it alone holds the leaf
    release(cache, longer)
    lock = cache.lock(found.last_device_node)
    assert (cache.protected_size(), cache.total_size()) == (16, 24)
    cache.unlock(lock)
    cache.check()


def test_locking_what_was_evicted_is_refused_and_changes_nothing() -> None:
    cache = build(4)
    insert(cache, range(16))
    found = match(cache, range(16)).last_device_node
    cache.evict(EvictParams(num_tokens=4))
    for _ in range(2):  # the node's number may be another's by then
        with pytest.raises(ValueError, match="16 tokens that was matched, a part has been evicted"):
            cache.lock(found)
        cache.check()
        assert cache.protected_size() == 0
        cache.evict(EvictParams(num_tokens=100))
        insert(cache, range(100, 116))
    insert(cache, range(16))
    assert cache.lock(found)  # as it was again
    assert cache.protected_size() == 16


def test_a_lock_needs_its_receipt_and_is_given_back_once() -> None:
    cache = build()
    insert(cache, range(8))
    node = match(cache, range(8)).last_device_node
    lock = cache.lock(node)
    with pytest.raises(ValueError, match="receipt"):
        cache.dec_lock_ref(node)
    cache.unlock(lock)
    with pytest.raises(ValueError, match="was released before"):
        cache.unlock(lock)
    cache.check()
    assert cache.evictable_size() == 8


# Publishing


@pytest.mark.parametrize("page", [1, 4])
def test_the_later_of_two_equal_requests_gets_the_earlier_ones_slots(page: int) -> None:
    cache = build(page)
    first, second = request(cache, 1, range(18)), request(cache, 2, [*range(14), *range(50, 56)])
    cache.checkpoint(first, up_to=18)
    cache.checkpoint(second, up_to=20)
    cache.check()
    shared = 14 - 14 % page
    rows = cache.req_to_token_pool.req_to_token
    assert rows[1, :shared].tolist() == rows[2, :shared].tolist()
    assert cache.total_size() == shared + (18 - shared) // page * page + (20 - shared) // page * page
    release(cache, first)
    release(cache, second)
    assert free_and_cached(cache) == 256
    assert match(cache, [*range(14), *range(50, 56)]).device_prefix_len == 20 - 20 % page


def test_a_chunked_prompt_stays_one_leaf() -> None:
    cache = build(4)
    req = request(cache, 1, range(60))
    for end in (10, 20, 35, 60):
        cache.checkpoint(req, up_to=end)
        assert req.kv.cache_protected_len == cache.protected_size() == end - end % 4
    assert cache._tree.num_nodes == 1
    release(cache, req)
    cache.check()
    assert free_and_cached(cache) == 256


def test_a_row_that_disagrees_with_its_lock_is_refused() -> None:
    cache = build()
    insert(cache, range(8))
    req = request(cache, 1, range(12))
    req.kv.cache_protected_len = 4
    with pytest.raises(ValueError, match="request 1 has locked 8 tokens, but 4 of its row are the cache's"):
        cache.checkpoint(req, up_to=12)
    cache.check()
    assert (cache.total_size(), cache.protected_size()) == (8, 8)


def test_what_began_before_a_reset_is_not_published() -> None:
    cache = build()
    req = request(cache, 1, range(12))
    cache.checkpoint(req, up_to=6)
    cache.reset()
    cache.checkpoint(req, up_to=12)
    assert match(cache, range(12)).device_prefix_len == 0
    cache.unlock(req.lock)
    cache.check()
    assert cache.total_size() == 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda slots: slots[:7], "8 tokens need 8 slots, got 7"),
        (lambda slots: slots.flip(0), "whole pages of 4"),
        (lambda slots: slots + 1, "whole pages of 4"),
        (lambda slots: slots[[0, 1, 2, 3, 0, 1, 2, 3]], "hold cached tokens already"),
    ],
)
def test_wrong_slots_are_refused(value: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    cache = build(4)
    with pytest.raises(ValueError, match=message):
        cache.insert(InsertParams(key=key(range(8)), value=value(slots_of(cache, 8))))
    cache.check()
    assert cache.total_size() == 0


def test_insert_frees_the_slots_of_what_was_cached() -> None:
    cache = build(4)
    first = insert(cache, range(16))
    insert(cache, range(16))  # with slots of its own
    cache.insert(InsertParams(key=key(range(16)), value=first))  # with those of the tree
    cache.check()
    assert free_and_cached(cache) == 256
    assert cache.path_device_indices(match(cache, range(16)).last_device_node).tolist() == first.tolist()


def test_namespaces_are_typed_and_joined_by_nobody() -> None:
    cache = build()
    names = [(), ("k",), (None, "k"), ("ab", "c"), ("a", "bc"), ("",), ("None",)]
    values = {name: insert(cache, range(8), *name).tolist() for name in names}
    for name, value in values.items():
        assert cache.path_device_indices(match(cache, range(8), *name).last_device_node).tolist() == value
    assert match(cache, range(8), None, "").device_prefix_len == 8  # no salt
    assert match(cache, range(8), "other").device_prefix_len == 0


# Eviction


def evicted(cache: Any, prompts: dict[str, range]) -> list[str]:
    """The order in which whole prompts go."""
    order: list[str] = []
    while cache.evictable_size():
        cache.evict(EvictParams(num_tokens=1))
        present = {name for name, tokens in prompts.items() if cache.explain(tokens).reason == "hit"}
        order += [name for name in prompts if name not in present and name not in order]
    return order


PROMPTS = {"a": range(0, 2), "b": range(100, 102), "c": range(200, 202)}


def serve(cache: Any, *names: str, **options: Any) -> None:
    for name in names:
        req = request(cache, 1, [*PROMPTS[name], 9], **options)
        cache.checkpoint(req, up_to=2)
        release(cache, req)


@pytest.mark.parametrize(
    ("policy", "order"),
    [("lru", "cab"), ("lfu", "cba"), ("slru", "cab"), ("fifo", "abc"), ("mru", "bac"), ("filo", "cba")],
)
def test_sglangs_policies(policy: str, order: str) -> None:
    cache = build(eviction_policy=policy)
    serve(cache, "a", "b", "c", "a", "a", "b")
    assert "".join(evicted(cache, PROMPTS)) == order


def test_priority_evicts_the_lowest_first() -> None:
    cache = build(eviction_policy="priority")
    serve(cache, "a", priority=2)
    serve(cache, "b")
    serve(cache, "c", priority=1)
    assert evicted(cache, PROMPTS) == ["b", "c", "a"]


@pytest.mark.parametrize("policy", ["lfu", "slru"])
def test_looking_is_no_use(policy: str) -> None:
    """A scheduler matches what waits in every step, and locks it to see whether it fits."""
    cache = build(eviction_policy=policy)
    serve(cache, "a", "b", "b")
    for _ in range(5):
        node = match(cache, PROMPTS["a"]).last_device_node
        cache.unlock(cache.lock(node))
    assert evicted(cache, {name: PROMPTS[name] for name in "ab"}) == ["a", "b"]


def test_slru_takes_sglangs_threshold() -> None:
    cache = build(eviction_policy="SLRU", eviction_policy_config={"protected_threshold": 3})
    serve(cache, "a", "a", "a", "b", "b", "c")
    assert evicted(cache, PROMPTS) == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("tlru", {}, "has the eviction policies lru, lfu, fifo, slru, priority, reuse, arc, mru, filo, not tlru"),
        ("lru", {"threshold": 1}, "eviction policy lru has no option threshold"),
        ("reuse", {"lru_blocks": 1}, "eviction policy reuse has no option lru_blocks"),
    ],
)
def test_unknown_policies_are_refused(policy: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(eviction_policy=policy, eviction_policy_config=options)


# Policies that learn


def run_agents(policy: str, look: Callable[[Any, list[int]], None] | None = None) -> Loop:
    """Eight agents that come back among one-off prompts, in a pool that LRU keeps too little of them in.

    After each request, `look` gets the cache and each agent's prompt.
    """
    rng = random.Random(0)
    agents = [[rng.randrange(50_000) for _ in range(320)] for _ in range(8)]
    loop = Loop(RadixKVCache, num_slots=2048, page_size=16, max_running=1, eviction_policy=policy)
    for number in range(600):
        one_off = rng.random() < 0.6
        prompt = array("q", [rng.randrange(50_000) for _ in range(256)] if one_off else rng.choice(agents))
        loop.submit(str(number), prompt, array("q", [1, 2, 3]))
        loop.run()
        for agent in agents if look else ():
            look(loop.cache, agent)
    loop.cache.check()
    loop.check_idle()
    return loop


def test_reuse_hits_more_than_lru_where_agents_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    loops = {policy: run_agents(policy) for policy in ("lru", *LEARNING)}
    hits = {policy: loop.num_hit_tokens for policy, loop in loops.items()}
    stats = loops["reuse"].cache.policy.stats
    with capsys.disabled():
        print(f"\nagents among one-off prompts, tokens hit: {hits}; {stats}")
    assert hits["reuse"] > 1.5 * hits["lru"]
    assert hits["arc"] > 1.5 * hits["lru"]
    assert (stats.lookups, stats.hit_blocks * 16) == (600, hits["reuse"])
    assert abs(stats.lru_hit_blocks * 16 - hits["lru"]) < 0.02 * hits["lru"]


@pytest.mark.parametrize("policy", LEARNING)
def test_looking_is_no_use_but_keeps(policy: str) -> None:
    """What waits is matched in every step: were that a use, all would be used again at once."""

    def matched(cache: Any, prompt: list[int]) -> None:
        match(cache, prompt)
        cache.touch_prefix(key(prompt[:100]))

    def locked(cache: Any, prompt: list[int]) -> None:
        cache.unlock(cache.lock(match(cache, prompt).last_device_node))

    for look in (matched, locked):
        loop, lru = run_agents(policy, look), run_agents("lru", look)
        assert min(loop.num_hit_tokens, lru.num_hit_tokens) > 52_500  # all but what does not fit
        if policy == "reuse":
            stats = loop.cache.policy.stats
            assert stats.lookups == 600
            assert abs(stats.lru_hit_blocks * 16 - lru.num_hit_tokens) < 0.05 * lru.num_hit_tokens


@pytest.mark.parametrize("schedule", ["fcfs", "lpm"])
def test_what_waits_in_a_long_queue_is_kept(schedule: str, tmp_path: Path) -> None:
    stream = Stream(chats(tmp_path / "chats", 20, 10))
    loops = {}
    for policy in ("lru", *LEARNING):
        loops[policy] = loop = Loop(
            RadixKVCache, num_slots=12_288, page_size=16, max_running=8, schedule=schedule, eviction_policy=policy
        )
        for _ in sglang_loop.serve(loop, stream):
            pass
        loop.cache.check()
    hits = {policy: loop.num_hit_tokens for policy, loop in loops.items()}
    estimate = loops["reuse"].cache.policy.stats.lru_hit_blocks * 16
    # they lost a third where what waits was not kept; with 200 requests there is little to learn from
    assert min(hits["reuse"], hits["arc"]) > (1 if schedule == "fcfs" else 0.9) * hits["lru"]
    assert abs(estimate - hits["lru"]) < 0.1 * hits["lru"]


def test_a_long_queue_is_not_matched_in_every_pass() -> None:
    cache, lru = build(4, eviction_policy="reuse"), build(4)
    insert(cache, range(8))
    num_passes = 0
    for _ in range(100):
        if cache.supports_fast_match_prefix():
            num_passes += 1
            for _ in range(1000):
                match(cache, range(8))
        assert not lru.supports_fast_match_prefix()
    assert num_passes == 100 // 8 + 1


@pytest.mark.parametrize("policy", LEARNING)
def test_a_prompt_that_waits_is_matched_anew_wherever_its_match_changed(policy: str) -> None:
    """What was found last is kept by the request; it must never stand for anything else."""
    cache = build(4, eviction_policy=policy)
    rng = random.Random(2)
    prompts = [[rng.randrange(2) for _ in range(48)] for _ in range(12)]
    waiting = [SimpleNamespace(last_node=None, prompt=prompt) for prompt in prompts]
    for _ in range(600):
        chance = rng.random()
        if chance < 0.2 and cache.token_to_kv_pool_allocator.available_size() > 48:
            insert(cache, rng.choice(prompts)[: rng.randrange(1, 48)])
        elif chance < 0.3:
            cache.evict(EvictParams(num_tokens=rng.randrange(1, 100)))
        elif chance < 0.32:
            cache.token_to_kv_pool_allocator.clear()
            cache.reset()
        req, num = rng.choice(waiting), rng.choice([48, 47, 20])
        found = cache.match_prefix(MatchPrefixParams(key(req.prompt[:num]), req=req))
        tree, packed = cache._tree, array("q", req.prompt[: num // 4 * 4]).tobytes()
        path, num_pages, part = tree.find(tree.root(None), packed, 0, len(packed))
        assert found.device_prefix_len == 4 * num_pages
        assert tree.blocks_of(*cache._found(found.last_device_node)) == tree.blocks_of(path, part)
        req.last_node = found.last_device_node
        cache.check()


def test_a_request_begins_once_and_with_its_whole_prompt() -> None:
    cache = build(4, eviction_policy="reuse")
    insert(cache, range(20))
    req = request(cache, 1, range(62))
    before = cache.policy.stats
    assert (before.lookups, before.asked_blocks, before.hit_blocks) == (1, 5, 0)
    for end in (22, 35, 62):  # the first chunk ends before there is a page to publish
        cache.checkpoint(req, up_to=end)
        stats = cache.policy.stats
        assert (stats.lookups, stats.asked_blocks - 5, stats.hit_blocks) == (2, 16, 5)
    release(cache, req)
    cache.check()
    assert free_and_cached(cache) == 256


def test_a_retracted_request_is_no_lookup_when_it_comes_back() -> None:
    cache = build(4, eviction_policy="reuse")
    for retracted in (False, True):
        req = request(cache, 1, range(40))
        req.retracted_stain = retracted
        cache.checkpoint(req, up_to=40)
        release(cache, req)
        assert cache.policy.stats.lookups == 1
    cache.check()


def test_what_was_evicted_is_known_when_it_comes_back() -> None:
    cache = build(4, eviction_policy="reuse")
    for _ in range(2):
        req = request(cache, 1, range(40))
        cache.checkpoint(req, up_to=40)
        known = cache._locks[req.lock.receipt.node_id][2]
        release(cache, req)
        cache.evict(EvictParams(num_tokens=100))
    assert known == 9  # the last token is left to prefill
    req = request(cache, 1, range(40))
    cache.reset()  # forgets that too
    cache.unlock(req.lock)
    req = request(cache, 2, range(40))
    cache.checkpoint(req, up_to=40)
    assert cache._locks[req.lock.receipt.node_id][2] == 0


# Events


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("eagle", [False, True])
@pytest.mark.parametrize("dynamo", [False, True])
def test_events_are_sglangs(page: int, eagle: bool, dynamo: bool) -> None:
    """The same blocks are announced, with the same hashes, as by SGLang's tree; and all are announced as removed."""
    names = KvEventLoraNames()
    names.register(SimpleNamespace(lora_id="l" * 32, extra_key="x" + "l" * 32), "adapter")
    options = {
        "enable_kv_cache_events": True,
        "is_eagle": eagle,
        "dynamo_kv_event_format": dynamo,
        "kv_event_lora_names": names,
        "size": 2048,
    }
    ours, theirs = build(page, **options), build(page, make=RadixCache, **options)
    rng = random.Random(3)
    stored: list[dict[int, Any]] = [{}, {}]
    for _ in range(60):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 24))]
        namespace = rng.choice([(), ("k",), (None, "s"), ("k", "s"), ("x" + "l" * 32,)])
        for blocks, cache in zip(stored, (ours, theirs), strict=True):
            insert(cache, tokens, *namespace)
            for event in cache.take_events():
                if isinstance(event, BlockStored):
                    blocks.update(_blocks(event, page, eagle))
    assert stored[0] == stored[1]
    assert stored[0]
    ours.check()
    ours.evict(EvictParams(num_tokens=1 << 30))
    [removed] = ours.take_events()
    assert isinstance(removed, BlockRemoved)
    assert (
        set(removed.block_hashes) == stored[0].keys()
    )  # not all differ: without dynamo's format no extra_key is in them
    ours.reset()
    assert [type(event) for event in ours.take_events()] == [AllBlocksCleared]


def _blocks(event: Any, page: int, eagle: bool) -> Iterator[tuple[int, Any]]:
    parent = event.parent_block_hash
    for start, block in enumerate(event.block_hashes):
        tokens = tuple(event.token_ids[start * page : (start + 1) * page])
        yield block, (parent, tokens, event.block_size, event.medium, event.cache_salt, event.lora_name)
        parent = block


# The device


@pytest.mark.parametrize("policy", ["lru", "reuse"])
def test_nothing_is_read_from_the_device(policy: str) -> None:
    """Fake tensors of a GPU have no values: whatever a request needs is done without waiting for the device."""
    from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        cache = build(4, device="cuda", eviction_policy=policy)
        cache._index = lambda places: torch.from_numpy(np.array(places, np.int64)).to("cuda")  # no pinning without one
        first, second = request(cache, 1, range(40)), request(cache, 2, range(40))
        for req in (first, second):
            cache.checkpoint(req, up_to=30)
            cache.checkpoint(req, up_to=40)
            release(cache, req)
        third = request(cache, 3, range(44))
        assert third.prefix_len == 40
        release(cache, third)
        assert cache.evict(EvictParams(num_tokens=10)).num_tokens_evicted == 12
        with pytest.raises(DynamicOutputShapeException):
            cache.all_values_flatten()  # which has to look


# Explaining


def test_explain_says_where_and_why() -> None:
    cache = build(4)
    insert(cache, range(16))
    found = cache.explain([*range(10), 99, *range(11, 20)])
    assert (found.reason, found.num_tokens, found.num_cached_tokens, found.position) == ("diverged", 20, 8, 10)
    assert (found.prompt_token, found.cached_token) == (99, 10)
    assert cache.explain(range(16), cache_salt="s").reason == "another namespace"
    with pytest.raises(ValueError, match="pairs"):
        build(is_eagle=True).explain(range(4))


def test_pretty_print_shows_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    cache = build(4)
    insert(cache, range(8))
    cache.pretty_print()
    shown = capsys.readouterr().out
    assert "tokens [0, 8): 0 1 2 ... 6 7 in blocks 0 1" in shown
    assert shown.endswith("8 tokens, 0 of them locked\n")


# The way in


def context(**options: Any) -> Any:
    names = ("is_hybrid_swa", "is_hybrid_ssm", "enable_hierarchical_cache", "disable_radix_cache")
    params = CacheInitParams(
        False, ReqToTokenPool(8, 512, "cpu", False), TokenToKVPoolAllocator(64, torch.float16, "cpu", None, False), 1
    )
    return SimpleNamespace(params=params, server_args=None, **{**dict.fromkeys(names, False), **options})


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("is_hybrid_swa", "sliding-window"),
        ("is_hybrid_ssm", "recurrent"),
        ("enable_hierarchical_cache", "--enable-hierarchical-cache"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(option: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"radixkv does not support .*{message}"):
        plugin.create(context(**{option: True}))


def test_other_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="does not support the slots of SimpleNamespace"):
        RadixKVCache(CacheInitParams(False, None, SimpleNamespace(), 1))


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    logging.disable(logging.NOTSET)
    monkeypatch.setattr(plugin, "version", lambda name: "0.6.0")
    plugin.register()
    assert "not available: tested with SGLang 0.5.23, and this is 0.6.0" in caplog.text
    assert get_radix_cache_factory("radixkv") is None


def test_the_flag_leads_to_the_cache(tmp_path: Path) -> None:
    """SGLang's own discovery of plugins, its command line, and its registry, in a process of its own."""
    installed = tmp_path / "radixkv-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: radixkv\nVersion: 0\n")
    entry = re.search(r'entry-points\."(.*)"\]\n(.*) = "(.*)"', (ROOT / "pyproject.toml").read_text())
    assert entry
    (installed / "entry_points.txt").write_text(f"[{entry[1]}]\n{entry[2]} = {entry[3]}\n")
    model = tmp_path / "config.json"
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "vocab_size": 1000}
    llama |= {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "torch_dtype": "float16"}
    model.write_text(json.dumps(llama))
    code = f"""
from test_sglang import context
from sglang.srt.mem_cache.registry import create_tree_cache
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_memory, publish
from sglang.srt.server_args import add_radix_eviction_policy_choices, prepare_server_args
load_plugins()
add_radix_eviction_policy_choices({LEARNING!r})
arguments = ["--model-path", {str(tmp_path)!r}, "--device", "cpu", "--skip-tokenizer-init"]
arguments += ["--radix-cache-backend", "radixkv", "--radix-eviction-policy", "reuse"]
publish(prepare_server_args(arguments), role="scheduler")
made = context()
made.params.eviction_policy = get_memory().radix_eviction_policy  # as SGLang's kv_cache_builder
cache = create_tree_cache(made)
print(type(cache).__module__, type(cache.policy).__module__)
"""
    path = os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "tests", ROOT / "bench")))
    run = subprocess.run(
        [sys.executable, "-B", "-W", "ignore", "-c", code],
        cwd=tmp_path,  # a clone may have older metadata
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert run.stdout.splitlines()[-1:] == ["radixkv.integrations.sglang_cache radixkv.reuse"], run.stderr[-3000:]
