import gzip
import json
import subprocess
import sys
import tracemalloc
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.errors import TraceError
from radixkv.synthetic import synthetic_trace
from radixkv.trace import IdTrace, TokenTrace, count_blocks, read_trace

TRACES = Path(__file__).parents[2] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not here")

IDS = {"timestamp": 2500, "input_length": 1500, "output_length": 7, "hash_ids": [0, 1, 2]}
RUNS = {"timestamp": 0, "input_length": 100, "output_length": 1, "block_size": 16, "hash_runs": [[0, 4], [9, 9]]}
SESSION = {"id": "a", "block_size": 64, "requests": [{"t": 0.0, "in": 200, "out": 9, "h": [[1, 3]]}]}
TOKENS = {"tokens": [1, 2, 3], "output_tokens": [4, 5]}


def lines(*records: object) -> bytes:
    return b"".join((record if isinstance(record, str) else json.dumps(record)).encode() + b"\n" for record in records)


@pytest.fixture
def write(tmp_path):
    def write(*records: object) -> Path:
        path = tmp_path / "trace"
        path.write_bytes(records[0] if isinstance(records[0], bytes) else lines(*records))
        return path

    return write


def runs_of(trace):
    return [request.runs.tolist() for request in trace.requests]


# Formats


def test_hash_ids_become_half_open_runs(write):
    trace = read_trace(write(IDS, {**IDS, "hash_ids": [0, 1, 3, 4], "input_length": 2048}))
    assert isinstance(trace, IdTrace)
    assert runs_of(trace) == [[0, 3], [0, 2, 3, 5]]
    assert (trace.num_blocks, trace.requests[1].num_blocks) == (5, 4)
    first = trace.requests[0]
    assert (first.time, first.num_prompt_tokens, first.num_output_tokens) == (2.5, 1500, 7)


def test_hash_runs_include_both_ends_and_are_numbered_densely(write):
    trace = read_trace(write(RUNS))
    assert runs_of(trace) == [[0, 6]]
    assert (trace.num_blocks, trace.block_size) == (6, 16)


def test_ids_of_any_size_are_numbered_by_first_appearance(write):
    trace = read_trace(write({**IDS, "hash_ids": [2**127, 5, 10**30]}, {**IDS, "hash_ids": [2**127, 5, 7]}))
    assert runs_of(trace) == [[0, 3], [0, 2, 3, 4]]


def test_runs_that_adjoin_are_one(write):
    trace = read_trace(write({**RUNS, "hash_runs": [[0, 2], [3, 5]]}, {**RUNS, "hash_runs": [[0, 5]]}))
    assert runs_of(trace) == [[0, 6], [0, 6]]


def test_runs_of_huge_ids_stay_runs(write):
    big = 10**15
    long, short = {**RUNS, "input_length": 160}, {**RUNS, "input_length": 128}
    trace = read_trace(write({**long, "hash_runs": [[big, big + 9]]}, {**short, "hash_runs": [[big, big + 4], [3, 5]]}))
    assert runs_of(trace) == [[0, 10], [0, 5, 10, 13]]
    assert trace.num_blocks == 13


def test_ids_of_two_sessions_never_meet(write):
    trace = read_trace(write(SESSION, SESSION), concurrency=1)
    assert sorted(runs_of(trace)) == [[0, 3], [3, 6]]
    assert trace.num_blocks == 6


def test_requests_of_a_session_keep_their_ids_and_intervals(write):
    turns = [{"t": 5.0, "in": 128, "out": 1, "h": [[1, 2]]}, {"t": 9.0, "in": 256, "out": 1, "api": 3.0, "h": [[1, 4]]}]
    trace = read_trace(write({**SESSION, "requests": turns}))
    assert runs_of(trace) == [[0, 2], [0, 4]]
    assert trace.requests[1].time - trace.requests[0].time == 4.0


