"""Where the tokens of a trace went, and what hid those that were there."""

import json
import random
import re
from array import array
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from chats import FAULTS, SYSTEM, bodies, library_chats, needs_traces, public_chats, write
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.cli import main
from radixkv.convert import with_block_size
from radixkv.explain import TokenCounts, explain
from radixkv.findings import ADVICE
from radixkv.repeats import MIN_RUN, Repeats
from radixkv.replay import replay
from radixkv.text_trace import parts_of
from radixkv.trace import IdRequest, IdTrace, TokenRequest, TokenTrace, count_blocks, read_trace
from radixkv.volatile import json_change, sorted_json, volatile_change, without_volatile
from radixkv.what_if import Setting, parse_change


def packed(tokens):
    return array("i", tokens).tobytes()


def token_trace(turns, block_size=4):
    """Of (prompt, answer) or (prompt, answer, namespace)."""
    requests = [
        TokenRequest(float(number), packed(prompt), packed(answer), *namespace)
        for number, (prompt, answer, *namespace) in enumerate(turns)
    ]
    return TokenTrace("made", requests, block_size=block_size, num_blocks=count_blocks(requests, block_size))


def id_trace(prompts, block_size=4):
    """Of (tokens, ids)."""
    requests = [
        IdRequest(float(number), num, 0, array("q", [end for one in ids for end in (one, one + 1)]))
        for number, (num, ids) in enumerate(prompts)
    ]
    return IdTrace("made", requests, block_size=block_size, num_blocks=1 + max(max(ids) for _, ids in prompts))


def parts(**counts):
    return TokenCounts(prompt=sum(counts.values()), **counts)


# Classes


def test_a_worked_example_of_each_class():
    first = list(range(100, 110))
    assert explain(token_trace([(first, [])])).tokens == parts(cold=10)
    again = explain(token_trace([(first, []), ([*first, 7, 8, 9], [])])).tokens
    assert again == parts(cold=10 + 3, hit=8, block_rounding=2), "tokens 8 and 9 are known, but in no whole block"
    same = explain(token_trace([(first, []), (first, [])])).tokens
    assert same == parts(cold=10, hit=8, block_rounding=1, last_token=1)
    whole = explain(token_trace([(first[:8], []), (first[:8], [])])).tokens
    assert whole == parts(cold=8, hit=4, block_rounding=3, last_token=1), "the last block is computed for one token"
    answered = explain(token_trace([(first, [1, 2, 3]), ([*first, 1, 2, 3, 4], [])])).tokens
    assert answered == parts(cold=10 + 2, hit=12), "the KV of the last token of an answer was never written"


def test_another_namespace_knows_it():
    prompt = list(range(10))
    tokens = explain(token_trace([(prompt, [], "a"), ([*prompt[:6], 77, 78], [], "b"), (prompt, [], "b")])).tokens
    assert tokens == parts(cold=10 + 2, namespace=6 + 3, hit=4, block_rounding=2, last_token=1)


def test_models_that_share_nothing_are_told_from_a_file(tmp_path):
    names = [f"model {number}" for number in range(20)]
    records = [{"body": {**record["body"], "model": name}} for record in bodies(library_chats(2)) for name in names]
    tokens = explain(read_trace(write(tmp_path / "t", records))).tokens
    alone = explain(read_trace(write(tmp_path / "t", bodies(library_chats(2))))).tokens
    assert (tokens.cold, tokens.hit) == (alone.cold, 20 * alone.hit)
    assert tokens.namespace > 0


def test_what_had_to_go_is_told_with_the_capacity_that_keeps_it():
    prompts = [[number] * 8 + [number] for number in range(6)]
    trace = token_trace([(prompt, []) for prompt in prompts + prompts])
    found = explain(trace, 4)
    assert found.tokens == parts(cold=54, capacity=48, last_token=6)
    assert found.keeping == [(0.5, 12), (0.9, 13), (1.0, 13)]
    assert [explain(trace, capacity).tokens.hit for capacity in (11, 12, 13)] == [0, 24, 48]
    assert explain(trace).keeping == []


