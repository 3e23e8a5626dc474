"""Time to first token of SmolLM2-135M: without a cache, on a miss, on a hit, and the floor.

    python bench/ttft.py [--tokens 512 1024 2048] [--shared 0.9] [--rounds 7] [--device cuda] [--dtype bfloat16]

Each round runs every case once, in turn, on a fresh prompt of random tokens; the hit shares its beginning with a prompt
that was served before. Ratios are those of medians within one run: of the process's CPU time on a CPU, of wall time
elsewhere. The floor is `generate` on the suffix alone, as if what it shares cost nothing, not even attention.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from card import card, finish

from radixkv.integrations.hf import RadixCache
from radixkv.integrations.smollm2 import load

SEED = 0
CASES = ("no cache", "miss", "hit", "floor")


@dataclass(frozen=True)
class Time:
    """Seconds until the first token, and until the call is over, with the commit."""

    cpu: float
    wall: float
    total_cpu: float
    total_wall: float


class Bench:
    """A model, its cache, and a source of prompts."""

    def __init__(self, device: str, dtype: str, quantize: str | None) -> None:
        self.model = load()[0].to(device, getattr(torch, dtype))
        self.model.generation_config.pad_token_id = self.model.generation_config.eos_token_id
        self.cache = RadixCache(self.model, quantize=quantize)
        self.random = torch.Generator().manual_seed(SEED)

    def prompt(self, num_tokens: int) -> torch.Tensor:
        """Random token ids, (1, num_tokens)."""
        vocabulary = self.model.config.vocab_size
        return torch.randint(100, vocabulary, (1, num_tokens), generator=self.random).to(self.model.device)

    def first_token(self, ids: torch.Tensor, *, cached: bool) -> tuple[Time, int]:
        """Serve one prompt; returns its times and how many of its tokens were cached."""
        mask = torch.ones_like(ids)
        start = self._now()
        if not cached:
            self.model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=1)
            first = end = self._now()
            num_cached = 0
        else:
            with self.cache.session(ids, mask) as session:
                self.model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=1, **session.kwargs)
                first = self._now()
            end = self._now()
            num_cached = session.num_cached_tokens
        return Time(first[0] - start[0], first[1] - start[1], end[0] - start[0], end[1] - start[1]), num_cached

    def _now(self) -> tuple[float, float]:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.process_time(), time.perf_counter()


def measure(bench: Bench, num_tokens: int, share: float, rounds: int) -> dict[str, object]:
    """All cases at one length of prompt, printed as a table."""
    num_shared = int(num_tokens * share)
    shared = bench.prompt(num_shared)
    bench.first_token(shared, cached=True)
    times: dict[str, list[Time]] = {case: [] for case in CASES}
    num_cached = 0
    for round_number in range(rounds + 1):
        fresh, suffix = bench.prompt(num_tokens), bench.prompt(num_tokens - num_shared)
        ids = {"hit": torch.cat([shared, suffix], 1), "floor": suffix}
        for case in CASES[round_number % 4 :] + CASES[: round_number % 4]:
            found, hit = bench.first_token(ids.get(case, fresh), cached=case in ("miss", "hit"))
            if case == "hit":
                num_cached = hit
            if round_number:  # the first one warms up
                times[case].append(found)

    def median(case: str, of: Callable[[Time], float]) -> float:
        return statistics.median(map(of, times[case]))

    on_cpu = bench.model.device.type == "cpu"
    ttft: Callable[[Time], float] = (lambda found: found.cpu) if on_cpu else (lambda found: found.wall)
    total: Callable[[Time], float] = (lambda found: found.total_cpu) if on_cpu else (lambda found: found.total_wall)
    print(f"{num_tokens} tokens, {num_shared} of them shared, {num_cached} cached; medians of {rounds} rounds")
    print(f"{'':10}{'TTFT CPU ms':>13}{'TTFT wall ms':>14}{'call CPU ms':>13}{'call wall ms':>14}{'TTFT / miss':>13}")
    rows = {}
    for case in CASES:
        parts = [1000 * median(case, of) for of in (lambda t: t.cpu, lambda t: t.wall)]
        parts += [1000 * median(case, of) for of in (lambda t: t.total_cpu, lambda t: t.total_wall)]
        ratio = median(case, ttft) / median("miss", ttft)
        print(f"{case:10}{parts[0]:13.1f}{parts[1]:14.1f}{parts[2]:13.1f}{parts[3]:14.1f}{ratio:13.3f}")
        rows[case] = dict(zip(("ttft_cpu_ms", "ttft_wall_ms", "call_cpu_ms", "call_wall_ms"), parts, strict=True))
    # subtle: a pair of one round runs back to back, so its ratio is the least touched by what else the machine does
    pairs = zip(times["miss"], times["no cache"], strict=True)
    overhead = statistics.median(total(miss) / total(plain) for miss, plain in pairs) - 1
    speedup = median("miss", ttft) / median("hit", ttft)
    ceiling = median("miss", ttft) / median("floor", ttft)
    print(f"hit: TTFT 1/{speedup:.2f} of a miss (floor 1/{ceiling:.2f}); miss: {100 * overhead:+.1f} % to no cache\n")
    return {
        "tokens": num_tokens,
        "shared": num_shared,
        "cached": num_cached,
        "speedup": speedup,
        "speedup_of_floor": ceiling,
        "miss_overhead": overhead,
        "cases": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024])
    parser.add_argument("--shared", type=float, default=0.9)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantize", choices=("int8", "fp8"))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else f"cpu, {options.threads} threads"
    result = card(
        "Time to first token with a prefix cache",
        model="SmolLM2-135M-Instruct, 30 layers",
        device=device,
        dtype=options.dtype + (f", K and V as {options.quantize}" if options.quantize else ""),
        seed=SEED,
        input=f"random tokens, {options.shared:.0%} shared with an earlier prompt",
        ceiling=f"1/{1 / (1 - options.shared):.1f} of a miss, if time were proportional to the tokens prefilled",
    )
    bench = Bench(options.device, options.dtype, options.quantize)
    runs = [measure(bench, num_tokens, options.shared, options.rounds) for num_tokens in options.tokens]
    finish(result | {"runs": runs})


if __name__ == "__main__":
    main()
