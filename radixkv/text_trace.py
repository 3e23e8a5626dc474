"""Chats as prompts: which messages a request sends, and their tokens. Knows nothing of files, times or caches.

A prompt is a sequence of parts: each tool definition, then each message. A part is its text between two marks, ids
that no tokenizer has: the first says whose part it is, the last ends it. What a model's own chat template would add
is left out, but for thinking and tool calls, which stand in the text as most templates write them:

    <think>\\n...\\n</think>\\n\\n        <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>
"""

import hashlib
import json
import reprlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from radixkv.tokenizer import MARKS, Tokenizer
from radixkv.tokens import TOKEN_BYTES

ROLES = ("tools", "system", "user", "assistant", "tool")  # whose a part is; "tools" are definitions, "tool" answers
_MARKS = {role: array("i", [MARKS + number]).tobytes() for number, role in enumerate(ROLES)}
_END_MARK = MARKS + len(ROLES)
_END = array("i", [_END_MARK]).tobytes()
_ROLE_NAMES = {
    **{name: name for name in ("system", "user", "assistant", "tool")},
    **{"developer": "system", "function": "tool"},
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"},  # ShareGPT and its kin
    **{"observation": "tool", "function_call": "assistant", "bot": "assistant"},
}
_MESSAGES = ("messages", "conversations", "conversation")
_WRAPPERS = ("body", "request")  # of a Batch API file, of a gateway's log
# What a request body has and a conversation that was only stored has not.
_OF_A_REQUEST = frozenset(
    ("model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stream", "tool_choice", "seed", "stop")
)
_CACHED_CHARACTERS = 1 << 16  # longer texts are not remembered


class BadLine(Exception):
    """What is wrong with a line, and in which field."""


@dataclass(frozen=True, slots=True)
class Chat:
    """One request of a chat, packed."""

    prompt: bytes
    answer: bytes  # empty where it is not known
    namespace: str | None  # model and cache salt, where the request names them


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a prompt: the tokens [start, end) between its marks."""

    role: str
    start: int
    end: int


class ChatReader:
    """Turns JSON records into chats.

    A record is a request (it has a `model` or another field of a request body, or no answer in it), or a conversation
    of which each turn of the assistant is a request. What the first record of a file is, all are.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.holds_requests: bool | None = None  # not known before the first record
        self._encode_cached = lru_cache(maxsize=4096)(tokenizer.encode)

    def read(self, record: dict[str, Any]) -> list[Chat]:
        """The requests of a record, in order. Raises: BadLine."""
        wrapper = next((name for name in _WRAPPERS if type(record.get(name)) is dict), "")
        body, where = (record[wrapper], f"{wrapper}.") if wrapper else (record, "")
        name = next((name for name in _MESSAGES if name in body), "")
        if not name:
            raise BadLine(f"{where}messages: missing")
        messages = body[name]
        if type(messages) is not list or not messages:
            raise BadLine(f"{where}{name}: must be a list of at least one message, got {reprlib.repr(messages)}")
        parts = self._tools(body, where)
        if type(body.get("system")) is str:  # ShareGPT
            parts.append(("system", body["system"]))
        first = len(parts)
        parts += (_message(message, f"{where}{name}[{index}]") for index, message in enumerate(messages))
        holds_requests = self.holds_requests
        if holds_requests is None:
            roles = [role for role, _ in parts[first:]]
            holds_requests = bool(wrapper or _OF_A_REQUEST & body.keys() or "assistant" not in roles)
        namespace = _namespace(body, where)
        if holds_requests:
            chats = [self._request(parts, _answer(record), namespace)]
        else:
            chats = list(self._turns(parts, namespace))
            if not chats:
                raise BadLine(f"{where}{name}: has no turn of the assistant behind another message")
        self.holds_requests = holds_requests
        return chats

    def _request(self, parts: list[tuple[str, str]], answer: str | None, namespace: str | None) -> Chat:
        if parts[-1][0] == "assistant":  # to be continued
            prompt = self._encode(parts[:-1]) + _MARKS["assistant"] + self._text(parts[-1][1])
        else:
            prompt = self._encode(parts) + _MARKS["assistant"]
        return Chat(prompt, b"" if answer is None else self._text(answer) + _END, namespace)

    def _turns(self, parts: list[tuple[str, str]], namespace: str | None) -> Iterator[Chat]:
        whole = bytearray()
        for role, text in parts:
            tokens = self._text(text) + _END
            whole += _MARKS[role]
            if role == "assistant" and len(whole) > TOKEN_BYTES:
                yield Chat(bytes(whole), tokens, namespace)
            whole += tokens

    def _encode(self, parts: list[tuple[str, str]]) -> bytes:
        return b"".join([piece for role, text in parts for piece in (_MARKS[role], self._text(text), _END)])

    def _text(self, text: str) -> bytes:
        return self._encode_cached(text) if len(text) <= _CACHED_CHARACTERS else self.tokenizer.encode(text)

    def _tools(self, body: dict[str, Any], where: str) -> list[tuple[str, str]]:
        tools = body.get("tools") or body.get("functions") or []
        if type(tools) is str:  # ShareGPT
            return [("tools", tools)]
        if type(tools) is not list:
            raise BadLine(f"{where}tools: must be a list, got {reprlib.repr(tools)}")
        return [("tools", _dump(tool)) for tool in tools]


