"""`radixkv replay`. Knows how results are shown; computes none."""

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from radixkv.cli.common import (
    MAX_BLOCK_SIZE,
    advance,
    app,
    count,
    parse_capacities,
    parse_policies,
    progress_bar,
    whole,
    write_json,
)
from radixkv.policy import POLICIES
from radixkv.replay import Row, default_capacities, replay
from radixkv.synthetic import NUM_REQUESTS, synthetic_trace
from radixkv.trace import DEFAULT_BLOCK_SIZE, DEFAULT_CONCURRENCY, IdTrace, Trace, read_trace


@app.command("replay")
def replay_command(
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
        typer.Option(parser=whole(0), metavar="N", help="Of the built-in workload, and of the arrival of sessions."),
    ] = 0,
    capacity: Annotated[
        str | None,
        typer.Option(help="In blocks: 1000,3000,inf. Default: shares of the trace's blocks.", show_default=False),
    ] = None,
    policy: Annotated[str, typer.Option(help=f"One or more of {', '.join(POLICIES)}.")] = "lru",
    bypass: Annotated[
        bool, typer.Option("--bypass", help="Requests run beside the cache, as beside a host tier.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(parser=whole(1), metavar="N", help="Only the first so many requests.")
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            parser=whole(1, MAX_BLOCK_SIZE),
            metavar="N",
            help="In tokens. Default: the trace's own, else 16.",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(parser=whole(1), metavar="N", help="Sessions at once, where a trace has sessions.")
    ] = DEFAULT_CONCURRENCY,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad lines out, and say so.")] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write JSON too; with - nothing but JSON to stdout.")
    ] = None,
) -> None:
    """Run a trace through the prefix cache: hit rates by policy and capacity."""
    if trace is not None and synthetic:
        raise typer.BadParameter(f"not with a TRACE ({trace})", param_hint="--synthetic")
    policies = parse_policies(policy)
    capacities = parse_capacities(capacity) if capacity is not None else None
    rows = []
    with progress_bar() as bar:
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
                progress=partial(advance, bar, task, 0),
            )
        runs = [(name, blocks) for name in policies for blocks in capacities or default_capacities(loaded.num_blocks)]
        for done, (name, blocks) in enumerate(runs):
            bar.update(task, description=f"{name} {count(blocks)}", total=len(runs))
            rows.append(replay(loaded, blocks, name, bypass=bypass, progress=partial(advance, bar, task, done)))
    if loaded.skipped.num_lines:
        print(f"radixkv: bad lines skipped: {loaded.skipped.num_lines:,}, the first:", file=sys.stderr)
        for reason in loaded.skipped.reasons:
            print(f"  {reason}", file=sys.stderr)
    try:
        if json_file is not None:
            write_json(json_file, _result(loaded, rows))
    finally:  # the table may be the last thing that is read of stdout, or all that is left of a long replay
        if json_file != "-":
            _print_table(loaded, rows)


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
            count(row.capacity_blocks),
            count(row.capacity_blocks and row.capacity_blocks * trace.block_size),
            count(row.hit_blocks),
            f"{100 * row.block_hit_rate:.2f}",
            count(row.hit_tokens),
            f"{100 * row.token_hit_rate:.2f}",
            f"{row.seconds:.2f} s",
            end_section=following is not None and following.policy != row.policy,
        )
    console.print(table)
    blocks = "block ids of the prompts" if isinstance(trace, IdTrace) else "prompt blocks, partial last ones included"
    console.print(f"\n% of blocks: hit blocks / all {rows[0].access_blocks:,} {blocks}")
    console.print(f"% of tokens: those in hit blocks / all {rows[0].prompt_tokens:,} prompt tokens")


def _result(trace: Trace, rows: list[Row]) -> dict[str, object]:
    result: dict[str, object] = {
        "trace": trace.name,
        "requests": len(trace.requests),
        "block_size": trace.block_size,
        "rows": [asdict(row) for row in rows],
    }
    if trace.skipped.num_lines:
        result["skipped"] = trace.skipped.num_lines
    return result
