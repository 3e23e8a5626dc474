"""Which of several workers gets a request: what is cached against what waits. Knows nothing of indexes or events."""

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

ROUTERS = ("prefix", "round-robin", "least-loaded")  # of a replay, see `radixkv.routing`
Worker = TypeVar("Worker", bound=Hashable)


class Balancer(Generic[Worker]):
    """Sends each request where the fewest tokens are prefilled before its first one is there.

    The cost of a worker, in tokens of prefill:

        num_tokens - cached                             what is left to prefill of this request
        + prefill tokens of its requests in flight      what waits there already
        + decode_tokens x its requests in flight        and what their decoding costs
        + spread x prefill tokens sent there lately     so that idle workers' caches fill too

    The first two are the time to the first token, were all workers alike. So a shared system prompt of S tokens draws
    requests to the worker that has it until those are S tokens ahead of another's; from then on that has it too. The
    last term does this where requests do not overlap. "Lately" decays: by half with every `half_life` tokens of prefill
    that are sent anywhere. No clock, no chance. Not thread-safe.
    """

    def __init__(
        self,
        workers: Iterable[Worker] = (),
        *,
        decode_tokens: float = 512,
        spread: float = 0.1,
        half_life: float = 1 << 20,
    ) -> None:
        """`decode_tokens`: of prefill, that would cost what decoding one request does. `half_life` in tokens."""
        for name, value in (("decode_tokens", decode_tokens), ("spread", spread), ("half_life", half_life)):
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise TypeError(f"{name} must be a number, got {value!r}")
            if not (math.isfinite(value) and value >= 0 and (value or name != "half_life")):
                raise ValueError(
                    f"{name} must be finite and {'above' if name == 'half_life' else 'at least'} 0, got {value}"
                )
        self._decode_tokens = decode_tokens
        self._spread = spread
        self._half_life = half_life
        self._waiting: dict[Worker, float] = {}  # of requests in flight
        self._recent: dict[Worker, float] = {}
        for worker in workers:
            self.add(worker)

    @property
    def workers(self) -> list[Worker]:
        """Those that were added and not removed."""
        return list(self._recent)

    def add(self, worker: Worker) -> None:
        """A worker to choose from; one that is known stays as it is.

        It begins with the recent tokens of the one that has the fewest: with none it would get every request until it
        had caught up.
        """
        self._recent.setdefault(worker, min(self._recent.values(), default=0.0))
        self._waiting.setdefault(worker, 0.0)

    def remove(self, worker: Worker) -> None:
        """Forget a worker that is gone."""
        self._waiting.pop(worker, None)
        self._recent.pop(worker, None)

    def cost(self, worker: Worker, num_tokens: int, num_cached: float = 0) -> float:
        """What a request of `num_tokens` costs on a worker that has `num_cached` of them, in tokens of prefill.

        Raises: KeyError for a worker that is not known.
        """
        return num_tokens - num_cached + self._waiting[worker] + self._spread * self._recent[worker]

    def choose(self, num_tokens: int, cached: Mapping[Worker, float]) -> Worker:
        """The worker of least cost; among equals the one that was added first. O(workers), changes nothing.

        `cached` is what `PrefixIndex.match` returns; who is not in it has nothing. Raises: ValueError for no workers.
        """
        if not self._recent:
            raise ValueError("there must be at least 1 worker to choose from, got 0")
        return min(self._recent, key=lambda worker: self.cost(worker, num_tokens, cached.get(worker, 0)))

    def begin(self, worker: Worker, num_prefill_tokens: float) -> None:
        """A request was sent to a worker, which has so many tokens to prefill. O(workers).

        Raises: KeyError for a worker that is not known.
        """
        self._waiting[worker] += num_prefill_tokens + self._decode_tokens
        kept = 2.0 ** (-num_prefill_tokens / self._half_life)
        for each in self._recent:
            self._recent[each] *= kept
        self._recent[worker] += num_prefill_tokens

    def end(self, worker: Worker, num_prefill_tokens: float) -> None:
        """The request of `begin` is over, or failed; nothing happens where the worker was removed meanwhile."""
        if worker in self._waiting:
            self._waiting[worker] = max(0.0, self._waiting[worker] - num_prefill_tokens - self._decode_tokens)
