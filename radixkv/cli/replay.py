"""`radixkv replay`. Knows how results are shown; computes none."""

from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from radixkv.cli.common import (
    Json,
    advance,
    command,
    count,
    parse_capacities,
    parse_policies,
    progress_bar,
    show,
    table,
)
from radixkv.cli.reading import Reading, head, print_head
from radixkv.policy import POLICIES
from radixkv.replay import Row, default_capacities, replay
from radixkv.trace import IdTrace, Trace


@command("replay")
def replay_command(
    *,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="The built-in chat workload; the default without TRACE.")
    ] = False,
    capacity: Annotated[
        str | None,
        typer.Option(
            metavar="N,...", help="In blocks: 1000,3000,inf. Default: shares of the trace's blocks.", show_default=False
        ),
    ] = None,
    policy: Annotated[str, typer.Option(metavar="NAME,...", help=f"One or more of {', '.join(POLICIES)}.")] = "lru",
    json_file: Json = None,
    reading: Reading,
) -> None:
    """Run a trace through the prefix cache: hit rates by policy and capacity."""
    if reading.traces and synthetic:
        raise typer.BadParameter(f"not with a TRACE ({reading.traces[0]})", param_hint="--synthetic")
    policies = parse_policies(policy)
    capacities = parse_capacities(capacity)
    rows = []
    with progress_bar() as bar:
        task = bar.add_task("reading", total=1)
        trace = reading.read(bar, task)
        runs = [(name, blocks) for name in policies for blocks in capacities or default_capacities(trace.num_blocks)]
        for done, (name, blocks) in enumerate(runs):
            bar.update(task, description=f"{name} {count(blocks)}", total=len(runs))
            rows.append(replay(trace, blocks, name, progress=partial(advance, bar, task, done)))
    show(json_file, lambda: {**head(trace), "rows": [asdict(row) for row in rows]}, lambda: _print(trace, rows))


def _print(trace: Trace, rows: list[Row]) -> None:
    console = Console(highlight=False)
    print_head(console, trace)
    console.print()
    units = "capacity\nblocks", "\ntokens", "hits\nblocks", "\n%", "hits\ntokens", "\n%", "\ntime"
    shown = table("\npolicy", *units, left=1)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        shown.add_row(
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
    console.print(shown)
    blocks = "block ids of the prompts" if isinstance(trace, IdTrace) else "prompt blocks, partial last ones included"
    console.print(f"\n% of blocks: hit blocks / all {rows[0].access_blocks:,} {blocks}")
    console.print(f"% of tokens: those in hit blocks / all {rows[0].prompt_tokens:,} prompt tokens")