def parts_of(tokens: bytes) -> list[Part]:
    """The parts of a chat's prompt, or of a prompt and its answer; of tokens without marks none. O(tokens)."""
    ids = np.frombuffer(tokens, "<i4")
    marks = np.flatnonzero((ids >= MARKS) & (ids <= _END_MARK))
    ends = [*marks[1:].tolist(), len(ids)][: len(marks)]
    return [
        Part(ROLES[mark - MARKS], start + 1, end)
        for start, end, mark in zip(marks.tolist(), ends, ids[marks].tolist(), strict=True)
        if mark != _END_MARK
    ]


def encode_parts(parts: list[tuple[str, bytes]], ends_open: bool) -> bytes:
    """Parts as a prompt again; the last one has no end where that `ends_open`."""
    whole = b"".join([piece for role, tokens in parts for piece in (_MARKS[role], tokens, _END)])
    return whole[:-TOKEN_BYTES] if ends_open else whole


def _namespace(body: dict[str, Any], where: str) -> str | None:
    names = []
    for field in ("model", "cache_salt"):
        value = body.get(field)
        if value is not None and type(value) is not str:
            raise BadLine(f"{where}{field}: must be text, got {reprlib.repr(value)}")
        names.append(value)
    return None if names == [None, None] else json.dumps(names)


def _answer(record: dict[str, Any]) -> str | None:
    """The text of the answer that a gateway's log, or a joined Batch API file, has beside the request."""
    response = record.get("response")
    if type(response) is dict and type(response.get("body")) is dict:
        response = response["body"]
    try:
        message = response["choices"][0]["message"]  # type: ignore[index]
    except (TypeError, KeyError, IndexError):
        return None
    if type(message) is not dict:
        return None
    return _message({**message, "role": "assistant"}, "response.choices[0].message")[1]


def _message(message: Any, where: str) -> tuple[str, str]:
    """Role and text."""
    if type(message) is not dict:
        raise BadLine(f"{where}: must be an object, got {reprlib.repr(message)}")
    field = "role" if "role" in message else "from"
    if field not in message:
        raise BadLine(f"{where}.role: missing")
    name = message[field]
    role = _ROLE_NAMES.get(name) if type(name) is str else None
    if role is None:
        raise BadLine(f"{where}.{field}: must be one of {', '.join(_ROLE_NAMES)}, got {reprlib.repr(name)}")
    field = "value" if "value" in message else "content"
    texts = [_content(message.get(field), f"{where}.{field}")]
    for thinking in ("reasoning_content", "reasoning", "thinking"):
        if type(message.get(thinking)) is str and message[thinking]:
            texts.insert(0, f"<think>\n{message[thinking]}\n</think>\n\n")
            break
    calls = message.get("tool_calls") or []
    if type(calls) is not list:
        raise BadLine(f"{where}.tool_calls: must be a list, got {reprlib.repr(calls)}")
    functions = [call.get("function") if type(call) is dict else None for call in calls]
    if type(message.get("function_call")) is dict:
        functions.append(message["function_call"])
    for index, function in enumerate(functions):
        if type(function) is not dict or "name" not in function:
            raise BadLine(f"{where}.tool_calls[{index}].function.name: missing")
        arguments = function.get("arguments")
        arguments = arguments if type(arguments) is str else _dump(arguments)
        texts.append(f'<tool_call>\n{{"name": {_dump(function["name"])}, "arguments": {arguments}}}\n</tool_call>')
    return role, "".join(texts)


def _content(content: Any, where: str) -> str:
    if type(content) is str:
        return content
    if content is None:
        return ""
    if type(content) is not list:
        raise BadLine(f"{where}: must be text, a list of parts or null, got {reprlib.repr(content)}")
    texts = []
    for index, part in enumerate(content):
        if type(part) is str:
            texts.append(part)
        elif type(part) is not dict:
            raise BadLine(f"{where}[{index}]: must be text or an object, got {reprlib.repr(part)}")
        elif type(part.get("text")) is str:
            texts.append(part["text"])
        elif type(part.get("thinking")) is str:
            texts.append(f"<think>\n{part['thinking']}\n</think>\n\n")
        else:  # an image or the like: which one it is counts, not what it costs
            digest = hashlib.sha256(_dump(part).encode("utf-8", "surrogatepass")).hexdigest()
            texts.append(f"[{part.get('type', 'part')} {digest[:16]}]")
    return "".join(texts)


def _dump(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise BadLine("nested too deeply") from None
