"""One change to a trace or its cache, to see what it would bring. Knows nothing of how the result is shown."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

from radixkv.convert import with_block_size
from radixkv.findings import Finding
from radixkv.prompts import TokenRequests
from radixkv.text_trace import encode_parts, parts_of
from radixkv.tokens import TOKEN_BYTES
from radixkv.trace import TokenTrace, Trace, count_blocks
from radixkv.volatile import VOLATILE, sorted_json, without_volatile

Message: TypeAlias = tuple[str, str]  # role and text

FORMS = "block-size=N, capacity=N, capacity=Nx, ttl=SECONDS, sort-tools, move-volatile"

_WRITTEN = ("tools", "system", "assistant")  # whose JSON a client may write anew
_MAX_BLOCK_SIZE = 1 << 20
_MAX_BLOCKS = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Setting:
    """What is explained: a trace in a cache."""

    trace: Trace
    capacity: int | None  # blocks
    ttl: float | None = None  # s


@dataclass(frozen=True, slots=True)
class Change:
    """A change as the user wrote it; made by `parse_change`."""

    text: str
    apply: Callable[[Setting, list[Finding]], Setting]


def parse_change(text: str) -> Change:
    """One of the `FORMS`. Its `apply` takes what was found before, and raises ValueError where it does not fit.

    Raises: ValueError with the text, and what it could be.
    """
    name, _, value = text.partition("=")
    if name == "block-size" and (size := _whole(value, _MAX_BLOCK_SIZE)):
        return Change(text, lambda setting, _: _with_block_size(setting, size))
    if name == "capacity" and value.endswith("x") and (factor := _positive(value[:-1])):
        return Change(text, lambda setting, _: _with_more(setting, factor))
    if name == "capacity" and (blocks := _whole(value, _MAX_BLOCKS)):
        return Change(text, lambda setting, _: replace(setting, capacity=blocks))
    if name == "ttl" and (seconds := _positive(value)):
        return Change(text, lambda setting, _: replace(setting, ttl=seconds))
    if text == "sort-tools":
        return Change(text, _sort_tools)
    if text == "move-volatile":
        return Change(text, _move_volatile)
    raise ValueError(f"{text[:40]!r} is none of {FORMS}")


def _with_block_size(setting: Setting, size: int) -> Setting:
    """The capacity stays the same in tokens."""
    blocks = setting.capacity and max(1, setting.capacity * setting.trace.block_size // size)
    return replace(setting, trace=with_block_size(setting.trace, size), capacity=blocks)


def _with_more(setting: Setting, factor: float) -> Setting:
    if setting.capacity is None:
        raise ValueError("there is no capacity to multiply")
    return replace(setting, capacity=min(_MAX_BLOCKS, max(1, round(setting.capacity * factor))))


def _sort_tools(setting: Setting, _: list[Finding]) -> Setting:
    """Tools in the order of their definitions, JSON with sorted keys, in prompts and answers alike."""

    def sort(prompt: list[Message]) -> list[Message]:
        prompt = [(role, sorted_json(text) if role in _WRITTEN else text) for role, text in prompt]
        tools = iter(sorted(message for message in prompt if message[0] == "tools"))
        return [next(tools) if message[0] == "tools" else message for message in prompt]

    return replace(setting, trace=_rewritten(setting.trace, sort, sorted_json))


def _move_volatile(setting: Setting, findings: list[Finding]) -> Setting:
    """Ids, times and the numbers that were found to change go behind the newest message, and stay there afterwards."""
    found = [finding for finding in findings if finding.kind in VOLATILE]
    roles = {"tools", "system"} | {finding.place for finding in found}
    counters = tuple(finding.before for finding in found if finding.kind == "counter" and finding.before)
    split = lru_cache(maxsize=4096)(lambda text: without_volatile(text, counters))
    sent: dict[int, str] = {}  # a chat up to a message that was the newest once -> what was sent behind it

    def move(prompt: list[Message]) -> list[Message]:
        kept: list[Message] = []
        moved: list[str] = []
        for role, text in prompt:
            rest, values = split(text) if role in roles else (text, ())
            kept.append((role, rest))
            moved += values
        answer = [kept.pop()] if kept[-1][0] == "assistant" else []
        chat: list[Message] = []
        before = 0
        for number, message in enumerate(kept, 1):
            before = hash((before, message))
            chat.append(message)
            if number == len(kept) and moved:
                sent.setdefault(before, " ".join(moved))
            if before in sent:
                chat.append(("user", sent[before]))
        return chat + answer

    return replace(setting, trace=_rewritten(setting.trace, move, str))


def _rewritten(
    trace: Trace, rewrite: Callable[[list[Message]], list[Message]], rewrite_answer: Callable[[str], str]
) -> Trace:
    if not isinstance(trace, TokenTrace) or trace.tokenizer is None or not parts_of(trace.requests[0].tokens):
        raise ValueError(f"{trace.name} has no text")
    decode = lru_cache(maxsize=4096)(trace.tokenizer.decode)
    encode = lru_cache(maxsize=4096)(trace.tokenizer.encode)
    requests = TokenRequests()
    for request in trace.requests:
        parts = parts_of(request.tokens)
        prompt = [
            (part.role, decode(request.tokens[part.start * TOKEN_BYTES : part.end * TOKEN_BYTES])) for part in parts
        ]
        is_open = parts[-1].end == request.num_prompt_tokens
        tokens = encode_parts([(role, encode(text)) for role, text in rewrite(prompt)], is_open)
        answer = request.output_tokens
        if len(answer) > TOKEN_BYTES:
            answer = encode(rewrite_answer(decode(answer[:-TOKEN_BYTES]))) + answer[-TOKEN_BYTES:]
        requests.add(request.time, tokens, answer, request.namespace)
    return replace(trace, requests=requests, num_blocks=count_blocks(requests, trace.block_size))


def _whole(text: str, high: int) -> int:
    """0 if it is none from 1 to `high`."""
    number = int(text) if text.isdecimal() and len(text) <= 10 else 0
    return number if number <= high else 0


def _positive(text: str) -> float:
    """0 if it is no positive number."""
    try:
        number = float(text)
    except ValueError:
        return 0
    return number if math.isfinite(number) and number > 0 else 0
