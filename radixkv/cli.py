"""The command line. Knows how results are shown; computes none."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import radixkv
from radixkv.errors import TraceError
from radixkv.policy import POLICIES
from radixkv.replay import Row, default_capacities, replay
from radixkv.synthetic import NUM_REQUESTS, synthetic_trace
from radixkv.trace import DEFAULT_BLOCK_SIZE, DEFAULT_CONCURRENCY, IdTrace, Trace, read_trace

app = typer.Typer(add_completion=False)

# subtle: typer has a click of its own or not, by its version, and exports one of its errors; this is the base of all
_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])
_MAX_BLOCKS = 2**31 - 1
_MAX_BLOCK_SIZE = 2**20


def main(arguments: list[str] | None = None) -> int:
    """Run a command line (default: the program's own) and return the exit code.

    0; 2 for bad arguments or a bad file, told in one line on stderr; 130 for Ctrl-C; 1 if nobody reads stdout any more.
    """
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="radixkv", standalone_mode=False)
        sys.stdout.flush()  # subtle: at exit would be too late to catch a closed pipe
        return code or 0
    except _UsageError as error:
        message = error.format_message()
    except TraceError as error:
        message = str(error)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    print(f"radixkv: {message}", file=sys.stderr)
    return 2


def _whole(low: int, high: int = 2**31 - 1) -> Callable[[str | int], int]:
    """A parser of whole numbers in [low, high] whose error names the value and the bounds."""

    def parse(text: str | int) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            raise typer.BadParameter(f"must be a whole number from {low} to {high}, got {str(text)[:40]!r}")
        return number

    return parse


@app.callback(invoke_without_command=True)
def _radixkv(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """A prefix cache for LLM inference, and what it is worth on a trace."""
    if version:
        print(radixkv.__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command("replay")
def _replay(
    trace: Annotated[
        str | None,
        typer.Argument(
            metavar="TRACE",
            help="JSONL, plain or gzipped: hash_ids, hash_runs, sessions or tokens.",
            show_default=False,
        ),
    ] = None,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="The built-in chat workload; the default without TRACE.")
    ] = False,
    seed: Annotated[
        int,
        typer.Option(parser=_whole(0), metavar="N", help="Of the built-in workload, and of the arrival of sessions."),
    ] = 0,
    capacity: Annotated[
        str | None,
        typer.Option(help="In blocks: 1000,3000,inf. Default: shares of the trace's blocks.", show_default=False),
    ] = None,
    policy: Annotated[str, typer.Option(help=f"One or more of {', '.join(POLICIES)}.")] = "lru",
    limit: Annotated[
        int | None, typer.Option(parser=_whole(1), metavar="N", help="Only the first so many requests.")
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            parser=_whole(1, _MAX_BLOCK_SIZE),
            metavar="N",
            help="In tokens. Default: the trace's own, else 16.",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(parser=_whole(1), metavar="N", help="Sessions at once, where a trace has sessions.")
    ] = DEFAULT_CONCURRENCY,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad lines out, and say so.")] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write JSON too; with - nothing but JSON to stdout.")
    ] = None,
) -> None:
    """Run a trace through the prefix cache: hit rates by policy and capacity."""
    if trace is not None and synthetic:
        raise typer.BadParameter(f"not with a TRACE ({trace})", param_hint="--synthetic")
    policies = _parse_policies(policy)
    capacities = _parse_capacities(capacity) if capacity is not None else None
    rows = []
    with _progress_bar() as bar:
        task = bar.add_task("reading", total=1)
        if trace is None:
            num_requests = min(limit or NUM_REQUESTS, NUM_REQUESTS)
            loaded: Trace = synthetic_trace(
                seed, num_requests=num_requests, block_size=block_size or DEFAULT_BLOCK_SIZE
            )
        else:
            loaded = read_trace(
                trace,
                limit=limit,
                block_size=block_size,
                skip_bad=skip_bad,
                concurrency=concurrency,
                seed=seed,
                progress=partial(_advance, bar, task, 0),
            )
        runs = [(name, blocks) for name in policies for blocks in capacities or default_capacities(loaded.num_blocks)]
        for done, (name, blocks) in enumerate(runs):
            bar.update(task, description=f"{name} {_count(blocks)}", total=len(runs))
            rows.append(replay(loaded, blocks, name, progress=partial(_advance, bar, task, done)))
    if loaded.skipped.num_lines:
        print(f"radixkv: bad lines skipped: {loaded.skipped.num_lines:,}, the first:", file=sys.stderr)
        for reason in loaded.skipped.reasons:
            print(f"  {reason}", file=sys.stderr)
    try:
        if json_file is not None:
            _write_json(json_file, loaded, rows)
    finally:  # the table may be the last thing that is read of stdout, or all that is left of a long replay
        if json_file != "-":
            _print_table(loaded, rows)


def _parse_policies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in POLICIES:
            raise typer.BadParameter(f"{name[:40]!r} is not one of {', '.join(POLICIES)}", param_hint="--policy")
    return list(dict.fromkeys(names))


def _parse_capacities(text: str) -> list[int | None]:
    """None stands for inf."""
    capacities: list[int | None] = []
    for part in (part.strip() for part in text.split(",")):
        if part == "inf":
            capacities.append(None)
        elif part.isdecimal() and len(part) <= 10 and 1 <= int(part) <= _MAX_BLOCKS:
            capacities.append(int(part))
        else:
            raise typer.BadParameter(
                f"{part[:40]!r} is neither inf nor 1 to {_MAX_BLOCKS} blocks", param_hint="--capacity"
            )
    return list(dict.fromkeys(capacities))


def _progress_bar() -> Progress:
    """On stderr, and only if that is a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def _advance(bar: Progress, task: TaskID, done: int, share: float) -> None:
    bar.update(task, completed=done + share)


def _print_table(trace: Trace, rows: list[Row]) -> None:
    console = Console(highlight=False)
    sizes = (
        f"requests: {len(trace.requests):,}, distinct blocks: {trace.num_blocks:,}, tokens a block: {trace.block_size}"
    )
    console.print(f"[bold]{escape(Path(trace.name).name)}[/bold]\n{sizes}\n")
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("\npolicy", no_wrap=True)
    for header in ("capacity\nblocks", "\ntokens", "hits\nblocks", "\n%", "hits\ntokens", "\n%", "\ntime"):
        table.add_column(header, justify="right", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(
            row.policy,
            _count(row.capacity_blocks),
            _count(row.capacity_blocks and row.capacity_blocks * trace.block_size),
            _count(row.hit_blocks),
            f"{100 * row.block_hit_rate:.2f}",
            _count(row.hit_tokens),
            f"{100 * row.token_hit_rate:.2f}",
            f"{row.seconds:.2f} s",
            end_section=following is not None and following.policy != row.policy,
        )
    console.print(table)
    blocks = "block ids of the prompts" if isinstance(trace, IdTrace) else "prompt blocks, partial last ones included"
    console.print(f"\n% of blocks: hit blocks / all {rows[0].access_blocks:,} {blocks}")
    console.print(f"% of tokens: those in hit blocks / all {rows[0].prompt_tokens:,} prompt tokens")


def _count(number: int | None) -> str:
    return "inf" if number is None else f"{number:,}"


def _write_json(file: str, trace: Trace, rows: list[Row]) -> None:
    result = {
        "trace": trace.name,
        "requests": len(trace.requests),
        "block_size": trace.block_size,
        "rows": [asdict(row) for row in rows],
    }
    if trace.skipped.num_lines:
        result["skipped"] = trace.skipped.num_lines
    text = json.dumps(result)
    if file == "-":
        print(text)
        return
    try:
        Path(file).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"cannot write {file}: {error.strerror}", param_hint="--json") from None
