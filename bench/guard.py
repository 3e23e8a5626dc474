"""Has the manager become slower? A small workload, compared with the committed bench/guard.json.

    make guard                            exit 1 where a part costs over 15 % more than the baseline
    python bench/guard.py --update        measure, and write the baseline
    python bench/guard.py --method ratio

Costs are instructions a request, counted by callgrind or by `perf stat`, whichever is there; they hardly depend on what
else the machine does. Where neither is, they are CPU time against a loop of plain Python that runs in between, which
does. The baseline of another method or another Python is not compared with.
"""

import argparse
import gc
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from radixkv import PrefixCache

BASELINE = Path(__file__).with_name("guard.json")
ALLOWED = 1.15
ROUNDS = 40  # of each part, less those that the shorter run makes as well
RETRIES = 3


def chats(num_rounds: int) -> None:
    """Chats of 6 turns that share system prompts and branch, in a pool that is too small for them."""
    rng = random.Random(0)
    cache = PrefixCache(600, 16)
    systems = [tokens(rng, 256) for _ in range(4)]
    for _ in range(num_rounds):
        context = rng.choice(systems)
        for _ in range(6):
            context += tokens(rng, rng.randrange(20, 100))
            request = cache.allocate(context)
            cache.commit(request)
            output = tokens(rng, rng.randrange(20, 100))
            cache.append(request, output)
            cache.commit(request, request.num_tokens - 1)
            cache.free(request)
            context = context[: -4 * rng.randrange(1, 50)] if rng.random() < 0.2 else context + output


def decoding(num_rounds: int) -> None:
    """8 requests that decode, a token each a step."""
    cache = PrefixCache(2000, 16)
    rng = random.Random(0)
    requests = [cache.allocate(tokens(rng, 100 + number)) for number in range(8)]
    for step in range(num_rounds * 8):
        for request in requests:
            cache.append(request, step)
            if not request.num_tokens % 16:
                cache.commit(request)


def matching(num_rounds: int) -> None:
    """A prompt of 4,000 tokens, of which 3,000 are cached, matched again and again."""
    rng = random.Random(0)
    cache = PrefixCache(1000, 16)
    cached = tokens(rng, 3000)  # subtle: from 4096 tokens on numpy is imported, which never costs the same twice
    request = cache.allocate(cached)
    cache.commit(request)
    cache.free(request)
    prompt = cached + tokens(rng, 1000)
    for _ in range(num_rounds * 6):
        cache.match(prompt)


def stepping(num_rounds: int) -> None:
    """Steps of an engine: 8 requests decode together, while 8 prompts wait, and are asked for and kept."""
    rng = random.Random(0)
    cache = PrefixCache(2000, 16)
    requests = [cache.allocate(tokens(rng, 100 + number)) for number in range(8)]
    system = tokens(rng, 1000)
    request = cache.allocate(system)
    cache.commit(request)
    cache.free(request)
    waiting = [cache.lookup(system + tokens(rng, 500)) for _ in range(8)]
    for step in range(num_rounds * 8):
        cache.decode(requests, [step] * 8)
        for lookup in waiting:
            cache.touch(lookup)
            cache.match(lookup)


PARTS: dict[str, Callable[[int], None]] = {
    "chats": chats,
    "decoding": decoding,
    "matching": matching,
    "stepping": stepping,
}


def tokens(rng: random.Random, num: int) -> bytes:
    """`num` packed tokens."""
    return rng.randbytes(4 * num).translate(_LOW)


_LOW = bytes(byte & 127 for byte in range(256))  # no token is negative


# Three ways to count


def callgrind(part: str) -> float:
    """Instructions a round under valgrind, those of the start taken out."""

    def count(num_rounds: int) -> int:
        out = _run(["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"], part, num_rounds)
        found = re.search(r"Collected : (\d+)", out)
        assert found, f"callgrind said no count:\n{out}"
        return int(found[1])

    return (count(ROUNDS) - count(ROUNDS // 4)) / (ROUNDS - ROUNDS // 4)


def perf(part: str) -> float:
    """Instructions a round by the processor's counter, those of the start taken out."""

    def count(num_rounds: int) -> int:
        out = _run(["perf", "stat", "-x,", "-e", "instructions:u"], part, num_rounds)
        return int(out.strip().splitlines()[-1].split(",")[0])

    return (count(ROUNDS * 10) - count(ROUNDS)) / (9 * ROUNDS)


def ratio(part: str) -> float:
    """CPU time of a part in loops of `reference`, the least of several tries, taken in turns."""
    mine: list[float] = []
    fixed: list[float] = []
    for _ in range(15):
        for function, spent in ((PARTS[part], mine), (reference, fixed)):
            start = time.process_time()
            function(ROUNDS)
            spent.append(time.process_time() - start)
    return min(mine) / min(fixed)


def reference(num_rounds: int) -> None:
    """What no change of radixkv touches: calls, dicts, slices and copies of bytes."""
    text = bytes(range(256)) * 64
    table: dict[bytes, int] = {}
    for number in range(num_rounds * 100):
        start = number % 128
        key = text[start : start + 64]
        table[key] = table.get(key, 0) + len(key)
        text.startswith(bytearray(text[:4096]))


METHODS: dict[str, Callable[[str], float]] = {"callgrind": callgrind, "perf": perf, "ratio": ratio}


def available() -> str:
    """The best method that this machine has."""
    if shutil.which("valgrind"):
        return "callgrind"
    if shutil.which("perf"):
        command = ["perf", "stat", "-x,", "-e", "instructions:u", "true"]
        if re.match(r"\d", subprocess.run(command, capture_output=True, text=True).stderr):
            return "perf"
    return "ratio"


def _run(tool: list[str], part: str, num_rounds: int) -> str:
    """What `tool` says of a run of this file; hashes are fixed, so that dicts are walked in the same order."""
    command = [*tool, sys.executable, __file__, "--run", part, "--rounds", str(num_rounds)]
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stderr


def guard(method: str) -> bool:
    """Print each part beside its baseline; whether all are within bounds."""
    key = f"{method}, {python()}"
    baseline = json.loads(BASELINE.read_text()).get(key) if BASELINE.exists() else None
    if baseline is None:
        print(f"guard: no baseline for {key} in {BASELINE.name}; nothing compared")
        return True
    slower = []
    for part in PARTS:
        cost = METHODS[method](part)
        for _ in range(RETRIES if method == "ratio" else 0):  # a slower try proves nothing on a busy machine
            if cost <= ALLOWED * baseline[part]:
                break
            cost = min(cost, METHODS[method](part))
        change = cost / baseline[part] - 1
        print(f"{part:<10}{cost:>14,.2f}{baseline[part]:>14,.2f}{change:>+9.1%}")
        if change > ALLOWED - 1:
            slower.append(part)
    verdict = f"slower by more than 15 %: {', '.join(slower)}" if slower else "no part is slower by more than 15 %"
    print(f"guard: {verdict} ({key})")
    return not slower


def python() -> str:
    return f"{platform.python_implementation()} {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=list(METHODS), help="default: the best that this machine has")
    parser.add_argument("--update", action="store_true", help="measure by every method there is; write the baseline")
    parser.add_argument("--run", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        gc.freeze()  # else it is chance which run has one more collection of all that was imported
        PARTS[arguments.run](arguments.rounds)
    elif arguments.update:
        known = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
        for method in dict.fromkeys((arguments.method or available(), "ratio")):
            known[f"{method}, {python()}"] = {part: round(METHODS[method](part), 2) for part in PARTS}
        BASELINE.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
    elif not guard(arguments.method or available()):
        sys.exit(1)


if __name__ == "__main__":
    main()