def test_a_time_to_live_hides_too():
    trace = token_trace([([1] * 9, []), ([2] * 9, []), ([1] * 9, []), ([1] * 9, [])])
    assert explain(trace, ttl=1.5).tokens.capacity == 8
    assert explain(trace, 100, ttl=2.5).tokens.capacity == 0
    with pytest.raises(ValueError, match="ttl must be positive, got -1 s"):
        explain(trace, ttl=-1)
    with pytest.raises(ValueError, match="capacity must be at least 1 block, got 0"):
        explain(trace, 0)


def test_ids_tell_what_is_known_and_nothing_of_what_is_behind():
    trace = id_trace([(10, [0, 1, 2]), (10, [0, 1, 2]), (14, [0, 1, 3])])
    assert explain(trace).tokens == parts(cold=10 + 6, hit=10 + 8)
    assert explain(trace, 1).tokens == parts(cold=10 + 6, hit=4 + 4, capacity=6 + 4)
    assert explain(trace).findings == []


def test_tokens_behind_the_last_id_are_in_no_whole_block():
    trace = id_trace([(10, [0, 1]), (11, [0, 1])])
    assert explain(trace).tokens == parts(cold=10, hit=8, block_rounding=3)


turns = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=24),
        st.lists(st.integers(0, 1), max_size=5),
        st.sampled_from([None, "a"]),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(turns, st.integers(1, 5), st.integers(1, 30) | st.none())
def test_the_parts_add_up_and_hits_are_those_of_replay(turns, block_size, capacity):
    trace = token_trace(turns, block_size)
    tokens = explain(trace, capacity).tokens
    row = replay(trace, capacity)
    assert (tokens.hit, tokens.prompt) == (row.hit_tokens, row.prompt_tokens)
    assert sum(getattr(tokens, part.name) for part in fields(tokens)) == 2 * tokens.prompt
    assert min(getattr(tokens, part.name) for part in fields(tokens)) >= 0
    assert tokens.hit + tokens.capacity == replay(trace, None).hit_tokens


@settings(max_examples=150, deadline=None)
@given(turns)
def test_what_is_known_is_the_longest_prefix_of_all_before(turns):
    tokens = explain(token_trace(turns, 1)).tokens
    known = elsewhere = last = 0
    before: list[tuple[object, list[int]]] = []
    for prompt, answer, namespace in turns:
        longest = {True: 0, False: 0}
        for other, sequence in before:
            same = 0
            while same < min(len(prompt), len(sequence)) and prompt[same] == sequence[same]:
                same += 1
            longest[other == namespace] = max(longest[other == namespace], same)
        ends = int(max(longest.values()) == len(prompt))
        last += ends
        known += min(longest[True], len(prompt) - ends)
        elsewhere += max(0, min(longest[False], len(prompt) - ends) - min(longest[True], len(prompt) - ends))
        before.append((namespace, prompt + answer[:-1]))
    assert (tokens.hit, tokens.namespace, tokens.last_token, tokens.block_rounding) == (known, elsewhere, last, 0)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_ids_are_explained_as_replay_replays_them(data):
    sizes = st.lists(st.integers(0, 2), min_size=1, max_size=6)
    numbers: dict[tuple[int, ...], int] = {}
    prompts = []
    for path in data.draw(st.lists(sizes, min_size=1, max_size=12)):
        ids = [numbers.setdefault(tuple(path[:end]), len(numbers)) for end in range(1, len(path) + 1)]
        prompts.append((4 * len(ids) - data.draw(st.integers(0, 3)), ids))
    trace = id_trace(prompts)
    capacity = data.draw(st.integers(1, 12) | st.none())
    tokens = explain(trace, capacity).tokens
    row = replay(trace, capacity)
    assert (tokens.hit, tokens.prompt) == (row.hit_tokens, row.prompt_tokens)
    assert tokens.hit + tokens.capacity + tokens.cold == tokens.prompt
    bigger = with_block_size(trace, 8)
    assert replay(bigger, None).hit_tokens == explain(bigger).tokens.hit <= replay(trace, None).hit_tokens


# Repeats


