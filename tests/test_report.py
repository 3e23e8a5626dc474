"""The tree of prefixes, the page and its command; the page is opened in headless Chromium where it is installed."""

import json
import os
import re
import shutil
import subprocess
import sys
from array import array
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.cli import main
from radixkv.curve import Curve
from radixkv.explain import explain
from radixkv.report import charts, prefix_tree
from radixkv.trace import IdRequest, IdTrace, read_trace

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def id_trace(*prompts: list[int]) -> IdTrace:
    requests = [
        IdRequest(float(time), 10 * len(ids), 0, array("q", [end for n in ids for end in (n, n + 1)]))
        for time, ids in enumerate(prompts)
    ]
    return IdTrace("made", requests, block_size=10, num_blocks=len({n for ids in prompts for n in ids}))


@st.composite
def tries(draw):
    ids: dict[tuple[int, ...], int] = {}
    prompts = draw(st.lists(st.lists(st.integers(0, 2), max_size=7), min_size=1, max_size=30))
    return [[ids.setdefault(tuple(word[: end + 1]), len(ids)) for end in range(len(word))] for word in prompts]


# The tree


def test_prefixes_are_those_that_requests_share():
    curve = Curve(id_trace([0, 1, 2], [0, 1, 3], [0, 1, 2, 4], [5], [0, 1, 3, 6]))
    tree = prefix_tree(curve.prompts, curve.lru_hits(None), min_share=0)
    shown = [(p.parent, p.start, p.end, p.num_requests, p.num_prefixes, p.num_blocks, p.num_hits) for p in tree]
    assert shown == [
        (-1, 0, 0, 5, 1, 0, 0),
        (0, 0, 0, 1, 1, 1, 0),  # 5
        (0, 0, 2, 4, 1, 8, 6),  # 0-1
        (2, 2, 3, 2, 1, 2, 1),  # 2
        (3, 3, 3, 1, 1, 1, 0),  # 4
        (2, 2, 3, 2, 1, 2, 1),  # 3
        (5, 3, 3, 1, 1, 1, 0),  # 6
    ]


def test_narrow_prefixes_are_put_together():
    curve = Curve(id_trace(*([0, n] for n in range(1, 9)), *[[0, 9]] * 8))
    tree = prefix_tree(curve.prompts, curve.lru_hits(None), min_share=0.2)
    assert [(p.num_requests, p.num_prefixes) for p in tree] == [(16, 1), (16, 1), (8, 8), (8, 1)]


def test_a_trace_without_blocks_has_no_tree():
    curve = Curve(id_trace([], []))
    assert prefix_tree(curve.prompts, curve.lru_hits(None)) == []


@given(tries(), st.integers(1, 20), st.sampled_from([0, 0.1]), st.sampled_from([3, 1000]))
def test_the_tree_holds_every_block_and_hit_once(prompts, capacity, min_share, max_prefixes):
    curve = Curve(id_trace(*prompts))
    hits = curve.lru_hits(capacity)
    tree = prefix_tree(curve.prompts, hits, min_share=min_share, max_prefixes=max_prefixes)
    assert sum(prefix.num_blocks for prefix in tree) == curve.access_blocks
    assert sum(prefix.num_hits for prefix in tree) == hits.sum()
    for number, prefix in enumerate(tree):
        assert prefix.parent < number
        assert prefix.num_hits <= prefix.num_blocks
        children = [child for child in tree if child.parent == number]
        assert sum(child.num_requests for child in children) <= prefix.num_requests
        assert {child.start for child in children} <= {prefix.end}
        if prefix.end > prefix.start:  # it goes as far as its requests agree, and has all of them
            path = prompts[prefix.request]
            assert sum(ids[: prefix.end] == path[: prefix.end] for ids in prompts) == prefix.num_requests
            further = sum(ids[: prefix.end + 1] == path[: prefix.end + 1] for ids in prompts)
            assert prefix.end == len(path) or further < prefix.num_requests