def test_a_slot_starts_a_session_when_its_former_one_was_answered(write):
    turns = [
        {"t": 0.0, "in": 64, "out": 1, "api": 2.0, "h": [[1, 1]]},
        {"t": 3.0, "in": 64, "out": 1, "api": 4.0, "h": []},
    ]
    trace = read_trace(write(*[{**SESSION, "requests": turns}] * 3), concurrency=1)
    times = [request.time - trace.requests[0].time for request in trace.requests]
    assert times == pytest.approx([0, 3, 7, 10, 14, 17])


def test_sessions_interleave_reproducibly_for_a_seed(write):
    def session(n):
        return {**SESSION, "requests": [{"t": float(t), "in": 64 * n, "out": 1, "h": [[1, n]]} for t in range(9)]}

    path = write(*map(session, range(1, 20)))
    first, again, other = (read_trace(path, concurrency=4, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert runs_of(first) != runs_of(other)
    assert sorted(runs_of(first)) == sorted(runs_of(other))
    times = [request.time for request in first.requests]
    assert times == sorted(times)


def test_tokens_are_packed(write):
    trace = read_trace(write(TOKENS, {"tokens": [7] * 40, "timestamp": 1000}))
    assert isinstance(trace, TokenTrace)
    first, second = trace.requests
    assert (first.tokens, first.output_tokens) == (array("i", [1, 2, 3]).tobytes(), array("i", [4, 5]).tobytes())
    assert (second.num_prompt_tokens, second.num_output_tokens, second.time) == (40, 0, 1.0)
    assert (trace.block_size, trace.num_blocks) == (16, 2)


def test_gzip_is_told_by_content(write):
    plain = read_trace(write(IDS, IDS))
    assert read_trace(write(gzip.compress(lines(IDS, IDS)))) == plain


def test_blank_lines_a_byte_order_mark_and_crlf_are_no_error(write):
    assert len(read_trace(write(b"\xef\xbb\xbf" + lines(IDS, "", IDS).replace(b"\n", b"\r\n") + b"  \n")).requests) == 2


def test_a_last_line_without_newline_is_read(write):
    assert len(read_trace(write(lines(IDS, IDS)[:-1])).requests) == 2


def test_ids_of_single_blocks_are_chained_and_times_are_seconds(write):
    chat = {"chat_id": 5, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 40, "output_length": 1, "turn": 1}
    reply = {**chat, "chat_id": 9, "parent_chat_id": 5, "timestamp": 61.114}
    trace = read_trace(write({**chat, "hash_ids": [7, 7, 8]}, {**reply, "hash_ids": [7, 8, 7]}))
    assert runs_of(trace) == [[0, 3], [0, 1, 3, 5]]
    assert (trace.block_size, [request.time for request in trace.requests]) == (16, [1.5, 61.114])


def test_several_files_are_merged_by_time_and_share_ids(write, tmp_path):
    first = write({**IDS, "timestamp": 0}, {**IDS, "timestamp": 9000})
    (tmp_path / "more").write_bytes(lines({**IDS, "timestamp": 0, "hash_ids": [0, 1, 5]}, {**IDS, "timestamp": 4000}))
    trace = read_trace(first, tmp_path / "more")
    assert [request.time for request in trace.requests] == [0, 0, 4, 9]
    assert runs_of(trace) == [[0, 3], [0, 2, 3, 4], [0, 3], [0, 3]]
    assert trace.name == f"{first} and 1 more"
    assert len(read_trace(first, tmp_path / "more", limit=3).requests) == 3
    (tmp_path / "more").write_bytes(lines(IDS, "bad"))
    with pytest.raises(TraceError, match="more:2: not JSON"):
        read_trace(first, tmp_path / "more")


def test_parts_of_a_trace_of_tokens_are_merged_too(write, tmp_path):
    first = write({**TOKENS, "timestamp": 0}, {**TOKENS, "timestamp": 9})
    (tmp_path / "more").write_bytes(lines({"tokens": [5], "timestamp": 4}))
    assert [len(request.tokens) for request in read_trace(first, tmp_path / "more").requests] == [12, 4, 12]


def test_stdin_is_read_plain_and_gzipped(write):
    code = "from radixkv.trace import read_trace; print(len(read_trace('-').requests))"
    for content in (lines(IDS, IDS), gzip.compress(lines(IDS, IDS))):
        done = subprocess.run([sys.executable, "-c", code], input=content, capture_output=True, check=True)
        assert done.stdout == b"2\n"


def test_requests_are_a_sequence(write):
    requests = read_trace(write(IDS, {**IDS, "timestamp": 3000}, IDS | {"timestamp": 4000})).requests
    assert [request.time for request in requests[1:]] == [3, 4]
    assert requests[-1] == list(requests)[2]
    assert requests == list(requests)
    with pytest.raises(IndexError):
        requests[3]


def test_memory_is_that_of_distinct_prompts(write):
    path = write(gzip.compress(lines({**IDS, "hash_ids": list(range(3))}) * 20_000))
    tracemalloc.start()
    trace = read_trace(path)
    used, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(trace.requests) == 20_000
    assert used < 20_000 * 29
    assert peak < 20_000 * 60 + 200_000


# Options


def test_limit_stops_reading_before_what_is_bad(write):
    assert len(read_trace(write(IDS, IDS, "bad"), limit=2).requests) == 2


def test_limit_counts_requests_of_merged_sessions(write):
    assert len(read_trace(write(SESSION, SESSION, SESSION), limit=2).requests) == 2


@pytest.mark.parametrize(
    ("lengths", "size"),
    [
        ([(6758, 14)], 512),
        ([(100, 1)], 128),
        ([(1600, 100), (31, 2)], 16),
        ([(300, 3), (1000, 10)], 100),
    ],
)
def test_block_size_is_what_explains_lengths_and_ids(write, lengths, size):
    path = write(*({**IDS, "input_length": tokens, "hash_ids": list(range(ids))} for tokens, ids in lengths))
    assert read_trace(path).block_size == size


def test_block_size_asked_for_is_that_of_ids_if_it_explains_them(write):
    path = write(IDS)
    assert read_trace(path, block_size=500).block_size == 500
    assert read_trace(path, block_size=400).block_size == 400  # the partial last block is left out
    with pytest.raises(TraceError, match=":1: input_length: 1500 tokens are not 3 blocks of 24"):
        read_trace(path, block_size=24)


def test_block_size_asked_for_is_that_of_tokens(write):
    assert read_trace(write(TOKENS), block_size=2).num_blocks == 2


@pytest.mark.parametrize("option", ["limit", "block_size", "concurrency"])
def test_options_below_one_are_refused(write, option):
    with pytest.raises(ValueError, match=f"{option} must be at least 1, got 0"):
        read_trace(write(IDS), **{option: 0})


def test_progress_goes_from_0_to_1(write):
    shares: list[float] = []
    read_trace(write(*[IDS] * 1000), progress=shares.append)
    assert len(shares) > 5
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1


# Bad files

BAD_LINES = {
    "no JSON": ("hello", "not JSON"),
    "a list": ([1, 2], "must be a JSON object, got 1"),
    "a number": (7, "must be a JSON object, got 7"),
    "not a number": ('{"hash_ids": [0], "input_length": NaN}', "NaN is no number"),
    "nested too deeply": ('{"hash_ids":' + "[" * 200_000, "nested too deeply"),
    "an int of 5,000 digits": ('{"hash_ids": [' + "9" * 5000 + "]}", "thousands of digits"),
    "other fields": ({"prompt": ""}, "none of the fields hash_ids, .* is there"),
    "no input_length": ({"timestamp": 0, "output_length": 1, "hash_ids": [1]}, "input_length: missing"),
    "negative length": ({**IDS, "input_length": -1}, r"input_length: must be an int in \[0, 2\^31\), got -1"),
    "huge length": ({**IDS, "input_length": 10**300}, "input_length: .* got 1000"),
    "length a float": ({**IDS, "input_length": 1.0}, "input_length: .* got 1.0"),
    "length a text": ({**IDS, "output_length": "12"}, "output_length: .* got '12'"),
    "length a bool": ({**IDS, "output_length": True}, "output_length: .* got True"),
    "length null": ({**IDS, "input_length": None}, "input_length: .* got None"),
    "timestamp a text": ({**IDS, "timestamp": "now"}, "timestamp: must be a number in .* got 'now'"),
    "timestamp infinite": ('{"hash_ids": [0], "input_length": 1, "timestamp": 1e999}', "timestamp: .* got inf"),
    "ids a number": ({**IDS, "hash_ids": 3}, "hash_ids: must be a list of ints, got 3"),
    "ids an object": ({**IDS, "hash_ids": {}}, "hash_ids: must be a list of ints, got {}"),
    "an id a float": ({**IDS, "hash_ids": [0, 1.5]}, r"hash_ids\[1\]: must be an int of at least 0, got 1.5"),
    "an id a bool": ({**IDS, "hash_ids": [0, True]}, r"hash_ids\[1\]: .* got True"),
    "an id negative": ({**IDS, "hash_ids": [0, 1, -5]}, r"hash_ids\[2\]: .* got -5"),
    "an id a list": ({**IDS, "hash_ids": [[0, 1]]}, r"hash_ids\[0\]: .* got \[0, 1\]"),
    "block size 0": ({**IDS, "block_size": 0}, r"block_size: must be an int in \[1, 2\^31\), got 0"),
    "runs a number": ({**RUNS, "hash_runs": 3}, "hash_runs: must be a list of runs"),
    "a run of one end": ({**RUNS, "hash_runs": [[0, 1], [3]]}, r"hash_runs\[1\]: must be a run .* got \[3\]"),
    "a run backwards": ({**RUNS, "hash_runs": [[4, 3]]}, r"hash_runs\[0\]: must be a run .* got \[4, 3\]"),
    "a run of bools": ({**RUNS, "hash_runs": [[False, True]]}, r"hash_runs\[0\]: must be a run"),
    "a run without end": ({**RUNS, "hash_runs": [[0, 10**18]]}, r"hash_runs\[0\]: .* longer than 2\^24 blocks"),
    "session without block size": ({"requests": []}, "block_size: missing"),
    "session of no list": ({**SESSION, "requests": {}}, "requests: must be a list, got {}"),
    "request of no object": ({**SESSION, "requests": [7]}, r"requests\[0\]: must be an object, got 7"),
    "request without time": ({**SESSION, "requests": [{"in": 1, "out": 1, "h": []}]}, r"requests\[0\].t: missing"),
    "request without length": ({**SESSION, "requests": [{"t": 1, "out": 1, "h": []}]}, r"requests\[0\].in: missing"),
    "request with bad runs": (
        {**SESSION, "requests": [*SESSION["requests"], {"t": 1, "in": 1, "out": 1, "h": [[2, 1]]}]},
        r"requests\[1\].h\[0\]: must be a run",
    ),
    "answer in the past": (
        {**SESSION, "requests": [{"t": 1, "in": 1, "out": 1, "h": [], "api": -1}]},
        r"requests\[0\].api: must be a number in \[0, 1e\+18\], got -1",
    ),
    "more ids than tokens": ({**RUNS, "input_length": 80}, "input_length: 80 tokens are not 6 blocks of 16"),
    "fewer ids than tokens": ({**RUNS, "input_length": 113}, "input_length: 113 tokens are not 6 blocks of 16"),
    "a session's ids without tokens": (
        {**SESSION, "requests": [{"t": 0, "in": 128, "out": 9, "h": [[1, 3]]}]},
        r"requests\[0\].in: 128 tokens are not 3 blocks of 64",
    ),
    "an id twice": ({**IDS, "hash_ids": [4, 5, 4]}, r"hash_ids\[0\]: id 4 is not behind the same ids as before"),
    "a run twice": ({**RUNS, "hash_runs": [[0, 2], [9, 9], [1, 1], [7, 7]]}, "hash_runs: id 1 is not behind the same"),
    "a session whose ids change": (
        {
            **SESSION,
            "requests": [{"t": 0, "in": 128, "out": 9, "h": h} for h in ([[1, 2]], [[1, 1], [5, 5]], [[2, 3]])],
        },
        r"requests\[2\].h: id 2 is not behind the same ids as before",
    ),
    "a chat without parent": ({**IDS, "chat_id": 1}, "parent_chat_id: missing"),
    "a chat of an unknown parent": (
        {**IDS, "input_length": 48, "chat_id": 1, "parent_chat_id": 1},
        "parent_chat_id: 1 is the chat_id of no line before",
    ),
    "no tokens": ({"tokens": []}, "tokens: must have at least one token"),
    "tokens a text": ({"tokens": "abc"}, "tokens: must be a list of ints, got 'abc'"),
    "a token too large": ({"tokens": [0, 2**31]}, r"tokens\[1\]: must be an int in \[0, 2\^31\), got 2147483648"),
    "an output token negative": ({"tokens": [0], "output_tokens": [-1]}, r"output_tokens\[0\]: .* got -1"),
    "output null": ({"tokens": [0], "output_tokens": None}, "output_tokens: must be a list of ints, got None"),
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_named_with_its_field(write, line, message):
    path = write(line)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:1: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(path))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({**IDS, "hash_ids": [9, 1, 2]}, r"hash_ids\[1\]: id 1 is not behind the same ids as before"),
        ({**IDS, "timestamp": 2499.5}, "timestamp: 2499.5 goes back, a line before has 2500"),
        ({**IDS, "block_size": 1024}, "block_size: 1024, but 512 before"),
        (TOKENS, "hash_ids: missing"),
        (
            {name: IDS[name] for name in IDS if name != "timestamp"},
            "timestamp: missing, though the lines before have it",
        ),
        ({name: IDS[name] for name in IDS if name != "output_length"}, "output_length: missing, though"),
    ],
)
def test_a_line_unlike_those_before_is_named(write, record, message):
    path = write({**IDS, "block_size": 512}, {"block_size": 512, **record})
    with pytest.raises(TraceError, match=f":2: {message}"):
        read_trace(path)


