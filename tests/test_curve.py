import json
from array import array
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.cli import main
from radixkv.curve import DEFINITIONS, Curve
from radixkv.replay import replay
from radixkv.trace import IdRequest, IdTrace, TokenRequest, TokenTrace, count_blocks, read_trace

TRACES = Path(__file__).parents[2] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not here")


def id_trace(*prompts: list[int], times: list[float] | None = None, block_size: int = 10) -> IdTrace:
    """Every prompt's last block has one token."""
    requests = [
        IdRequest(time, block_size * (len(ids) - 1) + 1 if ids else 0, 0, as_runs(ids))
        for ids, time in zip(prompts, times or [0.0] * len(prompts), strict=True)
    ]
    return IdTrace("made", requests, block_size=block_size, num_blocks=len({n for ids in prompts for n in ids}))


def as_runs(ids: list[int]) -> "array[int]":
    runs = array("q")
    for number in ids:
        if runs and runs[-1] == number:
            runs[-1] += 1
        else:
            runs.extend((number, number + 1))
    return runs


def token_trace(*turns: tuple[list[int], list[int]], block_size: int) -> TokenTrace:
    requests = [
        TokenRequest(0.0, array("i", prompt).tobytes(), array("i", answer).tobytes()) for prompt, answer in turns
    ]
    return TokenTrace("made", requests, block_size=block_size, num_blocks=count_blocks(requests, block_size))


@st.composite
def tries(draw, max_requests=30, max_length=7):
    """Prompts as chained ids: an id stands for the whole prefix that ends with it."""
    ids: dict[tuple[int, ...], int] = {}
    prompts = draw(st.lists(st.lists(st.integers(0, 2), max_size=max_length), min_size=1, max_size=max_requests))
    return [[ids.setdefault(tuple(word[: end + 1]), len(ids)) for end in range(len(word))] for word in prompts]


@st.composite
def conversations(draw):
    """(prompt, answer)s that often go on from a former turn, and a block size."""
    turns: list[tuple[list[int], list[int]]] = []
    for _ in range(draw(st.integers(1, 14))):
        before = draw(st.sampled_from([[], *(prompt + answer for prompt, answer in turns)]))
        prompt = before + draw(st.lists(st.integers(0, 1), min_size=not before, max_size=6))
        turns.append((prompt, draw(st.lists(st.integers(0, 1), max_size=5))))
    return turns, draw(st.integers(1, 3))


def hits_of(capacity, lru):
    return lru[min(capacity, len(lru) - 1)]


# Least recently used


def test_hits_of_a_small_trace_at_every_capacity():
    # 0-1-2 and 0-1-3 share two blocks; when 0-1-2 comes back, 3 stands between its last block and the shared ones
    curve = Curve(id_trace([0, 1, 2], [0, 1, 3], [0, 1, 2]))
    assert curve.lru().tolist() == [0, 2, 4, 4, 5]
    assert [curve.lru_hits(capacity).tolist() for capacity in (0, 1, 3, 4, None)] == [
        [0, 0, 0],
        [0, 1, 1],
        [0, 2, 2],
        [0, 2, 3],
        [0, 2, 3],
    ]
    assert (curve.access_blocks, curve.num_requests) == (9, 3)


def test_a_prompt_longer_than_the_capacity_hits_its_first_blocks():
    assert Curve(id_trace([0, 1, 2, 3], [0, 1, 2, 3])).lru().tolist() == [0, 1, 2, 3, 4]


def test_a_trace_that_repeats_nothing_has_no_hit():
    curve = Curve(id_trace([0, 1], [], [2]))
    assert curve.lru().tolist() == [0]
    assert curve.knee() == curve.capacity_for(1.0) == 0
    assert curve.opt_hits(5).tolist() == curve.lru_hits(None).tolist() == [0, 0, 0]


@given(tries())
def test_lru_hits_are_those_of_replay_at_every_capacity(prompts):
    trace = id_trace(*prompts)
    lru = Curve(trace).lru()
    for capacity in [*range(1, trace.num_blocks + 2)]:
        assert hits_of(capacity, lru) == replay(trace, capacity).hit_blocks
    assert lru[-1] == replay(trace, None).hit_blocks
    assert len(lru) == 1 or lru[-2] < lru[-1]


@given(tries(), st.integers(0, 20))
def test_hits_by_request_add_up_to_the_curve(prompts, capacity):
    curve = Curve(id_trace(*prompts))
    assert curve.lru_hits(capacity).sum() == hits_of(capacity, curve.lru())
    assert (curve.lru_hits(capacity) <= curve.prompts.num_blocks).all()


