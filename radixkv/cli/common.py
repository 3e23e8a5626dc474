"""What the commands share: the app, parsers of arguments, the progress bar."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from radixkv.policy import POLICIES

app = typer.Typer(add_completion=False)

MAX_BLOCKS = 2**31 - 1
MAX_BLOCK_SIZE = 2**20


def whole(low: int, high: int = 2**31 - 1) -> Callable[[str | int], int]:
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


def parse_policies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in POLICIES:
            raise typer.BadParameter(f"{name[:40]!r} is not one of {', '.join(POLICIES)}", param_hint="--policy")
    return list(dict.fromkeys(names))


def parse_capacities(text: str) -> list[int | None]:
    """None stands for inf."""
    capacities: list[int | None] = []
    for part in (part.strip() for part in text.split(",")):
        if part == "inf":
            capacities.append(None)
        elif part.isdecimal() and len(part) <= 10 and 1 <= int(part) <= MAX_BLOCKS:
            capacities.append(int(part))
        else:
            raise typer.BadParameter(
                f"{part[:40]!r} is neither inf nor 1 to {MAX_BLOCKS} blocks", param_hint="--capacity"
            )
    return list(dict.fromkeys(capacities))


def progress_bar() -> Progress:
    """On stderr, and only if that is a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def advance(bar: Progress, task: TaskID, done: int, share: float) -> None:
    bar.update(task, completed=done + share)


def count(number: int | None) -> str:
    return "inf" if number is None else f"{number:,}"


def write_json(file: str, result: object) -> None:
    """Write one JSON document to a file, or to stdout for "-"."""
    text = json.dumps(result)
    if file == "-":
        print(text)
        return
    try:
        Path(file).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"cannot write {file}: {error.strerror}", param_hint="--json") from None