def test_ids_cannot_be_cut_to_another_block_size(write):
    with pytest.raises(TraceError, match=":1: block_size: 16, but 64 was asked for"):
        read_trace(write(RUNS), block_size=64)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ": the file is empty"),
        (gzip.compress(b""), ": the file is empty"),
        (b"\n \n", ": there is no request in it"),
        (bytes(range(256)) * 8, ":1: not JSON"),
        (b"\x89PNG\r\n\x1a\n\0\0", ":1: not UTF-8 text: byte 0x89 at column 1"),
        ("é".encode("latin1") + lines(IDS), ":1: not UTF-8 text: byte 0xe9 at column 1"),
        (lines(IDS, IDS)[:-20], ":2: not JSON: .*; the file ends mid-line"),
        (gzip.compress(lines(*[IDS] * 5000))[:-20], ": the gzip stream is broken"),
        (b"\x1f\x8b\x08garbage", ":1: the gzip stream is broken"),
        (
            lines({**IDS, "input_length": 9000}, {**IDS, "input_length": 100}),
            ":2: input_length: 100 tokens in 3 blocks",
        ),
    ],
)
def test_a_bad_file_is_named(write, content, message):
    path = write(content)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_directory_and_a_missing_file_are_named(tmp_path):
    with pytest.raises(TraceError, match=f"{tmp_path}: Is a directory"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match="nothing: No such file"):
        read_trace(tmp_path / "nothing")


