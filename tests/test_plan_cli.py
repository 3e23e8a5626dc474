"""`radixkv plan` from its command line to what it prints, and the examples of docs/plan.md."""

import json
import re
from pathlib import Path

import pytest
from test_plan import LLAMA

from radixkv.cli import main
from radixkv.configs import PRESETS, find_model
from radixkv.plan import GPUS

DOCS = Path(__file__).parents[1] / "docs" / "plan.md"
TRACE = Path(__file__).parents[2] / "shared" / "traces" / "mooncake_conversation.jsonl.gz"


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


@pytest.fixture
def trace(tmp_path):
    """Two conversations that share their first block of 512 tokens, each of two turns."""
    path = tmp_path / "trace.jsonl"
    turns = [[0, 1, 2], [0, 3, 4], [0, 1, 2, 5], [0, 3, 4, 6]]
    lines = (
        {"timestamp": 1000 * second, "input_length": 512 * len(ids), "output_length": 100, "hash_ids": ids}
        for second, ids in enumerate(turns)
    )
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def shown(capsys, *arguments):
    assert main(["plan", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80
    return out


def run_json(capsys, *arguments):
    assert main(["plan", *map(str, arguments), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments):
    """The one line that refuses the arguments."""
    assert main(["plan", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("radixkv: ")
    assert err.count("\n") == 1
    return err


def squeezed(text):
    return re.sub(r"\s+", " ", text)


# What is printed


def test_one_command_tells_memory_time_and_every_assumption(capsys):
    out = squeezed(shown(capsys, "--model", "llama-3-70b", "--tp", "4"))
    for words in (
        "llama-3-70b, 70.6 B parameters, on 4 x H100 SXM 80 GB",
        "80 x full attention 8 128 + 128 all tokens 327,680",
        "weights in bf16 131.4 GiB 32.9 GiB",
        "KV of a token in bf16 327,680 B 81,920 B",
        "left for KV 36.8 GiB",
        "Fits 58 requests of 8,192 tokens (2.5 GiB) at once, or 30,168 blocks of 16 tokens",
        "A request of 7,936 + 256 tokens",
        "989 TFLOP/s in bf16",
        "90% of the memory is used, 2 GiB of that",
        "50% of the peak",
        "80% of the bandwidth",
        "not counted: communication between GPUs",
    ):
        assert words in out


def test_windows_and_states_are_told(capsys):
    out = squeezed(shown(capsys, "--model", "gpt-oss-20b"))
    assert "12 x sliding window 8 64 + 64 128 tokens 24,576" in out
    assert "KV of a token that has left all windows 24,576 B" in out
    out = squeezed(shown(capsys, "--model", "qwen3-next-80b-a3b", "--gpu", "b200"))
    assert "36 x linear attention one state 0" in out
    assert "states of a request 73.7 MiB" in out
    assert "a hit needs the state at its end, which blocks do not hold" in out


def test_every_preset_fits_80_columns(capsys):
    for name in PRESETS:
        assert f"{name}, " in shown(capsys, "--model", name, "--gpu", "b200", "--price", "3,0.3,15")


def test_presets_are_listed(capsys):
    out = shown(capsys, "--list")
    for name in [*PRESETS, *GPUS]:
        assert re.search(rf"^{re.escape(name)} ", out, re.M)


def test_presets_are_listed_as_json_alone(capsys):
    assert main(["plan", "--list", "--json", "-"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [model["model"] for model in listed["models"]] == [*PRESETS]
    assert [gpu["gpu"] for gpu in listed["gpus"]] == [*GPUS]
    llama = listed["models"][[*PRESETS].index("llama-3.1-8b")]
    assert llama["kv_bytes_per_token"] == llama["kv_bytes_per_token_beyond_windows"] == 2 * 32 * 8 * 128 * 2


def test_what_does_not_fit_says_what_would(capsys):
    out = squeezed(shown(capsys, "--model", "llama-3.1-405b", "--tp", "4"))
    assert "left for KV nothing" in out
    assert "Does not fit, not even with one request of 8,192 tokens (3.9 GiB); 16 of these GPUs are enough." in out
    assert "TTFT" not in out
    out = squeezed(shown(capsys, "--model", "kimi-k2", "--gpu", "8,100,300"))
    assert "64 of these GPUs are too few" in out


def test_the_fewest_gpus_that_hold_a_request_are_taken(capsys):
    assert run_json(capsys, "--model", "llama-3-70b")["tp"] == 2
    assert run_json(capsys, "--model", "llama-3-70b", "--context", "100000")["tp"] == 4
    assert run_json(capsys, "--model", "llama-3-70b", "--gpu", "h200")["tp"] == 2
    assert run_json(capsys, "--model", "llama-3-70b", "--weight-dtype", "fp8", "--gpu", "h200")["tp"] == 1


# What is counted


def test_json_has_the_sizes_of_the_model_and_of_what_fits(capsys):
    result = run_json(capsys, "--model", "llama-3-70b", "--tp", "8", "--context", "4096", "--output", "96")
    assert result["kv_bytes_per_token"] == 327_680
    assert result["kv_bytes_per_token_per_gpu"] == 40_960
    assert result["kv_bytes_per_request"] == 4096 * 327_680
    assert result["parameters"] == 70_553_706_496
    assert result["num_blocks"] == result["kv_pool_bytes_per_gpu"] // (16 * 40_960)
    assert result["num_requests"] == result["kv_pool_bytes_per_gpu"] // (4096 * 40_960)
    assert result["request"] == {"prompt": 4000, "output": 96, "cached": 0}
    for row in result["estimates"]:
        assert row["total_s"] == row["ttft_s"] + 96 * row["itl_s"]
    assert len(result["assumptions"]) > 3


def test_options_reach_the_plan(capsys):
    def run(*options):
        return run_json(capsys, "--model", "llama-3.1-8b", *options)

    base = run()
    assert run("--kv-dtype", "fp8")["kv_bytes_per_token"] == 65_536
    assert run("--weight-dtype", "fp8")["weight_bytes"] < 0.6 * base["weight_bytes"]
    assert run("--block-size", "64")["num_blocks"] == pytest.approx(base["num_blocks"] / 4, abs=1)
    for more, less in (("--utilization", 0.8), ("--reserve", 10)):
        assert run(more, less)["kv_pool_bytes_per_gpu"] < base["kv_pool_bytes_per_gpu"]
    fast = run("--compute-efficiency", "1", "--bandwidth-efficiency", "1")["estimates"][0]
    assert fast["ttft_s"] == pytest.approx(base["estimates"][0]["ttft_s"] / 2)
    assert fast["itl_s"] == pytest.approx(base["estimates"][0]["itl_s"] * 0.8)
    assert [row["batch"] for row in run("--batch", "7")["estimates"]] == [1, 7]
    assert [row["cached_tokens"] for row in run("--batch", "1", "--cached", "4000")["estimates"]] == [0, 4000]


def test_a_config_gives_what_its_preset_gives(capsys, config):
    ours, preset = run_json(capsys, "--config", config), run_json(capsys, "--model", "llama-3.1-8b")
    assert ours.pop("model") == config.parent.name
    assert preset.pop("model") == "llama-3.1-8b"
    assert ours == preset
    assert run_json(capsys, "--config", config.parent)["parameters"] == 8_030_261_248


def test_prices_make_a_bill_with_and_without_what_is_cached(capsys):
    arguments = "--model", "llama-3.1-8b", "--context", "10000", "--output", "1000", "--cached", "8000"
    out = squeezed(shown(capsys, *arguments, "--price", "3,0.3,15"))
    assert re.search(r" 0 \d+ TFLOP [^/]* 42\.00 ", out)  # 9,000 at 3 and 1,000 at 15, a thousand times
    assert re.search(r"8,000 .* 20\.40 ", out)  # 1,000 at 3, 8,000 at 0.3
    costs = [row["cost"] for row in run_json(capsys, *arguments, "--batch", "1", "--price", "3,0.3,15")["estimates"]]
    assert costs == pytest.approx([0.042, 0.0204])


def test_a_trace_shows_what_each_cache_saves(capsys, trace):
    arguments = "--model", "llama-3.1-8b", "--trace", trace, "--price", "3,0.3,15"
    out = squeezed(shown(capsys, *arguments))
    assert "trace.jsonl: 4 requests, 1 a second; 1,792 tokens of prompt and 100 of output on the mean" in out
    assert "blocks of 512 tokens fit on these GPUs" in out
    assert "hits are those of LRU over whole blocks of 512 tokens" in out
    result = run_json(capsys, *arguments, "--capacity", "1,inf")
    assert (result["request"]["prompt"], result["request"]["output"]) == (1792, 100)
    rows = result["trace"]["rows"]
    assert [row["capacity_blocks"] for row in rows] == [0, 1, None]
    assert [row["hit_tokens"] for row in rows] == [0, 3 * 512, 7 * 512]
    assert {row["prompt_tokens"] for row in rows} == {14 * 512}
    assert rows[0]["saved_flops"] == 0 < rows[1]["saved_flops"] < rows[2]["saved_flops"]
    assert rows[0]["ttft_s"] > rows[1]["ttft_s"] > rows[2]["ttft_s"]
    assert rows[1]["bytes"] == 512 * 131_072
    without, with_cache = (row["bill"] for row in rows[::2])
    assert without == pytest.approx((14 * 512 * 3 + 400 * 15) / 1e6)
    assert with_cache == pytest.approx((7 * 512 * 3.3 + 400 * 15) / 1e6)


def test_targets_name_the_smallest_cache_and_the_fewest_gpus(capsys, trace):
    arguments = "--model", "llama-3-70b", "--tp", "4", "--trace", trace
    rows = run_json(capsys, *arguments, "--capacity", "3,inf")["trace"]["rows"]
    assert [row["bytes"] for row in rows] == [num * 512 * 327_680 for num in (0, 3, 6)]  # 6 are enough for all hits
    goal = (rows[1]["ttft_s"] + rows[2]["ttft_s"]) / 2
    target = run_json(capsys, *arguments, "--ttft", goal)["target"]
    assert 3 < target["smallest_cache_blocks"] <= 7
    assert target["choice"]["gpus"] == 4
    assert target["choice"]["ttft_s"] <= goal
    assert target["without_cache"] is None
    out = squeezed(shown(capsys, *arguments, "--ttft", goal, "--rate", "0.5"))
    assert "- on 4 x H100 SXM 80 GB a cache of " in out
    assert "- with the cache that fits, 4 GPUs (1 x 4): TTFT " in out
    assert "- without a cache, no number of these GPUs is enough" in out


def test_a_rate_names_the_gpus_of_requests_that_are_alike(capsys):
    arguments = "--model", "llama-3.1-8b", "--rate", "20", "--cached", "7000"
    target = run_json(capsys, *arguments)["target"]
    assert target["choice"]["gpus"] < target["without_cache"]["gpus"]
    assert target["choice"]["busy"] <= 0.8
    out = squeezed(shown(capsys, *arguments))
    assert "For 20 requests a second at 80% of the time" in out
    assert f"- with the cache that fits, {target['choice']['gpus']} GPUs" in out


# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model: name either a preset (see --list) or a --config FILE"),
        (["--model", "a", "--config", "b"], "--model: name either"),
        (["--model", "llama-9b"], "--model: 'llama-9b' is no preset; near: llama-"),
        (["--model", "phi-4", "--gpu", "h99"], "--gpu: 'h99' is neither GiB,TFLOPS,GB/s nor one of a100-40, "),
        (["--model", "phi-4", "--tp", "3"], "--tp: tp must divide the 40 attention heads"),
        (["--model", "phi-4", "--tp", "0"], "'--tp': must be a whole number from 1 to 1024, got '0'"),
        (["--model", "phi-4", "--kv-dtype", "fp3"], "'--kv-dtype': 'fp3' is not one of fp32, "),
        (["--model", "phi-4", "--weight-dtype", "q4_0"], "'--weight-dtype': 'q4_0' is not one of fp32, "),
        (["--model", "phi-4", "--context", "1"], "'--context': must be a whole number from 2 to 1073741824, got '1'"),
        (["--model", "phi-4", "--output", "8192"], "--output: must be below the 8192 tokens of --context, got 8192"),
        (["--model", "phi-4", "--cached", "7936"], "--cached: must be below the prompt's 7936 tokens, got 7936"),
        (["--model", "phi-4", "--utilization", "1.5"], "'--utilization': must be a number from 0.01 to 1, got '1.5'"),
        (["--model", "phi-4", "--compute-efficiency", "nan"], "must be a number from 0.001 to 1, got 'nan'"),
        (["--model", "phi-4", "--ttft", "0"], "'--ttft': must be a number from 1e-06 to 1e+06, got '0'"),
        (["--model", "phi-4", "--rate", "fast"], "'--rate': must be a number from 1e-09 to 1e+09, got 'fast'"),
        (["--model", "phi-4", "--price", "1,2"], "'--price': must be INPUT,CACHED,OUTPUT, from 0 to 1e+09 each"),
        (["--model", "phi-4", "--price", "1,2,-3"], "'--price': must be INPUT,CACHED,OUTPUT"),
        (["--model", "phi-4", "--capacity", "-1"], "--capacity: '-1' is neither inf nor 1 to"),
        (["--model", "phi-4", "--trace", "/nothing/there"], "/nothing/there: No such file or directory"),
        (["--config", "/nothing/there"], "--config: /nothing/there: No such file or directory"),
    ],
)
def test_bad_arguments_get_one_line_with_value_and_bound(capsys, arguments, message):
    assert message in refused(capsys, *arguments)


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_missing_field_gets_one_line_with_file_and_field(capsys, config, name):
    config.write_text(json.dumps({key: value for key, value in LLAMA.items() if key != name}))
    assert refused(capsys, "--config", config) == f"radixkv: Invalid value for --config: {config}: {name}: missing\n"
    config.write_text(json.dumps({"text_config": {key: value for key, value in LLAMA.items() if key != name}}))
    assert f"{config}: text_config.{name}: missing" in refused(capsys, "--config", config)


@pytest.mark.parametrize("name", ["vocab_size", "intermediate_size"])
def test_without_a_field_that_weights_need_only_kv_is_planned(capsys, config, name):
    config.write_text(json.dumps({key: value for key, value in LLAMA.items() if key != name}))
    assert main(["plan", "--config", str(config), "--tp", "2", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["kv_bytes_per_token_per_gpu"] == 65_536
    assert json.loads(out)["parameters"] is None
    assert err == f"radixkv: only KV can be planned: {config}: {name}: missing\n"
    assert main(["plan", "--config", str(config)]) == 0
    assert "131,072 B" in capsys.readouterr().out
    for options in (["--gpu", "h100"], ["--ttft", "1"], ["--rate", "1"], ["--trace", "x"]):
        assert f"{config}: {name}: missing" in refused(capsys, "--config", config, *options)


def test_json_that_cannot_be_written_is_told_after_the_tables(capsys, tmp_path):
    assert main(["plan", "--model", "phi-4", "--json", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert "phi-4" in out
    assert err == f"radixkv: Invalid value for --json: cannot write {tmp_path}: Is a directory\n"


# The page


def test_the_page_shows_what_its_commands_print(capsys):
    examples = re.findall(r"^```console\n\$ radixkv ([^\n]*)\n(.*?)^```$", DOCS.read_text(), re.M | re.S)
    assert len(examples) > 1
    for command, expected in examples:
        assert main(command.split()) == 0
        printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
        assert printed == expected.rstrip("\n")


def test_the_page_shows_what_its_python_prints(capsys):
    ((code, expected),) = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", DOCS.read_text(), re.M | re.S)
    exec(compile(code, str(DOCS), "exec"), {})
    assert capsys.readouterr().out == expected


@pytest.mark.skipif(not TRACE.exists(), reason="needs the public traces")
def test_the_page_shows_what_a_public_trace_gives(capsys):
    page = DOCS.read_text()
    (command,) = re.findall(rf"`radixkv (.* --trace {TRACE.name} [^`]*)`", page)
    (expected,) = re.findall(rf"^```text\n({TRACE.name}.*?)^```$", page, re.M | re.S)
    assert main([str(TRACE) if word == TRACE.name else word for word in command.split()]) == 0
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert expected in printed


def test_the_page_has_a_row_for_every_preset_and_gpu():
    page = DOCS.read_text()
    for name in PRESETS:
        model = find_model(name)
        assert f"| `{name}` | {model.kv_bytes_per_token('bf16'):,} |" in page
        assert f"| {model.num_parameters:,} |" in page
    for name, gpu in GPUS.items():
        assert f"| `{name}` | {gpu.name} | {gpu.memory >> 20:,} | {gpu.bandwidth / 1e9:,.0f} |" in page


def test_presets_name_themselves():
    assert all(find_model(name).name == name for name in PRESETS)
