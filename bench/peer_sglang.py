"""SGLang's radix caches for bench/peers.py, called as its scheduler calls them; allocator and rows on the CPU."""

import logging
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

torch.set_num_threads(1)
logging.disable(logging.WARNING)


class Rows:
    """Stands in for ReqToTokenPool: a row of slots a running request."""

    def __init__(self, max_running: int, max_tokens: int) -> None:
        self.req_to_token = torch.zeros((max_running, max_tokens), dtype=torch.int32)
        self.write = self.req_to_token.__setitem__
        self.free = list(range(max_running))


class Manager:
    """See bench/peer_radixkv.py. Making the request object and its array of all tokens is not timed."""

    name = "SGLang UnifiedRadixCache, Rust"
    form = "array('q')"
    note = "evicts whole leaves, and a partial match refreshes a whole node"
    backend = "rust"
    conversions: ClassVar[dict[str, Callable[[list[int]], object]]] = {
        "array('q')": lambda tokens: array("q", tokens),
    }

    def __init__(self, num_blocks: int, block_size: int, max_tokens: int, max_running: int) -> None:
        num_slots = num_blocks * block_size
        common = (torch.float16, "cpu", SimpleNamespace(), False)
        if block_size == 1:
            self.slots = TokenToKVPoolAllocator(num_slots, *common)
        else:
            self.slots = PagedTokenToKVPoolAllocator(num_slots, block_size, *common)
        self.rows = Rows(max_running, max_tokens + block_size)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.slots,
            page_size=block_size,
        )
        self.size = block_size
        self.cache = self._tree(params)

    def _tree(self, params: CacheInitParams) -> object:
        params.tree_components = (ComponentType.FULL,)
        params.tree_core_backend = self.backend
        return UnifiedRadixCache(params)

    def prepare(self, prompt: np.ndarray, output: np.ndarray) -> SimpleNamespace:
        everything = np.concatenate([prompt, output])
        request = SimpleNamespace(
            rid="",
            origin_input_ids=_array(prompt),
            full_untruncated_fill_ids=_array(everything),
            num_prompt=len(prompt),
            num_output=len(output),
            extra_key=None,
            cache_salt=None,
            priority=0,
            session=None,
            session_id=None,
            kv_rotation_base=None,
            finished=lambda: False,
            kv=ReqKvInfo(),
        )
        return request

    def serve(self, request: SimpleNamespace) -> int:
        hit = self._start(request)
        num = request.num_prompt
        if request.num_output:
            self._extend(request, num, num + request.num_output - 1)  # the last token's KV is never written
            num += request.num_output - 1
        self._end(request, num)
        return hit

    def begin(self, request: SimpleNamespace) -> SimpleNamespace:
        self._start(request)
        request.num_tokens = request.num_prompt
        return request

    def step(self, requests: list[SimpleNamespace], tokens: list[int]) -> None:
        """One token more for each request, the whole batch in tensors; SGLang publishes them when the request ends."""
        rows = torch.tensor([request.kv.req_pool_idx for request in requests])
        lengths = torch.tensor([request.num_tokens for request in requests])
        if self.size == 1:
            evict_from_tree_cache(self.cache, len(requests))
            slots = self.slots.alloc(len(requests))
        else:
            last = self.rows.req_to_token[rows, lengths - 1]
            evict_from_tree_cache(self.cache, len(requests) * self.size)
            slots = self.slots.alloc_decode(lengths + 1, lengths + 1, last)
        self.rows.write((rows, lengths), slots.to(torch.int32))
        for request in requests:
            request.num_tokens += 1

    def end(self, request: SimpleNamespace) -> None:
        self._end(request, request.num_tokens)

    def wait(self, request: SimpleNamespace) -> array:
        return request.origin_input_ids

    def match(self, waiting: array) -> int:
        return self.cache.match_prefix(MatchPrefixParams(RadixKey(waiting, limit=len(waiting) - 1))).device_prefix_len

    def _start(self, request: SimpleNamespace) -> int:
        cache, kv, num = self.cache, request.kv, request.num_prompt
        found = cache.match_prefix(MatchPrefixParams(RadixKey(request.origin_input_ids, limit=num - 1)))
        hit = found.device_prefix_len
        request.last_node = found.last_device_node
        request.lock = cache.lock(request.last_node)
        kv.req_pool_idx = self.rows.free.pop()
        kv.cache_protected_len = hit
        if hit:
            self.rows.write((kv.req_pool_idx, slice(0, hit)), cache.path_device_indices(request.last_node)[:hit])
        self._extend(request, hit, num)
        cache.checkpoint(request, up_to=num)
        return hit

    def _extend(self, request: SimpleNamespace, start: int, end: int) -> None:
        """Slots for tokens [start, end), written into the request's row."""
        size, row, kv = self.size, request.kv.req_pool_idx, request.kv
        filled = -(-start // size) * size  # up to here, the request has pages
        write = self.rows.write
        if start < min(end, filled):
            last = self.rows.req_to_token[row, start - 1]
            write((row, slice(start, min(end, filled))), last + torch.arange(1, min(end, filled) - start + 1))
        if end > filled:
            num_slots = -(-(end - filled) // size) * size
            evict_from_tree_cache(self.cache, num_slots)
            slots = self.slots.alloc(num_slots)
            if slots is None:
                raise MemoryError(f"{num_slots} slots do not fit")
            write((row, slice(filled, end)), slots[: end - filled])
        kv.kv_allocated_len = kv.kv_committed_len = end

    def _end(self, request: SimpleNamespace, num_tokens: int) -> None:
        cache, kv = self.cache, request.kv
        if num_tokens > request.num_prompt:
            cache.checkpoint(request, up_to=num_tokens)
        cache.free_kv_row(kv, [(kv.cache_protected_len, num_tokens)])
        cache.unlock(request.lock)
        self.rows.free.append(kv.req_pool_idx)


class Legacy(Manager):
    """SGLang's tree in Python."""

    name = "SGLang RadixCache"

    def _tree(self, params: CacheInitParams) -> object:
        return RadixCache(params)


def _array(tokens: np.ndarray) -> array:
    return array("q", tokens.astype(np.int64).tobytes())


MANAGERS = {"sglang-rust": Manager, "sglang-radix": Legacy}
