"""Ray Serve sends requests where their prompts are cached. `make test-ray` runs it in an environment with Ray."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="Ray is not here: make test-ray")

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from radixkv import PrefixCache
from radixkv.events import ZmqPublisher
from radixkv.integrations.ray_serve import PrefixRouter, routing_stats

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@serve.deployment(
    num_replicas=2,
    max_ongoing_requests=100,  # so that none is passed over because it is full
    ray_actor_options={"num_cpus": 0},
    request_router_config=RequestRouterConfig(
        request_router_class=PrefixRouter,
        request_router_kwargs={"block_size": 4},
        request_routing_stats_period_s=0.2,
    ),
)
class Engine:
    """A cache in front of no model: it says which replica it is, and how much of a prompt it had."""

    def __init__(self) -> None:
        self.publisher = ZmqPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
        self.cache = PrefixCache(10_000, 4, events=self.publisher)

    def record_routing_stats(self) -> dict[str, Any]:
        return routing_stats(self.publisher)

    async def __call__(self, tokens: list[int]) -> tuple[str, int]:
        request = self.cache.allocate(tokens)
        self.cache.commit(request)
        await asyncio.sleep(0.05)  # so that requests overlap
        self.cache.free(request)
        return serve.get_replica_context().replica_id.unique_id, request.num_cached_tokens

    def die(self) -> None:
        os._exit(1)


@pytest.fixture(scope="module")
def handle() -> Iterator[Any]:
    os.environ["RAY_AUTH_MODE"] = "disabled"  # else Ray writes a token into the home folder
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        yield serve.run(Engine.bind(), route_prefix=None)
    finally:
        serve.shutdown()
        ray.shutdown()


def ask(handle: Any, tokens: list[int]) -> tuple[str, int]:
    replica, num_cached = handle.remote(tokens).result(timeout_s=30)
    time.sleep(0.01)  # the router hears a little later that it is over
    return replica, num_cached


def wait_until_followed(handle: Any) -> None:
    """Until the router has heard of both replicas: then a prompt stays where it was."""
    for attempt in range(300):
        tokens = [1_000_000 + attempt] * 1_000
        places = {ask(handle, tokens)}
        time.sleep(0.1)  # its events are on their way
        places.update(ask(handle, tokens) for _ in range(3))
        if sorted(hit for _, hit in places) == [0, 996]:
            return
    raise AssertionError("the router does not follow its replicas")


def test_sessions_stay_and_a_shared_prompt_makes_no_hot_spot(handle: Any) -> None:
    wait_until_followed(handle)
    system = list(range(400))
    prompts = [[*system, *range(10_000 * session, 10_000 * session + 1_000)] for session in range(1, 21)]
    answers = [handle.remote(prompt) for prompt in prompts]  # all at once
    places = [answer.result(timeout_s=30)[0] for answer in answers]
    assert min(Counter(places).values()) >= 8
    assert len(set(places)) == 2
    for _ in range(3):
        time.sleep(0.1)  # events are on their way
        for prompt, place in zip(prompts, places, strict=True):
            expected = len(prompt)
            prompt += range(1_000)
            assert ask(handle, prompt) == (place, expected)


def test_what_is_no_prompt_is_routed_all_the_same(handle: Any) -> None:
    with pytest.raises(Exception, match="token 'no' at position 0"):
        ask(handle, ["no", "tokens"])  # type: ignore[list-item]


def test_a_replica_that_dies_is_replaced(handle: Any) -> None:
    tokens = [7] * 1_000
    before, _ = ask(handle, tokens)
    time.sleep(0.1)
    assert ask(handle, tokens) == (before, 996)
    with pytest.raises(Exception):  # noqa: B017, PT011
        handle.die.remote().result(timeout_s=30)
    for _ in range(20):
        ask(handle, tokens)  # whoever is left
    wait_until_followed(handle)