def test_skipping_leaves_out_counts_and_tells_why(write):
    path = write(IDS, "bad", {**IDS, "hash_ids": 3}, IDS, [], {}, IDS)
    trace = read_trace(path, skip_bad=True)
    assert len(trace.requests) == 3
    assert trace.skipped.num_lines == 4
    assert [error.line for error in trace.skipped.reasons] == [2, 3, 5]


def test_a_bad_first_line_does_not_settle_the_format(write):
    path = write({"tokens": []}, {**RUNS, "block_size": 32, "hash_runs": 3}, RUNS)
    trace = read_trace(path, skip_bad=True)
    assert (trace.skipped.num_lines, trace.block_size, len(trace.requests)) == (2, 16, 1)


def test_skipping_saves_what_precedes_the_break_in_a_gzip_stream(write):
    path = write(gzip.compress(lines(*[IDS] * 5000))[:-20])
    trace = read_trace(path, skip_bad=True)
    assert 0 < len(trace.requests) <= 5000
    assert trace.skipped.num_lines == 1


def test_skipping_all_is_an_error(write):
    with pytest.raises(TraceError, match=r"no request is left, 2 bad lines were skipped, the first: .*:1: not JSON"):
        read_trace(write("bad", "worse"), skip_bad=True)


# Properties


