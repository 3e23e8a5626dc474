"""`hash_ids` lines of any trace: they replay as the trace does, and tell nothing else."""

import gzip
import json
import os

import pytest
from chats import TRACES, bodies, library_chats, needs_traces, write

from radixkv.cli import main
from radixkv.convert import converted, with_block_size
from radixkv.replay import replay
from radixkv.synthetic import synthetic_trace
from radixkv.trace import read_trace


def convert(tmp_path, trace, block_size, salt=b"salt"):
    return read_trace(write(tmp_path / "converted", list(converted(trace, block_size, salt))))


def counts(trace, capacity):
    row = replay(trace, capacity)
    return row.hit_tokens, row.prompt_tokens


@pytest.fixture
def chats(tmp_path):
    return write(tmp_path / "chats", bodies(library_chats(), answers=True))


@pytest.mark.parametrize("block_size", [1, 16, 100])
def test_chats_replay_as_before(tmp_path, chats, block_size):
    trace = read_trace(chats, block_size=block_size)
    after = convert(tmp_path, trace, block_size)
    assert counts(after, None) == counts(trace, None)
    assert [request.num_output_tokens for request in after.requests] == [
        request.num_output_tokens for request in trace.requests
    ]


def test_the_built_in_workload_replays_nearly_as_before_in_a_small_cache(tmp_path):
    """Nearly: an answer's unfinished block takes room too, but has no id."""
    trace = synthetic_trace(num_requests=400)
    after = convert(tmp_path, trace, 16)
    assert counts(after, None) == counts(trace, None)
    for capacity in (500, 2000):
        hits, before = counts(after, capacity)[0], counts(trace, capacity)[0]
        assert abs(hits - before) < 0.01 * before


def test_only_whole_blocks_have_an_id_and_those_of_the_answer_stand_apart(tmp_path):
    tokens = {"tokens": [*range(9)], "output_tokens": [*range(9, 14)]}
    trace = read_trace(write(tmp_path / "t", [tokens, {"tokens": [*range(8)]}]), block_size=4)
    first, second = converted(trace, 4, b"")
    assert [len(first[name]) for name in ("hash_ids", "output_hash_ids")] == [2, 1]
    assert (first["input_length"], first["output_length"], first["block_size"]) == (9, 5, 4)
    assert second["hash_ids"] == first["hash_ids"][:1], "the last token is always computed"
    assert second["output_hash_ids"] == first["hash_ids"][1:]


def test_ids_hang_on_the_salt_the_prefix_and_the_namespace(tmp_path):
    records = [{"tokens": [1, 2, 3, 4, 5], "namespace": name} for name in ("a", "a", "b")] + [
        {"tokens": [0, 2, 3, 4, 5]}
    ]
    trace = read_trace(write(tmp_path / "t", records), block_size=2)
    first, again, other, shifted = (record["hash_ids"] for record in converted(trace, 2, b"x"))
    assert first == again
    assert not set(first) & set(other)
    assert not set(first) & set(shifted), "equal tokens behind other ones"
    assert not set(first) & set(next(converted(trace, 2, b"y"))["hash_ids"])
    assert list(converted(trace, 2, b"x")) == list(converted(trace, 2, b"x"))


def test_no_text_is_left(tmp_path, chats):
    text = "\n".join(map(json.dumps, converted(read_trace(chats), 16, b"salt")))
    assert set(text) <= set('0123456789.,:{}[]" \nabcdefghijklmnopqrstuvwxyz_')
    assert "library" not in text
    assert set(json.loads(text.splitlines()[0])) <= {
        *("timestamp", "input_length", "output_length", "block_size", "hash_ids", "output_hash_ids")
    }


