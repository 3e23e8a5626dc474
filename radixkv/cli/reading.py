"""What commands that read a trace share: their options, and the reading itself."""

import os
import sys
from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypeAlias

import typer
from rich.progress import Progress, TaskID

from radixkv.cli.common import MAX_BLOCK_SIZE, advance, whole
from radixkv.errors import TraceError
from radixkv.synthetic import NUM_REQUESTS, synthetic_trace
from radixkv.trace import DEFAULT_BLOCK_SIZE, Trace, read_trace

Traces: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TRACE...",
        help="One file or several, merged by time; - is stdin. Default: the built-in chat workload.",
        show_default=False,
    ),
]
Limit: TypeAlias = Annotated[
    int | None, typer.Option("--limit", parser=whole(1), metavar="N", help="Only the first so many requests.")
]
BlockSize: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--block-size",
        parser=whole(1, MAX_BLOCK_SIZE),
        metavar="N",
        help="In tokens. Default: the trace's own, else 16.",
        show_default=False,
    ),
]
Concurrency: TypeAlias = Annotated[
    int,
    typer.Option("--concurrency", parser=whole(1), metavar="N", help="Sessions at once, where a trace has sessions."),
]
Seed: TypeAlias = Annotated[
    int,
    typer.Option(
        "--seed", parser=whole(0), metavar="N", help="Of the arrival of sessions, and of the built-in workload."
    ),
]
Tokenizer: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="FILE|DIR|NAME",
        help="For text: tokenizer.json, a model's folder or a tiktoken encoding. Default: a built-in one.",
        show_default=False,
    ),
]
SkipBad: TypeAlias = Annotated[bool, typer.Option("--skip-bad", help="Leave bad lines out, and say so.")]


@dataclass(frozen=True, slots=True)
class Reading:
    """What to read, and how."""

    paths: list[str] | None
    limit: int | None
    block_size: int | None
    concurrency: int
    seed: int
    tokenizer: str | None
    skip_bad: bool

    def read(self, bar: Progress, task: TaskID) -> Trace:
        """Read with progress from 0 to 1, and say on stderr what was skipped."""
        if not self.paths:
            return synthetic_trace(
                self.seed,
                num_requests=min(self.limit or NUM_REQUESTS, NUM_REQUESTS),
                block_size=self.block_size or DEFAULT_BLOCK_SIZE,
            )
        try:
            trace = read_trace(
                *self.paths,
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
