"""CPU time of the cache manager a request, and where it goes.

    python bench/manager.py [--requests 3000] [--leaves 100000]

Conversation requests are those of the Mooncake trace, each block id expanded to 512 tokens that are seeded by the
id; a request is allocated, its prompt committed, its output appended in one piece, committed but for the last
token, and freed. CPU time of the manager's calls alone, measured by the thread's clock.
"""

import argparse
import gc
import gzip
import json
import sys
import time
import tracemalloc
from array import array
from collections.abc import Iterator

import numpy as np
from card import TRACES, card, finish, quantiles

from radixkv import PrefixCache

BLOCK_SIZE = 16
SEED = 0
VOCABULARY = 150_000
STEPS = ("allocate", "commit prompt", "append output", "commit output", "free")
clock = time.thread_time_ns


def conversation(num_requests: int) -> Iterator[tuple[bytes, bytes]]:
    """(prompt, output) as packed tokens."""
    with gzip.open(TRACES / "mooncake_conversation.jsonl.gz", "rt") as file:
        for number, line in enumerate(file):
            if number == num_requests:
                return
            record = json.loads(line)
            blocks = [tokens((SEED, 1, block), 512) for block in record["hash_ids"]]
            yield b"".join(blocks)[: 4 * record["input_length"]], tokens((SEED, 2, number), record["output_length"])


def tokens(seed: tuple[int, ...], num: int) -> bytes:
    return np.random.default_rng(seed).integers(0, VOCABULARY, num, np.int32).tobytes()


def serve(cache: PrefixCache, prompt: object, output: object, times: list[list[int]], **options: bool) -> int:
    """One request's life, nanoseconds of each step added to `times`; returns the tokens that were cached."""
    start = clock()
    request = cache.allocate(prompt, **options)  # type: ignore[arg-type]
    allocated = clock()
    cache.commit(request)
    committed = clock()
    cache.append(request, output)  # type: ignore[arg-type]
    appended = clock()
    cache.commit(request, request.num_tokens - 1)
    published = clock()
    cache.free(request)
    freed = clock()
    ends = (allocated, committed, appended, published, freed)
    for step, end in zip(times, ends, strict=True):
        step.append(end - start)
        start = end
    return request.num_cached_tokens


def floor_us(requests: list[tuple[bytes, bytes]], hits: list[int]) -> float:
    """The least that a manager in Python can do: compare what is cached, copy the rest once."""
    cached = [prompt[: 4 * hit] for (prompt, _), hit in zip(requests, hits, strict=True)]
    spent = 0
    for (prompt, output), prefix in zip(requests, cached, strict=True):
        start = clock()
        assert prompt.startswith(prefix)
        bytearray(memoryview(prompt)[len(prefix) :])
        bytearray(output)
        spent += clock() - start
    return spent / len(requests) / 1000


def report(name: str, times: list[list[int]]) -> dict[str, float]:
    total = quantiles([sum(steps) / 1000 for steps in zip(*times, strict=True)])
    print(f"{name:<46}" + "".join(f"{total[key]:>9.1f}" for key in ("mean", "median", "p90", "p99", "max")))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--leaves", type=int, default=100_000)
    arguments = parser.parse_args()
    result = card(
        "Cost of the cache manager a request",
        input=f"first {arguments.requests} requests of mooncake_conversation, block size {BLOCK_SIZE}, seed {SEED}",
    )
    rows: dict[str, object] = {}
    heading = "us of CPU a request"
    print(f"{heading:<46}" + "".join(f"{key:>9}" for key in ("mean", "median", "P90", "P99", "max")))
    if (TRACES / "mooncake_conversation.jsonl.gz").exists():
        rows.update(conversation_rows(arguments.requests))
    else:
        print(f"conversation: missing, no {TRACES / 'mooncake_conversation.jsonl.gz'}", file=sys.stderr)
    rows.update(eviction_row(1000), **eviction_row(arguments.leaves))
    rows["bytes_per_leaf"] = memory(20_000)
    finish({**result, "rows": rows})


