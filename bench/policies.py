"""Which order of eviction hits most, and what it costs: LRU, ARC and "reuse" beside the optimum, on real traces.

    python bench/policies.py [--repeats 3] [--plot FILE]

Hits are shares of all blocks of the prompts, in %; "bypass" is "reuse" where requests run beside the cache. Costs are
CPU time of the process: what a request takes, the least of some repeats one after the other; the slowest request; and
what "reuse" keeps in memory beside LRU's, at the end of the trace. Below, the first trace with many requests at once.
`--plot` draws it.
"""

import argparse
import gc
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Sequence

import numpy as np
from card import TRACES, card, finish

from radixkv import OutOfBlocksError, PrefixCache, Request
from radixkv.curve import Curve
from radixkv.plot import save
from radixkv.replay import packed_ids, replay, replayed
from radixkv.report import charts
from radixkv.tokens import TOKEN_BYTES
from radixkv.trace import Trace, read_trace

CAPACITIES = {
    "mooncake_conversation.jsonl.gz": (1000, 3000, 5000, 10_000, 30_000),
    "mooncake_synthetic.jsonl.gz": (1000, 3000, 5000, 10_000),
    "coding_agents_merged60.blk64.jsonl.gz": (4000, 8000, 16_000, 32_000),
}
RUNNING = 64
DRAWN = (500, 1000, 2000, 3000, 5000, 7000, 10_000, 15_000, 20_000, 30_000, 50_000)
POLICIES = ("arc", "reuse")
COLUMNS = ("lru", "arc", "reuse", "bypass", "optimum", "lru us", "arc us", "reuse us", "slowest ms", "KiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plot", metavar="FILE")
    arguments = parser.parse_args()
    result = card("Orders of eviction", input="public traces, one request after the other")
    rows = []
    print(f"{'trace':<24}{'blocks':>8}" + "".join(f"{name:>11}" for name in COLUMNS))
    for file, capacities in CAPACITIES.items():
        if not (TRACES / file).exists():
            print(f"{file}: missing, no {TRACES / file}", file=sys.stderr)
            continue
        trace = read_trace(TRACES / file)
        curve = Curve(trace)
        for capacity in capacities:
            row = {**hits(trace, curve, capacity), **costs(trace, capacity, arguments.repeats)}
            rows.append({"trace": file, "capacity_blocks": capacity, **row})
            cells = "".join(f"{row[name]:>11,.0f}" if name == "KiB" else f"{row[name]:>11.2f}" for name in COLUMNS)
            print(f"{file.split('.')[0]:<24}{capacity:>8,}{cells}", flush=True)
        if file == next(iter(CAPACITIES)):
            crowd = side_by_side(trace, capacities[1], RUNNING)
            if arguments.plot:
                draw(trace, curve, file, arguments.plot)
    if rows:
        shown = ", ".join(f"{name} {share:.2f}" for name, share in crowd.items())
        print(f"\n{RUNNING} requests of the first trace at once, {rows[1]['capacity_blocks']:,} blocks: {shown}")
        result["side_by_side"] = crowd
    finish({**result, "rows": rows})


def side_by_side(trace: Trace, capacity: int, num_running: int) -> dict[str, float]:
    """Hits in % of so many requests at once, each cut so that all fit; "estimate" is what LRU was said to hit."""
    shares = {}
    for policy in ("lru", "reuse"):
        cache = PrefixCache(capacity, 1, policy=policy)
        running = deque()
        num_hit = num_asked = 0
        for request in trace.requests:
            path = packed_ids(request.runs)[: capacity // num_running * TOKEN_BYTES]
            while True:
                try:
                    running.append(cache.allocate(path, min_prefill_tokens=0))
                    break
                except OutOfBlocksError:
                    end(cache, running.popleft())
            num_hit += running[-1].num_cached_tokens
            num_asked += len(path) // TOKEN_BYTES
            if len(running) > 1:
                cache.commit(running[-2])
            if len(running) > num_running:
                end(cache, running.popleft())
        shares[policy] = 100 * num_hit / num_asked
    stats = cache.policy.stats
    return {**shares, "estimate": 100 * stats.lru_hit_blocks / stats.asked_blocks}


def end(cache: PrefixCache, request: Request) -> None:
    cache.commit(request)
    cache.free(request)


def hits(trace: Trace, curve: Curve, capacity: int) -> dict[str, float]:
    def share(num: int) -> float:
        return 100 * num / curve.access_blocks

    found = {policy: share(replay(trace, capacity, policy).hit_blocks) for policy in POLICIES}
    return {
        "lru": share(int(curve.lru_hits(capacity).sum())),
        **found,
        "bypass": share(replay(trace, capacity, "reuse", bypass=True).hit_blocks),
        "optimum": share(int(curve.opt_hits(capacity).sum())),
    }


def costs(trace: Trace, capacity: int, repeats: int) -> dict[str, float]:
    runs = [request.runs if request.path is None else request.path for request in trace.requests]  # type: ignore
    paths = [packed_ids(path)[: capacity * TOKEN_BYTES] for path in runs if path]
    times: dict[str, list[float]] = {"lru": [], "arc": [], "reuse": []}
    slowest = []
    for _ in range(repeats):
        for policy, found in times.items():
            gc.collect()
            cache = PrefixCache(capacity, 1, policy=policy)
            start = time.process_time()
            serve(cache, paths)
            found.append((time.process_time() - start) / len(paths) * 1e6)
        cache, longest = PrefixCache(capacity, 1, policy="reuse"), 0.0
        for path in paths:
            start = time.process_time()
            serve(cache, [path])
            longest = max(longest, time.process_time() - start)
        slowest.append(longest * 1e3)
    memory = {policy: kept(capacity, policy, paths) for policy in ("lru", "reuse")}
    return {
        **{f"{policy} us": min(found) for policy, found in times.items()},
        "slowest ms": min(slowest),
        "KiB": (memory["reuse"] - memory["lru"]) / 1024,
    }


def kept(capacity: int, policy: str, paths: Sequence[bytes]) -> int:
    tracemalloc.start()
    try:
        cache = PrefixCache(capacity, 1, policy=policy)
        serve(cache, paths)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def serve(cache: PrefixCache, paths: Sequence[bytes]) -> None:
    for path in paths:
        end(cache, cache.allocate(path, min_prefill_tokens=0))


def draw(trace: Trace, curve: Curve, name: str, file: str) -> None:
    found = {
        policy: {
            capacity: np.array([hit for _, hit in replayed(trace, capacity, policy)], np.int64) for capacity in DRAWN
        }
        for policy in POLICIES
    }
    save(charts(curve, policies=found, name=f"{name}, {curve.num_requests:,} requests")[:1], file)


if __name__ == "__main__":
    main()
