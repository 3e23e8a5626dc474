"""Real engines' caches, events and publishers: the index knows what each will hit.

Skipped without `make peers`; RADIXKV_PEERS names the folder with their environments, default .peers.
"""

import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from test_subscriber import free_ports

from radixkv.router import PrefixIndex
from radixkv.subscriber import EventSubscriber

ROOT = Path(__file__).parents[1]
PEERS = Path(os.environ.get("RADIXKV_PEERS", ROOT / ".peers"))
ENGINES = {"vllm": (16, "vllm"), "sglang": (8, "sglang"), "sglang, page size 1": (1, "sglang")}
pytestmark = pytest.mark.slow


class Engine:
    """An engine's process."""

    def __init__(self, name: str, num_blocks: int, block_size: int) -> None:
        self.port = free_ports()
        python = PEERS / name / "bin" / "python"
        if not python.exists():
            pytest.skip(f"{name} is not here: make peers")
        self.process = subprocess.Popen(
            [python, ROOT / "bench" / "peer_events.py", name, str(num_blocks), str(block_size), str(self.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._answers().readline() == "ready\n"

    def serve(self, prompt: list[int]) -> dict[str, Any]:
        print(json.dumps(prompt), file=self.process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._answers().readline())
        return answer

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _answers(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, int]]:
    block_size, name = ENGINES[request.param]
    engine = Engine(name, 400 // block_size, block_size)
    yield engine, block_size
    engine.stop()


def test_the_index_knows_what_the_engine_will_hit(engine: tuple[Engine, int]) -> None:
    """Prompts that share beginnings, in a cache that evicts all the time; the index comes late."""
    worker, size = engine
    rng = random.Random(0)
    runs = [[rng.randrange(1000) for _ in range(rng.randint(10, 60))] for _ in range(6)]

    def prompt() -> list[int]:
        return [token for _ in range(rng.randint(1, 4)) for token in rng.choice(runs)]

    index = PrefixIndex(size)
    with EventSubscriber(index) as subscriber:
        answer = worker.serve(prompt())
        subscriber.connect("a", f"tcp://127.0.0.1:{worker.port}", f"tcp://127.0.0.1:{worker.port + 1}")
        while index.last_sequence("a") is None:  # until the subscription is there
            answer = worker.serve([rng.randrange(1000) for _ in range(2 * size)])
            subscriber.poll(0.1)
        hits = 0
        for _ in range(300):
            while index.last_sequence("a") != answer["batches"] - 1:
                assert subscriber.poll(10), "the events do not come"
            tokens = prompt()
            expected = min(index.match(tokens).get("a", 0), (len(tokens) - 1) // size * size)
            answer = worker.serve(tokens)
            assert answer["hit"] == expected
            hits += bool(expected)
        index.check()
        assert 50 < hits < 300
        assert index.stats.skipped_blocks.keys() <= {"unknown_block"}  # vLLM tells of each copy that goes
        assert subscriber.stats.bad_messages == 0
        assert index.stats.missed_batches == 0
