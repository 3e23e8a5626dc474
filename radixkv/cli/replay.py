"""`radixkv replay`. Knows how results are shown; computes none."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from radixkv.balance import ROUTERS
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
    whole,
)
from radixkv.cli.reading import Reading, head, print_head
from radixkv.policy import POLICIES
from radixkv.replay import Row, default_capacities, replay
from radixkv.trace import IdTrace, Progress, Trace

if TYPE_CHECKING:
    from radixkv.routing import RoutedRow

MAX_WORKERS = 1024


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
    bypass: Annotated[
        bool, typer.Option("--bypass", help="Requests run beside the cache, as beside a host tier.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            parser=whole(1, MAX_WORKERS),
            metavar="N",
            help="So many caches of this capacity each, behind a router.",
            show_default=False,
        ),
    ] = None,
    router: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help=f"With --workers: one or more of {', '.join(ROUTERS)}. Default: prefix.",
            show_default=False,
        ),
    ] = None,
    json_file: Json = None,
    reading: Reading,
) -> None:
    """Run a trace through the prefix cache: hit rates by policy and capacity."""
    if reading.traces and synthetic:
        raise typer.BadParameter(f"not with a TRACE ({reading.traces[0]})", param_hint="--synthetic")
    if router is not None and workers is None:
        raise typer.BadParameter("chooses between --workers, of which there are none", param_hint="--router")
    if bypass and workers is not None:
        raise typer.BadParameter("not with --workers", param_hint="--bypass")
    policies = parse_policies(policy)
    capacities = parse_capacities(capacity)
    routers: Sequence[str | None] = [None] if workers is None else _parse_routers(router)
    rows: list[Row] = []
    routed: list[RoutedRow] = []
    with progress_bar() as bar:
        task = bar.add_task("reading", total=1)
        trace = reading.read(bar, task)
        runs = [
            (name, blocks, via)
            for name in policies
            for blocks in capacities or default_capacities(trace.num_blocks)
            for via in routers
        ]
        for done, (name, blocks, via) in enumerate(runs):
            bar.update(task, description=f"{name} {count(blocks)} {via or ''}", total=len(runs))
            watch = partial(advance, bar, task, done)
            if via is None or workers is None:
                rows.append(replay(trace, blocks, name, bypass=bypass, progress=watch))
            else:
                routed.append(_replay_routed(trace, blocks, name, num_workers=workers, router=via, progress=watch))
    result = {**head(trace), "rows": [asdict(row) for row in rows or routed]}
    show(json_file, lambda: result, lambda: _print_routed(trace, routed) if routed else _print(trace, rows))


def _parse_routers(text: str | None) -> Sequence[str]:
    names = ["prefix"] if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in ROUTERS:
            raise typer.BadParameter(f"{name[:40]!r} is not one of {', '.join(ROUTERS)}", param_hint="--router")
    return list(dict.fromkeys(names))


def _replay_routed(
    trace: Trace, capacity: int | None, policy: str, *, num_workers: int, router: str, progress: Progress
) -> "RoutedRow":
    try:
        from radixkv.routing import replay_routed  # here: it needs an extra
    except ImportError as error:
        message = f"{error.name} is not installed: pip install 'radixkv[events]'"
        raise typer.BadParameter(message, param_hint="--workers") from None
    return replay_routed(trace, capacity, policy, num_workers=num_workers, router=router, progress=progress)


def _print_routed(trace: Trace, rows: "list[RoutedRow]") -> None:
    console = Console(highlight=False)
    print_head(console, trace)
    console.print(f"workers: {len(rows[0].num_requests):,}\n")
    units = "blocks\neach", "hits\nblocks %", "hits\ntokens", "\n%", "most /\nmean", "\ntime"
    shown = table("\npolicy", "\nrouter", *units, left=2)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        shown.add_row(
            row.policy,
            row.router,
            count(row.capacity_blocks),
            f"{100 * row.block_hit_rate:.2f}",
            count(row.hit_tokens),
            f"{100 * row.token_hit_rate:.2f}",
            f"{row.imbalance:.2f}",
            f"{row.seconds:.2f} s",
            end_section=following is not None
            and (following.policy, following.capacity_blocks) != (row.policy, row.capacity_blocks),
        )
    console.print(shown)
    _print_rates(console, trace, rows[0])
    console.print("most / mean: tokens to prefill, of the worker that has most and of all")


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
    _print_rates(console, trace, rows[0])


def _print_rates(console: Console, trace: Trace, row: Row) -> None:
    """What the rates are of."""
    blocks = "block ids of the prompts" if isinstance(trace, IdTrace) else "prompt blocks, partial last ones included"
    console.print(f"\n% of blocks: hit blocks / all {row.access_blocks:,} {blocks}")
    console.print(f"% of tokens: those in hit blocks / all {row.prompt_tokens:,} prompt tokens")
