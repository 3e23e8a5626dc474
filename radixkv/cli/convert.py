"""`radixkv convert`. Knows files and options; hashes nothing itself."""

import gzip
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated

import typer

from radixkv.cli.common import MAX_BLOCK_SIZE, advance, command, progress_bar, whole
from radixkv.cli.reading import Reading
from radixkv.convert import converted


@command("convert")
def convert_command(
    *,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE|-", help="Gzipped if its name ends in .gz; - is stdout.")
    ] = "-",
    block_size: Annotated[
        int | None,
        typer.Option(
            parser=whole(1, MAX_BLOCK_SIZE),
            metavar="N",
            help="In tokens; of ids a multiple of the trace's own. Default: the trace's own, else 16.",
            show_default=False,
        ),
    ] = None,
    salt: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Equal prefixes get equal ids in all traces of one salt; keep it secret. Default: random.",
            show_default=False,
        ),
    ] = None,
    reading: Reading,
) -> None:
    """Write any trace as anonymous hash_ids lines, which every command reads."""
    key = secrets.token_bytes(16) if salt is None else salt.encode("utf-8", "surrogateescape")
    if len(key) > 64:
        raise typer.BadParameter(f"must be at most 64 bytes, got {len(key)}", param_hint="--salt")
    with progress_bar() as bar:
        task = bar.add_task("reading", total=2)
        trace = reading.read(bar, task)
        bar.update(task, description="writing")
        try:
            records = converted(trace, block_size or trace.block_size, key)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--block-size") from None
        with _writing(output) as write:
            for number, record in enumerate(records):
                if number % 64 == 0:
                    advance(bar, task, 1, number / len(trace.requests))
                write(json.dumps(record).encode() + b"\n")


@contextmanager
def _writing(output: str) -> Iterator[Callable[[bytes], object]]:
    """How to write a file, which takes its name only when it is whole; a pipe or a device is written to as it is."""
    if output == "-":
        yield sys.stdout.buffer.write
        return
    target = os.path.realpath(output)  # subtle: of a link, what it names is to be replaced, not the link
    is_whole = os.path.isfile(target) or not os.path.exists(target)
    path = target + ".part" if is_whole else output
    try:
        with gzip.open(path, "wb") if output.endswith(".gz") else open(path, "wb") as file:
            yield file.write
        if is_whole:
            os.replace(path, target)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {output}: {error.strerror}", param_hint="--output") from None
    finally:
        if is_whole:
            with suppress(OSError):
                os.remove(path)
