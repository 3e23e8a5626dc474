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

    Cost: some 20 us a request, and 4 bytes a block of capacity, at most of those that the trace
    could need.

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
        if isinstance(request, IdRequest):
            access_blocks += request.num_blocks
        else:
            access_blocks += -(-request.num_prompt_tokens // trace.block_size)
    name = policy if isinstance(policy, str) else type(policy).__name__
    counts = hit_blocks, access_blocks, hit_tokens, prompt_tokens
    return Row(name, capacity, *counts, seconds=time.perf_counter() - started)


def replayed(
    trace: Trace,
    capacity: int | None,
    policy: str | Policy = "lru",
    *,
    bypass: bool = False,
    progress: Progress | None = None,
) -> Iterator[tuple[IdRequest | TokenRequest, int]]:
    """As `replay`, request by request: each with its number of hit blocks."""
    if isinstance(trace, IdTrace):
        return _replay_ids(trace, capacity, policy, bypass, progress)
    return _replay_tokens(trace, capacity, policy, bypass, progress)


def default_capacities(num_blocks: int) -> list[int | None]:
    """What to try on a trace of so many distinct blocks: 0.3 to 30 % of them in round numbers, and no bound."""
    capacities = set()
    for parts in (300, 100, 30, 10, 3):
        exact = max(1, num_blocks // parts)
        capacities.add(round(exact, 1 - len(str(exact))))  # to one digit
    return [*sorted(capacities), None]


def _replay_ids(
    trace: IdTrace, capacity: int | None, policy: str | Policy, bypass: bool, progress: Progress | None
) -> Iterator[tuple[IdRequest, int]]:
    """Every id is one token in a block of one: ids are chained, so the tree of ids is the tree of prefixes."""
    num_blocks = _at_most(capacity, trace.num_blocks)
    longest = max(map(_path_length, trace.requests)) if bypass else 0
    cache = _cache(num_blocks, min(longest, num_blocks), 1, policy)
    for request in _watched(trace.requests, progress):
        path = packed_ids(request.runs if request.path is None else request.path)
        if not path:
            yield request, 0
            continue
        running = cache.allocate(path[: num_blocks * TOKEN_BYTES], min_prefill_tokens=0)
        yield request, min(running.num_cached_tokens, request.num_blocks)
        cache.commit(running)
        cache.free(running)
        cache.evict(max(0, cache.num_cached_blocks - num_blocks))


def _replay_tokens(
    trace: TokenTrace, capacity: int | None, policy: str | Policy, bypass: bool, progress: Progress | None
) -> Iterator[tuple[TokenRequest, int]]:
    """As an engine does: at least one token is prefilled, and the last token of the answer never has KV."""
    block_size = trace.block_size
    longest = max(
        -(-(request.num_prompt_tokens + request.num_output_tokens) // block_size) for request in trace.requests
    )
    num_blocks = _at_most(capacity, trace.num_blocks + longest)  # all that is cached, and the blocks of one request
    cache = _cache(num_blocks, min(longest, num_blocks) if bypass else 0, block_size, policy)
    room = num_blocks * block_size * TOKEN_BYTES
    for request in _watched(trace.requests, progress):
        running = cache.allocate(request.tokens[:room], namespace=request.namespace)
        yield request, running.num_cached_tokens // block_size
        cache.commit(running)
        output = request.output_tokens[: max(0, room - len(request.tokens))]
        if output:
            cache.append(running, output)
            cache.commit(running, running.num_tokens - 1)
        cache.free(running)
        cache.evict(max(0, cache.num_cached_blocks - num_blocks))


def _cache(num_blocks: int, num_beside: int, block_size: int, policy: str | Policy) -> PrefixCache:
    """A cache of `num_blocks` blocks, and so many beside it for the request that runs."""
    if policy == "reuse" and num_beside:
        policy = Reuse(lru_blocks=num_blocks)
    return PrefixCache(num_blocks + num_beside, block_size, policy=policy)


def _path_length(request: IdRequest) -> int:
    runs = request.runs if request.path is None else request.path
    return sum(runs[1::2]) - sum(runs[::2])


def _at_most(capacity: int | None, num_needed: int) -> int:
    return max(1, num_needed if capacity is None else min(capacity, num_needed))


def packed_ids(runs: "array[int]") -> bytes:
    """The ids of half open runs, packed."""
    return b"".join(
        np.arange(start, end, dtype="<i4").tobytes() for start, end in zip(runs[::2], runs[1::2], strict=True)
    )


def _watched(requests: Sequence[_Request], progress: Progress | None) -> Iterator[_Request]:
    for number, request in enumerate(requests):
        if progress is not None and number % 64 == 0:
            progress(number / len(requests))
        yield request
