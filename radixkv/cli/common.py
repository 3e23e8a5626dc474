"""What the commands share: the app, how options are declared and parsed, the progress bar, tables and JSON."""

import inspect
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, TypeAlias, get_type_hints

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from radixkv.policy import POLICIES

app = typer.Typer(add_completion=False)

MAX_BLOCKS = 2**31 - 1
MAX_BLOCK_SIZE = 2**20

Json: TypeAlias = Annotated[
    str | None, typer.Option("--json", metavar="FILE|-", help="Write JSON too; with - nothing but JSON to stdout.")
]


def command(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command. A parameter whose type is a dataclass stands for its fields, an option or argument each.

    Where the command has a parameter of a field's name itself, that field keeps its default.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function).parameters
        shared: dict[str, tuple[type, list[str]]] = {}  # parameter -> its type, and the fields that are asked for
        shown: list[inspect.Parameter] = []
        for parameter in own.values():
            kind = parameter.annotation
            if not is_dataclass(kind):
                shown.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
                continue
            assert isinstance(kind, type)
            asked = [field for field in fields(kind) if field.name not in own]
            shared[parameter.name] = kind, [field.name for field in asked]
            types = get_type_hints(kind, include_extras=True)
            shown += [
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name]
                )
                for field in asked
            ]

        def run(**given: object) -> None:
            for name, (kind, asked) in shared.items():
                given[name] = kind(**{field: given.pop(field) for field in asked})
            function(**given)

        # typer reads both
        run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
        app.command(name, help=inspect.getdoc(function))(run)
        return function

    return register


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


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """A parser of one of the names."""
    known = [*names]

    def parse(text: str) -> str:
        if text not in known:
            raise typer.BadParameter(f"{text[:40]!r} is not one of {', '.join(known)}")
        return text

    return parse


def parse_policies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in POLICIES:
            raise typer.BadParameter(f"{name[:40]!r} is not one of {', '.join(POLICIES)}", param_hint="--policy")
    return list(dict.fromkeys(names))


def parse_capacities(text: str | None, option: str = "--capacity") -> list[int | None] | None:
    """None stands for inf; of no text comes None."""
    if text is None:
        return None
    capacities: list[int | None] = []
    for part in (part.strip() for part in text.split(",")):
        if part == "inf":
            capacities.append(None)
        elif part.isdecimal() and len(part) <= 10 and 1 <= int(part) <= MAX_BLOCKS:
            capacities.append(int(part))
        else:
            raise typer.BadParameter(f"{part[:40]!r} is neither inf nor 1 to {MAX_BLOCKS} blocks", param_hint=option)
    return list(dict.fromkeys(capacities))


def progress_bar() -> Progress:
    """On stderr, and only if that is a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def advance(bar: Progress, task: TaskID, done: int, share: float) -> None:
    bar.update(task, completed=done + share)


def count(number: int | None) -> str:
    return "inf" if number is None else f"{number:,}"


def table(*headers: str, left: int = 0) -> Table:
    """All columns are flush right but the first `left` ones."""
    made = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for index, header in enumerate(headers):
        made.add_column(header, justify="left" if index < left else "right", no_wrap=True)
    return made


def show(json_file: str | None, result: Callable[[], object], print_tables: Callable[[], None]) -> None:
    """Print tables, write JSON, or both; to stdout, JSON goes alone."""
    try:
        if json_file is not None:
            _write_json(json_file, result())
    finally:  # the tables may be the last thing that is read of stdout, or all that is left of a long run
        if json_file != "-":
            print_tables()


def _write_json(file: str, result: object) -> None:
    """Write one JSON document to a file, or to stdout for "-"."""
    text = json.dumps(result)
    if file == "-":
        print(text)
        return
    try:
        Path(file).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"cannot write {file}: {error.strerror}", param_hint="--json") from None
