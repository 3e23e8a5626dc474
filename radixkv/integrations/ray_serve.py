"""Ray Serve sends each request to the replica that has most of its prompt cached. Needs the extra `ray`.

See docs/router.md. Replicas say where they publish their events, by `record_routing_stats`; the router of each handle
follows them all.
"""

import asyncio
import contextlib
import logging
import re
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import ray
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from radixkv.balance import Balancer
from radixkv.events import ZmqPublisher
from radixkv.router import DEFAULT_MAX_BLOCKS, PrefixIndex
from radixkv.subscriber import EventSubscriber
from radixkv.tokens import Tokens

logger = logging.getLogger("radixkv.ray_serve")

STATS = "kv_events"  # the key in a replica's routing stats
_ANY_HOST = re.compile(r"//(\*|0\.0\.0\.0|\[::\]):")


def routing_stats(publisher: ZmqPublisher, *, host: str | None = None) -> dict[str, Any]:
    """What a replica's `record_routing_stats` returns, for routers to find its events.

    An endpoint that is bound to every interface is told as `host`, by default the node's address. An engine with a
    publisher of its own returns `{"kv_events": {"endpoint": ..., "replay_endpoint": ..., "topic": ...}}`, the last two
    if there are any.
    """
    found = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
    host = host or ray.util.get_node_ip_address()
    told = {name: _ANY_HOST.sub(f"//{host}:", value) for name, value in found.items() if value is not None}
    return {STATS: told}


@dataclass(frozen=True, slots=True)
class Prompt:
    """What of a request decides where it goes."""

    tokens: Tokens
    num_tokens: int
    namespace: Hashable = None
    lora: str | int | None = None