@given(conversations(), st.integers(0, 2))
def test_lru_hits_of_tokens_are_those_of_replay_where_answers_are_new(conversation, num_answers):
    turns, size = conversation
    new = ([number, number + 1, number + 2][: len(answer)] for number, (_, answer) in enumerate(turns, 100))
    turns = [(prompt, answer if num_answers else []) for (prompt, _), answer in zip(turns, new, strict=True)]
    trace = token_trace(*turns, block_size=size)
    curve = Curve(trace)
    for capacity in range(1, trace.num_blocks + 3):
        assert hits_of(capacity, curve.lru()) == replay(trace, capacity).hit_blocks
    row = replay(trace, None)
    assert (curve.lru()[-1], curve.access_blocks) == (row.hit_blocks, row.access_blocks)


@given(conversations())
def test_replay_of_tokens_hits_no_more_where_answers_are_cached_already(conversation):
    turns, size = conversation
    trace = token_trace(*turns, block_size=size)
    lru = Curve(trace).lru()
    for capacity in range(1, trace.num_blocks + 3):
        assert hits_of(capacity, lru) >= replay(trace, capacity).hit_blocks
    assert lru[-1] == replay(trace, None).hit_blocks


@given(tries(), st.data())
def test_blocks_of_answers_are_cached_behind_the_prompts(paths, data):
    requests = []
    for path in paths:
        prompt = path[: data.draw(st.integers(0, len(path)))]
        requests.append(IdRequest(0.0, 10 * len(prompt), 1, as_runs(prompt), as_runs(path)))
    trace = IdTrace("made", requests, block_size=10, num_blocks=len({n for path in paths for n in path}))
    curve = Curve(trace)
    for capacity in range(1, trace.num_blocks + 2):
        assert hits_of(capacity, curve.lru()) == replay(trace, capacity).hit_blocks
    assert curve.access_blocks == sum(request.num_blocks for request in requests)


def test_namespaces_share_nothing():
    requests = [TokenRequest(0.0, array("i", [1, 2, 3]).tobytes(), b"", name) for name in ("a", "b", "a", None)]
    trace = TokenTrace("made", requests, block_size=1, num_blocks=9)
    assert Curve(trace).lru_hits(None).tolist() == [0, 0, 2, 0]
    assert replay(trace, None).hit_blocks == 2


# The optimum


def most_hits(paths, rooms, num_hittable):
    """By trying every choice of what to keep after each request, of at most so many blocks."""

    @cache
    def best(request, resident):
        if request == len(paths):
            return 0
        path = paths[request]
        hits = next((index for index, block in enumerate(path) if block not in resident), len(path))
        known = resident | set(path)
        keeps = combinations(sorted(known), min(rooms[request], len(known)))
        return min(hits, num_hittable[request]) + max(best(request + 1, frozenset(keep)) for keep in keeps)

    return best(0, frozenset())


@given(tries(max_requests=7, max_length=3), st.integers(0, 5))
def test_the_optimum_is_that_of_exhaustive_search(prompts, capacity):
    hits = Curve(id_trace(*prompts)).opt_hits(capacity).sum()
    lengths = [len(path) for path in prompts]
    assert hits == most_hits(prompts, [capacity] * len(prompts), lengths)


