"""An index of many workers' caches beside Dynamo's: CPU time to apply events and to match, and memory.

    make .peers/dynamo                                  the peer's environment, else its rows are missing
    python bench/router.py [--workers 1 8 64] [--sessions 512] [--quick]

Sessions on 1 to 64 workers behind one system prompt of 1,024 tokens grow by 512 tokens a turn; each prompt is matched
before its turn is stored; at the end half of the sessions are evicted. Tokens come as lists in both, as JSON or msgpack
has them. Events are in memory already: objects here, JSON there, whose tokens are hashed in the time that is shown, as
the relay between engine and tree does. Environment: RADIXKV_PEERS names the folder with `dynamo`, default .peers.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from card import ROOT, card, finish
from router_steps import Step, Times, chats, resident_bytes

from radixkv.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, decode, encode
from radixkv.router import PrefixIndex
from radixkv.tokens import pack

BLOCK_SIZE = 16
PEER = Path(os.environ.get("RADIXKV_PEERS", ROOT / ".peers")) / "dynamo" / "bin" / "python"
SHAPE = {"block_size": BLOCK_SIZE, "system": 1024, "turn": 512, "turns": 8, "seed": 0}
COLUMNS = ("decode", "store", "remove", "match", "match packed")
clock = time.process_time_ns


def event_of(step: Step, block_size: int) -> Event:
    if step["kind"] == "store":
        return BlockStored(step["hashes"], step["parent"], step["tokens"], block_size)
    return BlockRemoved(step["hashes"]) if step["kind"] == "remove" else AllBlocksCleared()


def run(path: Path, block_size: int, answers: Path) -> dict[str, Any]:
    """The steps through a `PrefixIndex`: the CPU time of each kind of step, and bytes; what matches found to a file."""
    PrefixIndex(block_size).match([1] * block_size)  # what is imported on first use
    index = PrefixIndex(block_size)
    times = Times()
    before = resident_bytes()
    with path.open() as file, answers.open("w") as found:
        for line in file:
            step = json.loads(line)
            if step["kind"] == "match":
                start = clock()
                answer = index.match(step["tokens"])
                times.add("match", clock() - start, 1)
                packed = pack(step["tokens"])
                start = clock()
                index.match(packed)
                times.add("match packed", clock() - start, 1)
                print(json.dumps({str(worker): num for worker, num in answer.items()}, sort_keys=True), file=found)
                continue
            num = len(step.get("hashes", ()))
            event = event_of(step, block_size)
            message = encode(EventBatch(0.0, [event]))
            start = clock()
            decode(message)
            times.add("decode", clock() - start, num)
            start = clock()
            index.apply(step["worker"], [event])
            times.add(step["kind"], clock() - start, num)
    return {"times": times.means(), "bytes": resident_bytes() - before}


def measure(who: str, path: Path, answers: Path) -> dict[str, Any] | None:
    """In a process of its own, None where the peer is missing."""
    if who == "dynamo" and not PEER.exists():
        return None
    python, script = (str(PEER), "peer_dynamo_index.py") if who == "dynamo" else (sys.executable, "router.py")
    options = [str(path), str(BLOCK_SIZE), str(answers)] if who == "dynamo" else ["--run", str(path), str(answers)]
    done = subprocess.run(
        [python, str(Path(__file__).with_name(script)), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{who} failed: {done.stderr.strip()}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--sessions", type=int, default=512)
    parser.add_argument("--quick", action="store_true", help="few sessions, to see that all runs")
    parser.add_argument("--run", type=Path, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        path, answers = arguments.run
        print(json.dumps(run(path, BLOCK_SIZE, answers)))
        return
    num_sessions = 64 if arguments.quick else arguments.sessions
    facts = card(
        "an index of many workers' caches",
        sessions=f"{num_sessions} of {SHAPE['turns']} turns of {SHAPE['turn']} tokens behind {SHAPE['system']}",
        seed=SHAPE["seed"],
        clock="CPU time of the process; us a block stored or removed, us a match",
    )
    rows = []
    print("| workers | index   | decode | store | remove | match, list | match, packed | bytes a block of a worker |")
    print("| ------: | :------ | -----: | ----: | -----: | ----------: | ------------: | ------------------------: |")
    with tempfile.TemporaryDirectory(prefix="radixkv-router-") as folder:
        for num_workers in arguments.workers:
            path = Path(folder) / "steps"
            num_held = 0
            with path.open("w") as file:
                for step in chats(num_workers, num_sessions, **SHAPE):
                    num_held += len(step.get("hashes", ())) * (1 if step["kind"] == "store" else 0)
                    print(json.dumps(step), file=file)
            found = []
            for who in ("radixkv", "dynamo"):
                answers = Path(folder) / who
                result = measure(who, path, answers)
                if result is None:
                    print(f"| {num_workers} | {who} | missing: no {PEER}")
                    continue
                found.append(answers.read_text())
                cells = [f"{result['times'][name]:.2f}" if name in result["times"] else "" for name in COLUMNS]
                padded = [cell.rjust(width) for cell, width in zip(cells, (6, 5, 6, 11, 13), strict=True)]
                size = f"{result['bytes'] / num_held:.0f}"
                print(f"| {num_workers:7} | {who:7} | {' | '.join(padded)} | {size:>25} |", flush=True)
                rows.append({"workers": num_workers, "index": who, "blocks": num_held, **result})
            assert len(set(found)) == 1, "they do not find the same"
    finish({"card": facts, "rows": rows})


if __name__ == "__main__":
    main()