def conversation_rows(num_requests: int) -> dict[str, object]:
    requests = list(conversation(num_requests))
    rows: dict[str, object] = {}
    for num_blocks in (200_000, 1_000_000):
        cache = PrefixCache(num_blocks, BLOCK_SIZE)
        times: list[list[int]] = [[] for _ in STEPS]
        hits = [serve(cache, prompt, output, times) for prompt, output in requests]
        name = f"packed tokens, {num_blocks:,} blocks"
        rows[name] = {
            **report(name, times),
            "hit_rate": cache.stats.hit_rate,
            "steps": {step: sum(spent) / len(spent) / 1000 for step, spent in zip(STEPS, times, strict=True)},
        }
        where = ", ".join(f"{step} {us:.1f}" for step, us in rows[name]["steps"].items())  # type: ignore[index]
        print(f"    of which {where}; {cache.stats.hit_rate:.1%} of the tokens hit")
    rows["floor"] = floor_us(requests, hits)
    print(f"{'floor: compare the hit, copy the rest once':<46}{rows['floor']:>9.1f}")

    cache = PrefixCache(num_blocks, BLOCK_SIZE)
    times = [[] for _ in STEPS]
    for prompt, output in requests:
        serve(cache, prompt, output, times, cacheable=False)
    rows["cache off"] = report("cache switched off (cacheable=False)", times)

    cache = PrefixCache(num_blocks, BLOCK_SIZE)
    times = [[] for _ in STEPS]
    conversion = []
    for prompt, output in requests:
        prompt_list, output_list = array("i", prompt).tolist(), array("i", output).tolist()
        start = clock()
        array("i", prompt_list), array("i", output_list)
        conversion.append((clock() - start) / 1000)
        prompt_list, output_list = array("i", prompt).tolist(), array("i", output).tolist()  # cold again
        serve(cache, prompt_list, output_list, times)
    name = f"lists of ints, {num_blocks:,} blocks"
    rows[name] = report(name, times)
    rows["array of a list"] = sum(conversion) / len(conversion)
    print(f"{'    of the same lists, array(...) alone':<46}{rows['array of a list']:>9.1f}")
    return rows


def eviction_row(num_leaves: int, num_steps: int = 20_000) -> dict[str, object]:
    """512-token prompts that share 256 with one of 1,000 system prompts, in a pool that is full."""
    systems = [tokens((SEED, 3, number), 256) for number in range(1000)]
    cache = PrefixCache((num_leaves + len(systems)) * 256 // BLOCK_SIZE, BLOCK_SIZE)
    spent = []
    for number in range(num_leaves + num_steps):
        prompt = systems[number * 7919 % 1000] + tokens((SEED, 4, number), 256)
        start = clock()
        request = cache.allocate(prompt)
        cache.commit(request)
        cache.free(request)
        if number >= num_leaves:
            spent.append(clock() - start)
    assert cache.stats.evicted_blocks > num_steps
    name = f"constant eviction, {num_leaves:,} leaves"
    row: dict[str, object] = dict(report(name, [spent]))
    gc.collect()
    start = clock()
    gc.collect()
    row["full_collection_ms"] = (clock() - start) / 1e6
    print(f"    a full garbage collection with that tree alive: {row['full_collection_ms']:.1f} ms of CPU")
    return {name: row}


def memory(num_leaves: int) -> float:
    """Bytes a 64-token leaf beyond its tokens, in a tree of leaves under one root."""
    tracemalloc.start()
    cache = PrefixCache(num_leaves * 4, BLOCK_SIZE)
    before = tracemalloc.get_traced_memory()[0]
    for number in range(num_leaves):
        request = cache.allocate(number.to_bytes(4, "little") + tokens((SEED, 5), 63))
        cache.commit(request)
        cache.free(request)
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    beyond = used / num_leaves - 64 * 4
    print(f"\nmemory: {beyond:.0f} bytes a leaf of 64 tokens, beyond its tokens' 256")
    return beyond


if __name__ == "__main__":
    main()
