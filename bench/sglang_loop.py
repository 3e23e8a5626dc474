"""SGLang's prefix caches in a scheduler loop: what is hit, what is lost, and the CPU time of the calls to the cache.

    PYTHONPATH=. .peers/sglang/bin/python bench/sglang_loop.py [--requests 2000] [--page-size 16] [--schedule fcfs]

Needs SGLang 0.5.23 (`make .peers/sglang`). Everything but the model is SGLang's own: requests, waiting queue, admission
in chunks, allocators, rows, retraction. Instead of a forward pass, each slot gets a number that stands for the tokens
up to it; where a cached prefix holds other numbers than its tokens ask for, the loop stops. The requests are chats.
"""

import argparse
import logging
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from card import card, finish
from peer_stream import Stream
from peer_workloads import chats
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder, SchedulePolicy
from sglang.srt.mem_cache.allocation import alloc_for_decode, alloc_for_extend
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from radixkv.integrations.sglang_cache import RadixKVCache

MODEL = SimpleNamespace(vocab_size=1 << 20, is_encoder_decoder=False)
clock = time.thread_time_ns


def unified(core: str) -> Callable[[CacheInitParams], Any]:
    def make(params: CacheInitParams) -> Any:
        params.tree_components = (ComponentType.FULL,)
        params.tree_core_backend = core
        return UnifiedRadixCache(params)

    return make


CACHES: dict[str, Callable[[CacheInitParams], Any]] = {
    "radixkv": RadixKVCache,
    "SGLang RadixCache": RadixCache,
    "SGLang UnifiedRadixCache, Rust": unified("rust"),
}
CALLS = (
    *("match_prefix", "touch_prefix", "checkpoint", "evict", "evict_for_alloc", "lock", "unlock"),
    *("prefix_device_indices", "free_kv_row", "evictable_size", "protected_size", "dfs_weight_order"),
)


