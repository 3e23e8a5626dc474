"""`radixkv explain`. Knows how it is shown; computes none."""

import textwrap
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from radixkv.cli.common import MAX_BLOCKS, Json, advance, command, progress_bar, show, table, whole
from radixkv.cli.reading import Reading, head, print_head
from radixkv.explain import Explained, TokenCounts, explain
from radixkv.trace import IdTrace, Trace
from radixkv.what_if import FORMS, Change, Setting, parse_change

_MEANINGS = {
    "hit": "cached, in a whole block",
    "cold": "came for the first time",
    "capacity": "was cached, and had to go",
    "broken_prefix": "came before, behind something else",
    "block_rounding": "known, but not as a whole block",
    "last_token": "known, but its logits are needed",
    "namespace": "known in another namespace only",
}
_SHOWN = 40  # characters of an example


@dataclass(frozen=True, slots=True)
class _Row:
    """A setting, explained."""

    change: str  # "" for the trace as it is
    setting: Setting
    explained: Explained


@command("explain")
def explain_command(
    *,
    capacity: Annotated[
        int | None,
        typer.Option(
            parser=whole(1, MAX_BLOCKS),
            metavar="N",
            help="Of the cache, in blocks. Default: no bound.",
            show_default=False,
        ),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option("--what-if", metavar="CHANGE", help=f"Replay with a change too: {FORMS}.", show_default=False),
    ] = None,
    json_file: Json = None,
    reading: Reading,
) -> None:
    """Where the misses come from, what hides a cached prefix, and what to do about it."""
    changes = [_parse(text) for text in what_if or []]
    rows = _compute(reading, capacity, changes)
    show(json_file, lambda: _result(rows), lambda: _print(rows))


def _parse(text: str) -> Change:
    try:
        return parse_change(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--what-if") from None


def _compute(reading: Reading, capacity: int | None, changes: list[Change]) -> list[_Row]:
    """What is, then what would be with each change alone."""
    with progress_bar() as bar:
        task = bar.add_task("reading", total=2 + len(changes))
        setting = Setting(reading.read(bar, task), capacity)
        rows: list[_Row] = []
        for done, change in enumerate([None, *changes], 1):
            bar.update(task, description=change.text if change else "explaining")
            try:
                changed = change.apply(setting, rows[0].explained.findings) if change else setting
                explained = explain(
                    changed.trace, changed.capacity, ttl=changed.ttl, progress=partial(advance, bar, task, done)
                )
            except ValueError as error:
                if change is None:
                    raise
                raise typer.BadParameter(f"{change.text}: {error}", param_hint="--what-if") from None
            rows.append(_Row(change.text if change else "", changed, explained))
    return rows


def _print(rows: list[_Row]) -> None:
    console = Console(highlight=False)
    row = rows[0]
    trace, tokens = row.setting.trace, row.explained.tokens
    print_head(console, trace)
    console.print(f"cache: {_show_cache(row.setting)}\n\nwhere the prompt tokens went")
    shown = table("", "tokens", "%", left=1)
    shown.add_column()
    for name, meaning in _MEANINGS.items():
        shown.add_row(_title(name), *_amount(getattr(tokens, name), tokens), meaning)
    shown.add_section()
    shown.add_row("all", *_amount(tokens.prompt, tokens))
    console.print(shown)
    if row.explained.keeping:
        sizes = ", ".join(f"{share:.0%} in {blocks:,}" for share, blocks in row.explained.keeping)
        console.print(f"\nof what had to go for want of capacity would stay, in blocks: {sizes}")
    _print_findings(console, trace, row.explained)
    for changed in rows[1:]:
        _print_change(console, row.explained.tokens, changed)


def _print_findings(console: Console, trace: Trace, explained: Explained) -> None:
    tokens = explained.tokens
    if isinstance(trace, IdTrace):
        console.print("\nfindings: none from ids. Text and tokens tell what is behind a difference.")
        return
    if not explained.findings:
        console.print("\nfindings: none. Nothing that could be changed hides a cached prefix.")
    for number, finding in enumerate(explained.findings, 1):
        share = 100 * finding.lost_tokens / tokens.prompt
        requests = "1 request" if finding.requests == 1 else f"{finding.requests:,} requests"
        console.print(
            f"\n[bold]{number}. {_title(finding.kind)}[/bold]: "
            f"{finding.lost_tokens:,} tokens lost ({share:.2f} %) by {requests}"
        )
        values = " | ".join(repr(value[:_SHOWN]) for value in finding.examples)
        for text in (f"in: {finding.where}", f"e.g. {values}" if values else "", finding.advice):
            if text:
                lines = textwrap.wrap(text, console.width - 6, break_on_hyphens=False)
                console.print(escape("\n".join(["   " + lines[0], *("      " + line for line in lines[1:])])))
    rest = tokens.broken_prefix - sum(finding.lost_tokens for finding in explained.findings)
    if 100 * rest >= tokens.prompt:
        console.print(
            f"\n{rest:,} {'other ' if explained.findings else ''}tokens of broken prefixes are repeats in prompts that "
            "differ for a reason, as far as can be told: the same answer of a tool in two chats, say."
        )


def _print_change(console: Console, before: TokenCounts, row: _Row) -> None:
    after = row.explained.tokens
    console.print(f"\nwhat if: [bold]{escape(row.change)}[/bold]")
    console.print(f"cache: {_show_cache(row.setting)}, tokens a block: {row.setting.trace.block_size}")
    shown = table("", "tokens", "%", "difference", "points", left=1)
    for name in (*_MEANINGS, "prompt"):
        old, new = getattr(before, name), getattr(after, name)
        points = 100 * (new / (after.prompt or 1) - old / (before.prompt or 1))
        if name == "prompt":
            shown.add_section()
        elif not old and not new:
            continue
        shown.add_row(
            "all" if name == "prompt" else _title(name), *_amount(new, after), f"{new - old:+,}", f"{points:+.2f}"
        )
    console.print(shown)


def _title(name: str) -> str:
    return name.replace("_", " ")


def _amount(number: int, tokens: TokenCounts) -> tuple[str, str]:
    return f"{number:,}", f"{100 * number / (tokens.prompt or 1):.2f}"


def _show_cache(setting: Setting) -> str:
    blocks = "no bound" if setting.capacity is None else f"{setting.capacity:,} blocks, least recently used first to go"
    return blocks + (f", {setting.ttl:g} s to live" if setting.ttl is not None else "")


def _result(rows: list[_Row]) -> dict[str, Any]:
    return {
        **head(rows[0].setting.trace),
        **_part(rows[0]),
        "what_if": [{"change": row.change, **_part(row)} for row in rows[1:]],
    }


def _part(row: _Row) -> dict[str, Any]:
    names = ("kind", "requests", "lost_tokens", "where", "advice")
    return {
        "block_size": row.setting.trace.block_size,
        "capacity_blocks": row.setting.capacity,
        "ttl_seconds": row.setting.ttl,
        "tokens": asdict(row.explained.tokens),
        "keeping": [{"share": share, "blocks": blocks} for share, blocks in row.explained.keeping],
        "findings": [{name: getattr(finding, name) for name in names} for finding in row.explained.findings],
    }
