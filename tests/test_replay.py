import json
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.policy import LRU, POLICIES
from radixkv.replay import default_capacities, replay
from radixkv.synthetic import synthetic_trace
from radixkv.trace import IdRequest, IdTrace, TokenRequest, TokenTrace, count_blocks, read_trace

TRACES = Path(__file__).parents[2] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not here")


def pack(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def id_trace(*prompts: list[int], block_size: int = 10) -> IdTrace:
    """Every prompt's last block has one token."""
    requests = [
        IdRequest(0.0, block_size * (len(ids) - 1) + 1, 0, array("q", [end for n in ids for end in (n, n + 1)]))
        for ids in prompts
    ]
    return IdTrace("made", requests, block_size=block_size, num_blocks=len({n for ids in prompts for n in ids}))


def token_trace(*turns: tuple[bytes, bytes], block_size: int = 2) -> TokenTrace:
    requests = [TokenRequest(0.0, prompt, answer) for prompt, answer in turns]
    return TokenTrace("made", requests, block_size=block_size, num_blocks=count_blocks(requests, block_size))


def lru_hits(prompts: list[list[int]], capacity: int) -> int:
    """The definition: leading resident blocks hit; the path is used, the root last; the least recently used goes."""
    resident: dict[int, None] = {}  # least recently used first
    hits = 0
    for path in prompts:
        path = path[:capacity]
        hits += next((index for index, block in enumerate(path) if block not in resident), len(path))
        for block in path:
            resident.pop(block, None)
        while len(resident) + len(path) > capacity:
            del resident[next(iter(resident))]
        resident.update(dict.fromkeys(reversed(path)))
    return hits


@st.composite
def tries(draw):
    """Prompts as chained ids: an id stands for the whole prefix that ends with it."""
    ids: dict[tuple[int, ...], int] = {}
    prompts = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=30))
    return [[ids.setdefault(tuple(word[: end + 1]), len(ids)) for end in range(len(word))] for word in prompts]


# Traces of ids


def test_leading_resident_blocks_hit():
    row = replay(id_trace([0, 1, 2], [0, 1, 3], [0, 1, 2, 4]), None)
    assert (row.hit_blocks, row.access_blocks) == (5, 10)
    assert row.block_hit_rate == 0.5


def test_hit_tokens_end_with_the_prompt():
    row = replay(id_trace([0, 1], [0, 1]), None)
    assert (row.hit_tokens, row.prompt_tokens) == (11, 22)
    assert row.token_hit_rate == 0.5


def test_a_prompt_longer_than_the_capacity_keeps_its_first_blocks():
    row = replay(id_trace([0, 1, 2, 3], [0, 1, 2, 3]), 2)
    assert (row.hit_blocks, row.access_blocks) == (2, 8)


def test_a_prompt_without_a_whole_block_counts_its_tokens_only():
    trace = IdTrace("made", [IdRequest(0.0, 5, 0, array("q"))], block_size=64, num_blocks=0)
    row = replay(trace, None)
    assert (row.access_blocks, row.prompt_tokens, row.block_hit_rate) == (0, 5, 0.0)


@given(tries(), st.integers(1, 12))
def test_lru_hits_are_those_of_the_definition(prompts, capacity):
    assert replay(id_trace(*prompts), capacity).hit_blocks == lru_hits(prompts, capacity)


@given(tries(), st.integers(1, 12) | st.none(), st.sampled_from(sorted(POLICIES)))
def test_runs_and_ids_give_the_same_rows(tmp_path_factory, prompts, capacity, policy):
    path = tmp_path_factory.getbasetemp() / "replayed"
    counts = []
    for name, values in (("hash_ids", prompts), ("hash_runs", [[[n + 9, n + 9] for n in ids] for ids in prompts])):
        records = ({"input_length": 16 * len(ids), "block_size": 16, name: ids} for ids in values)
        path.write_text("\n".join(map(json.dumps, records)))
        row = replay(read_trace(path), capacity, policy)
        counts.append((row.hit_blocks, row.access_blocks, row.hit_tokens, row.prompt_tokens))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(prompts=tries())
def test_every_policy_hits_all_that_came_before_when_nothing_is_evicted(policy, prompts):
    distinct = len({block for path in prompts for block in path})
    row = replay(id_trace(*prompts), None, policy)
    assert row.access_blocks - row.hit_blocks == distinct


# Traces of tokens


