"""What it costs to tell routers what a cache holds: events off, recorded, and published to routers that read or do not.

    python bench/events.py [--requests 1000] [--blocks 20000] [--wait-ms 2]

Requests of the Mooncake conversation trace as in bench/manager.py. Between two requests the engine waits, as it does
for its device; that is when the publisher's thread works. CPU time of the manager's calls by the clock of the engine's
thread, wall time beside it; CPU time of the whole process from the first request until everything is sent, against
the same with events off. Routers are processes of their own.
"""

import argparse
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from card import TRACES, card, finish, quantiles
from manager import BLOCK_SIZE, SEED, conversation

from radixkv import PrefixCache
from radixkv.event_log import EventLog
from radixkv.events import EventRecorder, ZmqPublisher

Requests = list[tuple[bytes, bytes]]

ROUTER = """
import sys, zmq
endpoint, reads = sys.argv[1], sys.argv[2] == "reads"
with zmq.Context() as context, context.socket(zmq.SUB) as socket:
    socket.subscribe(b"")
    socket.connect(endpoint)
    poller = zmq.Poller()
    poller.register(sys.stdin, zmq.POLLIN)
    if reads:
        poller.register(socket, zmq.POLLIN)
    print("ready", flush=True)
    num = 0
    while sys.stdin.fileno() not in dict(poller.poll()):
        while reads and socket.poll(0):
            socket.recv_multipart()
            num += 1
    while reads and socket.poll(500):
        socket.recv_multipart()
        num += 1
    print(num)
"""


@contextmanager
def router(endpoint: str, mode: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", ROUTER, endpoint, mode]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)  # until it is subscribed
        yield process


def serve(cache: PrefixCache, requests: Requests, wait_s: float, sink: Any) -> dict[str, Any]:
    """All requests; the CPU and wall time of each, in us."""
    cpu, wall = [], []
    for prompt, output in requests:
        time.sleep(wait_s)
        start = time.thread_time_ns(), time.perf_counter_ns()
        request = cache.allocate(prompt)
        cache.commit(request)
        cache.append(request, output)
        cache.commit(request, request.num_tokens - 1)
        cache.free(request)
        if isinstance(sink, ZmqPublisher):
            sink.flush()
        cpu.append((time.thread_time_ns() - start[0]) / 1000)
        wall.append((time.perf_counter_ns() - start[1]) / 1000)
        if isinstance(sink, EventRecorder):
            sink.take()
    return {"cpu": quantiles(cpu), "wall": quantiles(wall)}


def measure(mode: str, requests: Requests, num_blocks: int, wait_s: float) -> dict[str, Any]:
    sink: Any = None
    if mode == "recorded":
        sink = EventRecorder()
    elif mode != "off":
        sink = ZmqPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", autoflush=False)
    cache = PrefixCache(num_blocks, BLOCK_SIZE, events=sink)

    def run() -> dict[str, Any]:
        start = time.process_time()
        row = serve(cache, requests, wait_s, sink)
        if isinstance(sink, ZmqPublisher):
            sink.close()
            row["num_dropped"] = sink.num_dropped
        row["process"] = (time.process_time() - start) / len(requests) * 1e6
        return row

    if mode in ("off", "recorded", "no router"):
        return run()
    with router(sink.endpoint, "reads" if mode == "a router that reads" else "sleeps") as process:
        row = run()
        row["received"] = int(process.communicate("\n")[0])
    return row


def snapshot(requests: Requests, num_blocks: int) -> dict[str, float]:
    """CPU ms to read all that is cached in the engine's thread, and to make a message of it in the publisher's."""
    heard: list[Any] = []

    class Sink(EventRecorder):
        def attach(self, num_blocks: int, block_size: int, runs: Any = None) -> None:
            super().attach(num_blocks, block_size)
            heard.append(runs)

    cache = PrefixCache(num_blocks, BLOCK_SIZE, events=Sink())
    serve(cache, requests, 0, None)
    tracemalloc.start()
    log = EventLog(num_blocks, BLOCK_SIZE)
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    start = time.process_time()
    runs = [None, *heard[0]()]
    read = time.process_time()
    log.write(0, runs)
    written = time.process_time()
    ((_, payload),) = log.replay(0)
    made = time.process_time()
    return {
        "blocks": cache.num_cached_blocks,
        "bytes_per_block": num_bytes / num_blocks,
        "read_ms": (read - start) * 1e3,
        "first_ms": (written - read) * 1e3,
        "replay_ms": (made - written) * 1e3,
        "bytes": len(payload),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=20_000)
    parser.add_argument("--wait-ms", type=float, default=2)
    arguments = parser.parse_args()
    if not (TRACES / "mooncake_conversation.jsonl.gz").exists():
        sys.exit(f"missing: {TRACES / 'mooncake_conversation.jsonl.gz'}")
    facts = card(
        "Cost of KV events a request",
        input=f"first {arguments.requests} requests of mooncake_conversation, block size {BLOCK_SIZE}, seed {SEED}",
        cache=f"{arguments.blocks} blocks",
        wait=f"{arguments.wait_ms} ms before each request",
    )
    requests = list(conversation(arguments.requests))
    warm = PrefixCache(arguments.blocks, BLOCK_SIZE)
    serve(warm, requests, 0, None)
    num_new = warm.stats.prompt_tokens - warm.stats.hit_tokens + sum(len(output) // 4 for _, output in requests)
    print(f"{num_new / len(requests) / BLOCK_SIZE:.0f} blocks a request are new\n")
    print(f"{'us a request':<34}{'engine CPU':>12}{'':>9}{'wall':>9}{'':>9}{'process CPU':>13}{'batches':>10}")
    print(f"{'':<34}{'mean':>12}{'P99':>9}{'median':>9}{'P99':>9}{'over off':>13}{'dropped':>10}{'received':>10}")
    rows: dict[str, Any] = {}
    for mode in ("off", "recorded", "no router", "a router that reads", "a router that never reads"):
        rows[mode] = row = measure(mode, requests, arguments.blocks, arguments.wait_ms / 1000)
        print(
            f"{mode:<34}{row['cpu']['mean']:>12.1f}{row['cpu']['p99']:>9.1f}{row['wall']['median']:>9.1f}"
            f"{row['wall']['p99']:>9.1f}{row['process'] - rows['off']['process']:>13.1f}"
            f"{row.get('num_dropped', ''):>10}{row.get('received', ''):>10}"
        )
    rows["snapshot"] = row = snapshot(requests, arguments.blocks)
    print(
        f"\nall of {row['blocks']:,} cached blocks in one message of {row['bytes']:,} bytes, ms of CPU:\n"
        f"  for a replay {row['replay_ms']:.1f}\n"
        f"  after a drop {row['read_ms']:.1f} to read the tree in the engine's thread,"
        f" {row['first_ms']:.1f} to hash and encode it in the publisher's\n"
        f"memory of the log: {row['bytes_per_block']:.1f} bytes a block, beside the batches that it keeps"
    )
    finish({**facts, "rows": rows})


if __name__ == "__main__":
    main()
