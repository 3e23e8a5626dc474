"""CPU time of hits at every capacity: reading a trace, the one pass, the optimum, and replay at one capacity beside it.

    python bench/curve.py [--repeats 3] [--lines 0]

CPU seconds of the process, the best of some repeats; the command is a process of its own, its start included. With
`--lines N`, also the memory that reading and the pass take for a file of N requests, a hundredth of them distinct.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from card import TRACES, card, finish

from radixkv.curve import Curve
from radixkv.replay import replay
from radixkv.trace import read_trace

CAPACITIES = (1000, 3000, 5000, 10_000, 30_000, 50_000, 100_000)
FILES = {
    "mooncake_conversation.jsonl.gz": 32,
    "mooncake_synthetic.jsonl.gz": 32,
    "coding_agents_merged60.blk64.jsonl.gz": 32,
    "coding_agents.blk64.jsonl.gz": 100,
}
COLUMNS = ("read", "pass", "curve", "optimum", "command", "replay")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lines", type=int, default=0)
    arguments = parser.parse_args()
    result = card(
        "Hits at every capacity",
        input=f"public traces; optimum at {len(CAPACITIES)} capacities; replay at one, {CAPACITIES[4]:,} blocks",
    )
    rows: dict[str, object] = {}
    print(f"{'CPU seconds':<42}{'requests':>9}{'accesses':>12}" + "".join(f"{name:>9}" for name in COLUMNS))
    for file, concurrency in FILES.items():
        if not (TRACES / file).exists():
            print(f"{file}: missing, no {TRACES / file}", file=sys.stderr)
            continue
        rows[file] = row = measure(TRACES / file, concurrency, arguments.repeats)
        seconds = "".join(f"{row[name]:>9.3f}" for name in COLUMNS)
        print(f"{file:<42}{row['requests']:>9,}{row['accesses']:>12,}{seconds}")
    if arguments.lines:
        rows["memory"] = memory(arguments.lines)
    finish({**result, "rows": rows})


def measure(file: Path, concurrency: int, repeats: int) -> dict[str, float]:
    def best(run: Callable[[], object]) -> float:
        times = []
        for _ in range(repeats):
            start = time.process_time()
            run()
            times.append(time.process_time() - start)
        return min(times)

    trace = read_trace(file, concurrency=concurrency)
    curve = Curve(trace)
    return {
        "requests": curve.num_requests,
        "accesses": curve.access_blocks,
        "read": best(lambda: read_trace(file, concurrency=concurrency)),
        "pass": best(lambda: Curve(trace)),
        "curve": best(curve.lru),
        "optimum": best(lambda: [curve.opt_hits(capacity) for capacity in CAPACITIES]),
        "command": min(command(file, concurrency) for _ in range(repeats)),
        "replay": best(lambda: replay(trace, CAPACITIES[4])),
    }


def command(file: Path, concurrency: int) -> float:
    """CPU seconds of `radixkv curve FILE --at ... --json -`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    at = ",".join(map(str, CAPACITIES))
    arguments = ["curve", str(file), "--at", f"{at},inf", "--concurrency", str(concurrency), "--json", "-"]
    code = "import sys; from radixkv.cli import main; sys.exit(main(sys.argv[1:]))"
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def memory(num_lines: int) -> dict[str, float]:
    """Of a process that reads a file of so many lines and makes the curve."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        distinct = max(1, num_lines // 100)
        with path.open("w") as file:
            for number in range(num_lines):
                ids = [0, *range(20 * (number % distinct) + 1, 20 * (number % distinct) + 20)]
                record = {"timestamp": number, "input_length": 320, "output_length": 99, "hash_ids": ids}
                file.write(json.dumps(record) + "\n")
        code = (
            "import json, resource, sys, time; from radixkv.trace import read_trace; from radixkv.curve import Curve; "
            "trace = read_trace(sys.argv[1], block_size=16); rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
            "Curve(trace).lru(); print(json.dumps({'read_mb': rss / 1024, 'cpu_s': time.process_time(), "
            "'mb': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))"
        )
        done = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True)
        row: dict[str, float] = {
            "lines": num_lines,
            "file_mb": os.path.getsize(path) / 2**20,
            **json.loads(done.stdout),
        }
    print(
        f"\n{num_lines:,} lines, {row['file_mb']:,.0f} MB: at most {row['read_mb']:,.0f} MB to read, "
        f"{row['mb']:,.0f} MB with the curve; {row['cpu_s']:.1f} s of CPU"
    )
    return row


if __name__ == "__main__":
    main()
