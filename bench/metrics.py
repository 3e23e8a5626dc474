"""What metrics cost: CPU time of the cache manager a request without them and with each kind, and of a scrape.

    python bench/metrics.py [--requests 3000] [--rounds 3]

The requests are those of bench/manager.py. In every round each kind has a cache of its own, and each request goes
through all of them before the next one, so that a busy machine slows all kinds alike; the best round counts.
"""

import argparse
from itertools import islice

from card import TRACES, card, finish
from manager import BLOCK_SIZE, SEED, STEPS, clock, conversation, serve, tokens
from prometheus_client import CollectorRegistry, generate_latest

from radixkv import PrefixCache
from radixkv.metrics import Metrics

KINDS: dict[str, int | None] = {"counters": None, "sample=1000": 1000, "sample=100": 100, "sample=1": 1}
OFF = "off"


def evicting(num_requests: int) -> list[tuple[bytes, bytes]]:
    """512-token prompts that share 256 with one of 1,000 system prompts, and one token of output."""
    systems = [tokens((SEED, 3, number), 256) for number in range(1000)]
    return [
        (systems[number * 7919 % 1000] + tokens((SEED, 4, number), 256), tokens((SEED, 6, number), 1))
        for number in range(num_requests)
    ]


def measure(requests: list[tuple[bytes, bytes]], num_blocks: int, rounds: int) -> tuple[dict[str, float], float]:
    """Microseconds a request by kind, and of a scrape of all kinds, which must not change what is hit."""
    best = dict.fromkeys([OFF, *KINDS], float("inf"))
    scrape = float("inf")
    for _ in range(rounds):
        registry = CollectorRegistry()
        metrics = Metrics(registry)
        caches = {kind: PrefixCache(num_blocks, BLOCK_SIZE) for kind in best}
        for kind, sample in KINDS.items():
            metrics.watch(caches[kind], kind, sample=sample)
        times: dict[str, list[list[int]]] = {kind: [[] for _ in STEPS] for kind in caches}
        order = list(caches)
        for prompt, output in requests:
            order.append(order.pop(0))  # the first one reads the prompt from memory
            for kind in order:
                serve(caches[kind], prompt, output, times[kind])
        assert len({(cache.stats.hit_tokens, cache.stats.evicted_blocks) for cache in caches.values()}) == 1
        for kind, spent in times.items():
            best[kind] = min(best[kind], sum(map(sum, spent)) / len(requests) / 1000)
        start = clock()
        generate_latest(registry)
        scrape = min(scrape, (clock() - start) / 1000)
    return best, scrape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    result = card(
        "Cost of metrics a request",
        input=f"{arguments.requests} requests of mooncake_conversation, and as many made ones; block size {BLOCK_SIZE}",
    )
    loads = {"constant eviction, 512 tokens": (evicting(arguments.requests), 20_000)}
    if (TRACES / "mooncake_conversation.jsonl.gz").exists():
        loads["conversation, 12k tokens"] = list(islice(conversation(arguments.requests), arguments.requests)), 200_000
    print(f"{'us of CPU a request':<32}" + "".join(f"{kind:>13}" for kind in [OFF, *KINDS]) + f"{'a scrape':>13}")
    rows = {}
    for name, (requests, num_blocks) in loads.items():
        best, scrape = measure(requests, num_blocks, arguments.rounds)
        rows[name] = {**best, "scrape": scrape}
        print(f"{name:<32}" + "".join(f"{us:>13.1f}" for us in [*best.values(), scrape]))
    finish({**result, "rows": rows})


if __name__ == "__main__":
    main()