class PrefixRouter(RequestRouter):
    """Ranks replicas by the tokens that are left to prefill and by load (see `Balancer`), from their own KV events.

    A deployment names it in `RequestRouterConfig(request_router_class=...)`; `request_router_kwargs` are those of
    `initialize_state`. Requests are calls of the handle with the prompt's tokens; override `prompt_of` for others. A
    replica whose events are not known is ranked by its load. All of it runs in the event loop of the router.
    """

    def initialize_state(
        self,
        *,
        block_size: int = 16,
        max_blocks: int = DEFAULT_MAX_BLOCKS,
        tokens_argument: str = "tokens",
        poll_seconds: float = 0.05,
        **balance: float,
    ) -> None:
        """`block_size` is that of the engines. `tokens_argument` names the argument with the prompt; without it, the
        first one is taken. Events are read before each request, and every `poll_seconds`. `balance` is for `Balancer`.
        """
        self._index = PrefixIndex(block_size, max_blocks=max_blocks)
        self._subscriber = EventSubscriber(self._index)
        self._balancer = Balancer[ReplicaID]((), **balance)
        self._tokens_argument = tokens_argument
        self._poll_seconds = poll_seconds
        self._told: dict[ReplicaID, object] = {}  # where they publish
        # prefill tokens of requests: that run, by their id; that are on their way to a replica, by their object's
        self._running: dict[tuple[ReplicaID, str], list[int]] = {}
        self._expected: dict[int, tuple[ReplicaID, int]] = {}
        self._reader: asyncio.Task[None] | None = None
        weakref.finalize(self, self._subscriber.close)

    def prompt_of(self, pending_request: PendingRequest) -> Prompt | None:
        """The prompt of a request, None if it has none: then only load counts.

        By default the argument `tokens` of the call, or its first; and `namespace` and `lora` where they are given.
        """
        arguments = pending_request.kwargs
        tokens = arguments.get(self._tokens_argument)
        if tokens is None and pending_request.args:
            tokens = pending_request.args[0]
        if tokens is None or isinstance(tokens, (str, bytes)) or not hasattr(tokens, "__len__"):
            return None
        return Prompt(tokens, len(tokens), arguments.get("namespace"), arguments.get("lora"))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Every replica is a rank of its own, the one of least cost first; one that is full is passed over by Serve."""
        self._follow(candidate_replicas)
        self._subscriber.poll()
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # subtle: else Serve asks again without a pause
        prompt, cached = self._match(pending_request)
        num_tokens = prompt.num_tokens if prompt is not None else 0

        def cost(replica: RunningReplica) -> float:
            return self._balancer.cost(replica.replica_id, num_tokens, cached.get(replica.replica_id, 0))

        ranked = sorted(candidate_replicas, key=cost)
        if pending_request is not None and ranked:
            first = ranked[0].replica_id
            self._expect(pending_request, first, num_tokens - cached.get(first, 0))
        return [[replica] for replica in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        expected = self._expected.pop(id(pending_request), None)
        if expected is not None and expected[0] != replica_id:
            self._balancer.end(*expected)
            expected = None
        if replica_id not in self._balancer.workers:
            return  # it is gone already
        if expected is None:
            prompt, cached = self._match(pending_request)
            expected = replica_id, 0 if prompt is None else prompt.num_tokens - cached.get(replica_id, 0)
            self._balancer.begin(*expected)
        # an id is shared by the calls that one call made
        key = replica_id, pending_request.metadata.internal_request_id
        self._running.setdefault(key, []).append(expected[1])

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        key = replica_id, internal_request_id
        running = self._running.get(key)
        if running:
            self._balancer.end(replica_id, running.pop())
            if not running:
                del self._running[key]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        here = {replica.replica_id for replica in replicas}
        for replica_id in self._balancer.workers:
            if replica_id not in here:
                self._forget(replica_id)
        for replica in replicas:
            self._balancer.add(replica.replica_id)
        self._follow(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id)

    def _expect(self, pending_request: PendingRequest, replica_id: ReplicaID, num_prefill: int) -> None:
        """Count a request where it is about to go, or those that come at the same time would all go there.

        Until it is routed, is routed anew, or nobody waits for it any more.
        """
        key = id(pending_request)
        if key in self._expected:
            self._balancer.end(*self._expected[key])
        else:
            weakref.finalize(pending_request, self._give_up, key)
        self._balancer.begin(replica_id, num_prefill)
        self._expected[key] = replica_id, num_prefill

    def _give_up(self, key: int) -> None:
        if key in self._expected:
            self._balancer.end(*self._expected.pop(key))

    def _forget(self, replica_id: ReplicaID) -> None:
        self._told.pop(replica_id, None)
        self._subscriber.disconnect(replica_id)
        self._balancer.remove(replica_id)
        self._running = {key: value for key, value in self._running.items() if key[0] != replica_id}

    def _follow(self, replicas: list[RunningReplica]) -> None:
        """Connect to replicas that have told where they publish since, or publish elsewhere now."""
        for replica in replicas:
            told = replica.routing_stats.get(STATS)
            if told is None or self._told.get(replica.replica_id) == told:
                continue
            self._told[replica.replica_id] = told
            self._subscriber.disconnect(replica.replica_id)
            try:
                endpoints = told["endpoint"], told.get("replay_endpoint")
                self._subscriber.connect(replica.replica_id, *endpoints, topic=told.get("topic", ""))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                logger.warning("replica %s does not say where it publishes: %r: %s", replica.replica_id, told, error)
        if self._reader is None:
            self._reader = asyncio.get_running_loop().create_task(_read(weakref.ref(self), self._poll_seconds))

    def _match(self, pending_request: PendingRequest | None) -> tuple[Prompt | None, dict[Hashable, int]]:
        """The prompt of a request, and how much of it each replica has; nothing where it is no prompt of tokens."""
        prompt = None if pending_request is None else self.prompt_of(pending_request)
        if prompt is not None:
            with contextlib.suppress(TypeError, ValueError):  # whoever gets it will say what is wrong with it
                return prompt, self._index.match(prompt.tokens, namespace=prompt.namespace, lora=prompt.lora)
        return None, {}


async def _read(reference: "weakref.ref[PrefixRouter]", seconds: float) -> None:
    """Read events now and then, as long as the router lives."""
    while True:
        await asyncio.sleep(seconds)
        router = reference()
        if router is None:
            return
        router._subscriber.poll()
        del router