def test_a_repeat_has_32_tokens():
    sequences = [np.arange(100, dtype=np.int32)]
    repeats = Repeats(sequences.__getitem__)
    repeats.add(0, sequences[0], 0)
    for num in (31, 32, 50):
        tokens = np.concatenate([np.full(20, -1), np.arange(30, 30 + num), np.full(20, -2)]).astype(np.int32)
        found = [(repeat.start, repeat.end, repeat.sequence, repeat.offset) for repeat in repeats.find(tokens, 5)]
        assert found == ([] if num < 32 else [(20, 20 + num, 0, 30)])


def test_repeats_are_true_and_long_ones_are_found():
    rng = np.random.default_rng(0)
    sequences: list[np.ndarray] = []
    repeats = Repeats(lambda number: sequences[number])
    num_found = num_copied = 0
    for number in range(120):
        pieces, copied = [], []
        for _ in range(4):
            if sequences and rng.random() < 0.5:
                source = sequences[rng.integers(len(sequences))]
                start = rng.integers(len(source))
                piece = source[start : start + rng.integers(10, 90)]
                copied.append(np.full(len(piece), len(piece) >= MIN_RUN))
            else:
                piece = rng.integers(0, 50_000, rng.integers(5, 80), dtype=np.int32)
                copied.append(np.zeros(len(piece), bool))
            pieces.append(piece)
        tokens = np.concatenate(pieces).astype(np.int32)
        covered = np.zeros(len(tokens), bool)
        for found in repeats.find(tokens, 0):
            length = found.end - found.start
            assert not covered[found.start : found.end].any()
            earlier = sequences[found.sequence][found.offset : found.offset + length]
            assert np.array_equal(tokens[found.start : found.end], earlier)
            covered[found.start : found.end] = True
        num_copied += int(np.concatenate(copied).sum())
        num_found += int((covered & np.concatenate(copied)).sum())
        sequences.append(tokens)
        repeats.add(number, tokens, 0)
    assert num_copied > 2000
    assert num_found > 0.97 * num_copied


# Changes of words


@pytest.mark.parametrize(
    ("ours", "theirs", "kind", "value"),
    [
        ("Id 3f0a1b2c-1111-4222-8333-444455556666.", "Id 3f0a1b2c-1111-4222-8333-444455556667.", "uuid", "3f0a1b2c"),
        ("id=req_9f3k2l5m8n1p; x", "id=req_8a7s6d5f4g3h; x", "uuid", "9f3k2l5m8n1p"),
        ("[d3447490] Hi", "[85940927] Hi", "uuid", "d3447490"),
        ("Now 2024-05-14T10:00:01Z, go", "Now 2024-05-14T10:00:02Z, go", "timestamp", "2024-05-14T10:00:01Z"),
        ("It is Tuesday, May 14, 2024.", "It is Wednesday, May 15, 2024.", "timestamp", "Tuesday, May 14, 2024"),
        ("at 3:04 PM EST", "at 11:04 AM EST", "timestamp", "3:04 PM"),
        ("ts=1715698800 a", "ts=1715698923 a", "timestamp", "1715698800"),
        ("14 May 2024", "2 June 2024", "timestamp", "14 May 2024"),
        ("on 14.05.2024 and", "on 15.05.2024 and", "timestamp", "14.05.2024"),
        ("今天是2024年5月14日。", "今天是2024年5月15日。", "timestamp", "2024年5月14日"),
        ("turn 9 of", "turn 10 of", "counter", "9"),
        ("turn 1", "turn 12", "counter", "1"),
        ("You are Alice", "You are Bob", None, None),
        ("May the force", "Maybe the", None, None),
        ("user mia_li_3668", "user mia_lo_1234", None, None),
        ("", "x", None, None),
    ],
)
def test_what_changes_is_recognised(ours, theirs, kind, value):
    found = volatile_change(ours, theirs)
    assert (found.kind if found else None) == kind
    if found:
        assert found.ours.startswith(value)
        assert volatile_change(theirs, ours).kind == kind


def test_equal_json_is_recognised_however_it_is_written():
    assert json_change('a {"x": 1, "y": [1]} b', 'a {"y": [1], "x": 1} b').kind == "json_key_order"
    assert json_change('{"a": {"x":1}}', '{"a": {"x": 1}}').kind == "retokenised"
    assert json_change('[{"name": "a"}, {"name": "b"}]', '[{"name": "b"}, {"name": "a"}]').kind == "tool_order"
    for ours, theirs in (('{"a": 1}', '{"a": 2}'), ("[1, 2]", "[2, 1]"), ("{a", "{b"), ("x", "y")):
        assert json_change(ours, theirs) is None


