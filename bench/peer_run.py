"""Runs one manager on streams of requests, in the manager's own environment: bench/peers.py starts it.

    python bench/peer_run.py MODULE          jobs in, one JSON object a line; results out, one a line

Each job runs in a fork, so that none inherits another's heap. The clock is the CPU time of the whole process.
"""

import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from peer_stream import Stream

BATCH_TOKENS = 1 << 18  # prepared ahead of the clock, so that a request's tokens have left the cache when it comes
clock = time.process_time_ns


def serve(manager: Any, job: dict[str, Any]) -> dict[str, Any]:
    """A stream of requests, the first `skip` of which only fill the cache; stops where the budget of CPU time ends."""
    stream = Stream(job["stream"], job.get("limit"))
    skip, budget, fill_budget = job.get("skip", 0), job["budget"] * 1e9, job.get("fill_budget", 0) * 1e9
    spent: list[int] = []
    hits: list[int] = []
    total = filling = 0
    for numbers in batches(stream):
        tokens = [manager.prepare(stream.prompt(number), stream.output(number)) for number in numbers]
        for number, request in zip(numbers, tokens, strict=True):
            start = clock()
            hit = manager.serve(request)
            taken = clock() - start
            if number < skip:
                filling += taken
                if filling > fill_budget:
                    return {"unfinished": number, "filling_s": filling / 1e9}
                continue
            spent.append(taken)
            hits.append(hit)
            total += taken
            if total > budget:
                break
        if total > budget:
            break
    return {
        "ns": spent,
        "hits": hits,
        "num_tokens": stream.num_prompt_tokens()[skip : skip + len(spent)].tolist(),
        "num_requests": stream.num - skip,
    }


def decode(manager: Any, job: dict[str, Any]) -> dict[str, Any]:
    """All requests of a stream decode at once, one token a step."""
    stream = Stream(job["stream"])
    requests = [
        manager.begin(manager.prepare(stream.prompt(number), stream.output(number))) for number in range(stream.num)
    ]
    rows = [stream.output(number) for number in range(stream.num)]
    num_steps = len(rows[0])
    spent: list[int] = []
    total = 0
    for step in range(num_steps):
        tokens = [int(row[step]) for row in rows]
        start = clock()
        manager.step(requests, tokens)
        spent.append(clock() - start)
        total += spent[-1]
        if total > job["budget"] * 1e9:
            break
    start = clock()
    for request in requests:
        manager.end(request)
    return {"ns": spent, "end_ns": clock() - start, "num_decoding": stream.num, "num_requests": num_steps}


def match(manager: Any, job: dict[str, Any]) -> dict[str, Any]:
    """The first `skip` requests are served; the others wait, and all are matched in every step."""
    stream = Stream(job["stream"])
    for number in range(job["skip"]):
        manager.serve(manager.prepare(stream.prompt(number), stream.output(number)))
    waiting = [
        manager.wait(manager.prepare(stream.prompt(number), stream.output(number)))
        for number in range(job["skip"], stream.num)
    ]
    spent: list[int] = []
    hits: list[int] = []
    for _ in range(job["steps"]):
        start = clock()
        hits = [manager.match(request) for request in waiting]
        spent.append(clock() - start)
        if sum(spent) > job["budget"] * 1e9:
            break
    return {"ns": spent, "hits": hits, "num_waiting": len(waiting), "num_requests": job["steps"]}


def convert(manager: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Microseconds a request for each form that a manager's tokens can be made into, from lists that are cold."""
    stream = Stream(job["stream"], job["limit"])
    return {"forms": {name: _converted(stream, make) / stream.num for name, make in manager.conversions.items()}}


def floor(manager: Any, job: dict[str, Any]) -> dict[str, Any]:
    """The least that a cache can do: compare what is cached, and keep one copy of the rest, 4 bytes a token."""
    stream = Stream(job["stream"], len(job["hits"]))
    kept: deque[bytearray] = deque()
    left = job["num_tokens"] * 4
    spent: list[int] = []
    for numbers in batches(stream):
        tokens = [(stream.prompt(number).tobytes(), stream.output(number).tobytes()) for number in numbers]
        cached = [prompt[: 4 * job["hits"][number]] for number, (prompt, _) in zip(numbers, tokens, strict=True)]
        for prefix, (prompt, output) in zip(cached, tokens, strict=True):
            start = clock()
            assert prompt.startswith(prefix)
            suffix = bytearray(memoryview(prompt)[len(prefix) :])
            suffix += output
            spent.append(clock() - start)
            kept.append(suffix)
            left -= len(suffix)
            while left < 0:
                left += len(kept.popleft())
    return {"ns": spent}


JOBS: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "serve": serve,
    "decode": decode,
    "match": match,
    "convert": convert,
    "floor": floor,
}


def batches(stream: Stream) -> Iterator[range]:
    """The numbers of the requests, in runs of about BATCH_TOKENS."""
    start = num_tokens = 0
    for number, num in enumerate(stream.num_prompt_tokens().tolist()):
        num_tokens += num
        if num_tokens >= BATCH_TOKENS or number == stream.num - 1:
            yield range(start, number + 1)
            start, num_tokens = number + 1, 0


def _converted(stream: Stream, make: Callable[[list[int]], object]) -> float:
    spent = 0
    for numbers in batches(stream):
        lists = [(stream.prompt(number).tolist(), stream.output(number).tolist()) for number in numbers]
        for prompt, output in lists:
            start = clock()
            make(prompt)
            make(output)
            spent += clock() - start
    return spent / 1000


def run(kinds: dict[str, type], job: dict[str, Any]) -> dict[str, Any]:
    gc.collect()
    gc.freeze()  # as servers do once they are loaded: what was imported is not walked by each collection
    pauses = [0]
    started = [0]

    def pause(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            started[0] = clock()
        else:
            pauses.append(clock() - started[0])

    before = _resident()
    manager = kinds[job["manager"]](job["num_blocks"], job["block_size"], job["max_tokens"], job["max_running"])
    gc.callbacks.append(pause)
    result = JOBS[job["job"]](manager, job)
    result["resident_bytes"] = _resident() - before
    gc.callbacks.remove(pause)
    result["worst_pause_ms"] = max(pauses) / 1e6
    start = clock()
    gc.collect()
    result["full_collection_ms"] = (clock() - start) / 1e6
    return {**result, "note": manager.note}


def _resident() -> int:
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")  # shared: the streams' files


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a manager prints is no answer
    kinds = importlib.import_module(sys.argv[1]).MANAGERS
    print(json.dumps({name: {"name": kind.name, "form": kind.form} for name, kind in kinds.items()}), file=answers)
    answers.flush()
    for line in sys.stdin:
        if not (child := os.fork()):
            try:
                answer = run(kinds, json.loads(line))
            except BaseException as error:
                traceback.print_exc()
                answer = {"failed": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers)
            answers.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:  # killed
            print(json.dumps({"failed": f"ended by signal {status & 127}"}), file=answers)
            answers.flush()


if __name__ == "__main__":
    main()
