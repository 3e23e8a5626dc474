"""Pictures of hit rates: what each shows, and how matplotlib draws them. Knows arrays; nothing of traces or caches.

A `Chart` is a picture as data, so that `radixkv.report` can draw the same one for a page.
"""

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.floating[Any]]

# Told apart by people who see few colours, too (Okabe and Ito 2008); greys for what is only for comparison.
BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
)
INK, GREY, PALE = "#222222", "#767676", "#D9D9D9"
_OTHERS = [GREEN, PURPLE, SKY, RED, YELLOW, INK]
_CLASS_COLORS = {
    "hit": BLUE,
    "cold": PALE,
    "not cached before": PALE,
    "capacity": ORANGE,
    "broken_prefix": RED,
    "block_rounding": PURPLE,
    "last_token": SKY,
    "namespace": GREEN,
}

_HIGH = 0.9  # a share from which on no text is put above it
_TOO_THIN = 0.0005  # of all tokens: a class that nobody would see

SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True)
class Line:
    """A curve, or points where it has a marker; of a stacked chart the upper edge of an area, without what is below."""

    name: str
    x: Floats
    y: Floats
    color: str
    dash: str = "solid"  # or dash, dot
    marker: bool = False
    in_legend: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """A text beside the point that it is about; `right` and `above` say on which side."""

    x: float
    y: float
    text: str
    color: str = INK
    right: bool = True
    above: bool = True
    point: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture as data. Shares go from 0 to 1."""

    title: str
    subtitle: str
    x_label: str
    y_label: str
    lines: list[Line]
    x_ticks: list[tuple[float, str]]  # texts may have several lines
    y_max: float
    log_x: bool = True
    stacked: bool = False
    notes: list[Note] = field(default_factory=list)


# What the pictures show


def capacity_chart(
    lru: tuple[Floats, Floats],
    opt: tuple[Floats, Floats],
    ceiling: float,
    *,
    knee: tuple[float, float],
    block_size: int,
    kv_bytes_per_token: int | None = None,
    policies: Mapping[str, tuple[Floats, Floats]] | None = None,
    subtitle: str = "",
    rate: str = "block",
) -> Chart:
    """Hit rates by capacity: pairs of capacities, blocks above 0, and rates. `ceiling` is the rate without bound."""
    low, high = float(lru[0][0]), float(lru[0][-1])
    lines = [
        Line("ceiling", np.array([low, high]), np.array([ceiling, ceiling]), GREY, "dash"),
        Line("optimum", *opt, ORANGE),
        *(
            Line(name, *points, color, "dot", marker=True, in_legend=True)
            for (name, points), color in zip((policies or {}).items(), cycle(_OTHERS), strict=False)
        ),
        Line("LRU", *lru, BLUE),
    ]
    notes = [
        _note_ceiling(low, ceiling, "no bound"),
        _note_half_way(lines[1], right=False, above=True),
        _note_half_way(lines[-1], right=True, above=False),
        Note(*knee, f"knee: {knee[1]:.1%}\n{short(knee[0])} blocks", BLUE, above=False, point=True),
    ]
    units = ["blocks", "tokens", *(["memory"] if kv_bytes_per_token else [])]
    ticks = []
    for blocks in _round_steps(low, high):
        sizes = [short(blocks), short(blocks * block_size)]
        if kv_bytes_per_token:
            sizes.append(_short_bytes(blocks * block_size * kv_bytes_per_token))
        ticks.append((blocks, "\n".join(sizes)))
    return Chart(
        "Hits by cache capacity",
        subtitle,
        f"capacity: {', '.join(units)}",
        f"hit rate ({rate})",
        lines,
        ticks,
        y_max=_headroom(ceiling),
        notes=notes,
    )


def ttl_chart(
    seconds: Floats,
    rates: Floats,
    ceiling: float,
    *,
    marks: Sequence[tuple[float, float, int]] = (),
    subtitle: str = "",
    rate: str = "block",
) -> Chart:
    """Hit rates by time to live; `marks` are a time in seconds, its rate, and the most blocks cached at once."""
    low, high = float(seconds[0]), float(seconds[-1])
    return Chart(
        "Hits by time to live",
        subtitle,
        "kept unused for",
        f"hit rate ({rate})",
        [
            Line("ceiling", np.array([low, high]), np.array([ceiling, ceiling]), GREY, "dash"),
            Line("kept for a time", seconds, rates, BLUE),
        ],
        [(time, text) for time, text in _TIMES.items() if low <= time <= high],
        y_max=_headroom(ceiling),
        notes=[
            _note_ceiling(low, ceiling, "for ever"),
            *(
                Note(time, share, f"{share:.1%}\n{short(blocks)} blocks", BLUE, above=False, point=True)
                for time, share, blocks in marks
                if low <= time <= high
            ),
        ],
    )


def misses_chart(
    times: Floats, classes: Mapping[str, npt.ArrayLike], *, num_bins: int = 48, subtitle: str = ""
) -> Chart:
    """Shares of the prompt tokens over time; `classes` gives for each class its tokens of each request.

    `times` in seconds, one a request. Where they say nothing, requests are counted instead.
    """
    by_time = bool(np.ptp(times)) if len(times) else False
    places = times - times.min() if by_time else np.arange(len(times), dtype=float)
    width = max(float(places.max(initial=0)), 1e-9) / num_bins
    bins = np.minimum((places / width).astype(np.int64), num_bins - 1)
    sums = {name: np.bincount(bins, np.asarray(tokens, float), num_bins) for name, tokens in classes.items()}
    total = np.sum(list(sums.values()), axis=0)
    filled = np.flatnonzero(total)
    x = (filled + 0.5) * width
    lines = []
    for name, tokens in sums.items():
        if tokens.sum() > _TOO_THIN * total.sum():
            shares = np.asarray(tokens[filled] / total[filled], np.float64)
            lines.append(Line(name.replace("_", " "), x, shares, _CLASS_COLORS.get(name, GREY), in_legend=True))
    end = width * num_bins
    ticks = [(place, short(place)) for place in np.linspace(0, end, 5).tolist()]
    if by_time:
        step = next((time for time in _STEPS if end / time <= 8), _STEPS[-1])
        ticks = [(place, _clock(place)) for place in np.arange(0, end + step / 2, step).tolist()]
    return Chart(
        "Where the prompt tokens went",
        subtitle,
        "time since the first request" if by_time else "requests",
        "share of the prompt tokens",
        lines,
        ticks,
        y_max=1.0,
        log_x=False,
        stacked=True,
    )


# How they are drawn


def check(file: str | os.PathLike[str]) -> None:
    """Whether `save` can be expected to work, before there is anything to lose.

    Raises: ValueError for another suffix, ImportError without matplotlib.
    """
    if Path(file).suffix.lower() not in SUFFIXES:
        raise ValueError(f"{os.fspath(file)} must end with one of {', '.join(SUFFIXES)}")
    load("matplotlib.figure")


def load(module: str) -> Any:
    """A module of a plotting library. Raises: ImportError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ImportError(f"{package} is not installed: pip install 'radixkv[plot]'", name=package) from None