@st.composite
def tries(draw):
    """Prompts as chained ids, not dense."""
    words = draw(st.lists(st.lists(st.integers(0, 2), max_size=7), min_size=1, max_size=20))
    prefixes = sorted({tuple(word[:end]) for word in words for end in range(1, len(word) + 1)})
    ids = draw(st.randoms(use_true_random=False)).sample(range(2 * len(prefixes)), len(prefixes))
    numbers = dict(zip(prefixes, sorted(ids) if draw(st.booleans()) else ids, strict=True))
    return [[numbers[tuple(word[:end])] for end in range(1, len(word) + 1)] for word in words]


def flat(runs):
    return [number for start, end in zip(runs[::2], runs[1::2], strict=True) for number in range(start, end)]


def as_ids(prompt):
    return {"input_length": 16 * len(prompt), "block_size": 16, "hash_ids": prompt}


def as_runs(prompt):
    return {"input_length": 16 * len(prompt), "block_size": 16, "hash_runs": [[n, n] for n in prompt]}


def as_merged_runs(prompt):
    runs = []
    for number in prompt:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return {"input_length": 16 * len(prompt), "block_size": 16, "hash_runs": runs}


def as_chat(prompt):
    return {**as_ids(prompt), "chat_id": 1, "parent_chat_id": -1, "timestamp": 0}


