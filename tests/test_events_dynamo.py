"""The real consumer: Dynamo's indexer, fed by our publisher, answers every query as our cache does.

Needs `make peers`, or RADIXKV_PEERS, the folder in which that was run.
"""

import json
import os
import random
import socket
import subprocess
import time
from collections.abc import Hashable
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from radixkv import PrefixCache
from radixkv.events import ZmqPublisher
from radixkv.hashing import namespace_salt

PEERS = Path(os.environ.get("RADIXKV_PEERS", Path(__file__).parents[1] / ".peers"))
PYTHON = PEERS / "dynamo" / "bin" / "python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason=f"no {PYTHON}, see `make peers`")

SIZE = 4
PATIENCE_S = 60
NAMESPACES: list[Hashable] = [None, None, None, "tenant", ("lora", 7)]


class Indexer:
    """`python -m dynamo.indexer`, as a process."""

    def __init__(self, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        with log.open("w") as file:
            command = [PYTHON, "-m", "dynamo.indexer", "--port", str(self.port), "--threads", "1"]
            self.process = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            self.wait_for(lambda: self.ask("GET", "/health"))
        except BaseException:
            self.kill()
            raise

    def wait_for(self, answer: Any) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not answer():
            assert self.process.poll() is None, "the indexer has ended"
            assert time.monotonic() < deadline, "the indexer does not answer as it should"
            time.sleep(0.02)

    def ask(self, method: str, path: str, **fields: object) -> Any:
        """The answer as JSON; None where there is none yet."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)) as connection:
            try:
                connection.request(method, path, json.dumps(fields), {"Content-Type": "application/json"})
            except ConnectionRefusedError:
                return None
            response = connection.getresponse()
            text = response.read().decode()
            assert response.status < 300, f"{path}: {response.status} {text}"
            return json.loads(text) if text.startswith("{") else {"answer": text}

    def register(self, publisher: ZmqPublisher) -> None:
        self.ask(
            "POST",
            "/register",
            instance_id=1,
            endpoint=publisher.endpoint,
            replay_endpoint=publisher.replay_endpoint,
            model_name="model",
            block_size=SIZE,
        )

    def match(self, tokens: list[int], namespace: Hashable) -> int:
        salt = namespace_salt(namespace)
        fields = {} if salt is None else {"cache_salt": salt}
        scores = self.ask("POST", "/query", token_ids=tokens, model_name="model", **fields)["scores"]
        return int(scores.get("1", {}).get("0", 0))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Traffic:
    """Random requests that share prefixes, on a cache under pressure, with the odd eviction, clear and reset."""

    def __init__(
        self, cache: PrefixCache, publisher: ZmqPublisher, seed: int, namespaces: list[Hashable] = NAMESPACES
    ) -> None:
        self.cache, self.publisher, self.namespaces = cache, publisher, namespaces
        self.random = random.Random(seed)
        self.prompts: list[tuple[list[int], Hashable]] = [([1] * 12, None)]
        self.running: list[Any] = []

    def run(self, num_operations: int) -> None:
        for number in range(num_operations):
            self.operation()
            if number % 3 == 0:  # a step of the engine
                self.publisher.flush()
        self.publisher.flush()

    def operation(self) -> None:
        dice = self.random.random()
        if dice < 0.0005:
            self.cache.reset()
        elif dice < 0.002:
            self.cache.clear(self.random.choice(self.namespaces))
        elif dice < 0.01:
            self.cache.evict(self.random.randrange(8))
        elif dice < 0.4 or len(self.running) > 5:
            if self.running:
                request = self.running.pop(self.random.randrange(len(self.running)))
                self.cache.commit(request)
                self.cache.free(request)
        else:
            tokens, namespace = self.prompt()
            self.prompts = [*self.prompts[-60:], (tokens, namespace)]
            request = self.cache.allocate(tokens, namespace=namespace)
            self.cache.commit(request, self.random.randrange(len(tokens) + 1))
            self.running.append(request)

    def prompt(self) -> tuple[list[int], Hashable]:
        tokens, namespace = self.random.choice(self.prompts)
        if self.random.random() < 0.2:
            namespace = self.random.choice(self.namespaces)
        kept = tokens[: self.random.randrange(len(tokens) + 1)]
        return (kept + [self.random.randrange(50) for _ in range(self.random.randrange(1, 30))])[:96], namespace

    def compare(self, indexer: Indexer, num_queries: int) -> int:
        """Wait until all is there, then compare; returns how many queries hit."""
        last = [1000 + self.random.randrange(10**6)] * 9  # new, and stored after all else
        request = self.cache.allocate(last)
        self.cache.commit(request)
        self.publisher.flush()
        indexer.wait_for(lambda: self.publisher.flush() or indexer.match(last, None) == 8)
        num_hits = 0
        for _ in range(num_queries):
            tokens, namespace = self.prompt() if self.random.random() < 0.5 else self.random.choice(self.prompts)
            expected = self.cache.match(tokens, namespace=namespace)
            assert indexer.match(tokens, namespace) == expected
            num_hits += expected > 0
        self.cache.free(request)
        return num_hits


@pytest.mark.parametrize(
    ("options", "namespaces"),
    [({}, NAMESPACES), ({"max_queue_bytes": 20_000}, NAMESPACES), ({"wire": "array"}, [None])],
    ids=["maps", "batches are dropped", "arrays"],
)
def test_the_indexer_of_dynamo_answers_as_the_cache_does(
    tmp_path: Path, options: dict[str, Any], namespaces: list[Hashable]
) -> None:
    """It is killed in the middle, and the next one begins with a replay."""
    with ZmqPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", autoflush=False, **options) as publisher:
        traffic = Traffic(PrefixCache(256, SIZE, events=publisher), publisher, 1, namespaces)
        indexer = Indexer(tmp_path / "first.log")
        try:
            indexer.register(publisher)
            traffic.run(5000)
            assert traffic.compare(indexer, 100) > 30
        finally:
            indexer.kill()
        traffic.run(1000)
        indexer = Indexer(tmp_path / "second.log")
        try:
            indexer.register(publisher)
            traffic.run(4000)
            assert traffic.compare(indexer, 500) > 150
        finally:
            indexer.kill()
        assert "Requesting replay" in (tmp_path / "second.log").read_text()
        assert (publisher.num_dropped > 0) == ("max_queue_bytes" in options)


def test_a_worker_that_began_anew_is_registered_anew(tmp_path: Path) -> None:
    """By itself this indexer takes the lower numbers of a new publisher for batches that it knows."""
    indexer = Indexer(tmp_path / "indexer.log")
    endpoints = ["tcp://127.0.0.1:*", "tcp://127.0.0.1:*"]
    try:
        for seed in (1, 2):
            with ZmqPublisher(*endpoints) as publisher:
                endpoints = [publisher.endpoint, str(publisher.replay_endpoint)]
                traffic = Traffic(PrefixCache(256, SIZE, events=publisher), publisher, seed)
                indexer.register(publisher)
                traffic.run(500)
                traffic.compare(indexer, 50)
                indexer.ask("POST", "/unregister", instance_id=1, model_name="model")
    finally:
        indexer.kill()
