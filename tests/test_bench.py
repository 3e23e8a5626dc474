"""The benchmarks run on tiny inputs and say what they measured; figures are not judged here."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import guard
import peer_radixkv
import peer_run
import peer_workloads
import peers
from peer_stream import Stream

from radixkv import PrefixCache

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"
JOB = {
    "manager": "radixkv",
    "num_blocks": 2000,
    "block_size": 16,
    "max_tokens": 1 << 15,
    "max_running": 8,
    "budget": 60,
}


def run(stream: Path, job: str, **options: object) -> dict[str, object]:
    return peer_run.run(peer_radixkv.MANAGERS, {**JOB, "job": job, "stream": str(stream), **options})


@pytest.fixture(autouse=True)
def _thawed_heap() -> Iterator[None]:
    yield
    gc.unfreeze()  # a job freezes it


# The streams


def test_chats_continue_what_was_said(tmp_path: Path) -> None:
    stream = Stream(peer_workloads.chats(tmp_path / "chats", 3, 10))
    assert stream.num == 30
    said = [np.concatenate([stream.prompt(number), stream.output(number)]) for number in range(30)]
    lengths = stream.num_prompt_tokens().tolist()
    for number in range(30):
        prompt = stream.prompt(number)
        assert len(prompt) == lengths[number]
        earlier = [text for text in said[:number] if prompt[: len(text)].tolist() == text.tolist()]
        assert earlier or len(prompt) <= 512 + 200  # a turn goes on from an earlier one, or is the first of its session


def test_leaves_share_their_system_prompt_only(tmp_path: Path) -> None:
    stream = Stream(peer_workloads.leaves(tmp_path / "leaves", 20, 4))
    prompts = [stream.prompt(number).tolist() for number in range(20)]
    assert len({tuple(prompt[:256]) for prompt in prompts}) == 4
    assert len({tuple(prompt[256:272]) for prompt in prompts}) == 20
    assert all(len(prompt) == 512 for prompt in prompts)


# The jobs


def test_serving_hits_what_the_cache_says(tmp_path: Path) -> None:
    folder = peer_workloads.session(tmp_path / "session", 6, 200)
    answer = run(folder, "serve")
    # 100 tokens more a turn and 100 of output, of which the last is not written: whole blocks of the turn before
    assert answer["hits"] == [(200 * turn - 1) // 16 * 16 if turn else 0 for turn in range(6)]
    assert answer["num_tokens"] == [200 * turn + 100 for turn in range(6)]
    assert len(answer["ns"]) == 6  # type: ignore[arg-type]


def test_filling_is_not_measured_and_ends_with_its_budget(tmp_path: Path) -> None:
    folder = peer_workloads.leaves(tmp_path / "leaves", 40, 4)
    answer = run(folder, "serve", num_blocks=600, skip=30, fill_budget=60)
    assert answer["hits"] == [256] * 10
    assert "unfinished" in run(folder, "serve", num_blocks=600, skip=30, fill_budget=0)


def test_decoding_publishes_whole_blocks(tmp_path: Path) -> None:
    folder = peer_workloads.decoding(tmp_path / "decoding", 3, 20)
    answer = run(folder, "decode")
    assert len(answer["ns"]) == 20  # type: ignore[arg-type]
    assert answer["num_decoding"] == 3


def test_waiting_prompts_match_their_document(tmp_path: Path) -> None:
    folder = peer_workloads.waiting(tmp_path / "waiting", 5, 1024, 2)
    answer = run(folder, "match", skip=2, steps=3)
    assert answer["hits"] == [768] * 5
    assert len(answer["ns"]) == 3  # type: ignore[arg-type]


def test_managers_of_packed_tokens_and_of_lists_serve_alike(tmp_path: Path) -> None:
    folder = peer_workloads.chats(tmp_path / "chats", 4, 6)
    managers = ("radixkv", "radixkv-lists")
    hits = [run(folder, "serve", manager=manager, num_blocks=300)["hits"] for manager in managers]
    assert hits[0] == hits[1]
    assert sum(hits[0]) > 0  # type: ignore[arg-type]


def test_a_session_whose_lookup_is_kept_is_served_alike(tmp_path: Path) -> None:
    folder = peer_workloads.session(tmp_path / "session", 20, 100)
    managers = ("radixkv", "radixkv-lookup")
    hits = [run(folder, "serve", manager=manager, num_blocks=200)["hits"] for manager in managers]
    assert hits[0] == hits[1]
    assert hits[0][-1] == (19 * 100 - 1) // 16 * 16  # type: ignore[index]


# The driver


def test_a_manager_that_is_not_there_is_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.ENVIRONMENTS, "peer_vllm", ROOT / ".peers/nowhere/python")
    bench = peers.Bench(tmp_path, ["vllm"], quick=True)
    try:
        answers = bench.compare(("radixkv", "vllm"), "serve", peer_workloads.session(tmp_path / "s", 3, 100))
    finally:
        bench.close()
    assert "ns" in answers["radixkv"]
    assert "make peers" in peers.cells(answers["vllm"], answers)[0]
    assert peers.means(answers).keys() == {"radixkv"}


def test_hits_that_differ_are_explained() -> None:
    ours = {
        "name": "radixkv",
        "ns": [10, 10],
        "hits": [0, 500],
        "num_tokens": [500, 500],
        "num_requests": 2,
        "note": "",
    }
    same = {**ours, "name": "other", "note": "evicts otherwise"}
    answers = {"radixkv": ours}
    assert peers.explain(same, answers, "") == []
    (note,) = peers.explain({**same, "hits": [0, 480]}, answers, "")
    assert note == "other: -2.0 points of hit tokens against radixkv: evicts otherwise"
    (note,) = peers.explain({**same, "ns": [10], "hits": [0]}, answers, "")
    assert "the first 1 of 2 only" in note


def test_targets_are_met_not_met_or_not_measured() -> None:
    rows = {row[0]: row[-1] for row in peers.targets({"e radixkv": 0.4, "d growth": 7.0})["rows"]}
    assert rows["(e) us a decoded token"] == "met"
    assert rows["(d) the last turns cost what the first do"] == "**not met**"
    assert rows["import radixkv, s of CPU"] == "not measured"


def test_tables_go_between_the_markers_of_a_page_and_nothing_else_changes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- peers:card -->\nold\n<!-- /peers:card -->\nafter\n")
    peers.write(page, {"card": {"benchmark": "title", "seed": 0}, "tables": {}, "curves": {}})
    text = page.read_text()
    assert text.startswith("before\n<!-- peers:card -->\n")
    assert text.endswith("<!-- /peers:card -->\nafter\n")
    assert "seed: 0" in text
    assert "old" not in text
    table = {"title": "t", "columns": ["c"], "rows": [["1"]], "notes": []}
    with pytest.raises(SystemExit, match="peers:e"):
        peers.write(page, {"card": {}, "tables": {"e": table}, "curves": {}})
    assert page.read_text() == text


def test_the_page_has_a_place_for_everything_that_is_measured() -> None:
    text = (ROOT / "docs/benchmarks.md").read_text()
    for name in (*peers.WORKLOADS, "card", "targets", "managers", "leaves", "session"):
        assert f"<!-- peers:{name} -->\n" in text
        assert f"<!-- /peers:{name} -->" in text


def test_the_comparison_runs_and_its_last_line_is_json(tmp_path: Path) -> None:
    command = [sys.executable, BENCH / "peers.py", "--quick", "--workloads", "d", "f", "--managers", "radixkv"]
    done = subprocess.run([*command, "--folder", tmp_path], capture_output=True, text=True, check=True, env=os.environ)
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["tables"]) == {"d", "f", "targets"}
    assert result["tables"]["d"]["rows"][0][:2] == ["radixkv", "40"]
    assert [*tmp_path.iterdir()] == []  # the streams are gone


def test_events_are_measured_beside_a_cache_without() -> None:
    if not (ROOT.parent / "shared" / "traces" / "mooncake_conversation.jsonl.gz").exists():
        pytest.skip("no trace")
    command = [sys.executable, BENCH / "events.py", "--requests", "5", "--blocks", "2000", "--wait-ms", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert rows["a router that reads"]["received"] > 0
    assert rows["a router that never reads"]["received"] == 0
    assert rows["a router that never reads"]["num_dropped"] == 0


# The guard


def test_guard_sees_a_manager_that_became_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {"chats": 100.0, "decoding": 10.0, "matching": 1.0, "stepping": 1.0}
    baseline = tmp_path / "guard.json"
    baseline.write_text(json.dumps({f"fake, {guard.python()}": costs}))
    monkeypatch.setattr(guard, "BASELINE", baseline)
    monkeypatch.setitem(guard.METHODS, "fake", lambda part: costs[part] * 1.14)
    assert guard.guard("fake")
    monkeypatch.setitem(guard.METHODS, "fake", lambda part: costs[part] * (1.16 if part == "matching" else 1))
    assert not guard.guard("fake")


def test_guard_compares_nothing_without_a_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guard, "BASELINE", tmp_path / "none.json")
    assert guard.guard("ratio")
    assert "nothing compared" in capsys.readouterr().out


def test_guard_workload_costs_more_where_matching_does(monkeypatch: pytest.MonkeyPatch) -> None:
    before = guard.ratio("matching")
    once = PrefixCache.match
    monkeypatch.setattr(PrefixCache, "match", lambda *arguments: [once(*arguments) for _ in range(3)])
    assert guard.ratio("matching") > 1.5 * before


def test_guard_has_a_baseline_of_every_part() -> None:
    baselines = json.loads((BENCH / "guard.json").read_text())
    assert any(key.startswith("callgrind") for key in baselines)
    assert any(key.startswith("ratio") for key in baselines)
    assert all(set(costs) == set(guard.PARTS) for costs in baselines.values())
