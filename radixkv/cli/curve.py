"""`radixkv curve`. Knows how hits by capacity are asked for and shown; computes none."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from radixkv.cli.common import (
    Json,
    advance,
    command,
    count,
    one_of,
    parse_capacities,
    parse_policies,
    progress_bar,
    show,
    table,
    whole,
)
from radixkv.cli.reading import Reading, head, print_head, short_name
from radixkv.configs import find_model
from radixkv.curve import DEFINITIONS, Counts, Curve
from radixkv.plot import SUFFIXES, Chart, check, save
from radixkv.policy import POLICIES
from radixkv.replay import default_capacities, replayed
from radixkv.report import charts
from radixkv.trace import IdTrace, Trace

_TTLS = [60.0, 300.0, 3600.0]  # s
_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86_400}
_GIB = 1 << 30
_MAX_KV_BYTES = 1 << 30  # a token


def parse_seconds(text: str) -> list[float]:
    """90, 90s, 5min, 1h, 2d, several with commas between."""
    seconds = []
    for part in (part.strip() for part in text.split(",")):
        number = part.rstrip("smindh")
        factor = _UNITS.get(part[len(number) :] or "s")
        if factor is None or not number.isdecimal() or len(number) > 9 or not int(number):
            raise typer.BadParameter(f"{part[:40]!r} is no time such as 90, 5min, 1h or 2d", param_hint="--ttl")
        seconds.append(float(int(number) * factor))
    return sorted(set(seconds))


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of a curve: the options of commands that show one."""

    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="N,...",
            help="Capacities in blocks: 1000,3000,inf. Default: shares of the trace's.",
            show_default=False,
        ),
    ] = None
    rate: Annotated[
        str,
        typer.Option(
            "--rate",
            parser=one_of(DEFINITIONS),
            metavar="NAME",
            help=f"What a hit rate is: {', '.join(DEFINITIONS)}.",
        ),
    ] = "block"
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy", metavar="NAME,...", help=f"Beside LRU, by replay: {', '.join(POLICIES)}.", show_default=False
        ),
    ] = None
    kv_bytes_per_token: Annotated[
        int | None,
        typer.Option(
            "--kv-bytes-per-token",
            parser=whole(1, _MAX_KV_BYTES),
            metavar="N",
            help="To show capacities in GiB too.",
            show_default=False,
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="As that, of a preset (radixkv plan --list).", show_default=False),
    ] = None

    def capacities(self) -> list[int | None] | None:
        """None for the default. Raises: typer.BadParameter, like the others."""
        return parse_capacities(self.at, "--at")

    def policies(self) -> list[str]:
        return [] if self.policy is None else parse_policies(self.policy)

    def kv_bytes(self) -> int | None:
        """Of a token."""
        if self.model is None:
            return self.kv_bytes_per_token
        if self.kv_bytes_per_token is not None:
            raise typer.BadParameter("not with --kv-bytes-per-token", param_hint="--model")
        try:
            found = find_model(self.model)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--model") from None
        return found.kv_bytes_per_token(found.dtype)


@dataclass(frozen=True, slots=True)
class Row:
    """Hit blocks of each request in a cache of one capacity."""

    capacity: int | None
    lru: Counts
    opt: Counts
    policies: dict[str, Counts]  # by name, from replay


@dataclass(frozen=True, slots=True)
class Kept:
    """What a time to live does, without bound on the capacity."""

    seconds: float
    hits: Counts  # blocks, of each request
    most_blocks: int  # at once


@command("curve")
def curve_command(
    *,
    asked: Asked,
    ttl: Annotated[
        str | None,
        typer.Option(metavar="T,...", help="What is kept so long after its last use: 60,5min,1h.", show_default=False),
    ] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help=f"Draw it: {', '.join(SUFFIXES)}.", show_default=False)
    ] = None,
    json_file: Json = None,
    reading: Reading,
) -> None:
    """Hits at every capacity, from one pass: LRU, the optimum, a time to live, and where the knee is."""
    kv_bytes, capacities, policies = asked.kv_bytes(), asked.capacities(), asked.policies()
    ttls = parse_seconds(ttl) if ttl is not None else None
    if plot is not None:
        _check_plot(plot)
    trace, curve, rows = compute(reading, capacities, policies)
    kept = _keep(curve, trace, ttls)
    show(
        json_file,
        lambda: _result(trace, curve, rows, kept, kv_bytes),
        lambda: _print(trace, curve, rows, kept, asked.rate, kv_bytes),
    )
    if plot is not None:
        try:
            save(draw(trace, curve, rows, asked.rate, kv_bytes), plot)
        except OSError as error:
            raise typer.BadParameter(f"cannot write {plot}: {error.strerror}", param_hint="--plot") from None


def compute(
    reading: Reading, capacities: list[int | None] | None, policies: list[str]
) -> tuple[Trace, Curve, list[Row]]:
    """Read a trace and count its hits, with a progress bar."""
    with progress_bar() as bar:
        task = bar.add_task("reading", total=2)
        trace = reading.read(bar, task)
        capacities = capacities or default_capacities(trace.num_blocks)
        bar.update(task, description="curve", total=2 + len(capacities) * len(policies))
        curve = Curve(trace, progress=partial(advance, bar, task, 1))
        done = 2
        rows = []
        for capacity in capacities:
            hits = {}
            for policy in policies:
                bar.update(task, description=f"{policy} {count(capacity)}")
                replay = replayed(trace, capacity, policy, progress=partial(advance, bar, task, done))
                hits[policy] = np.array([hit for _, hit in replay], np.int64)
                done += 1
            rows.append(Row(capacity, curve.lru_hits(capacity), curve.opt_hits(capacity), hits))
    return trace, curve, rows