# Charts


def test_charts_show_what_the_curve_counts():
    curve = Curve(id_trace(*[[0, 1, 2], [3, 4], [0, 1, 5]] * 20))
    chart, ttl = charts(curve, policies={"lfu": {3: curve.lru_hits(3)}}, name="made")
    lines = {line.name: line for line in chart.lines}
    for blocks, share in zip(lines["LRU"].x.tolist(), lines["LRU"].y.tolist(), strict=True):
        assert share == curve.lru_hits(int(blocks)).sum() / curve.access_blocks
    assert lines["LRU"].y[-1] == lines["optimum"].y[-1] == lines["ceiling"].y[0]
    assert lines["lfu"].y.tolist() == [curve.lru_hits(3).sum() / curve.access_blocks]
    assert ttl.lines[-1].y[-1] == lines["ceiling"].y[0]
    assert chart.subtitle == "made"


def test_a_trace_without_times_or_hits_is_drawn_too():
    trace = id_trace([0], [1])
    still = IdTrace("made", [trace.requests[0]] * 2, block_size=10, num_blocks=1)
    assert [len(charts(Curve(each))) for each in (still, id_trace([]))] == [1, 1]


# The page


class Page(HTMLParser):
    """What a page loads, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.text = ""
        self._tag = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self._tag = tag
        self.loads += [value for name, value in attrs if name in ("src", "href") and value]

    def handle_data(self, data):
        if self._tag not in ("script", "style"):
            self.text += data + "\n"


def chat(*messages: str) -> dict[str, object]:
    roles = ("system", *("user", "assistant") * len(messages))
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, messages, strict=False)]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A report of chats: its HTML, and the file."""
    pytest.importorskip("plotly")
    folder = tmp_path_factory.mktemp("report")
    system = "You are <b>helpful</b> & answer briefly. </script> " + "Rules follow. " * 40
    lines = [chat(system, f"question {n} " * 20, f"answer {n} " * 10, "and then? ", "so. " * 20) for n in range(12)]
    (folder / "chats & more.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = ["report", str(folder / "chats & more.jsonl"), "-o", str(folder / "page.html"), "--policy", "lfu"]
    assert main([*arguments, "--rate", "token", "--capacity", "60", "--at", "20,60,inf"]) == 0
    return (folder / "page.html").read_text("utf-8"), folder / "page.html"


def test_the_page_loads_nothing(made):
    html, _ = made
    assert Page(html).loads == []
    assert "@import" not in html
    assert "url(http" not in html


def test_the_page_says_what_the_trace_holds(made):
    html, file = made
    text = Page(html).text
    trace = read_trace(file.parent / "chats & more.jsonl")
    curve = Curve(trace)
    assert "chats & more.jsonl" in text
    assert str(file.parent) not in html
    assert f"{len(trace.requests)} requests" in text
    for capacity in (20, 60, None):
        assert f"{curve.rates(curve.lru_hits(capacity)).token:.2%}" in text
    assert f"{explain(trace, 60).tokens.hit:,}" in text
    assert "Hit rate (token): prompt tokens in hit blocks / all prompt tokens." in text
    for name in ("lfu", "optimum", "60 blocks", "What broke the prefix", "mean over the requests"):
        assert name in text


def test_figures_survive_what_a_text_holds(made):
    html, _ = made
    assert html.count("</script>") == 2  # the library, and the figures
    figures = json.loads(re.search(r"const figures = (.*);\n", html).group(1))
    assert len(figures) == 4
    (tree,) = figures[-1]["data"]
    assert (tree["type"], tree["values"][0]) == ("icicle", 24)
    assert "You are &lt;b&gt;helpful&lt;/b&gt; &amp; answer briefly." in tree["hovertext"][1]
    assert 0 <= min(share for share in tree["marker"]["colors"] if share is not None) <= 1


def test_lone_surrogates_are_no_obstacle(tmp_path):
    pytest.importorskip("plotly")
    trace = os.fsdecode(os.fsencode(tmp_path) + b"/chat\xff.jsonl")
    with open(trace, "w") as file:
        file.write((json.dumps(chat("a \ud800 b " * 20, "hi", "ho")) + "\n") * 3)
    assert main(["report", trace, "-o", str(tmp_path / "page.html")]) == 0
    assert "chat?.jsonl" in (tmp_path / "page.html").read_text("utf-8")


SCRIPT = """
<script>
addEventListener("load", async () => {
  const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
  const seen = {errors, network: performance.getEntriesByType("resource").map((entry) => entry.name)};
  await pause(1000);
  const tree = document.getElementById("figure" + (figures.length - 1));
  const slices = () => tree.querySelectorAll("g.slice").length;
  seen.lines = document.querySelectorAll("#figure0 .scatterlayer .trace").length;
  seen.labels = [...document.querySelectorAll("#figure0 text")].map((text) => text.textContent);
  seen.before = slices();
  tree.querySelectorAll("g.slice")[2].dispatchEvent(new MouseEvent("click", {bubbles: true}));
  await pause(2000);
  seen.after = slices();
  seen.path = tree.querySelectorAll("g.pathbar").length;
  const result = document.createElement("pre");
  result.id = "seen";
  result.textContent = JSON.stringify(seen);
  document.body.append(result);
});
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_page_works_in_a_browser(made, tmp_path):
    html, _ = made
    errors = (
        "<head><script>const errors = []; addEventListener('error', (event) => errors.push(event.message));</script>"
    )
    (tmp_path / "page.html").write_text(
        html.replace("<head>", errors, 1).replace("</body>", SCRIPT + "</body>"), "utf-8"
    )
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=20000", "--dump-dom"]
    done = subprocess.run(
        [*command, (tmp_path / "page.html").as_uri()], capture_output=True, text=True, timeout=300, check=True
    )
    seen = json.loads(re.search(r'<pre id="seen">(.*?)</pre>', done.stdout).group(1).replace("&amp;", "&"))
    assert (seen["errors"], seen["network"]) == ([], [])
    assert seen["lines"] >= 4
    assert {"LRU", "optimum", "lfu"} <= set(seen["labels"])
    assert 0 < seen["after"] < seen["before"]  # a click shows what follows the prefix, and the way back
    assert seen["path"] >= 1


# The command


def refused(capsys, *arguments):
    assert main([*map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--capacity", "0"], "'--capacity': must be a whole number from 1 to 2147483647, got '0'"),
        (["--rate", "byte"], "'--rate': 'byte' is not one of block, token, full, mean, warm"),
        (["--at", "x"], "--at: 'x' is neither inf nor 1 to"),
        (["--model", "nothing-like-it"], "--model: 'nothing-like-it' is no preset"),
        (["-o", "."], "--output: cannot write .: Is a directory"),
        (["-o", "no/where.html"], "--output: cannot write no/where.html: No such directory"),
    ],
)
def test_bad_arguments_are_refused_before_the_trace_is_read(capsys, monkeypatch, tmp_path, arguments, message):
    pytest.importorskip("plotly")
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, "report", "missing", *arguments)


def test_a_bad_trace_leaves_the_former_page(capsys, tmp_path):
    pytest.importorskip("plotly")
    (tmp_path / "page.html").write_text("former")
    (tmp_path / "trace").write_text("{}\n")
    assert "trace:1: none of the fields" in refused(capsys, "report", tmp_path / "trace", "-o", tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == "former"


def test_without_plotly_it_is_said_what_to_install(capsys, monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.partition(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert "plotly is not installed: pip install 'radixkv[plot]'" in refused(
        capsys, "report", "-o", tmp_path / "page.html"
    )
    assert not (tmp_path / "page.html").exists()
