"""A report as one self-contained page of HTML, on which plotly draws. Knows how things are shown; computes none."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from textwrap import wrap

from radixkv.curve import DEFINITIONS, Curve
from radixkv.explain import Explained
from radixkv.plot import BLUE, GREY, INK, ORANGE, PALE, Chart, load, short
from radixkv.report import Prefix, over_time, prefix_tree
from radixkv.tokens import TOKEN_BYTES
from radixkv.trace import IdTrace, TokenTrace, Trace

_TEXT_TOKENS = 100  # of a prefix, that are shown beside it
_TEXT_CHARACTERS = 300
_LABEL_CHARACTERS = 30
_LINE_CHARACTERS = 70


@dataclass(frozen=True, slots=True)
class Row:
    """Hits in a cache of one capacity: shares, by the rate that the page shows."""

    capacity: int | None
    lru: float
    opt: float
    policies: dict[str, float]


def page(
    trace: Trace,
    curve: Curve,
    *,
    capacity: int,
    rows: Sequence[Row],
    drawn: Sequence[Chart],
    explained: Explained,
    rate: str = "block",
) -> str:
    """HTML that needs nothing else, and no network: the `drawn` charts, tables, findings and the tree of prefixes.

    `capacity`, in blocks, is that of the cache that is explained, shown over time and in the tree. Where the trace has
    text, the page shows beginnings of prompts. About 5 MB, for plotly is in it. Raises: ImportError without plotly.
    """
    name = escape(os.path.basename(trace.name))
    library = load("plotly.offline").get_plotlyjs()
    hits = curve.lru_hits(capacity)
    rates, ceiling = curve.rates(hits), curve.rates(curve.lru_hits(None))
    tree = prefix_tree(curve.prompts, hits)
    of_cache = f"a cache of {capacity:,} blocks ({capacity * trace.block_size:,} tokens)"
    figures: list[dict[str, object]] = []

    def draw(figure: dict[str, object]) -> str:
        figures.append(figure)
        return f'<div id="figure{len(figures) - 1}"></div>'

    capacities, *others = drawn
    parts = [
        f"<p>{curve.num_requests:,} requests, {int(curve.prompts.num_tokens.sum()):,} prompt tokens, "
        f"{trace.num_blocks:,} distinct blocks of {trace.block_size} tokens.</p>",
        "<h2>What cache memory buys</h2>",
        draw(_figure(capacities)),
        _table(
            ["blocks", "tokens", "LRU", "optimum", *rows[0].policies],
            [
                [_count(row.capacity), _count(row.capacity and row.capacity * trace.block_size)]
                + [f"{share:.2%}" for share in (row.lru, row.opt, *row.policies.values())]
                for row in rows
            ],
        ),
        f"<p class=note>Hit rate ({rate}): {escape(DEFINITIONS[rate])}.</p>",
        *(f"<h2>What a time to live keeps</h2>{draw(_figure(chart))}" for chart in others),
        f"<h2>Where the prompt tokens went</h2><p>In {of_cache}.</p>",
        draw(_figure(over_time(curve, hits))),
        _token_table(explained),
        "<h2>What broke the prefix</h2>",
        _findings(trace, explained),
        "<h2>The tree of prefixes</h2>",
        f"<p>Width: the requests that begin so. Colour: how much of it hits in {of_cache}. A number is its tokens. "
        "Click on a prefix to see what follows it, and on the bar above to go back.</p>",
        draw(_icicle(trace, tree, rates.block)) if tree else "<p>No prompt has a whole block.</p>",
        "<h2>One trace, five hit rates</h2>",
        _table(
            ["rate", f"{capacity:,} blocks", "no bound", "definition"],
            [
                [name, f"{getattr(rates, name):.2%}", f"{getattr(ceiling, name):.2%}", escape(text)]
                for name, text in DEFINITIONS.items()
            ],
            texts=(0, 3),
        ),
    ]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{name}</title>\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{_STYLE}</style>\n'
        f"<script>{library}</script>\n</head>\n<body>\n<h1>{name}</h1>\n"
        + "\n".join(parts)
        + f"\n<script>\nconst figures = {json.dumps(figures)};\n{_DRAW}</script>\n</body>\n</html>\n"
    )


_STYLE = """
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem 1.2rem .2rem 0; text-align: right; vertical-align: top; }
th { font-weight: 600; white-space: nowrap; border-bottom: 1px solid #767676; }
.text { text-align: left; } .note { color: #666; font-size: .9rem; }
"""
_DRAW = """
figures.forEach((figure, number) =>
  Plotly.newPlot("figure" + number, figure.data, figure.layout, {responsive: true, displayModeBar: false}));
"""


# Tables


def _token_table(explained: Explained) -> str:
    tokens = asdict(explained.tokens)
    total = tokens.pop("prompt")
    rows = [[name.replace("_", " "), f"{num:,}", f"{num / (total or 1):.2%}"] for name, num in tokens.items() if num]
    keeping = ", ".join(f"{share:.0%} in {blocks:,} blocks" for share, blocks in explained.keeping)
    keeping = keeping and f"<p>What was lost for want of capacity would hit: {keeping}.</p>"
    return _table(["", "prompt tokens", ""], rows, texts=(0,)) + keeping


def _findings(trace: Trace, explained: Explained) -> str:
    if isinstance(trace, IdTrace):
        return "<p>Ids do not tell; that takes the tokens or the text of the prompts.</p>"
    if not explained.findings:
        return "<p>Nothing was found.</p>"
    return _table(
        ["what changes", "requests", "lost tokens", "where", "what to do"],
        [
            [found.kind.replace("_", " "), f"{found.requests:,}", f"{found.lost_tokens:,}"]
            + [escape(text) for text in (found.where, found.advice)]
            for found in explained.findings
        ],
        texts=(0, 3, 4),
    )


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, texts: Sequence[int] = ()) -> str:
    """Cells are HTML; the columns `texts` hold no numbers."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(
            f"<{tag}{' class=text' if column in texts else ''}>{cell}</{tag}>" for column, cell in enumerate(cells)
        )

    return "<table>\n" + "\n".join([line("th", headers), *(line("td", row) for row in rows)]) + "\n</table>"


def _count(number: int | None) -> str:
    return "no bound" if number is None else f"{number:,}"


# Figures, as plotly's JSON

_FONT = {"family": "system-ui, sans-serif", "color": INK, "size": 13}


def _figure(chart: Chart) -> dict[str, object]:
    data: list[dict[str, object]] = [
        {
            "type": "scatter",
            "mode": "lines+markers" if line.marker else "lines",
            "name": line.name,
            "x": line.x.tolist(),
            "y": line.y.tolist(),
            "line": {
                "color": line.color,
                "dash": line.dash,
                "width": 0 if chart.stacked else 2.5 if line.dash == "solid" else 1.5,
            },
            "hovertemplate": "%{y:.2%}",
            "showlegend": line.in_legend,
            **({"stackgroup": "all", "fillcolor": line.color} if chart.stacked else {}),
        }
        for line in chart.lines
    ]
    data += [
        {
            "type": "scatter",
            "mode": "markers+text",
            "x": [note.x],
            "y": [note.y],
            "text": [_lines(note.text)],
            "textposition": f"{'top' if note.above else 'bottom'} {'right' if note.right else 'left'}",
            "textfont": {"color": note.color},
            "marker": {"color": note.color, "size": 9, "opacity": 1 if note.point else 0},
            "hoverinfo": "skip",
            "showlegend": False,
            "cliponaxis": False,
        }
        for note in chart.notes
    ]
    layout = {
        "height": 420,
        "margin": {"l": 60, "r": 30, "t": 20, "b": 50 + 18 * max(text.count("\n") for _, text in chart.x_ticks)},
        "font": _FONT,
        "plot_bgcolor": "white",
        "hovermode": "x unified",
        "legend": {"traceorder": "reversed"} if chart.stacked else {"x": 1, "xanchor": "right", "y": 0.02},
        "xaxis": {
            "type": "log" if chart.log_x else "linear",
            "title": {"text": chart.x_label},
            "tickvals": [place for place, _ in chart.x_ticks],
            "ticktext": [_lines(text) for _, text in chart.x_ticks],
            "ticks": "outside",
            "tickcolor": GREY,
            "linecolor": GREY,
            "showgrid": False,
            "hoverformat": ",.0f",
        },
        "yaxis": {
            "title": {"text": chart.y_label},
            "range": [0, chart.y_max],
            "tickformat": ".0%",
            "gridcolor": PALE,
            "zeroline": False,
        },
    }
    return {"data": data, "layout": layout}


def _icicle(trace: Trace, tree: Sequence[Prefix], share_of_all: float) -> dict[str, object]:
    # those that are drawn together last
    order = sorted(range(len(tree)), key=lambda number: tree[number].num_prefixes > 1)
    names, details = [], []
    for prefix in map(tree.__getitem__, order):
        name, text = _describe(trace, prefix)
        end = f" to {prefix.end * trace.block_size:,}" if prefix.end > prefix.start else " on"
        lines = [f"requests: {prefix.num_requests:,}", f"tokens: {prefix.start * trace.block_size:,}{end}"]
        if (share := _hit_share(prefix)) is not None:
            lines.append(f"hit: {share:.1%} of {prefix.num_blocks:,} blocks")
        names.append(name)
        details.append("<br>".join([*lines, *(["", text] if text else [])]))
    data = {
        "type": "icicle",
        "ids": [str(number) for number in order],
        "parents": ["" if tree[number].parent < 0 else str(tree[number].parent) for number in order],
        "labels": names,
        "values": [tree[number].num_requests for number in order],
        "branchvalues": "total",
        "sort": False,
        "hovertext": details,
        "hoverinfo": "text",
        "textinfo": "label",
        "maxdepth": 9,
        "tiling": {"orientation": "v", "pad": 1},
        "marker": {
            "colors": [_hit_share(tree[number]) if number else share_of_all for number in order],
            "colorscale": [[0, ORANGE], [0.5, "#F4F1E8"], [1, BLUE]],
            "cmin": 0,
            "cmax": 1,
            "line": {"color": "white", "width": 0.5},
            "colorbar": {"title": {"text": "hit"}, "tickformat": ".0%", "thickness": 12, "outlinewidth": 0},
            "showscale": True,
        },
    }
    layout = {
        "height": 640,
        "margin": {"l": 0, "r": 0, "t": 30, "b": 10},
        "uniformtext": {"minsize": 9, "mode": "hide"},
        "font": _FONT,
        "hoverlabel": {"align": "left", "bgcolor": "white", "bordercolor": GREY, "font": _FONT},
    }
    return {"data": [data], "layout": layout}


def _hit_share(prefix: Prefix) -> float | None:
    return prefix.num_hits / prefix.num_blocks if prefix.num_blocks else None


def _describe(trace: Trace, prefix: Prefix) -> tuple[str, str]:
    """What is written on a prefix, and what of its text is shown beside it: HTML."""
    if prefix.parent < 0:
        return "all requests", ""
    if prefix.num_prefixes > 1:
        return f"{prefix.num_prefixes:,} others", ""
    num_tokens = (prefix.end - prefix.start) * trace.block_size
    name = short(num_tokens) if num_tokens else "1 other"
    if not isinstance(trace, TokenTrace) or trace.tokenizer is None:
        return name, ""
    request = trace.requests[prefix.request]
    start = prefix.start * trace.block_size
    stop = start + min(num_tokens or _TEXT_TOKENS, _TEXT_TOKENS)
    tokens = (request.tokens + request.output_tokens)[start * TOKEN_BYTES : stop * TOKEN_BYTES]
    text = " ".join(trace.tokenizer.decode(tokens).split())
    shown = "<br>".join(escape(line, quote=False) for line in wrap(text[:_TEXT_CHARACTERS], _LINE_CHARACTERS))
    label = text if len(text) <= _LABEL_CHARACTERS else f"{text[:_LABEL_CHARACTERS]}…"
    return escape(label, quote=False) or name, shown


def _lines(text: str) -> str:
    return text.replace("\n", "<br>")
