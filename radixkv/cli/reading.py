"""What commands that read a trace share: their options, the reading itself, and what is said of a trace."""

import os
import sys
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID

from radixkv.cli.common import MAX_BLOCK_SIZE, advance, whole
from radixkv.errors import TraceError
from radixkv.synthetic import NUM_REQUESTS, synthetic_trace
from radixkv.tokenizer import BUILT_IN
from radixkv.trace import DEFAULT_BLOCK_SIZE, DEFAULT_CONCURRENCY, TokenTrace, Trace, read_trace

_PANEL = "How a trace is read"
_BUILT_IN = "built-in chunks of text (name a model's own with --tokenizer)"


@dataclass(frozen=True, slots=True)
class Reading:
    """What to read, and how: the options of every command that reads a trace."""

    traces: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TRACE",
            help="One file or several, merged by time; - is stdin. Default: the built-in chat workload.",
            show_default=False,
        ),
    ] = None
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", rich_help_panel=_PANEL, parser=whole(1), metavar="N", help="Only the first so many requests."
        ),
    ] = None
    block_size: Annotated[
        int | None,
        typer.Option(
            "--block-size",
            rich_help_panel=_PANEL,
            parser=whole(1, MAX_BLOCK_SIZE),
            metavar="N",
            help="In tokens. Default: the trace's own, else 16.",
            show_default=False,
        ),
    ] = None
    concurrency: Annotated[
        int,
        typer.Option(
            "--concurrency",
            rich_help_panel=_PANEL,
            parser=whole(1),
            metavar="N",
            help="Sessions at once, where a trace has sessions.",
        ),
    ] = DEFAULT_CONCURRENCY
    seed: Annotated[
        int,
        typer.Option(
            "--seed",
            rich_help_panel=_PANEL,
            parser=whole(0),
            metavar="N",
            help="Of the arrival of sessions, and of the built-in workload.",
        ),
    ] = 0
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            rich_help_panel=_PANEL,
            metavar="FILE|DIR|NAME",
            help="For text: tokenizer.json, a model's folder or a tiktoken encoding. Default: a built-in one.",
            show_default=False,
        ),
    ] = None
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", rich_help_panel=_PANEL, help="Leave bad lines out, and say so.")
    ] = False

    def read(self, bar: Progress, task: TaskID) -> Trace:
        """Read with progress from 0 to 1, and say on stderr what was skipped."""
        if not self.traces:
            return synthetic_trace(
                self.seed,
                num_requests=min(self.limit or NUM_REQUESTS, NUM_REQUESTS),
                block_size=self.block_size or DEFAULT_BLOCK_SIZE,
            )
        if self.traces.count("-") > 1:
            raise typer.BadParameter("stdin (-) can be read once only", param_hint="TRACE")
        try:
            trace = read_trace(
                *self.traces,
                limit=self.limit,
                block_size=self.block_size,
                skip_bad=self.skip_bad,
                concurrency=self.concurrency,
                seed=self.seed,
                tokenizer=self.tokenizer,
                progress=partial(advance, bar, task, 0),
            )
        except TraceError:
            raise
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--tokenizer") from None
        if trace.skipped.num_lines:
            print(f"radixkv: bad lines skipped: {trace.skipped.num_lines:,}, the first:", file=sys.stderr)
            for reason in trace.skipped.reasons:
                print(f"  {reason}", file=sys.stderr)
        return trace


def short_name(trace: Trace) -> str:
    """The file's name, without what no terminal shows."""
    return os.path.basename(trace.name).encode("utf-8", "replace").decode("utf-8")


def print_head(console: Console, trace: Trace) -> None:
    """What stands above the tables: the trace, its size, and what made tokens of text."""
    console.print(
        f"[bold]{escape(short_name(trace))}[/bold]\nrequests: {len(trace.requests):,}, "
        f"distinct blocks: {trace.num_blocks:,}, tokens a block: {trace.block_size}"
    )
    name = _tokenizer_name(trace)
    if name is not None:
        console.print(f"tokens: {_BUILT_IN if name == BUILT_IN else escape(name)}")


def head(trace: Trace) -> dict[str, object]:
    """As `print_head`, for JSON."""
    fields: dict[str, object] = {
        "trace": trace.name,
        "requests": len(trace.requests),
        "block_size": trace.block_size,
        "tokenizer": _tokenizer_name(trace),
    }
    if trace.skipped.num_lines:
        fields["skipped"] = trace.skipped.num_lines
    return fields


def _tokenizer_name(trace: Trace) -> str | None:
    tokenizer = trace.tokenizer if isinstance(trace, TokenTrace) else None
    return None if tokenizer is None else tokenizer.name