def save(charts: Sequence[Chart], file: str | os.PathLike[str]) -> None:
    """Draw charts below each other into a PNG, SVG or PDF file.

    Raises: ValueError for another suffix, ImportError without matplotlib, OSError.
    """
    check(file)
    matplotlib = load("matplotlib")
    with matplotlib.rc_context(_STYLE):
        figure = load("matplotlib.figure").Figure(figsize=(8, 4.4 * len(charts)), layout="constrained")
        figure.get_layout_engine().set(h_pad=0.15, w_pad=0.1)
        for axes, chart in zip(figure.subplots(len(charts), squeeze=False)[:, 0], charts, strict=True):
            _draw(axes, chart)
        # no date, so that the same trace gives the same file
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(Path(file).suffix.lower())
        figure.savefig(file, dpi=160, metadata=metadata)


_STYLE = {
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": PALE,
    "grid.linewidth": 0.6,
    "ytick.left": False,
    "xtick.minor.visible": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "radixkv",
}
_DASHES = {"solid": "-", "dash": "--", "dot": ":"}


def _draw(axes: Any, chart: Chart) -> None:
    if chart.log_x:
        axes.set_xscale("log")
    if chart.stacked:
        x = chart.lines[0].x if chart.lines else np.zeros(0)
        shares = [line.y for line in chart.lines]
        names, colors = [line.name for line in chart.lines], [line.color for line in chart.lines]
        axes.stackplot(x, *shares, labels=names, colors=colors, linewidth=0)
    else:
        for line in chart.lines:
            axes.plot(
                line.x,
                line.y,
                _DASHES[line.dash],
                color=line.color,
                linewidth=1.2 if line.dash != "solid" else 2.2,
                marker="o" if line.marker else None,
                markersize=4,
                label=line.name if line.in_legend else None,
            )
    for note in chart.notes:
        if note.point:
            axes.plot([note.x], [note.y], "o", color=note.color, markersize=6, zorder=5)
        axes.annotate(
            note.text,
            (note.x, note.y),
            xytext=(6 if note.right else -6, 4 if note.above else -4),
            textcoords="offset points",
            ha="left" if note.right else "right",
            va="bottom" if note.above else "top",
            color=note.color,
            linespacing=1.3,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
        )
    axes.set_title(chart.title, loc="left", fontweight="bold", pad=24 if chart.subtitle else 8)
    axes.annotate(chart.subtitle, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", color=GREY)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.set_xticks([place for place, _ in chart.x_ticks], [text for _, text in chart.x_ticks])
    axes.minorticks_off()
    axes.set_ylim(0, chart.y_max)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.margins(x=0 if chart.stacked else 0.01)
    if any(line.in_legend for line in chart.lines):
        if chart.stacked:
            handles, names = axes.get_legend_handles_labels()
            axes.legend(handles[::-1], names[::-1], frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        else:
            axes.legend(frameon=False, loc="lower right")


_TIMES = {
    **{1: "1 s", 3: "3 s", 10: "10 s", 30: "30 s", 60: "1 min", 300: "5 min", 1200: "20 min"},
    **{3600: "1 h", 14_400: "4 h", 86_400: "1 day", 604_800: "1 week", 2_592_000: "30 days"},
}
_STEPS = [1, 5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 14_400, 43_200, 86_400, 604_800, 2_592_000]


def _note_half_way(line: Line, *, right: bool, above: bool) -> Note:
    index = min(int(np.searchsorted(line.y, line.y[-1] / 2)), len(line.y) - 1)
    return Note(float(line.x[index]), float(line.y[index]), line.name, line.color, right=right, above=above)


def _note_ceiling(x: float, ceiling: float, text: str) -> Note:
    return Note(x, ceiling, f"{text}: {ceiling:.1%}", GREY, above=ceiling < _HIGH)


def _headroom(ceiling: float) -> float:
    return min(1.0, max(1.12 * ceiling, 0.01)) if ceiling < _HIGH else 1.06


def _round_steps(low: float, high: float) -> list[float]:
    """1, 3, 10, 30, ... in [low, high], or powers of ten only where those are enough."""
    decades = np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
    factors = (1, 3) if np.log10(high / low) < 5 else (1,)
    steps = [factor * 10.0**decade for decade in decades.tolist() for factor in factors]
    return [step for step in steps if low <= step <= high]


def short(number: float) -> str:
    """A count in three digits: 950, 12.6k, 1.54M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def _short_bytes(number: float) -> str:
    for limit, unit in ((1 << 50, "PiB"), (1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")):
        if number >= limit:
            return f"{number / limit:.3g} {unit}"
    return f"{number / 1024:.3g} KiB"


def _clock(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:g} s"
    if seconds < 3600:
        return f"{seconds / 60:g} min"
    return f"{seconds / 3600:g} h" if seconds < 172_800 else f"{seconds / 86_400:g} d"