def test_ids_keep_their_meaning_in_larger_blocks(tmp_path):
    ids = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 9], [0, 1, 2, 8]]
    lines = [{"timestamp": 0, "input_length": 4 * len(one) - 1, "block_size": 4, "hash_ids": one} for one in ids]
    trace = read_trace(write(tmp_path / "t", lines))
    larger = with_block_size(trace, 8)
    assert [request.num_blocks for request in larger.requests] == [3, 3, 2]
    assert counts(larger, None) == (16 + 8, 19 + 19 + 15)
    assert counts(convert(tmp_path, trace, 8), None) == counts(larger, None)
    assert with_block_size(trace, 4) is trace
    for size in (6, 2):
        with pytest.raises(ValueError, match=f"must be a multiple of the trace's own, 4, got {size}"):
            with_block_size(trace, size)


def test_larger_blocks_of_what_has_answers_stay_chained(tmp_path, chats):
    trace = convert(tmp_path, read_trace(chats), 16)
    larger = convert(tmp_path, trace, 32)
    assert counts(larger, None) == counts(with_block_size(trace, 32), None)
    assert counts(larger, None)[0] > 0.9 * counts(trace, None)[0]


@needs_traces
@pytest.mark.parametrize(
    ("name", "size"), [("mooncake_conversation", 512), ("mooncake_conversation", 2048), ("coding_agents.blk64", 256)]
)
def test_public_ids_replay_as_before(tmp_path, name, size):
    trace = read_trace(TRACES / f"{name}.jsonl.gz", limit=1500)
    larger = with_block_size(trace, size)
    after = convert(tmp_path, trace, size)
    for capacity in (1000, None):
        assert counts(after, capacity) == counts(larger, capacity)


# The command


def test_the_command_writes_what_every_command_reads(capsys, tmp_path, chats):
    for output in ("out.jsonl", "out.jsonl.gz"):
        path = tmp_path / output
        assert main(["convert", str(chats), "--block-size", "32", "--salt", "s", "-o", str(path)]) == 0
        assert capsys.readouterr().out == ""
        assert main(["replay", str(path), "--json", "-"]) == 0
        assert json.loads(capsys.readouterr().out)["block_size"] == 32
    assert gzip.decompress(path.read_bytes()) == (tmp_path / "out.jsonl").read_bytes()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["chats", "out.jsonl", "out.jsonl.gz"]


def test_without_a_salt_no_two_runs_have_an_id_in_common(capfdbinary, chats):
    ids = []
    for _ in range(2):
        assert main(["convert", str(chats), "--limit", "2"]) == 0
        ids.append({one for line in capfdbinary.readouterr().out.splitlines() for one in json.loads(line)["hash_ids"]})
    assert len(ids[0]) == len(ids[1]) > 0
    assert not ids[0] & ids[1]


def test_what_is_there_stays_when_the_input_is_bad(capsys, tmp_path):
    bad, out = write(tmp_path / "bad", [{"tokens": []}]), tmp_path / "out"
    out.write_text("precious")
    assert main(["convert", str(bad), "-o", str(out)]) == 2
    assert "bad:1: tokens: must have at least one token" in capsys.readouterr().err
    assert out.read_text() == "precious"


def test_what_is_no_regular_file_is_written_to_and_not_replaced(tmp_path):
    """A device, say, which root could replace by a file."""
    few = write(tmp_path / "few", bodies(library_chats()[:1]))
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    target.write_text("old")
    link.symlink_to(target)
    assert main(["convert", str(few), "-o", str(link), "--salt", "s"]) == 0
    assert link.is_symlink()
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as end:
        assert main(["convert", str(few), "-o", str(pipe), "--salt", "s"]) == 0
        assert end.read() == target.read_bytes()
    assert pipe.is_fifo()
    assert sorted(tmp_path.iterdir()) == sorted([few, pipe, link, target])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "no/such/folder/x"], "cannot write no/such/folder/x: No such file or directory"),
        (["--salt", "x" * 65], "must be at most 64 bytes, got 65"),
        (["--block-size", "0"], "must be a whole number from 1 to"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(capsys, chats, arguments, message):
    assert main(["convert", str(chats), *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
