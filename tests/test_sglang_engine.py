"""SGLang's whole engine on the CPU, with a tiny model of random weights: the same replies on any cache.

Needs what `make test-sglang` installs besides. Strict: SGLang checks its pools in every step, and dies of a leak.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang.srt")
for package in ("einops", "fastapi", "prometheus_client", "setproctitle", "uvicorn", "uvloop", "xgrammar"):
    pytest.importorskip(package)

ROOT = Path(__file__).parents[1]
STRICT = ("STRICT_MEM_CHECK_DURING_IDLE", "STRICT_MEM_CHECK_DURING_BUSY")
MODEL = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", "vocab_size": 1000},
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6},
}


def chat(model: str, options: dict[str, Any], result: str) -> None:
    """Six chats of three turns behind one system prompt, and a copy of the first; in a pool that is too small."""
    import random
    import time

    import sglang

    engine = sglang.Engine(
        model_path=model,
        **{"device": "cpu", "load_format": "dummy", "skip_tokenizer_init": True, "attention_backend": "torch_native"},
        **{
            "sampling_backend": "pytorch",
            "random_seed": 1,
            "log_level": "info",
            "dtype": "float32",
            "context_length": 1024,
        },
        **{"max_total_tokens": 2048, "chunked_prefill_size": 64, "max_running_requests": 8, "mem_fraction_static": 0.1},
        **options,
    )
    rng = random.Random(0)
    system, *chats = [[rng.randrange(10, 900) for _ in range(150)] for _ in range(7)]
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    replies, num_cached = [], 0
    for _ in range(3):
        answers = engine.generate(input_ids=[system + text for text in [*chats, chats[0]]], sampling_params=sampling)
        replies.append([answer["output_ids"] for answer in answers])
        num_cached += sum(answer["meta_info"]["cached_tokens"] for answer in answers)
        for text, answer in zip(chats, answers, strict=False):
            text += answer["output_ids"] + [rng.randrange(10, 900) for _ in range(30)]
    for _ in range(50):
        if flushed := engine.flush_cache().success:
            break
        time.sleep(0.2)  # until the engine has seen that it is idle
    engine.shutdown()
    Path(result).write_text(json.dumps({"replies": replies, "num_cached": num_cached, "flushed": flushed}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    (folder / "config.json").write_text(json.dumps(MODEL))
    installed = folder / "path" / "radixkv-0.dist-info"  # as pip would leave it
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: radixkv\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nradixkv = radixkv.integrations.sglang:register\n"
    )
    if find_spec("vllm") is None:  # SGLang imports, and does not call, this one on the CPU
        (folder / "path" / "vllm").mkdir()
        (folder / "path" / "vllm" / "__init__.py").touch()
        (folder / "path" / "vllm" / "_custom_ops.py").write_text("rotary_embedding = None\n")
    return folder


def run(folder: Path, name: str, **options: Any) -> dict[str, Any]:
    result = folder / f"{name}.json"
    settings = {f"SGLANG_ENABLE_{check}": "1" for check in STRICT} | {"SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
    settings["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(folder / "path")])
    command = [sys.executable, "-B", "-W", "ignore", __file__, str(folder), json.dumps(options), str(result)]
    process = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=600)
    assert result.exists(), (process.stdout + process.stderr)[-4000:]
    if "radix_cache_backend" in options:
        assert "source=registered('radixkv') impl=RadixKVCache" in process.stdout + process.stderr
    return dict(json.loads(result.read_text()))


@pytest.mark.parametrize("page", [1, 16])
def test_the_engine_replies_as_without_a_cache(folder: Path, page: int, capsys: pytest.CaptureFixture[str]) -> None:
    events = json.dumps({"publisher": "zmq", "endpoint": f"ipc://{folder}/events"})
    observed = {"enable_metrics": True, "kv_events_config": events}
    ours = run(folder, f"radixkv-{page}", radix_cache_backend="radixkv", page_size=page, **observed)
    without = run(folder, f"without-{page}", disable_radix_cache=True, page_size=page)
    theirs = run(folder, f"theirs-{page}", page_size=page)
    with capsys.disabled():
        print(f"\npages of {page}: {ours['num_cached']} tokens cached, {theirs['num_cached']} with SGLang's own cache")
    assert ours["replies"] == without["replies"]
    assert ours["flushed"]
    assert without["num_cached"] == 0 < ours["num_cached"]


if __name__ == "__main__":
    chat(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])