def draw(trace: Trace, curve: Curve, rows: list[Row], rate: str, kv_bytes: int | None) -> list[Chart]:
    policies = {
        name: {row.capacity: row.policies[name] for row in rows if row.capacity is not None}
        for name in rows[0].policies
    }
    name = f"{short_name(trace)}, {curve.num_requests:,} requests"
    return charts(curve, rate=rate, kv_bytes_per_token=kv_bytes, policies=policies, name=name)


def _check_plot(file: str) -> None:
    try:
        check(file)
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(str(error), param_hint="--plot") from None


def _keep(curve: Curve, trace: Trace, asked: list[float] | None) -> list[Kept]:
    """By default, nothing of a trace without times."""
    if not np.ptp(curve.prompts.times):
        if asked is not None:
            raise typer.BadParameter(f"{trace.name} has no times", param_hint="--ttl")
        return []
    return [Kept(seconds, curve.ttl_hits(seconds), curve.ttl_blocks(seconds)) for seconds in asked or _TTLS]


def _show_seconds(seconds: float) -> str:
    for unit, factor in reversed(_UNITS.items()):
        if seconds >= factor and seconds % factor == 0:
            return f"{seconds / factor:,.0f} {unit}"
    return f"{seconds:g} s"


def _show_gib(blocks: int | None, block_size: int, kv_bytes: int) -> str:
    if blocks is None:
        return "inf"
    gib = blocks * block_size * kv_bytes / _GIB
    return f"{gib:,.0f}" if gib >= 100 else f"{gib:.3g}"


def _print(trace: Trace, curve: Curve, rows: list[Row], kept: list[Kept], rate: str, kv_bytes: int | None) -> None:
    console = Console(highlight=False)

    def percent(hits: Counts) -> str:
        return f"{100 * getattr(curve.rates(hits), rate):.2f}"

    def sizes(blocks: int | None) -> list[str]:
        cells = [count(blocks), count(blocks and blocks * trace.block_size)]
        return [*cells, _show_gib(blocks, trace.block_size, kv_bytes)] if kv_bytes else cells

    units = ["capacity\nblocks", "\ntokens", *(["\nGiB"] if kv_bytes else [])]
    print_head(console, trace)
    console.print()
    shown = table(*units, "LRU\nhits", "\n%", "optimum\n%", *(f"{name}\n%" for name in rows[0].policies))
    for row in rows:
        cells = [percent(row.lru), percent(row.opt), *map(percent, row.policies.values())]
        shown.add_row(*sizes(row.capacity), count(int(row.lru.sum())), *cells)
    console.print(shown)
    knee = curve.knee()
    console.print(f"\nknee: {_listed(sizes(knee))}, LRU {percent(curve.lru_hits(knee))} %")
    for share, name in ((0.9, "90 % of all hits"), (1.0, "all hits")):
        console.print(f"{name} from {_listed(sizes(curve.capacity_for(share)))} on")
    if kept:
        console.print()
        shown = table("kept unused\nfor", "\nhits", "\n%", "most at once\nblocks", *units[1:])
        for ttl in kept:
            cells = [count(int(ttl.hits.sum())), percent(ttl.hits), *sizes(ttl.most_blocks)]
            shown.add_row(_show_seconds(ttl.seconds), *cells)
        console.print(shown)
    console.print(f"\n% is {rate}: {DEFINITIONS[rate]}")
    if not isinstance(trace, IdTrace):
        console.print("Of the blocks, one is the running request's unfinished one.")


def _listed(sizes: list[str]) -> str:
    units = ["block" if sizes[0] == "1" else "blocks", "token" if sizes[1] == "1" else "tokens", "GiB"]
    first, *others = (f"{size} {unit}" for size, unit in zip(sizes, units, strict=False))
    return f"{first} ({', '.join(others)})"


def _result(trace: Trace, curve: Curve, rows: list[Row], kept: list[Kept], kv_bytes: int | None) -> dict[str, object]:
    def rates(hits: Counts) -> dict[str, float]:
        return asdict(curve.rates(hits))

    lru = curve.lru()
    knee = curve.knee()
    return {
        **head(trace),
        "access_blocks": curve.access_blocks,
        "distinct_blocks": trace.num_blocks,
        "kv_bytes_per_token": kv_bytes,
        "rows": [
            {
                "capacity_blocks": row.capacity,
                "lru_hit_blocks": int(row.lru.sum()),
                "opt_hit_blocks": int(row.opt.sum()),
                "lru_rates": rates(row.lru),
                "opt_rates": rates(row.opt),
                "policies": {
                    name: {"hit_blocks": int(hits.sum()), "rates": rates(hits)} for name, hits in row.policies.items()
                },
            }
            for row in rows
        ],
        "knee": {"capacity_blocks": knee, "lru_hit_blocks": int(lru[knee])},
        "capacity_for_all_hits_blocks": len(lru) - 1,
        "ttl": [
            {
                "seconds": row.seconds,
                "hit_blocks": int(row.hits.sum()),
                "most_blocks": row.most_blocks,
                "rates": rates(row.hits),
            }
            for row in kept
        ],
        "definitions": DEFINITIONS,
    }