def test_text_is_parted_from_what_changes():
    text = "Turn 7 of 2024-05-14 10:00, id 3f0a1b2c-1111-4222-8333-444455556666: 12 books."
    assert without_volatile(text, ("Turn",)) == (
        "Turn  of id : 12 books.",
        ["7", "2024-05-14 10:00, ", "3f0a1b2c-1111-4222-8333-444455556666"],
    )
    assert sorted_json('x {"b": 1, "a": [{"n": 2}, {"n": 1}]} {y') == 'x {"a": [{"n": 2}, {"n": 1}], "b": 1} {y'
    assert sorted_json('[{"n": 2}, {"n": 1}]') == '[{"n": 1}, {"n": 2}]'


# Findings


def found_in(path, records, **options):
    explained = explain(read_trace(write(path, records), **options))
    return [finding.kind for finding in explained.findings], explained


def needs_tools(fault):
    return fault.startswith("tool_order") or fault == "json_key_order of tools"


@pytest.mark.parametrize("answers", [False, True], ids=["requests", "with answers"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_the_only_finding(tmp_path, fault, answers):
    if fault == "retokenised" and not answers:
        pytest.skip("without answers nobody knows how they were generated")
    records = bodies(library_chats(), FAULTS[fault], answers=answers, tools=needs_tools(fault))
    kinds, explained = found_in(tmp_path / "t", records)
    assert kinds == [fault.replace(",", "").split()[0]]
    (finding,) = explained.findings
    assert 0 < finding.lost_tokens <= explained.tokens.broken_prefix
    assert 2 < finding.requests <= len(records)
    assert finding.advice == ADVICE[finding.kind]


@pytest.mark.parametrize("answers", [False, True], ids=["requests", "with answers"])
@pytest.mark.parametrize("tools", [False, True], ids=["no tools", "tools"])
def test_the_same_chats_untouched_have_no_finding(tmp_path, answers, tools):
    for seed in range(3):
        assert found_in(tmp_path / "t", bodies(library_chats(), answers=answers, tools=tools, seed=seed))[0] == []
    assert found_in(tmp_path / "t", [{"messages": chat} for chat in library_chats()])[0] == []


PUBLIC = {
    "taubench_gpt4o_airline": lambda: public_chats("taubench_gpt4o_airline", 8),
    "mtbench101": lambda: public_chats("mtbench101", 30, least=6),
    "sweagent_demos": lambda: public_chats("sweagent_demos", 9),
}
# what costs nothing in a trace, because it has no tools, or too few turns
COSTS_NOTHING = {
    "mtbench101": ("json_key_order of calls", "history_trim", "history_trim with a summary", "history_trim of tools"),
    "sweagent_demos": ("json_key_order of calls", "history_trim of tools"),
    "taubench_gpt4o_airline": (),
}


@needs_traces
@pytest.mark.parametrize("name", PUBLIC)
def test_planted_faults_are_found_in_the_public_chats(tmp_path, name):
    chats = PUBLIC[name]()
    for fault, plant in FAULTS.items():
        if fault not in COSTS_NOTHING[name]:
            records = bodies(chats, plant, answers=True, tools=needs_tools(fault))
            assert (fault, found_in(tmp_path / "t", records)[0]) == (fault, [fault.replace(",", "").split()[0]])


@needs_traces
@pytest.mark.parametrize("name", PUBLIC)
def test_the_public_chats_untouched_have_no_finding(tmp_path, name):
    every = public_chats(name, 100)
    for answers in (False, True):
        assert found_in(tmp_path / "t", bodies(every, answers=answers))[0] == []
    for seed in (0, 1):
        assert found_in(tmp_path / "t", [{"messages": chat} for chat in every], seed=seed)[0] == []


def test_a_finding_says_where_and_shows_the_words(tmp_path):
    _, explained = found_in(tmp_path / "t", bodies(library_chats(), FAULTS["uuid of the request"]))
    (finding,) = explained.findings
    assert finding.where.startswith("system prompt, token ")
    assert finding.where.endswith(", behind 'Request-ID:'")
    assert len(set(finding.examples)) == 3
    assert all(len(example) == 36 for example in finding.examples)


def test_a_date_in_the_users_own_words_is_no_finding(tmp_path):
    def dated(body, chat, turn, request, rng):
        for index, message in enumerate(body["messages"]):
            if message["role"] == "user":
                message["content"] += f" (on May {1 + (7 * chat + index) % 28}, 2024)"

    assert found_in(tmp_path / "t", bodies(library_chats(), dated))[0] == []
    questions = [
        {
            "model": "m",
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Open on May {day}?"}],
        }
        for day in range(1, 29)
    ]
    assert found_in(tmp_path / "t", questions)[0] == []


def test_what_only_resembles_another_chat_is_no_finding(tmp_path):
    """Chats that differ early, for a reason, and say the same later on: nothing hides what they have in common."""
    (chat,) = library_chats(1)

    def alike(**changes):
        return [[{**message, "content": changes.get(str(at), message["content"])} for at, message in enumerate(chat)]]

    greetings = ("Hello there, a question about books.", "Good morning! It is about a book.", "I look for something.")
    chats = [one for greeting in greetings for one in alike(**{"1": greeting})]
    for records in (bodies(chats), bodies(chats)[::2], bodies(chats)[1::2]):
        assert found_in(tmp_path / "t", records)[0] == []
    assert found_in(tmp_path / "t", bodies(alike()) + bodies(alike(**{"0": f"Be very brief. {SYSTEM}"})))[0] == []
    records = bodies([chat] * 2, FAULTS["uuid of the request"])
    models = [{"body": {**record["body"], "model": str(number)}} for number, record in enumerate(records)]
    assert found_in(tmp_path / "t", models)[0] == []


def test_only_what_breaks_is_counted(tmp_path):
    chats = library_chats(1) * 6
    _, explained = found_in(tmp_path / "t", bodies(chats, FAULTS["uuid of the chat"]))
    assert [(finding.kind, finding.requests) for finding in explained.findings] == [("uuid", 5)]


def test_one_chat_is_enough(tmp_path):
    (chat,) = library_chats(1)
    for fault in ("uuid of the request", "counter of turns", "system_prompt changes", "thinking", "history_trim"):
        assert found_in(tmp_path / "t", bodies([chat], FAULTS[fault]))[0] == [fault.split()[0]]


def test_system_prompts_made_from_a_template_are_a_finding(tmp_path):
    names = ("Ada", "Boris", "Chen", "Dora", "Emil", "Fatima")
    chats = library_chats()
    for number, chat in enumerate(chats):
        chat[0]["content"] = f"You help {names[number % 6]}. {chat[0]['content']}"
    kinds, explained = found_in(tmp_path / "t", [{"messages": chat} for chat in chats])
    assert kinds == ["system_prompt"]
    assert "behind 'You help'" in explained.findings[0].where
    for number, chat in enumerate(chats):
        chat[0]["content"] = f"You help {names[number % 2]}. {SYSTEM}"
    assert found_in(tmp_path / "t", [{"messages": chat} for chat in chats])[0] == [], "two services, maybe"


def sessions(edit, seed=0):
    """Token ids of chats that share a prompt; `edit` gets (turn, tokens, rng)."""
    rng = random.Random(seed)

    def draw(num):
        return [rng.randrange(50_000) for _ in range(num)]

    shared = draw(300)
    waiting = []
    for _ in range(8):
        history, requests = list(shared), []
        for turn in range(6):
            history = history + draw(60)
            answer = draw(80)
            requests.append((edit(turn, list(history), rng), answer))
            history = history + answer
        waiting.append(requests)
    mixed = []
    while waiting:
        requests = rng.choice(waiting)
        mixed.append(requests.pop(0))
        waiting = [requests for requests in waiting if requests]
    return token_trace(mixed, 16)


def other_tokens(turn, tokens, rng):
    for number in range(turn):
        start = 300 + 140 * number + 80
        tokens[start : start + 2] = [60_000 + tokens[start]]
    return tokens


@pytest.mark.parametrize(
    ("edit", "kinds"),
    [
        (lambda turn, tokens, rng: tokens, []),
        (other_tokens, ["retokenised"]),
        (lambda turn, tokens, rng: tokens[:5] + [rng.randrange(50_000) for _ in range(6)] + tokens[5:], ["other"]),
        (lambda turn, tokens, rng: tokens[:300] + tokens[300:][-260:], ["history_trim"]),
    ],
    ids=["untouched", "retokenised", "other", "history_trim"],
)
def test_token_ids_without_a_tokenizer_show_the_shape_of_a_change(edit, kinds):
    explained = explain(sessions(edit))
    assert [finding.kind for finding in explained.findings] == kinds
    assert all(finding.where.startswith("prompt, token ") for finding in explained.findings)


def test_token_ids_of_any_value_are_taken(tmp_path):
    rng = random.Random(0)
    prompts = [[rng.randrange(2**31) for _ in range(200)] for _ in range(3)]
    prompts.append([2**30 + number % 9 for number in range(200)])
    explain(token_trace([(prompt[number:], []) for prompt in prompts for number in (0, 0, 1)], 16))


# What if


@pytest.mark.parametrize(
    ("fault", "change"),
    [
        ("uuid of the request", "move-volatile"),
        ("timestamp in words", "move-volatile"),
        ("counter of turns", "move-volatile"),
        ("uuid in a message", "move-volatile"),
        ("tool_order", "sort-tools"),
        ("tool_order in the system prompt", "sort-tools"),
        ("json_key_order of tools", "sort-tools"),
        ("json_key_order of calls", "sort-tools"),
    ],
)
def test_a_change_brings_back_what_a_fault_cost(tmp_path, fault, change):
    records = bodies(library_chats(), FAULTS[fault], answers=True, tools=needs_tools(fault))
    before = found_in(tmp_path / "t", records)[1]
    trace = read_trace(tmp_path / "t")
    changed = parse_change(change).apply(Setting(trace, None), before.findings)
    after = explain(changed.trace)
    assert after.findings == []
    assert after.tokens.hit > before.tokens.hit + 0.9 * before.findings[0].lost_tokens
    assert [request.time for request in changed.trace.requests] == [request.time for request in trace.requests]


def test_a_change_leaves_untouched_chats_as_they_are(tmp_path):
    trace = read_trace(write(tmp_path / "t", [{"messages": chat} for chat in library_chats()]))
    before = explain(trace)
    for change in ("sort-tools", "move-volatile"):
        after = explain(parse_change(change).apply(Setting(trace, None), before.findings).trace)
        assert after.tokens.hit >= before.tokens.hit
        assert after.findings == []
    sorted_trace = parse_change("sort-tools").apply(Setting(trace, None), []).trace
    assert parts_of(sorted_trace.requests[3].tokens) == parts_of(trace.requests[3].tokens)


def test_block_size_and_capacity_change_together():
    trace = id_trace([(16, [0, 1, 2, 3]), (12, [0, 1, 4])])
    changed = parse_change("block-size=8").apply(Setting(trace, 6), [])
    assert (changed.trace.block_size, changed.capacity, changed.trace.num_blocks) == (8, 3, 3)
    assert parse_change("capacity=1.5x").apply(changed, []).capacity == 4
    assert parse_change("capacity=7").apply(changed, []).capacity == 7
    assert parse_change("ttl=2.5").apply(changed, []).ttl == 2.5


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "block-size", "block-size=0", "block-size=x", "block-size=9999999", "capacity=x", "capacity=0x"),
        *("capacity=-1", "ttl=0", "ttl=nan", "ttl=inf", "ttl=-1", "sort-tools=1", "capacity=99999999999"),
    ],
)
def test_a_change_of_no_form_is_refused(text):
    with pytest.raises(ValueError, match="is none of block-size=N, capacity=N"):
        parse_change(text)