def test_an_answer_is_hit_by_the_next_turn_but_for_its_last_token():
    prompt, answer = pack(1, 2, 3), pack(4, 5, 6)
    row = replay(token_trace((prompt, answer), (prompt + answer + pack(7, 8), b"")), None)
    # written: 1 2 | 3 4 | 5; the KV of 6 never was
    assert (row.hit_blocks, row.hit_tokens) == (2, 4)
    assert (row.access_blocks, row.prompt_tokens) == (2 + 4, 3 + 8)


def test_one_token_is_always_left_to_prefill():
    assert replay(token_trace(*[(pack(1, 2, 3, 4), b"")] * 2), None).hit_tokens == 2


def test_tokens_that_do_not_fit_are_cached_as_far_as_they_do():
    long, answer = pack(*range(10)), pack(*range(10, 20))
    row = replay(token_trace((long, answer), (long, answer)), 3)
    assert (row.hit_blocks, row.hit_tokens, row.access_blocks) == (2, 4, 10)
    row = replay(token_trace((long, answer), (long + answer, b"")), 7)
    assert row.hit_tokens == 12


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=9), st.lists(st.integers(0, 1), max_size=5)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 4),
)
def test_token_hits_are_the_longest_written_prefix_in_whole_blocks(turns, size):
    expected, written = 0, set()
    for prompt, answer in turns:
        for end in range(size, len(prompt), size):  # the last token is never hit
            if tuple(prompt[:end]) not in written:
                break
            expected += size
        tokens = prompt + answer[:-1]
        written |= {tuple(tokens[:end]) for end in range(len(tokens) + 1)}
    trace = token_trace(*((pack(*prompt), pack(*answer)) for prompt, answer in turns), block_size=size)
    assert replay(trace, None).hit_tokens == expected


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_synthetic_workload_hits_more_with_more_room(policy):
    trace = synthetic_trace(num_requests=500)
    hits = [replay(trace, capacity, policy).hit_tokens for capacity in (100, 1000, 10_000, None)]
    assert 0 < hits[0] < hits[1] < hits[2] <= hits[3]


# Arguments


def test_a_row_tells_policy_and_capacity():
    trace = id_trace([0])
    assert [(row.policy, row.capacity_blocks) for row in (replay(trace, 5), replay(trace, None, "lfu"))] == [
        ("lru", 5),
        ("lfu", None),
    ]
    assert replay(trace, 1, LRU()).policy == "LRU"


def test_a_capacity_beyond_all_need_costs_no_memory():
    assert replay(id_trace([0, 1], [0, 1]), 10**15).hit_blocks == 2


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="capacity must be at least 1 block, got 0"):
        replay(id_trace([0]), 0)
    with pytest.raises(ValueError, match=r"policy must be one of lru, .* got 'mru'"):
        replay(id_trace([0]), 1, "mru")


def test_progress_is_told_as_a_share():
    shares: list[float] = []
    replay(id_trace(*[[0]] * 1000), None, progress=shares.append)
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert 0.9 < shares[-1] < 1


@pytest.mark.parametrize(
    ("num_blocks", "capacities"),
    [(0, [1, None]), (1, [1, None]), (182_790, [600, 2000, 6000, 20_000, 60_000, None])],
)
def test_default_capacities_are_round_shares_of_the_blocks(num_blocks, capacities):
    assert default_capacities(num_blocks) == capacities


# The public traces

CAPACITIES = [1000, 3000, 5000, 10_000, 30_000, 50_000, 100_000, None]
REFERENCE = {
    "conversation": (288_500, [12_847, 18_850, 32_260, 61_046, 93_978, 102_290, 104_924, 105_710]),
    "synthetic": (121_877, [10_252, 23_226, 34_043, 51_669, 76_077, 77_953, 77_953, 77_953]),
}


@needs_traces
@pytest.mark.parametrize("name", REFERENCE)
def test_lru_hits_on_mooncake_traces_equal_the_reference(name):
    accesses, hits = REFERENCE[name]
    trace = read_trace(TRACES / f"mooncake_{name}.jsonl.gz")
    rows = [replay(trace, capacity) for capacity in CAPACITIES]
    assert [row.hit_blocks for row in rows] == hits
    assert {row.access_blocks for row in rows} == {accesses}


@needs_traces
def test_sessions_of_43_million_blocks_miss_each_block_once_without_bound():
    trace = read_trace(TRACES / "coding_agents.blk64.jsonl.gz")
    row = replay(trace, None)
    assert row.access_blocks - row.hit_blocks == trace.num_blocks
