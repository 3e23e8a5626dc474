"""`radixkv report`. Knows how a report is asked for; what is on it is made by `radixkv.page`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from radixkv.cli.common import MAX_BLOCKS, advance, command, progress_bar, whole
from radixkv.cli.curve import Asked, compute, draw
from radixkv.cli.reading import Reading
from radixkv.curve import Counts
from radixkv.explain import explain
from radixkv.page import Row as PageRow
from radixkv.page import page
from radixkv.plot import load


@command("report")
def report_command(
    *,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="The page to write.")] = "report.html",
    capacity: Annotated[
        int | None,
        typer.Option(
            parser=whole(1, MAX_BLOCKS),
            metavar="N",
            help="Of the cache that is explained, in blocks. Default: the knee.",
            show_default=False,
        ),
    ] = None,
    asked: Asked,
    reading: Reading,
) -> None:
    """One page of HTML about a trace: the curve, a time to live, the misses, the tree of its prefixes.

    It needs no network. Where the trace has text, it shows beginnings of prompts.
    """
    kv_bytes, capacities, policies = asked.kv_bytes(), asked.capacities(), asked.policies()
    _check(output)
    trace, curve, rows = compute(reading, capacities, policies)
    capacity = capacity or max(1, curve.knee())
    with progress_bar() as bar:
        task = bar.add_task("misses", total=1)
        explained = explain(trace, capacity, progress=partial(advance, bar, task, 0))

    def share(hits: Counts) -> float:
        return float(getattr(curve.rates(hits), asked.rate))

    html = page(
        trace,
        curve,
        capacity=capacity,
        rows=[
            PageRow(
                row.capacity, share(row.lru), share(row.opt), {name: share(hits) for name, hits in row.policies.items()}
            )
            for row in rows
        ],
        drawn=draw(trace, curve, rows, asked.rate, kv_bytes),
        explained=explained,
        rate=asked.rate,
    )
    try:
        Path(output).write_text(html, encoding="utf-8", errors="replace")  # of a lone surrogate
    except OSError as error:
        raise _cannot_write(output, error.strerror) from None


def _check(output: str) -> None:
    """What can be known before a long trace is read."""
    try:
        load("plotly.offline")
    except ImportError as error:
        raise typer.BadParameter(str(error), param_hint="--output") from None
    if Path(output).is_dir():
        raise _cannot_write(output, "Is a directory")
    if not Path(output).absolute().parent.is_dir():
        raise _cannot_write(output, "No such directory")


def _cannot_write(file: str, why: str | None) -> typer.BadParameter:
    return typer.BadParameter(f"cannot write {file}: {why}", param_hint="--output")