@pytest.mark.parametrize("form", [as_ids, as_runs, as_merged_runs, as_chat])
@given(tries())
def test_numbering_keeps_which_ids_are_equal(form, tmp_path_factory, prompts):
    path = tmp_path_factory.getbasetemp() / "numbering"
    path.write_bytes(lines(*map(form, prompts)))
    trace = read_trace(path)
    numbers = {}
    for ids, request in zip(prompts, trace.requests, strict=True):
        read = flat(request.runs)
        assert len(read) == len(ids) == request.num_blocks
        assert all(numbers.setdefault(old, new) == new for old, new in zip(ids, read, strict=True))
    assert sorted(numbers.values()) == list(range(trace.num_blocks))


@pytest.mark.parametrize("form", [as_ids, as_runs, as_merged_runs])
@given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), min_size=1, max_size=8))
def test_ids_are_refused_exactly_where_they_are_not_chained(form, tmp_path_factory, prompts):
    path = tmp_path_factory.getbasetemp() / "chained"
    path.write_bytes(lines(*map(form, prompts)))
    before = {}
    good, num_bad = [], 0
    for prompt in prompts:
        follows = dict(zip(prompt, [None, *prompt], strict=False))
        if len(follows) < len(prompt) or any(before.get(n, follows[n]) != follows[n] for n in follows):
            num_bad += 1
        else:
            before |= follows
            good.append(prompt)
    if not good:
        with pytest.raises(TraceError, match="no request is left"):
            read_trace(path, skip_bad=True)
        return
    trace = read_trace(path, skip_bad=True)
    assert trace.skipped.num_lines == num_bad
    assert [request.num_blocks for request in trace.requests] == [len(prompt) for prompt in good]
    assert trace.num_blocks == len({number for prompt in good for number in prompt})