@given(conversations(), st.integers(1, 4))
def test_the_optimum_of_tokens_is_that_of_exhaustive_search(conversation, capacity):
    turns, size = conversation
    turns = [(prompt[:6], answer) for prompt, answer in turns[:6]]
    curve = Curve(token_trace(*turns, block_size=size))
    paths = []
    for prompt, answer in turns:
        tokens = tuple(prompt + answer[:-1])
        paths.append(tuple(tokens[:end] for end in range(size, len(tokens) + 1, size)))
    rooms = [capacity - bool(answer or len(prompt) % size) for prompt, answer in turns]
    num_hittable = [(len(prompt) - 1) // size for prompt, _ in turns]
    assert curve.opt_hits(capacity).sum() == most_hits(paths, rooms, num_hittable)


@given(tries() | conversations(), st.integers(0, 20))
def test_the_optimum_lies_between_lru_and_the_ceiling(trace, capacity):
    trace = token_trace(*trace[0], block_size=trace[1]) if isinstance(trace, tuple) else id_trace(*trace)
    curve = Curve(trace)
    opt = curve.opt_hits(capacity)
    assert curve.lru_hits(capacity).sum() <= opt.sum() <= curve.lru_hits(None).sum()
    assert (opt <= curve.lru_hits(None)).all()
    assert (curve.opt_hits(None) == curve.lru_hits(None)).all()


# Time to live


@given(tries(), st.data())
def test_a_time_to_live_keeps_what_was_used_since(prompts, data):
    gaps = data.draw(st.lists(st.integers(0, 3), min_size=len(prompts), max_size=len(prompts)))
    times = np.cumsum(gaps, dtype=float).tolist()
    curve = Curve(id_trace(*prompts, times=times))
    for seconds in (0, 1, 2, 5, 100):
        used: dict[int, float] = {}
        hits, most = [], 0
        for path, now in zip(prompts, times, strict=True):
            used = {block: time for block, time in used.items() if now - time <= seconds}
            hits.append(next((index for index, block in enumerate(path) if block not in used), len(path)))
            used |= dict.fromkeys(path, now)
            most = max(most, len(used))
        assert curve.ttl_hits(seconds).tolist() == hits
        assert curve.ttl_blocks(seconds) == most


# Definitions, and where it is worth it


def test_each_definition_of_a_hit_rate():
    curve = Curve(id_trace([0, 1], [0, 1], [0, 2, 3], [0, 2]))  # of 11, 11, 21 and 11 tokens
    rates = curve.rates(curve.lru_hits(None))
    assert rates.block == (0 + 2 + 1 + 2) / 9
    assert rates.token == (0 + 11 + 10 + 11) / 54
    assert rates.full == (0 + 1 + 1 + 1) / 5
    assert rates.mean == (0 + 1 + 1 / 3 + 1) / 4
    assert rates.warm == (10 + 11) / 32
    assert set(DEFINITIONS) == set(type(rates).__slots__)


def test_rates_of_a_trace_without_blocks_are_zero():
    trace = IdTrace("made", [IdRequest(0.0, 5, 0, array("q"))], block_size=64, num_blocks=0)
    curve = Curve(trace)
    assert curve.rates(curve.lru_hits(None)).block == curve.rates(curve.opt_hits(1)).mean == 0


@given(conversations(), st.integers(1, 9))
def test_block_and_token_rates_are_those_of_replay(conversation, capacity):
    turns, size = conversation
    trace = token_trace(*((prompt, []) for prompt, _ in turns), block_size=size)
    curve, row = Curve(trace), replay(trace, capacity)
    rates = curve.rates(curve.lru_hits(capacity))
    assert (rates.block, rates.token) == (row.block_hit_rate, row.token_hit_rate)


def test_the_knee_is_where_the_curve_leaves_the_straight_line_most():
    # 19 hits take one block, the last one takes nine
    turns = [[0]] * 20 + [[number] for number in range(1, 9)] + [[0]]
    curve = Curve(id_trace(*turns))
    assert curve.lru().tolist() == [0, *[19] * 8, 20]
    assert curve.knee() == 1
    assert [curve.capacity_for(share) for share in (0.5, 0.95, 0.96, 1.0)] == [1, 1, 9, 9]


def test_a_share_of_all_hits_is_counted_exactly():
    curve = Curve(id_trace([*range(100)], [*range(100)]))
    assert [curve.capacity_for(n / 100) for n in range(101)] == [*range(101)]
    assert curve.capacity_for(0.5501) == 56


def test_the_knee_of_a_curve_that_only_steepens_is_its_end():
    curve = Curve(id_trace([0, 1], [2, 3, 4], [0, 1], [2, 3, 5]))
    assert curve.lru().tolist() == [0, 0, 0, 1, 3, 4]
    assert curve.knee() == 5


def test_progress_is_told_as_a_share():
    shares: list[float] = []
    Curve(id_trace(*[[0]] * 3000), progress=shares.append)
    assert len(shares) == 3
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] < 1


# The command


