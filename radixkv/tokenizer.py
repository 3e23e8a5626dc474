"""Text as tokens: a tokenizer that the user has at hand, or the built-in one. Knows nothing of chats or files.

Nothing is downloaded by radixkv: a tokenizer is a local file or folder, or a tiktoken encoding that is installed.
"""

import os
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from radixkv.tokens import pack

BUILT_IN = "built-in"  # the name of the tokenizer for want of another
MARKS = 2**30  # ids from here on are no text of any tokenizer

# Words and signs as common vocabularies cut them, roughly: a single space belongs to what is behind it.
_CHUNK = re.compile(
    r" ?[A-Za-z\u00c0-\u024f\u0370-\u04ff]{1,8}|[0-9]{1,2}| ?[!-/:-@\[-`{-~]{1,2}| {1,16}(?=[ \n]|$)|\s{1,4}|.",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A way to turn text into packed tokens and back."""

    name: str  # for people
    encode: Callable[[str], bytes] = field(repr=False)
    decode: Callable[[bytes], str] = field(repr=False)


def load_tokenizer(name: str | os.PathLike[str] | None) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, of a model's folder, or of a tiktoken encoding; None for the built-in one.

    Raises: ValueError that says what is missing, a file, a package or a name.
    """
    if name is None:
        chunks = _Chunks()
        return Tokenizer(BUILT_IN, chunks.encode, chunks.decode)
    path = Path(name)
    if path.is_dir():
        file = path / "tokenizer.json"
        return _from_file(file, path) if file.is_file() else _from_folder(path)
    if path.is_file():
        return _from_file(path, path)
    text = os.fspath(name)
    if os.sep in text or path.suffix:
        raise ValueError(f"there is no file or folder {text!r}")
    return _from_tiktoken(text)


class _Chunks(dict[str, int]):
    """A vocabulary that grows with what it reads: each distinct chunk of text is a token. About 0.1 us a token."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def __missing__(self, chunk: str) -> int:
        self._texts.append(chunk)
        return self.setdefault(chunk, len(self))

    def encode(self, text: str) -> bytes:
        return array("i", [self[chunk] for chunk in _CHUNK.findall(text)]).tobytes()

    def decode(self, tokens: bytes) -> str:
        return "".join([self._texts[token] for token in array("i", tokens) if token < MARKS])


def _from_file(file: Path, named: Path) -> Tokenizer:
    try:
        import tokenizers  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise _missing("tokenizers", file) from None
    try:
        loaded = tokenizers.Tokenizer.from_file(os.fspath(file))
    except Exception as error:  # it raises bare Exceptions
        raise ValueError(f"{file} is no tokenizer.json: {_line(error)}") from None
    loaded.no_truncation()
    loaded.no_padding()

    def encode(text: str) -> Sequence[int]:
        ids: list[int] = loaded.encode(text, add_special_tokens=False).ids
        return ids

    return _wrapped(named.name, encode, lambda ids: loaded.decode(ids, skip_special_tokens=False))


def _from_folder(folder: Path) -> Tokenizer:
    try:
        import transformers  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise _missing("transformers", folder) from None
    try:
        loaded: Any = transformers.AutoTokenizer.from_pretrained(os.fspath(folder), local_files_only=True)
    except Exception as error:  # many kinds, by what the folder lacks
        raise ValueError(f"{folder} holds no tokenizer that transformers can load: {_line(error)}") from None
    return _wrapped(folder.name, lambda text: loaded.encode(text, add_special_tokens=False), loaded.decode)


def _from_tiktoken(name: str) -> Tokenizer:
    try:
        import tiktoken  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ValueError(
            f"{name!r} is no file or folder here, and tiktoken, for its encodings, is not installed"
        ) from None
    names = tiktoken.list_encoding_names()
    if name not in names:
        raise ValueError(f"{name!r} is no file or folder here, nor one of tiktoken's encodings {', '.join(names)}")
    try:
        loaded = tiktoken.get_encoding(name)
    except Exception as error:  # by what it does to fetch its ranks
        raise ValueError(f"tiktoken cannot load {name}: {_line(error)}") from None
    return _wrapped(name, lambda text: loaded.encode(text, disallowed_special=()), loaded.decode)


def _wrapped(name: str, encode: Callable[[str], Sequence[int]], decode: Callable[[list[int]], str]) -> Tokenizer:
    def encode_text(text: str) -> bytes:
        # subtle: a lone surrogate is no text to them
        return pack(list(encode(text.encode("utf-8", "replace").decode() if _is_broken(text) else text)))

    def decode_tokens(tokens: bytes) -> str:
        ids = [token for token in array("i", tokens) if token < MARKS]
        try:
            return decode(ids)
        except (KeyError, OverflowError):  # another vocabulary's
            return "".join(f" {token}" for token in ids)

    return Tokenizer(name, encode_text, decode_tokens)


def _is_broken(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _missing(package: str, path: Path) -> ValueError:
    return ValueError(f"{path} needs {package}: pip install {package}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