@given(st.binary(max_size=200))
def test_no_file_whatever_gives_another_error(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "whatever"
    path.write_bytes(content)
    with pytest.raises(TraceError):
        read_trace(path)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**33) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["t", "in", "out", "h", "api"]), inner),
    max_leaves=8,
)


@given(
    st.sampled_from([IDS, RUNS, SESSION, TOKENS]),
    st.dictionaries(st.sampled_from([*IDS, *RUNS, *SESSION, *TOKENS]), JSON_VALUES, min_size=1),
)
def test_a_line_with_odd_values_is_read_or_named(tmp_path_factory, record, odd):
    path = tmp_path_factory.getbasetemp() / "odd"
    path.write_bytes(lines({**record, **odd}))
    try:
        trace = read_trace(path)
    except TraceError:
        return
    assert trace.requests


# The built-in workload


def test_the_synthetic_workload_is_the_same_for_a_seed():
    assert synthetic_trace(3, num_requests=200) == synthetic_trace(3, num_requests=200)
    assert synthetic_trace(3, num_requests=200) != synthetic_trace(4, num_requests=200)


def test_fewer_synthetic_requests_are_the_first_ones():
    assert synthetic_trace(num_requests=50).requests == synthetic_trace(num_requests=200).requests[:50]


def test_the_synthetic_workload_has_sessions_that_go_on_and_a_realistic_size():
    requests = synthetic_trace().requests
    assert len(requests) == 2000
    assert 1e6 < sum(request.num_prompt_tokens for request in requests) < 1e7
    times = [request.time for request in requests]
    assert times == sorted(times)
    answered = {request.tokens + request.output_tokens: request for request in requests}
    prompts = [request.tokens for request in requests]
    going_on = sum(any(prompt.startswith(turn) for prompt in prompts) for turn in list(answered)[:200])
    assert going_on > 100


def test_blocks_are_counted_by_their_whole_prefix():
    requests = synthetic_trace(num_requests=100).requests
    prefixes = set()
    for request in requests:
        tokens = request.tokens + request.output_tokens
        prefixes |= {tokens[: 64 * (n + 1)] for n in range(len(tokens) // 64)}
    assert count_blocks(requests, 16) == len(prefixes)


# The public traces


@needs_traces
def test_coding_agent_sessions_stay_runs():
    trace = read_trace(TRACES / "coding_agents.blk64.jsonl.gz")
    assert isinstance(trace, IdTrace)
    assert (len(trace.requests), trace.block_size) == (22_892, 64)
    assert sum(request.num_blocks for request in trace.requests) == 43_638_751
    assert sum(len(request.runs) // 2 for request in trace.requests) < 90_000


@needs_traces
def test_merged_coding_agents_are_numbered_densely():
    trace = read_trace(TRACES / "coding_agents_merged60.blk64.jsonl.gz")
    assert (len(trace.requests), trace.block_size) == (3_546, 64)
    assert max(max(request.runs, default=0) for request in trace.requests) == trace.num_blocks


@needs_traces
def test_the_block_size_of_the_mooncake_traces_is_inferred():
    assert read_trace(TRACES / "mooncake_conversation.jsonl.gz", limit=50).block_size == 512
