import gzip
import json
import os
import pty
import re
import signal
import subprocess
import sys

import pytest

import radixkv
from radixkv.cli import main

GOOD = '{"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]}\n'
RADIXKV = [sys.executable, "-c", "import sys; from radixkv.cli import main; sys.exit(main())"]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD * 3)
    return path


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def run_json(capsys, *arguments):
    assert main(["replay", *map(str, arguments), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments):
    """The one line that refuses the arguments."""
    assert main([*map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("radixkv: ")
    assert err.count("\n") == 1
    return err


def test_beside_the_cache_a_request_may_be_the_first_to_go(capsys, tmp_path):
    """One block comes back every third time, between new ones; beside the cache it stays once that is known."""
    path = tmp_path / "trace.jsonl"
    ids = [number if number % 3 else 0 for number in range(600)]
    path.write_text("".join(f'{{"input_length": 512, "hash_ids": [{number}]}}\n' for number in ids))
    rows = [
        run_json(capsys, path, "--capacity", 1, "--policy", "reuse,arc", *options)["rows"]
        for options in ((), ("--bypass",))
    ]
    assert [row["hit_blocks"] for row in rows[0]] == [0, 0]
    assert rows[1][0]["hit_blocks"] > 100
    error = refused(capsys, "replay", path, "--bypass", "--workers", 2)
    assert "--bypass" in error
    assert "not with --workers" in error


def test_the_table_has_a_row_for_each_policy_and_capacity_and_defines_its_rates(capsys, trace):
    assert main(["replay", str(trace), "--capacity", "1,inf", "--policy", "lru,priority"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "trace.jsonl\nrequests: 3, distinct blocks: 2, tokens a block: 512" in out
    rows = [line.split() for line in out.splitlines() if line.startswith(("lru ", "priority "))]
    assert [row[:-2] for row in rows] == [
        ["lru", "1", "512", "2", "33.33", "1,024", "33.33"],
        ["lru", "inf", "inf", "4", "66.67", "2,048", "66.67"],
        ["priority", "1", "512", "2", "33.33", "1,024", "33.33"],
        ["priority", "inf", "inf", "4", "66.67", "2,048", "66.67"],
    ]
    assert "% of blocks: hit blocks / all 6 block ids of the prompts" in out
    assert "% of tokens: those in hit blocks / all 3,072 prompt tokens" in out
    assert max(map(len, out.splitlines())) <= 80


def test_workers_are_replayed_behind_each_router(capsys, trace):
    options = ["--capacity", "inf", "--workers", "2", "--router", "round-robin,prefix"]
    assert main(["replay", str(trace), *options]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "tokens a block: 512\nworkers: 2\n" in out
    rows = [line.split()[:-2] for line in out.splitlines() if line.startswith("lru ")]
    assert rows == [
        ["lru", "round-robin", "inf", "33.33", "1,024", "33.33", "1.00"],
        ["lru", "prefix", "inf", "66.67", "2,048", "66.67", "2.00"],
    ]
    assert "most / mean: tokens to prefill" in out
    assert max(map(len, out.splitlines())) <= 80
    shown = run_json(capsys, trace, *options)["rows"]
    assert [(row["router"], row["num_requests"], row["prefill_tokens"]) for row in shown] == [
        ("round-robin", [2, 1], [1024, 1024]),
        ("prefix", [3, 0], [1024, 0]),
    ]


def test_what_routing_needs_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "radixkv.routing", None)
    line = refused(capsys, "replay", "--limit", "1", "--workers", "2")
    assert "--workers: radixkv.routing is not installed: pip install 'radixkv[events]'" in line


def test_without_a_trace_the_synthetic_workload_is_replayed(capsys):
    assert main(["replay", "--capacity", "500"]) == 0
    out = capsys.readouterr().out
    assert "synthetic\nrequests: 2,000, " in out
    assert "prompt blocks, partial last ones included" in out
    results = [run_json(capsys, *arguments) for arguments in ([], ["--synthetic"])]
    for row in (row for result in results for row in result["rows"]):
        del row["seconds"]
    assert results[0] == results[1]


def test_json_alone_goes_to_stdout(capsys, trace):
    result = run_json(capsys, trace, "--capacity", "1,inf")
    for row in result["rows"]:
        assert row.pop("seconds") >= 0
    counts = {"access_blocks": 6, "prompt_tokens": 3072}
    assert result == {
        "trace": str(trace),
        "requests": 3,
        "block_size": 512,
        "tokenizer": None,
        "rows": [
            {"policy": "lru", "capacity_blocks": 1, "hit_blocks": 2, "hit_tokens": 1024, **counts},
            {"policy": "lru", "capacity_blocks": None, "hit_blocks": 4, "hit_tokens": 2048, **counts},
        ],
    }


def test_json_goes_to_a_file_beside_the_table(capsys, trace, tmp_path):
    assert main(["replay", str(trace), "--json", str(tmp_path / "out.json")]) == 0
    assert "policy" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["requests"] == 3


def test_json_that_cannot_be_written_is_told_after_the_table(capsys, trace, tmp_path):
    assert main(["replay", str(trace), "--json", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert "policy" in out
    assert err == f"radixkv: Invalid value for --json: cannot write {tmp_path}: Is a directory\n"


def test_options_reach_the_trace(capsys, trace):
    assert run_json(capsys, trace, "--limit", "2")["requests"] == 2
    assert run_json(capsys, trace, "--block-size", "600")["block_size"] == 600
    assert run_json(capsys, "--limit", "9", "--block-size", "8")["requests"] == 9
    first, other = (run_json(capsys, "--limit", "50", "--capacity", "inf", "--seed", seed) for seed in (1, 2))
    assert first["rows"][0]["prompt_tokens"] != other["rows"][0]["prompt_tokens"]


def test_several_files_are_merged_by_time(capsys, trace, tmp_path):
    late = tmp_path / "late"
    late.write_text(GOOD.replace('p": 0', 'p": 9000').replace("[0, 1]", "[0, 2]"))
    between = tmp_path / "between.gz"
    between.write_bytes(gzip.compress(GOOD.replace('p": 0', 'p": 5000').replace("[0, 1]", "[0, 3]").encode()))
    result = run_json(capsys, late, trace, between, "--capacity", "2")
    assert (result["requests"], result["trace"]) == (5, f"{late} and 2 more")
    assert result["rows"][0]["hit_blocks"] == 2 + 2 + 1 + 1
    assert main(["replay", str(late), str(trace)]) == 0
    assert capsys.readouterr().out.startswith("late and 1 more\nrequests: 4, distinct blocks: 3, ")


def test_a_bad_line_is_named_in_its_own_file(capsys, trace, tmp_path):
    (tmp_path / "other").write_text(GOOD + "bad\n")
    assert refused(capsys, "replay", trace, tmp_path / "other").startswith(f"radixkv: {tmp_path / 'other'}:2: not JSON")
    assert run_json(capsys, trace, tmp_path / "other", "--skip-bad")["skipped"] == 1


@pytest.mark.parametrize("command", [["replay"], ["plan", "--model", "llama-3.1-8b", "--trace"]])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_dash_is_stdin_beside_files_too(trace, command, pack):
    run = subprocess.run(
        [*RADIXKV, *command, "-", "--json", "-"], input=pack(GOOD.encode() * 2), capture_output=True, check=True
    )
    assert b'"stdin"' in run.stdout
    more = ["--trace"] * (command[0] == "plan") + [str(trace)]
    both = subprocess.run(
        [*RADIXKV, *command, "-", *more], input=pack(GOOD.encode() * 2), capture_output=True, check=True
    )
    assert b"stdin and 1 more" in both.stdout


def test_text_is_replayed_in_the_tokens_of_a_tokenizer_which_is_named(capsys, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<unk>": 0, "extraordinary": 1, "there": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = tmp_path / "tokenizer.json"
    made.save(str(tokenizer))
    chat = {"model": "m", "messages": [{"role": "user", "content": "extraordinary there " * 40}]}
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(chat) + "\n" + json.dumps(chat) + "\n")
    named = run_json(capsys, path, "--tokenizer", tokenizer, "--capacity", "inf")
    built_in = run_json(capsys, path, "--capacity", "inf")
    assert (named["tokenizer"], built_in["tokenizer"]) == ("tokenizer.json", "built-in")
    assert 80 < named["rows"][0]["prompt_tokens"] / 2 < 90 < built_in["rows"][0]["prompt_tokens"] / 2
    assert named["rows"][0]["hit_tokens"] == 80
    for command in ("replay", "curve", "explain"):
        assert main([command, str(path)]) == 0
        assert "tokens: built-in chunks of text" in capsys.readouterr().out
        assert main([command, str(path), "--tokenizer", str(tokenizer)]) == 0
        assert "tokens: tokenizer.json\n" in capsys.readouterr().out


def test_repeated_capacities_and_policies_run_once(capsys, trace):
    assert len(run_json(capsys, trace, "--capacity", "5, 5,inf,inf", "--policy", "lru,lru")["rows"]) == 2


def test_the_version_and_the_help_are_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == radixkv.__version__ + "\n"
    assert main([]) == 0
    assert "replay" in capsys.readouterr().out
    assert main(["replay", "--help"]) == 0
    assert "--capacity" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "mru"], "--policy: 'mru' is not one of lru, lfu, fifo, slru, priority"),
        (["--policy", ""], "--policy: '' is not one of"),
        (["--capacity", "0"], "--capacity: '0' is neither inf nor 1 to 2147483647 blocks"),
        (["--capacity", "abc"], "--capacity: 'abc' is neither"),
        (["--capacity", "10,-1"], "--capacity: '-1' is neither"),
        (["--capacity", "10,,20"], "--capacity: '' is neither"),
        (["--capacity", "2147483648"], "--capacity: '2147483648' is neither"),
        (["--capacity", "1" * 5000], "is neither"),
        (["--limit", "0"], "'--limit': must be a whole number from 1 to 2147483647, got '0'"),
        (["--limit", "many"], "'--limit': must be a whole number from 1 to 2147483647, got 'many'"),
        (["--block-size", "0"], "'--block-size': must be a whole number from 1 to 1048576, got '0'"),
        (["--block-size", "1048577"], "'--block-size': must be a whole number from 1 to 1048576, got '1048577'"),
        (["--concurrency", "0"], "'--concurrency': must be a whole number from 1 to"),
        (["--seed", "1.5"], "'--seed': must be a whole number from 0 to 2147483647, got '1.5'"),
        (["--synthetic", "FILE"], "--synthetic: not with a TRACE (FILE)"),
        (["-", "-"], "TRACE: stdin (-) can be read once only"),
        (["--tokenizer", "no/file", "FILE"], "--tokenizer: there is no file or folder 'no/file'"),
        (["--workers", "0"], "'--workers': must be a whole number from 1 to 1024, got '0'"),
        (
            ["--workers", "2", "--router", "random"],
            "--router: 'random' is not one of prefix, round-robin, least-loaded",
        ),
        (["--workers", "2", "--router", ""], "--router: '' is not one of"),
        (["--router", "prefix"], "--router: chooses between --workers, of which there are none"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_bad_arguments_get_one_line_with_value_and_bound(capsys, arguments, message):
    assert message in refused(capsys, "replay", *arguments)


def test_the_demo_says_what_to_install_and_shows_the_replay(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["demo"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "left out. SmolLM2 needs torch: pip install 'radixkv[demo]'" in out
    assert "synthetic requests: 2,000, " in out


def test_an_unknown_command_gets_one_line(capsys):
    assert "frobnicate" in refused(capsys, "frobnicate")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ": the file is empty"),
        (GOOD.encode() + b"hello\n", ":2: not JSON"),
        (GOOD.encode() * 2 + GOOD.encode()[:40], ":3: not JSON: .*; the file ends mid-line"),
        (GOOD.replace("1024", "-1").encode(), ":1: input_length: must be"),
        (GOOD.replace("[0, 1]", "7").encode(), ":1: hash_ids: must be a list"),
        (GOOD.replace("hash_ids", "ids").encode(), ":1: none of the fields hash_ids"),
        (b"\x7fELF\x02\x01\x01\0\0\xff", ":1: not UTF-8 text: byte 0xff at column 10"),
        (gzip.compress(GOOD.encode() * 5000)[:-10], ":[0-9]+: the gzip stream is broken"),
    ],
)
def test_a_bad_file_gets_one_line(capsys, tmp_path, content, message):
    path = tmp_path / "trace"
    path.write_bytes(content)
    line = refused(capsys, "replay", path)
    assert re.search(f"{path}{message}", line)


def test_a_directory_and_a_missing_file_get_one_line(capsys, tmp_path):
    assert refused(capsys, "replay", tmp_path) == f"radixkv: {tmp_path}: Is a directory\n"
    assert "No such file or directory" in refused(capsys, "replay", tmp_path / "nothing")


def test_skipped_lines_are_counted_and_told(capsys, trace):
    trace.write_text(GOOD + "bad\n" * 9 + GOOD)
    assert main(["replay", str(trace), "--skip-bad", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["skipped"] == 9
    assert err.splitlines()[0] == "radixkv: bad lines skipped: 9, the first:"
    assert err.splitlines()[1].startswith(f"  {trace}:2: not JSON")
    assert len(err.splitlines()) == 4


def test_skipping_every_line_is_an_error(capsys, trace):
    trace.write_text("bad\n" * 9)
    assert "no request is left, 9 bad lines were skipped" in refused(capsys, "replay", trace, "--skip-bad")


def test_ctrl_c_ends_with_130_and_no_traceback(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    # subtle: a background job of a shell starts with Ctrl-C ignored, and so would this program
    listen = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    command = [sys.executable, "-c", listen + "from radixkv.cli import main; sys.exit(main())", "replay", str(fifo)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        with open(fifo, "wb"):  # waits until the program has opened it to read
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        assert process.stderr.read() == b""


@pytest.mark.parametrize("arguments", [["replay"], ["replay", "--json", "-"], ["--help"]])
def test_a_closed_stdout_gives_no_traceback(arguments):
    with subprocess.Popen([*RADIXKV, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) in (0, 1)


def started_with(redirection, *arguments):
    """The exit code and what was said, of a program that a shell starts with its streams as `redirection` has them."""
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", *RADIXKV, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("arguments", [["replay"], ["convert"], ["--version"]])
def test_a_full_disk_behind_stdout_gets_one_line(arguments):
    code, _, err = started_with("> /dev/full", *arguments)
    assert (code, err) == (2, "radixkv: stdout: No space left on device\n")


def test_streams_that_were_never_opened_give_no_traceback(trace, tmp_path):
    written = tmp_path / "rows.json"
    assert started_with(">&-", "replay", trace, "--json", written) == (0, "", "")
    assert json.loads(written.read_text())["requests"] == 3
    code, out, _ = started_with("2>&-", "replay", trace)
    assert code == 0
    assert "lru" in out
    assert started_with("2>&-", "replay", tmp_path / "missing") == (2, "", "")
    assert started_with("<&-", "replay", "-") == (2, "", "radixkv: stdin: Bad file descriptor\n")


def test_progress_is_shown_on_a_terminal_and_not_on_stdout(trace):
    terminal, end = pty.openpty()
    with subprocess.Popen([*RADIXKV, "replay", str(trace)], stdout=subprocess.PIPE, stderr=end) as process:
        out = process.stdout.read()
        process.wait(60)
    shown = os.read(terminal, 100_000)
    os.close(end)
    os.close(terminal)
    assert b"reading" in shown
    assert b"reading" not in out
    assert b"lru" in out
