"""A trace over several workers: what routing is worth. Needs the extra `events`.

Each worker is a `PrefixCache`; the router knows of them only what the events say that they emit.
"""

import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from radixkv.balance import ROUTERS, Balancer
from radixkv.cache import PrefixCache
from radixkv.events import EventRecorder
from radixkv.replay import Row, block_tokens, num_blocks_needed, num_prompt_blocks, packed_ids, serve, watched
from radixkv.router import PrefixIndex
from radixkv.trace import IdRequest, Progress, TokenRequest, Trace


@dataclass(frozen=True, slots=True)
class RoutedRow(Row):
    """What several caches of one policy, each of the capacity, did on a trace under one router."""

    router: str
    num_requests: tuple[int, ...]  # of each worker
    prefill_tokens: tuple[int, ...]  # of each worker: prompt tokens that were not hit
    routing_seconds: float  # in the router: applying events, matching, choosing; wall time

    @property
    def imbalance(self) -> float:
        """Prefill tokens of the busiest worker over their mean; 1 is even."""
        total = sum(self.prefill_tokens)
        return max(self.prefill_tokens) * len(self.prefill_tokens) / total if total else 1.0


def replay_routed(
    trace: Trace,
    capacity: int | None,
    policy: str = "lru",
    *,
    num_workers: int,
    router: str = "prefix",
    progress: Progress | None = None,
    **balance: float,
) -> RoutedRow:
    """Run all requests through `num_workers` fresh caches of `capacity` blocks each, sent to them by a router.

    "prefix" asks a `PrefixIndex` and a `Balancer`; "least-loaded" a balancer that knows of no cache; "round-robin"
    takes the workers in turn. A request ends before the next begins, and its events have arrived by then: so what
    counts as load is what a worker was sent lately. What counts as a hit is what `radixkv.replay` says. `balance` are
    settings of the balancer.

    Raises: ValueError for an unknown router or policy, a capacity or a number of workers below 1.
    """
    if router not in ROUTERS:
        raise ValueError(f"router must be one of {', '.join(ROUTERS)}, got {router!r}")
    for name, value in (("capacity", 1 if capacity is None else capacity), ("num_workers", num_workers)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    started = time.perf_counter()
    balancer = Balancer(range(num_workers), **balance)
    routing = 0.0
    num_requests, prefill_tokens = [0] * num_workers, [0] * num_workers
    hit_blocks = access_blocks = hit_tokens = prompt_tokens = 0
    for request, worker, hit, seconds in _routed(trace, capacity, policy, balancer, router, progress):
        num_tokens = request.num_prompt_tokens
        num_hit = min(hit * trace.block_size, num_tokens)
        routing += seconds
        num_requests[worker] += 1
        prefill_tokens[worker] += num_tokens - num_hit
        hit_blocks += hit
        hit_tokens += num_hit
        prompt_tokens += num_tokens
        access_blocks += num_prompt_blocks(request, trace.block_size)
    return RoutedRow(
        policy,
        capacity,
        hit_blocks,
        access_blocks,
        hit_tokens,
        prompt_tokens,
        seconds=time.perf_counter() - started,
        router=router,
        num_requests=tuple(num_requests),
        prefill_tokens=tuple(prefill_tokens),
        routing_seconds=routing,
    )


def _routed(
    trace: Trace,
    capacity: int | None,
    policy: str,
    balancer: Balancer[int],
    router: str,
    progress: Progress | None,
) -> Iterator[tuple[IdRequest | TokenRequest, int, int, float]]:
    """Each request with its worker, its hit blocks, and what the router took."""
    size, num_blocks = block_tokens(trace), num_blocks_needed(trace, capacity)
    workers = balancer.workers
    recorders = [EventRecorder() for _ in workers]
    caches = [PrefixCache(num_blocks, size, policy=policy, events=recorder) for recorder in recorders]
    index = PrefixIndex(size, max_blocks=num_blocks)
    scale = trace.block_size // size  # tokens that one of the cache's stands for
    requests: Sequence[IdRequest | TokenRequest] = trace.requests
    for number, request in enumerate(watched(requests, progress)):
        num_tokens = request.num_prompt_tokens
        prompt, namespace = _prompt(request)
        started = time.perf_counter()
        cached: dict[int, float] = {}
        if router == "prefix":
            found = index.match(prompt, namespace=namespace)
            cached = {each: min(found[each] * scale, num_tokens) for each in workers if each in found}
        worker = workers[number % len(workers)] if router == "round-robin" else balancer.choose(num_tokens, cached)
        num_prefill = num_tokens - cached.get(worker, 0)
        balancer.begin(worker, num_prefill)
        balancer.end(worker, num_prefill)
        seconds = time.perf_counter() - started
        hit = serve(caches[worker], request)
        events = recorders[worker].take()
        started = time.perf_counter()
        if router == "prefix":
            index.apply(worker, events)
        yield request, worker, hit, seconds + time.perf_counter() - started


def _prompt(request: IdRequest | TokenRequest) -> tuple[bytes, Hashable]:
    """What the router sees of a request: its prompt, packed, and its namespace."""
    if isinstance(request, IdRequest):
        return packed_ids(request.runs), None
    return request.tokens, request.namespace