@pytest.fixture
def trace(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = [
        {"timestamp": 1000 * second, "input_length": 512 * len(ids) - 500, "output_length": 1, "hash_ids": ids}
        for second, ids in [(0, [0, 1]), (1, [2, 3, 4]), (100, [0, 1]), (101, [2, 3, 5])]
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def run_json(capsys, *arguments):
    assert main(["curve", *map(str, arguments), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments):
    assert main(["curve", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("radixkv: ")
    assert err.count("\n") == 1
    return err


def test_the_table_shows_hits_by_capacity_and_names_its_rate(capsys, trace):
    arguments = ["curve", str(trace), "--at", "3,5,inf", "--kv-bytes-per-token", "1048576", "--policy", "lfu"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "trace.jsonl\nrequests: 4, distinct blocks: 6, tokens a block: 512" in out
    assert [line.split() for line in out.splitlines()[6:9]] == [
        ["3", "1,536", "1.5", "1", "10.00", "30.00", "10.00"],
        ["5", "2,560", "2.5", "4", "40.00", "40.00", "40.00"],
        ["inf", "inf", "inf", "4", "40.00", "40.00", "40.00"],
    ]
    assert "knee: 5 blocks (2,560 tokens, 2.5 GiB), LRU 40.00 %" in out
    assert "all hits from 5 blocks (2,560 tokens, 2.5 GiB) on" in out
    assert "1 min 0 0.00 5 2,560 2.5 5 min 4 40.00 6 3,072 3 1 h " in " ".join(out.split())
    assert "% is block: hit blocks / all blocks of the prompts, partial last ones included" in out
    assert max(map(len, out.splitlines())) <= 80


def test_json_has_what_other_tools_read(capsys, trace):
    result = run_json(capsys, trace, "--at", "3,inf", "--policy", "lfu", "--ttl", "90s,2min")
    assert {name: result[name] for name in ("block_size", "access_blocks", "distinct_blocks")} == {
        "block_size": 512,
        "access_blocks": 10,
        "distinct_blocks": 6,
    }
    counts = ("capacity_blocks", "lru_hit_blocks", "opt_hit_blocks")
    assert [[row[name] for name in counts] for row in result["rows"]] == [[3, 1, 3], [None, 4, 4]]
    assert list(result["rows"][1]["lru_rates"]) == list(result["definitions"]) == list(DEFINITIONS)
    assert result["rows"][1]["policies"]["lfu"]["hit_blocks"] == 4
    assert result["knee"] == {"capacity_blocks": 5, "lru_hit_blocks": 4}
    assert result["capacity_for_all_hits_blocks"] == 5
    ttl = [(row["seconds"], row["hit_blocks"], row["most_blocks"]) for row in result["ttl"]]
    assert ttl == [(90, 0, 5), (120, 4, 6)]


def test_each_rate_can_be_shown(capsys, trace):
    rates = run_json(capsys, trace, "--at", "inf")["rows"][0]["lru_rates"]
    for name, definition in DEFINITIONS.items():
        assert main(["curve", str(trace), "--at", "inf", "--rate", name]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert f" inf inf 4 {100 * rates[name]:.2f} " in out
        assert f"% is {name}: {definition}" in out


def test_capacities_are_shown_in_gib_of_a_model(capsys, trace):
    assert run_json(capsys, trace, "--model", "llama-3.1-8b")["kv_bytes_per_token"] == 131_072


def test_without_a_trace_the_built_in_workload_is_shown(capsys):
    result = run_json(capsys, "--limit", "100", "--block-size", "8", "--at", "5000")
    assert (result["trace"], result["requests"], result["block_size"]) == ("synthetic", 100, 8)
    assert main(["curve", "--limit", "100"]) == 0
    assert "one is the running request's unfinished one" in capsys.readouterr().out


def test_several_files_and_options_reach_the_reader(capsys, trace, tmp_path):
    (tmp_path / "more").write_text("bad\n" + trace.read_text())
    result = run_json(capsys, trace, tmp_path / "more", "--skip-bad", "--limit", "7")
    assert (result["requests"], result["skipped"], result["access_blocks"]) == (7, 1, 17)


def test_json_that_cannot_be_written_is_told_after_the_table(capsys, trace, tmp_path):
    assert main(["curve", str(trace), "--json", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert "knee" in out
    assert err == f"radixkv: Invalid value for --json: cannot write {tmp_path}: Is a directory\n"


def test_a_picture_is_drawn(capsys, trace, tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["curve", str(trace), "--plot", str(tmp_path / "curve.svg")]) == 0
    assert "no bound: 40.0%" in (tmp_path / "curve.svg").read_text()
    assert main(["curve", str(trace), "--plot", str(tmp_path / "no" / "curve.svg")]) == 2
    assert "--plot: cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--at", "0"], "--at: '0' is neither inf nor 1 to 2147483647 blocks"),
        (["--at", ""], "--at: '' is neither inf nor"),
        (["--rate", "hits"], "'--rate': 'hits' is not one of block, token, full, mean, warm"),
        (["--policy", "opt"], "--policy: 'opt' is not one of lru, lfu"),
        (["--ttl", "soon"], "--ttl: 'soon' is no time such as 90, 5min, 1h or 2d"),
        (["--ttl", "5min,0"], "--ttl: '0' is no time"),
        (["--ttl", "1" * 5000], "is no time"),
        (["--kv-bytes-per-token", "0"], "'--kv-bytes-per-token': must be a whole number from 1 to 1073741824, got '0'"),
        (["--model", "no-such-model"], "--model: 'no-such-model' is no preset"),
        (["--model", "llama-3.1-8b", "--kv-bytes-per-token", "9"], "--model: not with --kv-bytes-per-token"),
        (["--plot", "curve.gif"], "--plot: curve.gif must end with one of .png, .svg, .pdf"),
        (["--tokenizer", "no-such-tokenizer"], "--tokenizer: 'no-such-tokenizer' is no file or folder here"),
        (["--seed", "-1"], "'--seed': must be a whole number from 0 to"),
        (["no-such-trace"], "no-such-trace: No such file"),
    ],
)
def test_bad_arguments_get_one_line_with_value_and_bound(capsys, trace, arguments, message):
    assert message in refused(capsys, trace, *arguments)


def test_a_time_to_live_needs_times(capsys, trace):
    trace.write_text('{"input_length": 3, "hash_ids": [1]}\n' * 2)
    assert run_json(capsys, trace)["ttl"] == []
    assert f"--ttl: {trace} has no times" in refused(capsys, trace, "--ttl", "60")


def test_ids_that_are_not_chained_are_named(capsys, trace):
    trace.write_text(trace.read_text() + '\n{"timestamp": 1e6, "input_length": 9, "output_length": 1, "hash_ids": [4]}')
    assert "trace.jsonl:5: hash_ids[0]: id 4 is not behind the same ids as before" in refused(capsys, trace)
    assert run_json(capsys, trace, "--skip-bad")["requests"] == 4


# The public traces

CAPACITIES = [1000, 3000, 5000, 10_000, 30_000, 50_000, 100_000, None]
REFERENCE = {
    "conversation": (
        (288_500, 182_790),
        [12_847, 18_850, 32_260, 61_046, 93_978, 102_290, 104_924, 105_710],
        [55_019, 84_953, 98_448, 105_710, 105_710, 105_710, 105_710, 105_710],
    ),
    "synthetic": (
        (121_877, 43_924),
        [10_252, 23_226, 34_043, 51_669, 76_077, 77_953, 77_953, 77_953],
        [33_728, 54_438, 64_139, 75_316, 77_953, 77_953, 77_953, 77_953],
    ),
}


@needs_traces
@pytest.mark.parametrize("name", REFERENCE)
def test_mooncake_traces_give_the_reference_table(name):
    sizes, lru, opt = REFERENCE[name]
    trace = read_trace(TRACES / f"mooncake_{name}.jsonl.gz")
    curve = Curve(trace)
    assert (curve.access_blocks, trace.num_blocks) == sizes
    assert [curve.lru_hits(capacity).sum() for capacity in CAPACITIES] == lru
    assert [hits_of(capacity or 10**9, curve.lru()) for capacity in CAPACITIES] == lru
    assert [curve.opt_hits(capacity).sum() for capacity in CAPACITIES] == opt


@needs_traces
def test_one_trace_gives_five_rates():
    curve = Curve(read_trace(TRACES / "mooncake_synthetic.jsonl.gz"))
    rates = curve.rates(curve.lru_hits(None))
    assert [round(100 * getattr(rates, name)) for name in DEFINITIONS] == [64, 65, 66, 42, 86]


@needs_traces
@pytest.mark.parametrize("capacity", [5000, 77_777])
def test_hits_of_long_runs_are_those_of_replay(capacity):
    trace = read_trace(TRACES / "coding_agents_merged60.blk64.jsonl.gz")
    assert Curve(trace).lru_hits(capacity).sum() == replay(trace, capacity).hit_blocks


@needs_traces
def test_43_million_blocks_are_counted_by_runs():
    trace = read_trace(TRACES / "coding_agents.blk64.jsonl.gz", concurrency=100)
    curve = Curve(trace)
    assert curve.access_blocks == 43_638_751
    assert curve.access_blocks - curve.lru()[-1] == trace.num_blocks
    assert curve.opt_hits(20_000).sum() > hits_of(20_000, curve.lru())
