"""vLLM's KVCacheManager for bench/peers.py, called as its scheduler calls it; one full-attention group, no tensors."""

import os
from itertools import count

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_PLUGINS", "")

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

torch.set_num_threads(1)
Tokens = tuple[list[int], list[int]]


class Manager:
    """See bench/peer_radixkv.py. Hashing the blocks is part of the cost: `Request` does it."""

    name = "vLLM KVCacheManager"
    form = "list[int]"
    note = ""
    hashing = "sha256"  # vLLM's default

    def __init__(self, num_blocks: int, block_size: int, max_tokens: int, max_running: int) -> None:
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float16)
        config = KVCacheConfig(
            num_blocks=num_blocks + 1,  # one of them is its null block
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.manager = KVCacheManager(
            config, max_model_len=max_tokens, scheduler_block_size=block_size, hash_block_size=block_size
        )
        hash_function = get_hash_fn_by_name(self.hashing)
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(block_size, hash_function)
        self.sampling = SamplingParams(max_tokens=1)
        self.numbers = count()

    def prepare(self, prompt: np.ndarray, output: np.ndarray) -> Tokens:
        return prompt.tolist(), output.tolist()

    def serve(self, tokens: Tokens) -> int:
        prompt, output = tokens
        request, hit = self._start(prompt)
        if output:
            request.append_output_token_ids(output)
            if len(output) > 1:  # the last token's KV is never written
                self._allocate(request, len(output) - 1)
        self.manager.free(request)
        return hit

    def begin(self, tokens: Tokens) -> Request:
        return self._start(tokens[0])[0]

    def step(self, requests: list[Request], tokens: list[int]) -> None:
        for request, token in zip(requests, tokens, strict=True):
            request.append_output_token_ids(token)
            self._allocate(request, 1)

    def end(self, request: Request) -> None:
        self.manager.free(request)

    def wait(self, tokens: Tokens) -> Request:
        return self._request(tokens[0])

    def match(self, waiting: Request) -> int:
        return self.manager.get_computed_blocks(waiting)[1]

    def _request(self, prompt: list[int]) -> Request:
        return Request(str(next(self.numbers)), prompt, self.sampling, None, block_hasher=self.hasher)

    def _start(self, prompt: list[int]) -> tuple[Request, int]:
        request = self._request(prompt)
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        self._allocate(request, len(prompt) - hit, hit, blocks)
        return request, hit

    def _allocate(self, request: Request, num_new: int, num_hit: int = 0, blocks: object = None) -> None:
        if self.manager.allocate_slots(request, num_new, num_hit, blocks) is None:
            raise MemoryError(f"{num_new} tokens do not fit")
        request.num_computed_tokens += num_hit + num_new


class Fast(Manager):
    """The same with the fastest of its hash functions."""

    name = "vLLM KVCacheManager, xxhash"
    hashing = "xxhash"


MANAGERS = {"vllm": Manager, "vllm-xxhash": Fast}
