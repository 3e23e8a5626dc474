"""Pictures of hit rates: what they show is checked as data; where matplotlib is installed, they are drawn too."""

import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from radixkv.plot import SUFFIXES, capacity_chart, check, misses_chart, save, short, ttl_chart


def floats(*values):
    return np.array(values, float)


@pytest.fixture
def capacities():
    blocks = floats(10, 100, 1000)
    return capacity_chart(
        (blocks, floats(0.1, 0.3, 0.5)),
        (blocks, floats(0.2, 0.4, 0.5)),
        0.5,
        knee=(100, 0.3),
        block_size=16,
        kv_bytes_per_token=131_072,
        policies={"lfu": (floats(30, 300), floats(0.1, 0.2))},
        subtitle="a <trace> & more",
        rate="token",
    )


def texts(chart):
    return [note.text for note in chart.notes]


def test_a_capacity_chart_names_its_lines_and_units(capacities):
    assert [line.name for line in capacities.lines] == ["ceiling", "optimum", "lfu", "LRU"]
    assert texts(capacities) == ["no bound: 50.0%", "optimum", "LRU", "knee: 30.0%\n100 blocks"]
    assert capacities.x_ticks[0] == (10, "10\n160\n20 MiB")
    assert capacities.x_ticks[-1] == (1000, "1k\n16k\n1.95 GiB")
    assert (capacities.x_label, capacities.y_label) == ("capacity: blocks, tokens, memory", "hit rate (token)")
    assert 0.5 < capacities.y_max <= 1


def test_every_policy_has_a_line():
    blocks = floats(10, 100)
    hits = (blocks, floats(0.1, 0.3))
    names = ["slru", "lfu", "fifo", "priority", "arc", "reuse", "mine", "yours"]
    chart = capacity_chart(hits, hits, 0.5, knee=(10, 0.1), block_size=16, policies=dict.fromkeys(names, hits))
    assert [line.name for line in chart.lines] == ["ceiling", "optimum", *names, "LRU"]
    assert len({line.color for line in chart.lines[2:8]}) == 6


def test_without_a_models_bytes_no_memory_is_shown():
    line = floats(1, 3), floats(0, 1)
    chart = capacity_chart(line, line, 1.0, knee=(3, 1), block_size=512)
    assert [text for _, text in chart.x_ticks] == ["1\n512", "3\n1.54k"]


def test_a_ttl_chart_marks_times_within_its_range():
    marks = [(60, 0.2, 1500), (300, 0.4, 3000), (3600, 0.5, 9000)]
    chart = ttl_chart(floats(1, 60, 600), floats(0, 0.2, 0.45), 0.5, marks=marks)
    assert texts(chart) == ["for ever: 50.0%", "20.0%\n1.5k blocks", "40.0%\n3k blocks"]
    assert [text for _, text in chart.x_ticks] == ["1 s", "3 s", "10 s", "30 s", "1 min", "5 min"]


def test_misses_are_shares_of_the_tokens_over_time():
    chart = misses_chart(floats(0, 10, 20, 100), {"hit": [0, 6, 3, 5], "broken_prefix": [4, 4, 7, 5]}, num_bins=4)
    hit, broken = chart.lines
    assert (hit.name, broken.name) == ("hit", "broken prefix")
    assert hit.x.tolist() == [12.5, 87.5]  # bins without a request are left out
    assert hit.y.tolist() == [9 / 24, 5 / 10]
    assert (hit.y + broken.y).tolist() == [1, 1]
    assert chart.x_ticks[:2] == [(0, "0 s"), (30, "30 s")]


def test_misses_of_a_trace_without_times_are_by_request():
    chart = misses_chart(floats(0, 0, 0, 0), {"hit": [1, 1, 1, 1], "cold": [0, 0, 0, 0]}, num_bins=4)
    assert [line.name for line in chart.lines] == ["hit"]  # a class that nobody would see has no line
    assert chart.x_label == "requests"
    assert misses_chart(floats(), {"hit": []}).lines == []


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (7, "7"), (999, "999"), (1536, "1.54k"), (2e6, "2M"), (43_638_751, "43.6M")]
)
def test_counts_are_short(number, text):
    assert short(number) == text


def test_a_file_of_another_kind_is_refused_before_anything_is_drawn(capacities, tmp_path):
    for action in (lambda: check("a.gif"), lambda: save([capacities], tmp_path / "a.gif")):
        with pytest.raises(ValueError, match=r"a\.gif must end with one of \.png, \.svg, \.pdf"):
            action()


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"matplotlib is not installed: pip install 'radixkv\[plot\]'"):
        check("a.png")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_charts_are_drawn_the_same_each_time(capacities, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    charts = [
        capacities,
        ttl_chart(floats(1, 60), floats(0.1, 0.9), 0.95, marks=[(60, 0.9, 7)]),
        misses_chart(floats(0, 1, 2), {"hit": [1, 2, 3], "cold": [3, 2, 1]}, subtitle="b"),
    ]
    contents = []
    for name in ("one", "two"):
        save(charts, (tmp_path / name).with_suffix(suffix))
        contents.append((tmp_path / name).with_suffix(suffix).read_bytes())
    assert contents[0] == contents[1]
    assert contents[0].startswith({".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix])


def test_texts_of_an_svg_are_texts(capacities, tmp_path):
    pytest.importorskip("matplotlib")
    save([capacities], tmp_path / "chart.svg")
    shown = "\n".join(ET.parse(tmp_path / "chart.svg").getroot().itertext())
    for text in ("Hits by cache capacity", "a <trace> & more", "LRU", "optimum", "knee: 30.0%", "20 MiB", "lfu", "40%"):
        assert text in shown
