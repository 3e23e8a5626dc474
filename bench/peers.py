"""The same requests through radixkv and the prefix caches of other engines, side by side in one run.

    make peers                                              the others, each in an environment under .peers/
    python bench/peers.py [--quick] [--workloads a b ...] [--managers radixkv vllm ...]
    python bench/peers.py --write docs/benchmarks.md        run, then put tables and plots into the page
    python bench/peers.py --read run.json --write PAGE      put in what an earlier run's last line said

A request's life through each manager's own calls: match all but the last token, pin, make room, take blocks for the
suffix and for the output, publish both, give back duplicates and tail, unpin. CPU time of these calls alone; tokens
come in the form that the manager takes, made before. No manager writes a tensor. A whole run takes 15 to 25 minutes.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import numpy as np
import peer_workloads as workloads
from card import ROOT, card, finish, quantiles

BLOCK_SIZE = 16
ENVIRONMENTS = {  # module of bench/ -> the Python that it runs in
    "peer_radixkv": Path(sys.executable),
    "peer_sglang": ROOT / ".peers/sglang/bin/python",
    "peer_vllm": ROOT / ".peers/vllm/bin/python",
    "peer_dynamo": ROOT / ".peers/dynamo/bin/python",
}
MODULES = {
    "radixkv": "peer_radixkv",
    "radixkv-lists": "peer_radixkv",
    "radixkv-lookup": "peer_radixkv",
    "sglang-rust": "peer_sglang",
    "sglang-radix": "peer_sglang",
    "vllm": "peer_vllm",
    "vllm-xxhash": "peer_vllm",
    "dynamo": "peer_dynamo",
}
SETTINGS = {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
WHOLE = ("radixkv", "sglang-rust", "sglang-radix", "vllm")  # managers that have blocks, and evict
INDEX = "dynamo"
Row = dict[str, Any]


class Missing(Exception):
    """A manager cannot be run here; the message says why."""


class Worker:
    """One module's process in its own environment; each job runs in a fork of it."""

    def __init__(self, module: str, log: Path) -> None:
        python = ENVIRONMENTS[module]
        if not python.exists():
            raise Missing(f"missing: no {python.relative_to(ROOT)}, see `make peers`")
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [python, Path(__file__).with_name("peer_run.py"), module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **SETTINGS},
            )
        first = self._answers().readline()
        if not first:
            raise Missing(f"missing: {log.read_text().strip().splitlines()[-1]}")
        self.kinds = json.loads(first)

    def ask(self, job: Row) -> Row:
        print(json.dumps(job), file=self.process.stdin, flush=True)
        line = self._answers().readline()
        answer: Row = json.loads(line) if line else {"failed": "its process ended"}
        return answer

    def close(self) -> None:
        self.process.communicate()

    def _answers(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout


class Bench:
    """Asks managers to do jobs, keeps what they answer as tables, curves and facts."""

    def __init__(self, folder: Path, managers: Sequence[str], *, quick: bool) -> None:
        self.folder = folder
        self.managers = managers
        self.quick = quick
        self.workers: dict[str, Worker | Missing] = {}
        self.tables: dict[str, Row] = {}
        self.curves: dict[str, Any] = {}
        self.facts: dict[str, float] = {}

    def pick(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def stream(self, name: str, write: Callable[..., Path], *sizes: int) -> Path:
        return write(self.folder / name, *sizes)

    def ask(self, manager: str, job: str, stream: Path, **options: Any) -> Row:
        """One job of one manager: its answer, {"missing": why} or {"failed": why}."""
        module = MODULES[manager]
        if module not in self.workers:
            try:
                self.workers[module] = Worker(module, self.folder / f"{module}.log")
            except Missing as why:
                self.workers[module] = why
        worker = self.workers[module]
        if isinstance(worker, Missing):
            return {"manager": manager, "name": manager, "form": "", "missing": str(worker)}
        settings = {"num_blocks": 1000, "block_size": BLOCK_SIZE, "max_tokens": 1 << 17, "max_running": 2, "budget": 20}
        start = time.monotonic()
        answer = worker.ask({"manager": manager, "job": job, "stream": str(stream), **settings, **options})
        seconds = time.monotonic() - start
        if job not in ("convert", "floor"):
            size = f"{len(answer['ns']):,} measured" if "ns" in answer else answer.get("failed", "unfinished")
            print(f"  {manager}: {stream.name}, {size}, {seconds:.0f} s", file=sys.stderr)
        return {"manager": manager, **worker.kinds[manager], **answer}

    def compare(self, among: Iterable[str], job: str, stream: Path, **options: Any) -> dict[str, Row]:
        """The same job of several managers, radixkv first."""
        chosen = [manager for manager in among if manager == "radixkv" or manager in self.managers]
        return {manager: self.ask(manager, job, stream, **options) for manager in chosen}

    def table(self, letter: str, title: str, columns: Sequence[str], rows: list[list[str]], notes: list[str]) -> None:
        self.tables[letter] = {"title": title, "columns": list(columns), "rows": rows, "notes": notes}
        print(markdown(self.tables[letter]), flush=True)

    def close(self) -> None:
        for worker in self.workers.values():
            if isinstance(worker, Worker):
                worker.close()


# The workloads


def conversation(bench: Bench) -> None:
    """(a) conversations"""
    if not workloads.TRACE.exists():
        print(f"(a) missing: no {workloads.TRACE.name}", file=sys.stderr)
        return
    num, first = bench.pick(12_031, 200), bench.pick(3_000, 100)
    stream = bench.stream("conversation", workloads.conversation, num)
    sizes = (200_000, 1_000_000, 3_000_000) if not bench.quick else (20_000,)
    among = ("radixkv", "radixkv-lists", "sglang-rust", "sglang-radix", "vllm", "vllm-xxhash", INDEX)
    rows, notes = [], []
    for num_blocks in sizes:
        main = num_blocks == sizes[len(sizes) // 2]
        chosen = among if main else WHOLE
        answers = bench.compare(chosen, "serve", stream, num_blocks=num_blocks, budget=60)
        for answer in answers.values():
            rows.append([f"{num_blocks:,}", answer["name"], *cells(answer, answers, first=first)])
            notes += explain(answer, answers, f"{num_blocks:,} blocks")
        for part, size in (("first", first), ("all", None)):
            ratios(bench, f"a {part} {num_blocks}", answers, size)
        ours = answers["radixkv"]
        bench.facts[f"a growth {num_blocks}"] = mean(ours) / mean(ours, len(ours["ns"]) // 4)
        if main:
            bench.curves["bars"] = {**bench.curves.get("bars", {}), "(a) conversations": means(answers)}
            hits, tokens = ours["hits"], num_blocks * BLOCK_SIZE
            floor = bench.ask("radixkv", "floor", stream, hits=hits, num_tokens=tokens)
            name = "floor: compare what is cached, keep one copy of the rest"
            rows.append(["", name, *cells(floor, {}, first=first)])
            bench.facts["a floor first"] = mean(ours, first) / mean(floor, first)
            bench.facts["a floor all"] = mean(ours) / mean(floor)
            convert(bench, "a", stream, answers, first, rows)
    columns = ("blocks", "manager", "requests", f"first {first:,}", *QUANTILES, "x radixkv", "hit tokens")
    title = f"(a) {num:,} requests of the Mooncake conversation trace, block size 16, us of CPU a request"
    bench.table("a", title, columns, rows, notes)


def convert(bench: Bench, key: str, stream: Path, answers: dict[str, Row], first: int, rows: list[list[str]]) -> None:
    """What each form of tokens costs from lists that are cold, and the cheapest of the ways to bytes."""
    limit = min(first, 1000)
    forms: dict[str, float] = {}
    for manager in ("radixkv", "sglang-rust"):
        if manager in answers and "ns" in answers[manager]:
            forms |= bench.ask(manager, "convert", stream, limit=limit)["forms"]
    for name, spent in forms.items():
        blank = ["" for _ in QUANTILES[1:]]
        rows.append(["", f"list[int] to {name}, alone", f"{limit:,}", "", f"{spent:,.1f}", *blank, "", ""])
    lists = answers.get("radixkv-lists", {})
    if "ns" in lists:
        cheapest = min(spent for name, spent in forms.items() if "bytes" in name)
        bench.facts[f"{key} lists"] = mean(lists, limit) / cheapest


def leaves(bench: Bench) -> None:
    """(b) constant eviction"""
    sizes = (1_000, 10_000, 100_000, 1_000_000) if not bench.quick else (500, 2_000)
    steps = bench.pick(20_000, 500)
    num_systems = bench.pick(1_000, 100)
    stream = bench.stream("leaves", workloads.leaves, sizes[-1] + steps, num_systems)
    rows, notes = [], []
    for num_leaves in sizes:
        among = [manager for manager in WHOLE if num_leaves <= 100_000 or manager != "sglang-radix"]
        answers = bench.compare(
            among,
            "serve",
            stream,
            num_blocks=(num_leaves + num_systems) * 256 // BLOCK_SIZE,
            skip=num_leaves,
            limit=num_leaves + steps,
            budget=10,
            fill_budget=300,
        )
        for answer in answers.values():
            pause = f"{answer['worst_pause_ms']:.1f}" if "ns" in answer else ""
            size = f"{answer['resident_bytes'] / num_leaves:,.0f}" if "ns" in answer else ""
            rows.append([f"{num_leaves:,}", answer["name"], *cells(answer, answers), pause, size])
            notes += explain(answer, answers, f"{num_leaves:,} leaves")
        ratios(bench, f"b {num_leaves}", answers)
        curve = bench.curves.setdefault("leaves", {})
        for manager, value in means(answers).items():
            curve.setdefault(manager, []).append([num_leaves, value])
        ours = answers["radixkv"]
        bench.facts[f"b us {num_leaves}"] = mean(ours)
        bench.facts["b pause ms"] = max(ours["worst_pause_ms"], ours["full_collection_ms"])
        bench.facts["b worst step ms"] = max(ours["ns"]) / 1e6
        num_blocks = (num_leaves + num_systems) * 256 // BLOCK_SIZE
        bench.facts["b bytes a block"] = ours["resident_bytes"] / num_blocks
        # tokens and ids in the tree, the id in the pool
        bench.facts["b bytes a leaf beyond"] = (
            ours["resident_bytes"] - num_blocks * (BLOCK_SIZE * 4 + 4 + 4)
        ) / num_leaves
        if num_leaves == sizes[-2]:
            bench.curves["bars"] = {**bench.curves.get("bars", {}), f"(b) {num_leaves:,} leaves": means(answers)}
    bench.facts["b flat"] = bench.facts[f"b us {sizes[-1]}"] / bench.facts[f"b us {sizes[0]}"]
    bench.facts["b most leaves"] = sizes[-1]
    if not bench.quick:
        notes.append("SGLang RadixCache at 1,000,000 leaves is left out: each eviction makes a heap of all leaves")
    notes.append(
        "pause: the longest garbage collection while requests were served; bytes: growth of the process's own resident "
        "memory over the whole row, a leaf of 256 tokens, their block ids and the pool's share included"
    )
    columns = ("leaves", "manager", "requests", *QUANTILES, "x radixkv", "hit tokens", "pause ms", "bytes a leaf")
    title = "(b) 512-token prompts that share 256 with one of 1,000, a full pool, us of CPU a request"
    bench.table("b", title, columns, rows, notes)


def chats(bench: Bench) -> None:
    """(c) branching chats"""
    num_sessions, num_turns = bench.pick(2_000, 30), bench.pick(30, 10)
    num_blocks = bench.pick(500_000, 3_000)
    stream = bench.stream("chats", workloads.chats, num_sessions, num_turns)
    answers = bench.compare((*WHOLE, INDEX), "serve", stream, num_blocks=num_blocks)
    title = f"(c) {num_sessions:,} sessions of {num_turns} turns, one in ten a branch, {num_blocks:,} blocks of 16"
    simple(bench, "c", title, answers)
    bench.curves["bars"] = {**bench.curves.get("bars", {}), "(c) chats": means(answers)}


def session(bench: Bench) -> None:
    """(d) one long session"""
    num_turns, num_new = bench.pick(1_000, 40), 1_000
    stream = bench.stream("session", workloads.session, num_turns, num_new)
    answers = bench.compare(
        (WHOLE[0], "radixkv-lookup", *WHOLE[1:], INDEX),
        "serve",
        stream,
        num_blocks=num_turns * num_new // BLOCK_SIZE + 1_000,
        max_tokens=num_turns * num_new,
    )
    title = f"(d) one session of {num_turns:,} turns, {num_new:,} new tokens each, us of CPU a turn"
    rows, notes = [], []
    num_late = bench.pick(50, 10)
    early, late = slice(5, 5 + num_late), slice(num_turns - num_late, num_turns)
    for answer in answers.values():
        spent = [answer.get("ns", [])[part] for part in (early, late)]
        at = [f"{np.median(part) / 1000:,.1f}" if part else "" for part in spent]
        rows.append([answer["name"], *cells(answer, answers), *at])
        notes += explain(answer, answers, "")
    ours = answers.get("radixkv-lookup", answers["radixkv"])["ns"]
    bench.facts["d growth"] = float(np.median(ours[late]) / np.median(ours[early]))
    ratios(bench, "d", answers)
    bench.curves["session"] = {
        manager: [
            [at + 5, round(mean({"ns": answer["ns"][at : at + 10]}), 2)] for at in range(0, len(answer["ns"]), 10)
        ]
        for manager, answer in answers.items()
        if "ns" in answer
    }
    bench.curves["bars"] = {**bench.curves.get("bars", {}), "(d) long session": means(answers)}
    columns = (
        "manager",
        "turns",
        *QUANTILES,
        "x radixkv",
        "hit tokens",
        f"turns 6-{5 + num_late}",
        f"the last {num_late} of {num_turns:,}",
    )
    bench.table("d", title, columns, rows, notes)


def decoding(bench: Bench) -> None:
    """(e) decoding"""
    num_requests, num_steps = bench.pick(256, 16), bench.pick(10_000, 100)
    stream = bench.stream("decoding", workloads.decoding, num_requests, num_steps)
    answers = bench.compare(
        WHOLE,
        "decode",
        stream,
        num_blocks=num_requests * (num_steps + 1_100) // BLOCK_SIZE,
        max_tokens=num_steps + 1_100,
        max_running=num_requests,
        budget=30,
    )
    rows, notes = [], []
    for manager, answer in answers.items():
        if "ns" not in answer:
            rows.append([answer["name"], *why(answer), *[""] * 5])
            continue
        steps = np.array(answer["ns"]) / num_requests / 1000
        whole = (sum(answer["ns"]) + answer["end_ns"]) / len(answer["ns"]) / num_requests / 1000
        bench.facts[f"e {manager}"] = whole
        times = f"{whole / bench.facts['e radixkv']:,.1f}"
        some = [f"{np.quantile(steps, at):,.3f}" for at in (0.5, 0.9, 0.99, 1)]
        rows.append([answer["name"], f"{len(steps):,}", f"{whole:,.3f}", *some, times])
        notes += short(answer)
    notes.append("mean: with the end of the requests, where SGLang publishes what they decoded")
    title = f"(e) {num_requests} requests decoding at once, one token each a step, us of CPU a token"
    bench.table("e", title, ("manager", "steps", *QUANTILES, "x radixkv"), rows, notes)


def waiting(bench: Bench) -> None:
    """(f) requests that wait"""
    num_waiting, steps = bench.pick(100, 10), bench.pick(100, 5)
    rows, notes = [], []
    for num_tokens in (2_048, 32_768):
        stream = bench.stream(f"waiting-{num_tokens}", workloads.waiting, num_waiting, num_tokens)
        num_blocks = 11 * num_tokens // BLOCK_SIZE
        answers = bench.compare(
            (*WHOLE, INDEX), "match", stream, num_blocks=num_blocks, skip=10, steps=steps, budget=10
        )
        for manager, answer in answers.items():
            if "ns" not in answer:
                rows.append([f"{num_tokens:,}", answer["name"], *why(answer), *[""] * 6])
                continue
            spent = quantiles([step / num_waiting / 1000 for step in answer["ns"]])
            bench.facts[f"f {manager} {num_tokens}"] = spent["mean"]
            times = spent["mean"] / bench.facts[f"f radixkv {num_tokens}"]
            hit = sum(answer["hits"]) / num_waiting / num_tokens
            some = [f"{value:,.2f}" for value in spent.values()]
            rows.append(
                [f"{num_tokens:,}", answer["name"], f"{len(answer['ns']):,}", *some, f"{times:,.1f}", f"{hit:.1%}"]
            )
            notes += short(answer)
    bench.facts["f growth"] = bench.facts["f radixkv 32768"] / bench.facts["f radixkv 2048"]
    notes.append("hashes of the prompt are made once, before the clock (vLLM, Dynamo)")
    title = f"(f) {num_waiting} waiting requests matched again every step, three quarters cached, us of CPU a match"
    bench.table("f", title, ("tokens", "manager", "steps", *QUANTILES, "x radixkv", "hit tokens"), rows, notes)


def block_sizes(bench: Bench) -> None:
    """(g) block sizes"""
    if not workloads.TRACE.exists():
        print(f"(g) missing: no {workloads.TRACE.name}", file=sys.stderr)
        return
    num = bench.pick(1_000, 100)
    num_tokens = bench.pick(4_000_000, 400_000)
    stream = bench.stream("sizes", workloads.conversation, num)
    rows, notes = [], []
    for size in (1, 16, 64, 256):
        answers = bench.compare(WHOLE, "serve", stream, num_blocks=num_tokens // size, block_size=size, budget=12)
        for answer in answers.values():
            rows.append([str(size), answer["name"], *cells(answer, answers)])
            notes += explain(answer, answers, f"block size {size}")
    columns = ("block size", "manager", "requests", *QUANTILES, "x radixkv", "hit tokens")
    title = f"(g) the first {num:,} requests of (a), room for {num_tokens:,} tokens, us of CPU a request"
    bench.table("g", title, columns, rows, notes)


WORKLOADS = {
    "a": conversation,
    "b": leaves,
    "c": chats,
    "d": session,
    "e": decoding,
    "f": waiting,
    "g": block_sizes,
}
QUANTILES = ("mean", "median", "P90", "P99", "max")


# What the answers say


def mean(answer: Row, num: int | None = None) -> float:
    """Microseconds a request over the first `num`."""
    spent: list[int] = answer["ns"][:num]
    return sum(spent) / len(spent) / 1000


def means(answers: dict[str, Row]) -> dict[str, float]:
    return {manager: round(mean(answer), 2) for manager, answer in answers.items() if answer.get("ns")}


def times(answer: Row, answers: dict[str, Row], num: int | None = None) -> float:
    """How many times radixkv's cost, over the requests that both were measured on."""
    ours = answers["radixkv"]
    both = min(len(answer["ns"]), len(ours["ns"]), num or len(ours["ns"]))
    return mean(answer, both) / mean(ours, both)


def ratios(bench: Bench, key: str, answers: dict[str, Row], num: int | None = None) -> None:
    """The fact that the fastest peer is so many times slower."""
    peers = [manager for manager in WHOLE[1:] if answers.get(manager, {}).get("ns")]
    if peers:
        bench.facts[f"{key} fastest"] = min(times(answers[manager], answers, num) for manager in peers)


def why(answer: Row) -> list[str]:
    """A cell for what was not measured."""
    if "unfinished" in answer:
        return [f"not measured: {answer['filling_s']:.0f} s of CPU for the first {answer['unfinished']:,} requests"]
    return [answer.get("missing") or f"failed: {answer['failed']}"]


def cells(answer: Row, answers: dict[str, Row], *, first: int | None = None) -> list[str]:
    """The columns of a row from the number of requests on."""
    between = [] if first is None else [""]
    if not answer.get("ns"):
        return [*why(answer), *between, *[""] * (len(QUANTILES) + 2)]
    if first is not None:
        between = [f"{mean(answer, first):,.1f}"]
    some = [f"{value / 1000:,.1f}" for value in quantiles(answer["ns"]).values()]
    if not answers:
        return [f"{len(answer['ns']):,}", *between, *some, "", ""]
    return [
        f"{len(answer['ns']):,}",
        *between,
        *some,
        f"{times(answer, answers):,.1f}",
        f"{sum(answer['hits']):,} ({sum(answer['hits']) / sum(answer['num_tokens']):.1%})",
    ]


def explain(answer: Row, answers: dict[str, Row], where: str) -> list[str]:
    """Notes on a row: measured in part; hits that differ from radixkv's by more than 0.1 points."""
    if not answer.get("ns"):
        return []
    notes = short(answer, where)
    both = min(len(answer["hits"]), len(answers["radixkv"]["hits"]))
    theirs, ours = sum(answer["hits"][:both]), sum(answers["radixkv"]["hits"][:both])
    points = 100 * (theirs - ours) / sum(answers["radixkv"]["num_tokens"][:both])
    if abs(points) > 0.1:
        reason = answer["note"] or "its order of eviction differs"
        at = f", {where}" if where else ""
        notes.append(f"{answer['name']}{at}: {points:+.1f} points of hit tokens against radixkv: {reason}")
    return notes


def short(answer: Row, where: str = "") -> list[str]:
    """A note where the time budget ended a row early."""
    if len(answer["ns"]) == answer["num_requests"]:
        return []
    at = f", {where}" if where else ""
    return [
        f"{answer['name']}{at}: measured on the first {len(answer['ns']):,} of {answer['num_requests']:,} only, "
        "where its time budget ended; its ratio and its hit tokens are over these"
    ]


def simple(bench: Bench, letter: str, title: str, answers: dict[str, Row]) -> None:
    rows = [[answer["name"], *cells(answer, answers)] for answer in answers.values()]
    notes = [note for answer in answers.values() for note in explain(answer, answers, "")]
    ratios(bench, letter, answers)
    columns = ("manager", "requests", *QUANTILES, "x radixkv", "hit tokens")
    bench.table(letter, f"{title}, us of CPU a request", columns, rows, notes)


def import_seconds() -> float:
    """CPU seconds that `import radixkv` adds to a bare Python: the least of five."""

    def spent(code: str) -> float:
        before = os.times()
        subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        after = os.times()
        return (after.children_user + after.children_system) - (before.children_user + before.children_system)

    return min(spent("import radixkv") for _ in range(5)) - min(spent("") for _ in range(5))


def targets(facts: dict[str, float]) -> Row:
    """A table of the targets of the project, each met, not met or not measured."""
    most = int(facts.get("b most leaves", 1_000_000))
    sizes = sorted({int(key.split()[2]) for key in facts if key.startswith("a all")})
    wanted: list[tuple[str, str, str, float]] = [
        *(
            (
                f"(a) the fastest peer costs 10 times radixkv, {size:,} blocks, {part}",
                f"a {part} {size} fastest",
                ">=",
                10,
            )
            for size in sizes
            for part in ("first", "all")
        ),
        ("(a) from packed tokens: within 2.5 of the floor, first requests", "a floor first", "<=", 2.5),
        ("(a) from packed tokens: within 2.5 of the floor, all requests", "a floor all", "<=", 2.5),
        ("(a) from lists: within 1.3 of the cheapest conversion of a cold list", "a lists", "<=", 1.3),
        *(
            (f"(a) all within 1.2 of the first quarter, {size:,} blocks", f"a growth {size}", "<=", 1.2)
            for size in sizes
        ),
        (f"(b) flat: {most:,} leaves at most 1.3 times the fewest", "b flat", "<=", 1.3),
        (f"(b) the fastest peer costs 10 times radixkv, {most:,} leaves", f"b {most} fastest", ">=", 10),
        ("(b) longest garbage collection at the most leaves, ms", "b pause ms", "<=", 20),
        ("(b) bytes a cached block of 16 tokens (10^7 in 2 GB: 200)", "b bytes a block", "<=", 200),
        ("(d) the last turns cost what the first do", "d growth", "<=", 1.3),
        ("(e) us a decoded token", "e radixkv", "<=", 0.5),
        ("(f) a repeated match at 32,768 tokens costs what it does at 2,048", "f growth", "<=", 1.3),
        ("import radixkv, s of CPU", "import s", "<=", 0.15),
    ]
    rows = []
    for name, key, sense, bound in wanted:
        if key not in facts:
            rows.append([name, f"{sense} {bound:g}", "", "not measured"])
            continue
        value = facts[key]
        met = value <= bound if sense == "<=" else value >= bound
        rows.append([name, f"{sense} {bound:g}", f"{value:,.2f}", "met" if met else "**not met**"])
    return {"title": "Targets", "columns": ["target", "bound", "measured", ""], "rows": rows, "notes": []}


# What is shown


def markdown(table: Row) -> str:
    """A table as Markdown that reads as plain text too; text to the left, numbers to the right."""
    columns, rows = table["columns"], table["rows"]
    known = [[cell for cell in column if not cell.startswith(SAID)] for column in zip(*rows, strict=True)]
    spans = [max(map(len, [name, *cells])) for name, cells in zip(columns, known, strict=True)]
    left = [any(re.search("[a-z]{3}", cell) for cell in cells) for cells in known]

    def line(cells: Sequence[str]) -> str:
        aligned = zip(cells, spans, left, strict=True)
        padded = (cell.ljust(span) if is_left else cell.rjust(span) for cell, span, is_left in aligned)
        return f"| {' | '.join(padded)} |"

    rule = (
        f":{'-' * (span - 1)}" if is_left else f"{'-' * (span - 1)}:" for span, is_left in zip(spans, left, strict=True)
    )
    text = [f"**{table['title']}**", "", line(columns), f"| {' | '.join(rule)} |", *map(line, rows)]
    if table["notes"]:
        text += ["", *(f"- {note}" for note in dict.fromkeys(table["notes"]))]
    return "\n".join([*text, ""])


SAID = ("missing", "failed", "not measured:")


def plots(curves: dict[str, Any], folder: Path) -> list[str]:
    """Draw what was measured as SVG files next to the page; returns their names."""
    if not curves:
        return []
    import matplotlib  # type: ignore[import-not-found,unused-ignore]  # here: only for pages

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "radixkv", "font.size": 9}
    from matplotlib import pyplot as plt

    colors = {manager: f"C{number}" for number, manager in enumerate(MODULES)}
    drawn = []

    def save(name: str, figure: Any) -> None:
        figure.savefig(folder / f"benchmarks-{name}.svg", metadata={"Date": None}, bbox_inches="tight")
        plt.close(figure)
        drawn.append(f"benchmarks-{name}.svg")

    if bars := curves.get("bars"):
        figure, axes = plt.subplots(1, len(bars), figsize=(2.6 * len(bars), 2.6), sharey=True, squeeze=False)
        for axis, (title, values) in zip(axes[0], bars.items(), strict=True):
            drawing = axis.bar(values.keys(), values.values(), color=[colors[manager] for manager in values])
            axis.bar_label(drawing, fmt="%.0f", fontsize=7)
            axis.set_yscale("log")
            axis.set_title(title, fontsize=9)
            axis.tick_params(axis="x", rotation=90)
        axes[0][0].set_ylabel("us of CPU a request")
        axes[0][0].set_ylim(1, 3 * max(max(values.values()) for values in bars.values()))
        save("managers", figure)
    for name, label, unit in (("leaves", "cached leaves", "request"), ("session", "turn of one session", "turn")):
        if lines := curves.get(name):
            figure, axis = plt.subplots(figsize=(5.2, 3))
            for manager, points in lines.items():
                x, y = zip(*points, strict=True)
                axis.plot(x, y, label=manager, color=colors[manager], marker="." if name == "leaves" else "")
            axis.set_yscale("log")
            if name == "leaves":
                axis.set_xscale("log")
            axis.set(xlabel=label, ylabel=f"us of CPU a {unit}")
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
            save(name, figure)
    return drawn


def write(page: Path, result: dict[str, Any]) -> None:
    """Put card, targets, tables and plots between the page's markers `<!-- peers:NAME -->` and `<!-- /peers:NAME -->`.

    What this run did not measure stays as it is.
    """
    text = page.read_text()
    parts = {name: markdown(table) for name, table in result["tables"].items()}
    facts = {key: value for key, value in result["card"].items() if key != "benchmark"}
    parts["card"] = "\n".join(["```text", *(f"{key}: {value}" for key, value in facts.items()), "```", ""])
    for name in plots(result["curves"], page.parent):
        parts[name.removeprefix("benchmarks-").removesuffix(".svg")] = f"![{name}]({name})\n"
    for name, part in parts.items():
        begin, end = f"<!-- peers:{name} -->\n", f"<!-- /peers:{name} -->"
        if begin not in text or end not in text:
            sys.exit(f"{page}: no line {begin.strip()} before a line {end}")
        head, rest = text.split(begin, 1)
        text = f"{head}{begin}\n{part}\n{end}{rest.split(end, 1)[1]}"
    page.write_text(text)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    start = time.monotonic()
    facts = card(
        "radixkv beside other engines' prefix caches",
        workloads=" ".join(arguments.workloads) + (", quick" if arguments.quick else ""),
        seed=workloads.SEED,
        peers=", ".join(f"{name} {version(name)}" for name in ("vllm", "sglang", "ai-dynamo-runtime")),
        clock="CPU time of the process, in the manager's calls",
    )
    with tempfile.TemporaryDirectory(prefix="radixkv-peers-", dir=arguments.folder) as folder:
        bench = Bench(Path(folder), arguments.managers, quick=arguments.quick)
        try:
            for letter in arguments.workloads:
                print(f"{WORKLOADS[letter].__doc__}", file=sys.stderr)
                WORKLOADS[letter](bench)
        finally:
            bench.close()
        bench.facts["import s"] = import_seconds()
    bench.tables["targets"] = targets(bench.facts)
    print(markdown(bench.tables["targets"]))
    facts["seconds"] = round(time.monotonic() - start)
    return {"card": facts, "tables": bench.tables, "facts": bench.facts, "curves": bench.curves}


def version(package: str) -> str:
    """The version of a peer in its environment."""
    folder = ROOT / ".peers" / {"ai-dynamo-runtime": "dynamo"}.get(package, package)
    found = list(folder.glob(f"lib/python*/site-packages/{package.replace('-', '_')}-*.dist-info"))
    return found[0].name.removesuffix(".dist-info").split("-")[1] if found else "missing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--managers", nargs="+", choices=list(MODULES), default=list(MODULES))
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that all runs")
    parser.add_argument("--folder", type=Path, help="where the streams are written meanwhile, up to 1.5 GB")
    parser.add_argument("--read", type=Path, help="the output of an earlier run, instead of running")
    parser.add_argument("--write", type=Path, help="a page with markers to put tables and plots into")
    arguments = parser.parse_args()
    if arguments.write and not find_spec("matplotlib"):
        sys.exit("--write draws plots: pip install matplotlib")
    if arguments.read:
        result = json.loads(arguments.read.read_text().splitlines()[-1])
    else:
        result = measure(arguments)
        finish(result)
    if arguments.write:
        write(arguments.write, result)


if __name__ == "__main__":
    main()