# The command


@pytest.fixture
def faulty(tmp_path):
    return str(write(tmp_path / "chats.jsonl", bodies(library_chats(), FAULTS["timestamp"], tools=True)))


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_the_table_and_the_findings_fit_the_terminal(capsys, faulty):
    assert main(["explain", faulty, "--capacity", "100", "--what-if", "move-volatile", "--what-if", "capacity=2x"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80
    for line in (
        "where the prompt tokens went",
        "1. timestamp: ",
        "   in: system prompt",
        "   e.g. ",
        "what if: move-volatile",
    ):
        assert line in out, line
    assert "tokens: built-in chunks of text" in out
    assert "100.00" in out


def test_json_has_the_parts_the_findings_and_the_changes(capsys, faulty):
    assert main(["explain", faulty, "--capacity", "500", "--what-if", "ttl=300", "--json", "-"]) == 2
    assert "ttl=300: " in (err := capsys.readouterr().err)
    assert "has no times" in err
    assert main(["explain", faulty, "--capacity", "500", "--what-if", "block-size=32", "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["tokens"]) == {part.name for part in fields(TokenCounts)}
    assert sum(result["tokens"].values()) == 2 * result["tokens"]["prompt"]
    assert [set(finding) for finding in result["findings"]] == [{"kind", "requests", "lost_tokens", "where", "advice"}]
    assert result["findings"][0]["kind"] == "timestamp"
    (change,) = result["what_if"]
    assert (change["change"], change["block_size"], change["capacity_blocks"]) == ("block-size=32", 32, 250)


def test_json_goes_to_a_file_beside_the_table(capsys, faulty, tmp_path):
    assert main(["explain", faulty, "--json", str(tmp_path / "out.json")]) == 0
    assert "1. timestamp" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["capacity_blocks"] is None


def test_odd_text_is_shown_as_it_is_written(capsys, tmp_path):
    system = "\ud800[bold]\x1b[31m id {} " + "[" * 400 + "]" * 400 + SYSTEM
    chats = [
        [{"role": "system", "content": system.format(number)}, {"role": "user", "content": "?"}] for number in range(8)
    ]
    path = write(tmp_path / "t", [{"model": "m", "messages": chat} for chat in chats])
    assert main(["explain", str(path), "--what-if", "sort-tools"]) == 0
    assert r"behind '\ud800[bold]\x1b[31m id'" in capsys.readouterr().out


def test_ids_are_said_to_tell_less(capsys, tmp_path):
    lines = [{"input_length": 20, "hash_ids": ids} for ids in ([0, 1], [0, 1], [0, 2])]
    assert main(["explain", str(write(tmp_path / "t", lines)), "--capacity", "1"]) == 0
    out = capsys.readouterr().out
    assert "findings: none from ids" in out
    assert "of what had to go for want of capacity would stay" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--what-if", "more"], "'more' is none of block-size=N"),
        (["--what-if", "capacity=2x"], "capacity=2x: there is no capacity to multiply"),
        (["--capacity", "0"], "must be a whole number from 1 to"),
        (["--tokenizer", "no/file"], "there is no file or folder 'no/file'"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(capsys, faulty, arguments, message):
    assert main(["explain", faulty, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_changes_of_text_are_refused_for_ids(capsys, tmp_path):
    path = str(write(tmp_path / "t", [{"input_length": 20, "block_size": 16, "hash_ids": [0, 1]}]))
    for change, message in (
        ("sort-tools", "has no text"),
        ("block-size=24", "must be a multiple of the trace's own, 16"),
    ):
        assert main(["explain", path, "--what-if", change]) == 2
        assert message in capsys.readouterr().err


def test_a_bad_line_is_named(capsys, tmp_path):
    path = write(tmp_path / "t", [{"model": "m", "messages": [{"role": "boss"}]}])
    assert main(["explain", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"radixkv: {path}:1: messages[0].role: must be one of ")


def test_the_page_about_it_shows_what_happens(capsys, tmp_path, monkeypatch):
    page = (Path(__file__).parents[1] / "docs" / "explain.md").read_text()
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    blocks = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for code, shown in blocks:
        exec(compile(code, "docs/explain.md", "exec", dont_inherit=True), names)
        assert capsys.readouterr().out == shown
    command, shown = re.findall(r"^```console\n\$ radixkv (.*?)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    assert main(command.split()) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == shown.splitlines()