class Loop:
    """SGLang's scheduler, without a model: `submit` requests, then `run`."""

    def __init__(
        self,
        make: Callable[[CacheInitParams], Any],
        *,
        num_slots: int,
        page_size: int,
        max_running: int = 16,
        max_tokens: int = 1 << 15,
        chunk: int = 2048,
        schedule: str = "fcfs",
        new_token_ratio: float = 0.7,
        **params: Any,
    ) -> None:
        common = (torch.float16, "cpu", SimpleNamespace(), False)
        self.slots = (
            TokenToKVPoolAllocator(num_slots, *common)
            if page_size == 1
            else PagedTokenToKVPoolAllocator(num_slots, page_size, *common)
        )
        self.rows = ReqToTokenPool(max_running, max_tokens, "cpu", False)
        self.cache = make(CacheInitParams(False, self.rows, self.slots, page_size, **params))
        self.policy = SchedulePolicy(schedule, self.cache, False, False, False)
        self.page_size, self.chunk, self.max_running = page_size, chunk, max_running
        self.new_token_ratio = new_token_ratio  # of planned outputs, room for which is kept free
        self.num_slots = self.slots.available_size()
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.chunked: Req | None = None
        self.contents = np.zeros(num_slots + page_size, np.int64)
        self.num_hit_tokens = self.num_retracted = 0
        self.spent: dict[str, list[int]] = {}  # call -> [nanoseconds, calls]

    def measure(self) -> None:
        """Count the CPU time of calls to the cache; what a call calls itself counts as its own."""
        depth = 0

        def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            spent = self.spent.setdefault(name, [0, 0])

            def run(*args: Any, **options: Any) -> Any:
                nonlocal depth
                if depth:
                    return call(*args, **options)
                depth = 1
                start = clock()
                try:
                    return call(*args, **options)
                finally:
                    spent[0] += clock() - start
                    spent[1] += 1
                    depth = 0

            return run

        for name in CALLS:
            setattr(self.cache, name, timed(name, getattr(self.cache, name)))

    def submit(self, rid: str, prompt: "array[int]", output: "array[int]", **options: Any) -> Req:
        sampling = SamplingParams(max_new_tokens=len(output))
        sampling.normalize(None)
        req = Req(rid, "", prompt, sampling, **options)
        req.planned = output
        self.waiting.append(req)
        return req

    def step(self) -> None:
        """One batch: prefill where something fits, else decode."""
        if not self._prefill() and self.running:
            self._decode()

    def run(self) -> None:
        while self.waiting or self.running or self.chunked:
            self.step()

    def check_idle(self) -> None:
        """SGLang's own invariant of an idle server, and the pool itself."""
        cache = self.cache
        free, evictable = self.slots.available_size(), cache.evictable_size()
        assert cache.protected_size() == 0, f"{cache.protected_size()} tokens are locked by nobody"
        assert free + evictable == self.num_slots, f"{free} free + {evictable} evictable of {self.num_slots}"
        owned = torch.cat([self.slots.get_all_free_pages() * self.page_size, cache.all_values_flatten()])
        pages = (owned // self.page_size).unique()
        assert len(pages) == self.num_slots // self.page_size, f"{len(pages)} pages have an owner"
        assert len(self.rows.free_slots) == self.rows.size

    def _prefill(self) -> bool:
        cache = self.cache
        if self.chunked is not None:
            checkpoint_kv_cache(self.chunked, cache)
        self.policy.calc_priority(self.waiting)
        adder = PrefillAdder(
            self.page_size, cache, self.slots, self._batch(self.running), self.new_token_ratio, 1 << 14, self.chunk
        )
        if self.chunked is not None:
            self.chunked.init_next_round_input()
            self.chunked = adder.add_chunked_req(self.chunked)
        for req in self.waiting:
            if len(self.running) + len(adder.can_run_list) >= self.max_running:
                break
            req.init_next_round_input(cache)
            if adder.add_one_req(req, self.chunked is not None, None) != AddReqResult.CONTINUE:
                break
        reqs = adder.can_run_list
        if not reqs:
            assert self.running or not self.waiting, f"request {self.waiting[0].rid} can never run"
            return False
        self.waiting = [req for req in self.waiting if req not in reqs]
        if adder.new_chunked_req is not None:
            self.chunked = adder.new_chunked_req
        starts = [req.prefix_len for req in reqs]
        alloc_for_extend(self._lengths(self._batch(reqs), [req.extend_end for req in reqs]))
        for req, start in zip(reqs, starts, strict=True):
            if not req.extend_batch_idx:
                self.num_hit_tokens += start
            req.extend_batch_idx += 1
            self._forward(req, start, req.extend_end)
            if req is not self.chunked:
                self._next(req)
                if not req.finished():
                    checkpoint_kv_cache(req, cache)
                    self.running.append(req)
        return True

    def _decode(self) -> None:
        while not self._batch(self.running).check_decode_mem():
            victim = self.running.pop()
            release_kv_cache(victim, self.cache, checkpoint=False)
            victim.reset_for_retract()
            victim.extend_batch_idx = 1  # counts as a hit once
            self.waiting.insert(0, victim)
            self.num_retracted += 1
        batch = self._lengths(self._batch(self.running), [req.kv.kv_committed_len for req in self.running])
        batch.req_pool_indices = batch.req_pool_indices_cpu = torch.tensor([r.kv.req_pool_idx for r in self.running])
        alloc_for_decode(batch, token_per_req=1)
        for req in self.running:
            self._forward(req, req.kv.kv_committed_len - 1, req.kv.kv_committed_len)
            self._next(req)
        self.running = [req for req in self.running if not req.finished()]

    def _next(self, req: Req) -> None:
        """One token more; the request ends where its planned output does."""
        req.output_ids.append(req.planned[len(req.output_ids)])
        req.update_finish_state()
        if req.finished():
            release_kv_cache(req, self.cache, checkpoint=True)

    def _forward(self, req: Req, start: int, end: int) -> None:
        """Write what stands for the KV of tokens [start, end), after proving what stands before them."""
        tokens = np.frombuffer(req.origin_input_ids + req.output_ids, np.int64)[:end]
        expected = np.cumsum((tokens + 1) * (np.arange(end) + 7919))
        if req.cache_salt or req.extra_key:
            expected = expected + hash((req.cache_salt, req.extra_key)) % (1 << 40)
        slots = self.rows.req_to_token[req.kv.req_pool_idx, :end].numpy()
        assert (self.contents[slots[:start]] == expected[:start]).all(), f"request {req.rid} reads somebody else's KV"
        self.contents[slots[start:]] = expected[start:]

    def _batch(self, reqs: list[Req]) -> ScheduleBatch:
        """What SGLang's allocation reads of a batch."""
        batch = ScheduleBatch.init_new(reqs, self.rows, self.slots, self.cache, MODEL, False, SpeculativeAlgorithm.NONE)
        batch.prefix_lens = [req.prefix_len for req in reqs]
        batch.extend_lens = [req.extend_end - req.prefix_len for req in reqs]
        batch.extend_num_tokens = sum(batch.extend_lens)
        return batch

    def _lengths(self, batch: ScheduleBatch, lengths: list[int]) -> ScheduleBatch:
        batch.seq_lens = batch.seq_lens_cpu = torch.tensor(lengths)
        return batch


def run_loops(stream: Stream, **options: Any) -> dict[str, dict[str, Any]]:
    """All requests of a stream on each cache, in turns, so that all meet the same machine.

    Returns what was hit, and CPU time by call.
    """
    loops = {name: Loop(make, **options) for name, make in CACHES.items()}
    for loop in loops.values():
        loop.measure()
    for _ in zip(*(serve(loop, stream) for loop in loops.values()), strict=True):
        pass
    return {
        name: {
            "hit_tokens": loop.num_hit_tokens,
            "prompt_tokens": int(stream.num_prompt_tokens().sum()),
            "us_a_request": sum(spent for spent, _ in loop.spent.values()) / 1000 / stream.num,
            "calls": {call: {"us": spent / 1000, "calls": num} for call, (spent, num) in loop.spent.items() if num},
        }
        for name, loop in loops.items()
    }


def serve(loop: Loop, stream: Stream) -> Iterator[None]:
    """Submit the requests of a stream as the queue empties, and prove at the end that nothing is lost."""
    for number in range(stream.num):
        loop.submit(str(number), _array(stream.prompt(number)), _array(stream.output(number)))
        while len(loop.waiting) >= 2 * loop.max_running:
            loop.step()
        yield
    loop.run()
    loop.check_idle()


def publish() -> None:
    """SGLang's process-wide settings, as of a server on the CPU."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    get_context().override_server_args(device="cpu").install()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--slots", type=int, default=1 << 16)
    parser.add_argument("--schedule", default="fcfs", help="SGLang's --schedule-policy: fcfs, lpm, ...")
    parser.add_argument("--policy", default="lru", help="of radixkv; SGLang's own evict by lru")
    arguments = parser.parse_args()
    publish()
    CACHES["radixkv"] = lambda params: RadixKVCache(replace(params, eviction_policy=arguments.policy))
    num_sessions = arguments.requests // 10
    result = card(
        "SGLang's scheduler loop on each prefix cache",
        input=f"{num_sessions} chats of 10 turns, {arguments.slots:,} slots in pages of {arguments.page_size}, "
        f"policy {arguments.policy}, schedule {arguments.schedule}, 16 running, chunks of 2,048, seed 0",
        sglang=version("sglang"),
    )
    options = {"num_slots": arguments.slots, "page_size": arguments.page_size, "schedule": arguments.schedule}
    with tempfile.TemporaryDirectory() as folder:
        path = chats(Path(folder) / "chats", num_sessions, 10)
        run_loops(Stream(path, 20), **options)  # what is done once
        rows = run_loops(Stream(path), **options)
    print(f"{'':<32}{'hit tokens':>12}{'hit rate':>10}{'CPU us a request':>18}")
    for name, row in rows.items():
        rate = row["hit_tokens"] / row["prompt_tokens"]
        print(f"{name:<32}{row['hit_tokens']:>12,}{rate:>10.4f}{row['us_a_request']:>18.1f}")
    finish({**result, "rows": rows})


def _array(tokens: np.ndarray) -> "array[int]":
    return array("q", tokens.astype(np.int64).tobytes())


if __name__ == "__main__":
    main()
