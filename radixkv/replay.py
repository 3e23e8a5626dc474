"""A trace through the very `PrefixCache` that engines use, one request at a time. Knows nothing of files.

What is counted:

- block hit rate = hit blocks / all blocks of the prompts, a partial last one included (a trace of ids counts its ids);
- token hit rate = prompt tokens in hit blocks / all prompt tokens.
"""

import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from radixkv.cache import PrefixCache
from radixkv.reuse import Reuse
from radixkv.tokens import TOKEN_BYTES
from radixkv.trace import IdRequest, IdTrace, Progress, TokenRequest, TokenTrace, Trace
from radixkv.tree import Policy

_Request = TypeVar("_Request")


@dataclass(frozen=True, slots=True)
class Row:
    """What a cache of one capacity and policy did on a trace."""

    policy: str
    capacity_blocks: int | None  # None: as many as the trace could ever need
    hit_blocks: int
    access_blocks: int
    hit_tokens: int
    prompt_tokens: int
    seconds: float  # the whole replay, wall time

    @property
    def block_hit_rate(self) -> float:
        return self.hit_blocks / self.access_blocks if self.access_blocks else 0.0

    @property
    def token_hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def replay(
    trace: Trace,
    capacity: int | None,
    policy: str | Policy = "lru",
    *,
    bypass: bool = False,
    progress: Progress | None = None,
) -> Row:
    """Run all requests through a fresh cache of `capacity` blocks of the trace's block size; None for no bound.

    A request ends before the next begins. A prompt of more than `capacity` blocks is cached as far as it fits. With
    `bypass`, requests run beside the cache, as beside a host tier: what they leave goes through the same order as what
    is there, so that a request's own tail may be the first to go. A policy object must be fresh.

    Cost: some 20 us a request, and 4 bytes a block of capacity, at most of those that the trace could need.

    Raises: ValueError for a capacity below 1 or an unknown policy.
    """
    if capacity is not None and capacity < 1:
        raise ValueError(f"capacity must be at least 1 block, got {capacity}")
    started = time.perf_counter()
    hit_blocks = access_blocks = hit_tokens = prompt_tokens = 0
    for request, hit in replayed(trace, capacity, policy, bypass=bypass, progress=progress):
        hit_blocks += hit
        hit_tokens += min(hit * trace.block_size, request.num_prompt_tokens)
        prompt_tokens += request.num_prompt_tokens
        access_blocks += num_prompt_blocks(request, trace.block_size)
    name = policy if isinstance(policy, str) else type(policy).__name__
    counts = hit_blocks, access_blocks, hit_tokens, prompt_tokens
    return Row(name, capacity, *counts, seconds=time.perf_counter() - started)


def num_prompt_blocks(request: IdRequest | TokenRequest, block_size: int) -> int:
    """Blocks of a prompt, a partial last one included."""
    if isinstance(request, IdRequest):
        return request.num_blocks
    return -(-request.num_prompt_tokens // block_size)


def replayed(
    trace: Trace,
    capacity: int | None,
    policy: str | Policy = "lru",
    *,
    bypass: bool = False,
    progress: Progress | None = None,
) -> Iterator[tuple[IdRequest | TokenRequest, int]]:
    """As `replay`, request by request: each with its number of hit blocks."""
    num_blocks = num_blocks_needed(trace, capacity)
    num_beside = min(num_blocks, _longest(trace)) if bypass else 0
    if policy == "reuse" and bypass:
        policy = Reuse(lru_blocks=num_blocks)
    cache = PrefixCache(num_blocks + num_beside, block_tokens(trace), policy=policy)
    requests: Sequence[IdRequest | TokenRequest] = trace.requests
    for request in watched(requests, progress):
        hit = serve(cache, request, max_blocks=num_blocks)
        cache.evict(max(0, cache.num_cached_blocks - num_blocks))
        yield request, hit


def default_capacities(num_blocks: int) -> list[int | None]:
    """What to try on a trace of so many distinct blocks: 0.3 to 30 % of them in round numbers, and no bound."""
    capacities = set()
    for parts in (300, 100, 30, 10, 3):
        exact = max(1, num_blocks // parts)
        capacities.add(round(exact, 1 - len(str(exact))))  # to one digit
    return [*sorted(capacities), None]


def serve(cache: PrefixCache, request: IdRequest | TokenRequest, *, max_blocks: int | None = None) -> int:
    """Live one request from beginning to end in a cache of its trace's blocks (see `block_tokens`); returns hit blocks.

    Of an `IdRequest` every id is one token in a block of one: ids are chained, so the tree of ids is the tree of
    prefixes. A `TokenRequest` lives as in an engine: at least one token is prefilled, and the last token of the answer
    never has KV. It keeps its first `max_blocks` blocks, by default as many as the cache has.
    """
    room = (max_blocks or cache.num_blocks) * cache.block_size * TOKEN_BYTES
    if isinstance(request, IdRequest):
        path = packed_ids(request.runs if request.path is None else request.path)
        if not path:
            return 0
        running = cache.allocate(path[:room], min_prefill_tokens=0)
        hit = min(running.num_cached_tokens, request.num_blocks)
        cache.commit(running)
    else:
        running = cache.allocate(request.tokens[:room], namespace=request.namespace)
        hit = running.num_cached_tokens // cache.block_size
        cache.commit(running)
        output = request.output_tokens[: max(0, room - len(request.tokens))]
        if output:
            cache.append(running, output)
            cache.commit(running, running.num_tokens - 1)
    cache.free(running)
    return hit


def block_tokens(trace: Trace) -> int:
    """The block size of a cache for `serve`."""
    return 1 if isinstance(trace, IdTrace) else trace.block_size


def num_blocks_needed(trace: Trace, capacity: int | None) -> int:
    """Of `capacity` blocks, as many as the trace could ever use; None for no bound."""
    num = trace.num_blocks
    if isinstance(trace, TokenTrace):  # all that is cached, and the blocks of one request
        num += _longest(trace)
    return max(1, num if capacity is None else min(capacity, num))


def _longest(trace: Trace) -> int:
    """Blocks that the longest request leaves behind, or has while it runs."""
    if isinstance(trace, TokenTrace):
        sizes = (request.num_prompt_tokens + request.num_output_tokens for request in trace.requests)
        return max(-(-size // trace.block_size) for size in sizes)
    paths = (request.runs if request.path is None else request.path for request in trace.requests)
    return max(sum(path[1::2]) - sum(path[::2]) for path in paths)


def packed_ids(runs: "array[int]") -> bytes:
    """The ids of half open runs, packed."""
    return b"".join(
        np.arange(start, end, dtype="<i4").tobytes() for start, end in zip(runs[::2], runs[1::2], strict=True)
    )


def watched(requests: Sequence[_Request], progress: Progress | None) -> Iterator[_Request]:
    """The requests, telling `progress` now and then."""
    for number, request in enumerate(requests):
        if progress is not None and number % 64 == 0:
            progress(number / len(requests))
        yield request
