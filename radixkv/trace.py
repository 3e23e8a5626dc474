"""Traces of requests, and the files they are read from. Knows file formats; knows nothing of caches.

Formats, one JSON object a line, plain or gzipped (told by content, not by name):

- `{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}`: ids are chained, so that the same id
  means the same whole prefix; the last one may cover a partial block.
- the same with `"hash_runs": [[first, last], ...]` for the ids, both ends included.
- the same with `"chat_id"` and `"parent_chat_id"` (-1 for none) beside `hash_ids` (Bailian): `timestamp` is in seconds,
  a block has 16 tokens, and an id is that of the block alone, so that they are chained here.
- sessions: `{"block_size": n, "requests": [{"t": s, "in": n, "out": n, "h": [[first, last], ...]}, ...]}`, ids local to
  the session.
- `{"tokens": [...], "output_tokens": [...]}`, and `"namespace": "..."` where prompts must not share.
- chats: OpenAI request bodies, Batch API files, `messages` and ShareGPT conversations, see `radixkv.text_trace`.

A file may also be one JSON array of such objects. With `hash_ids` or `hash_runs`, `"output_hash_ids": [...]` are the
blocks that the request filled behind those of the prompt. `timestamp`, `output_length`, `block_size` and the outputs
may be left out, the first three from all lines or none.
Timestamps do not go back; `input_length` is that of the blocks of the ids, the partial last one counted or left out.
"""

import gzip
import io
import json
import math
import os
import random
import reprlib
import zlib
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from typing import Any, NoReturn, TypeAlias, overload

from radixkv.errors import TraceError
from radixkv.json_array import array_items
from radixkv.prompts import TokenRequest as TokenRequest
from radixkv.prompts import TokenRequests
from radixkv.text_trace import BadLine as _BadLine
from radixkv.text_trace import ChatReader
from radixkv.tokenizer import Tokenizer, load_tokenizer
from radixkv.tokens import TOKEN_BYTES

Progress: TypeAlias = Callable[[float], None]  # called now and then with the share done, 0 to 1

DEFAULT_BLOCK_SIZE = 16  # tokens, where the trace does not say
DEFAULT_CONCURRENCY = 32  # sessions at once
MAX_REQUEST_BLOCKS = 1 << 24  # of one request, so that no line of a few bytes fills the memory
_INT32_END = 1 << 31
_CHAT_BLOCK_SIZE = 16  # tokens, of lines with a chat_id
_OPTIONAL = {"timestamp", "output_length", "block_size", "chat_id"}  # fields that all lines have, or none
_NUM_REASONS = 3  # skipped lines whose reason is kept
_NOTHING = -1  # before the first id of a prompt
_TURN_SECONDS = 30.0  # between the turns of a chat whose file has no times

_Runs: TypeAlias = list[tuple[int, int]]  # of a file's ids, half open


@dataclass(frozen=True, slots=True)
class IdRequest:
    """A request known by the ids of its prompt's blocks; `runs` is start, end, start, end, ..., half open."""

    time: float  # s
    num_prompt_tokens: int
    num_output_tokens: int
    runs: "array[int]"
    path: "array[int] | None" = None  # as `runs`, the blocks of the answer behind them; None where they are not known

    @property
    def num_blocks(self) -> int:
        return sum(self.runs[1::2]) - sum(self.runs[::2])


class IdRequests(Sequence[IdRequest]):
    """Requests with ids as columns: 24 bytes each, and the runs of each distinct prompt once.

    A distinct prompt has a last block of its own, so the memory for runs is bounded by the distinct blocks.
    """

    __slots__ = ("num_output_tokens", "num_prompt_tokens", "paths", "prompts", "runs", "times")

    def __init__(self) -> None:
        self.times = array("d")  # s
        self.num_prompt_tokens = array("i")
        self.num_output_tokens = array("i")
        self.prompts = array("i")  # of each request, where its runs are
        self.paths = array("i")  # of each request, where those of prompt and answer are, _NOTHING if not known
        self.runs: list[array[int]] = []  # of each distinct prompt, as those of an IdRequest

    def add(
        self, time: float, num_prompt_tokens: int, num_output_tokens: int, prompt: int, path: int = _NOTHING
    ) -> None:
        self.times.append(time)
        self.num_prompt_tokens.append(num_prompt_tokens)
        self.num_output_tokens.append(num_output_tokens)
        self.prompts.append(prompt)
        self.paths.append(path)

    def __len__(self) -> int:
        return len(self.times)

    @overload
    def __getitem__(self, index: int) -> IdRequest: ...
    @overload
    def __getitem__(self, index: slice) -> list[IdRequest]: ...
    def __getitem__(self, index: int | slice) -> IdRequest | list[IdRequest]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        return IdRequest(
            self.times[index],
            self.num_prompt_tokens[index],
            self.num_output_tokens[index],
            self.runs[self.prompts[index]],
            self._path(self.paths[index]),
        )

    def __iter__(self) -> Iterator[IdRequest]:
        runs = map(self.runs.__getitem__, self.prompts)
        paths = map(self._path, self.paths)
        return map(IdRequest, self.times, self.num_prompt_tokens, self.num_output_tokens, runs, paths)

    def _path(self, path: int) -> "array[int] | None":
        return None if path == _NOTHING else self.runs[path]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


@dataclass(slots=True)
class Skipped:
    """Lines that were left out of a trace, and why, of the first few."""

    num_lines: int = 0
    reasons: list[TraceError] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Trace:
    name: str  # the file, as it was named
    _: KW_ONLY
    block_size: int  # tokens
    num_blocks: int  # distinct ones
    skipped: Skipped = field(default_factory=Skipped)


@dataclass(frozen=True, slots=True)
class IdTrace(_Trace):
    """Requests in the order they came. Invariant: their ids are dense, [0, num_blocks)."""

    requests: Sequence[IdRequest]


@dataclass(frozen=True, slots=True)
class TokenTrace(_Trace):
    """Requests in the order they came; `num_blocks` counts whole blocks, of prompts and outputs."""

    requests: Sequence[TokenRequest]
    tokenizer: Tokenizer | None = None  # what reads the tokens, where that is known


Trace: TypeAlias = IdTrace | TokenTrace


def read_trace(
    *paths: str | os.PathLike[str],
    limit: int | None = None,
    block_size: int | None = None,
    skip_bad: bool = False,
    concurrency: int = DEFAULT_CONCURRENCY,
    seed: int = 0,
    tokenizer: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Read a trace of any of the formats above from a file, from stdin ("-"), or from several files, merged by time.

    `limit`: the first so many requests. `block_size`: tokens; else the file's own, else for ids what explains their
    number and `input_length`, for tokens 16. `skip_bad`: leave bad lines out, and count them in the trace.
    `concurrency` and `seed` merge sessions, see `_merge`. Equal ids in several files mean equal prefixes.
    `tokenizer` turns text into tokens, see `radixkv.tokenizer`; else a built-in one does.

    Ids are numbered anew where they are not dense; consecutive ones stay so. Cost: some 20 us a request, of a token
    0.1 us; memory 24 bytes a request and the runs of each distinct prompt, or 40 and each distinct prefix of tokens
    once, whatever the lines hold.

    Raises: TraceError, with file, line and field; ValueError for an argument below 1, no path, or a tokenizer that is
        not to be had.
    """
    for argument, value in (("limit", limit), ("block_size", block_size), ("concurrency", concurrency)):
        if value is not None and value < 1:
            raise ValueError(f"{argument} must be at least 1, got {value}")
    if not paths:
        raise ValueError("a trace needs at least 1 path, got 0")
    names = ["stdin" if path == "-" else os.fspath(path) for path in paths]
    name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    reads_text = None if tokenizer is None else load_tokenizer(tokenizer)
    lines = _Lines(block_size, reads_text)
    num_lines = 0
    skipped = Skipped()

    def skip(file: str, line: int, message: str) -> None:
        error = TraceError(file, line, message)
        if not skip_bad:
            raise error
        skipped.num_lines += 1
        if skipped.num_lines <= _NUM_REASONS:
            skipped.reasons.append(error)

    for part, path in enumerate(paths):
        lines.begin_file()
        number = 0
        try:
            for number, line in _read_lines(path, _of_part(progress, part, len(paths))):
                try:
                    lines.add(line)
                except _BadLine as error:
                    skip(names[part], number, str(error))
                if limit is not None and len(paths) == 1 and lines.num_requests >= limit:
                    break
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            skip(names[part], number + 1, f"the gzip stream is broken: {error}")
        except OSError as error:
            raise TraceError(names[part], 0, error.strerror or str(error)) from None
        num_lines += number

    if lines.token_requests:
        size = block_size or DEFAULT_BLOCK_SIZE
        tokens = lines.token_requests
        if lines.sessions:
            _merge(lines.sessions, tokens.times, concurrency, seed)
        tokens.sort()
        if limit is not None:
            tokens.truncate(limit)
        num_blocks = count_blocks(tokens, size)
        reads_text = lines.chats.tokenizer if lines.chats else reads_text
        return TokenTrace(name, tokens, reads_text, block_size=size, num_blocks=num_blocks, skipped=skipped)
    requests = lines.id_requests
    if not requests:
        raise TraceError(name, 0, _why_nothing(num_lines, skipped))
    rows: Sequence[int] = range(len(requests))
    if lines.sessions:
        rows = _merge(lines.sessions, requests.times, concurrency, seed)
    if lines.sessions or len(paths) > 1:
        rows = sorted(rows, key=requests.times.__getitem__)
    requests, num_blocks = _numbered(requests, rows[:limit])
    if num_blocks >= _INT32_END:
        raise TraceError(name, 0, f"there are {num_blocks} distinct blocks, the bound is 2^31")
    return IdTrace(name, requests, block_size=lines.block_size, num_blocks=num_blocks, skipped=skipped)


def count_blocks(requests: Iterable[TokenRequest], block_size: int) -> int:
    """How many distinct whole blocks the requests have: a block is its tokens and all before them."""
    width = block_size * TOKEN_BYTES
    seen: set[int] = set()
    for request in requests:
        tokens = request.tokens + request.output_tokens
        prefix = hash(request.namespace)
        for end in range(width, len(tokens) + 1, width):
            prefix = hash((prefix, tokens[end - width : end]))
            seen.add(prefix)
    return len(seen)


class _NotChained(Exception):
    """An id that does not follow the one that it followed before."""

    def __init__(self, number: int) -> None:
        self.id = number


class _Stretches:
    """Which id each id follows, for ids that are chained. Consecutive ones that follow one another are a stretch.

    Invariant: stretches have no id in common, and every run is the beginning of one.
    """

    def __init__(self, first: int = 0) -> None:
        self._starts: list[int] = []  # sorted
        self._numbers: dict[int, int] = {}  # start -> number of the stretch
        self._before: list[int] = []  # of each stretch, the id that its first one follows, _NOTHING for none
        self._lengths: list[int] = []  # of each stretch, as far as it is known
        self._first = first

    @property
    def next_number(self) -> int:
        return self._first + len(self._lengths)

    def place(self, runs: _Runs) -> "array[int]":
        """The runs of a prompt as stretch, length, stretch, length, ...

        O(log stretches) a run. Raises: _NotChained, and then nothing has changed.
        """
        before = _NOTHING
        for start, end in runs:
            self._check(start, end, before)
            before = end - 1
        if len(runs) > 1:
            for (_, end), (start, _) in pairwise(sorted(runs)):
                if start < end:
                    raise _NotChained(start)
        placed = array("i")
        before = _NOTHING
        for start, end in runs:
            number = self._numbers.get(start)
            if number is None:
                number = self._numbers[start] = len(self._lengths)
                insort(self._starts, start)
                self._before.append(before)
                self._lengths.append(0)
            self._lengths[number] = max(self._lengths[number], end - start)
            placed.extend((self._first + number, end - start))
            before = end - 1
        return placed

    def _check(self, start: int, end: int, before: int) -> None:
        starts = self._starts
        index = bisect_left(starts, start)
        if index < len(starts) and starts[index] == start:
            if self._before[self._numbers[start]] != before:
                raise _NotChained(start)
            index += 1
        elif index and starts[index - 1] + self._lengths[self._numbers[starts[index - 1]]] > start:
            raise _NotChained(start)  # it followed the one below it
        if index < len(starts) and starts[index] < end:
            raise _NotChained(starts[index])  # it did not follow the one below it


@dataclass(slots=True)
class _Session:
    """Requests [first, end) of all are one client's, times from its first one on; it lasts until its last answer."""

    first: int
    end: int
    seconds: float


class _Lines:
    """What the good lines have told so far. A bad one changes nothing."""

    def __init__(self, block_size: int | None, tokenizer: Tokenizer | None) -> None:
        self.id_requests = IdRequests()  # runs as stretch, length, stretch, length, ...
        self.sessions: list[_Session] = []
        self.token_requests = TokenRequests()
        self.chats: ChatReader | None = None
        self._tokenizer = tokenizer
        self._block_size = block_size
        self._sizes = (1, _INT32_END)  # where it is not known, the smallest and the largest that explain all lines
        self._format = ""
        self._fields: set[str] = set()  # of those that may be left out, the ones that the first line has
        self._timestamp: float = -math.inf  # of the last request of this file
        self._chats: set[int] = set()
        self._numbers: dict[int | tuple[int, int], int] = {}  # id -> its rank among the ids, by first appearance
        self._stretches = _Stretches()  # of the ids, or of the last session's
        self._prompts: dict[int, int] = {}  # last block -> the prompt that ends with it

    @property
    def num_requests(self) -> int:
        """How many requests are known in their final order: none of a session file before its end."""
        return 0 if self.sessions else len(self.id_requests) or len(self.token_requests)

    @property
    def block_size(self) -> int:
        """That of the lines, or else one that explains them, a power of two if any does."""
        if self._block_size:
            return self._block_size
        least, most = self._sizes
        power = 1 << (least - 1).bit_length()
        return power if power <= most else least

    def begin_file(self) -> None:
        self._timestamp = -math.inf

    def add(self, line: bytes) -> None:
        """Raises: _BadLine."""
        if line.isspace():
            return
        record = _decode(line)
        known = self._format or next((name for name in _FORMATS if name in record), "")
        if not known:
            raise _BadLine(f"none of the fields {', '.join(_FORMATS)} is there, but {_short(list(record))}")
        _get(record, known)
        for name in sorted(self._fields - record.keys()):
            raise _BadLine(f"{name}: missing, though the lines before have it")
        _FORMATS[known](self, record)
        if not self._format:
            stored = self.chats is not None and not self.chats.holds_requests  # what else stands there means nothing
            self._format, self._fields = known, set() if stored else _OPTIONAL & record.keys()

    def _add_ids(self, record: dict[str, Any]) -> None:
        ids = _ints(record, "hash_ids")
        numbers = self._numbers
        if "chat_id" not in record:
            ranks = [numbers.setdefault(number, len(numbers)) for number in ids]
            try:
                self._add_request(record, _as_runs(ranks))
            except _NotChained as error:
                index = ranks.index(error.id)
                raise _not_chained(f"hash_ids[{index}]", ids[index]) from None
            return
        chat, parent = _int(record, "chat_id"), _int(record, "parent_chat_id", least=-1)
        if parent >= 0 and parent not in self._chats:
            raise _BadLine(f"parent_chat_id: {parent} is the chat_id of no line before")
        ranks, rank = [], _NOTHING
        for number in ids:
            rank = numbers.setdefault((rank, number), len(numbers))
            ranks.append(rank)
        self._add_request(record, _as_runs(ranks), default_size=_CHAT_BLOCK_SIZE, milliseconds=1000)
        self._chats.add(chat)

    def _add_runs(self, record: dict[str, Any]) -> None:
        try:
            self._add_request(record, _runs(record, "hash_runs"))
        except _NotChained as error:
            raise _not_chained("hash_runs", error.id) from None

    def _add_request(
        self, record: dict[str, Any], runs: _Runs, *, default_size: int | None = None, milliseconds: float = 1
    ) -> None:
        """Add a line that is one request; `milliseconds` is the unit of its timestamp. Raises: _NotChained too."""
        timestamp = self._time(record)
        num_prompt_tokens = _int(record, "input_length")
        num_output_tokens = _int(record, "output_length") if "output_length" in record else 0
        size = self._size(record) or default_size
        sizes = self._explain(size, "input_length", num_prompt_tokens, _num_blocks(runs))
        outputs = _ints(record, "output_hash_ids") if "output_hash_ids" in record else []
        if outputs and "chat_id" in record:
            raise _BadLine("output_hash_ids: not with a chat_id")
        path = None
        if outputs:
            numbers = self._numbers
            ranks = [numbers.setdefault(number, len(numbers)) for number in outputs]
            path = self._stretches.place(_joined(runs, _as_runs(ranks) if "hash_ids" in record else _as_runs(outputs)))
        placed = self._stretches.place(runs)
        self._add(timestamp * milliseconds / 1000, num_prompt_tokens, num_output_tokens, placed, path)
        self._timestamp, self._block_size, self._sizes = timestamp, size, sizes

    def _add_session(self, record: dict[str, Any]) -> None:
        size = self._size(record)
        if size is None:
            raise _BadLine("block_size: missing")
        items = _get(record, "requests")
        if type(items) is not list:
            raise _BadLine(f"requests: must be a list, got {_short(items)}")
        stretches = _Stretches(self._stretches.next_number)
        requests: list[tuple[float, int, int, array[int]]] = []
        end = 0.0  # of the last answer
        for index, item in enumerate(items):
            where = f"requests[{index}]."
            if type(item) is not dict:
                raise _BadLine(f"{where[:-1]}: must be an object, got {_short(item)}")
            time = _number(item, "t", where)
            answered = time + (0.0 if item.get("api") is None else _number(item, "api", where, least=0))
            end = max(end, answered) if requests else answered
            num_prompt_tokens, num_output_tokens = _int(item, "in", where), _int(item, "out", where)
            runs = _runs(item, "h", where)
            self._explain(size, f"{where}in", num_prompt_tokens, _num_blocks(runs))
            try:
                requests.append((time, num_prompt_tokens, num_output_tokens, stretches.place(runs)))
            except _NotChained as error:
                raise _not_chained(f"{where}h", error.id) from None
        if not requests:
            return
        start = min(time for time, *_ in requests)
        first = len(self.id_requests)
        for time, num_prompt_tokens, num_output_tokens, placed in requests:
            self._add(time - start, num_prompt_tokens, num_output_tokens, placed)
        self.sessions.append(_Session(first, len(self.id_requests), end - start))
        self._block_size, self._stretches = size, stretches

    def _add_tokens(self, record: dict[str, Any]) -> None:
        tokens = _ints(record, "tokens", end=_INT32_END)
        if not tokens:
            raise _BadLine("tokens: must have at least one token")
        output = _ints(record, "output_tokens", end=_INT32_END) if "output_tokens" in record else []
        timestamp = self._time(record)
        namespace = record.get("namespace")
        if namespace is not None and type(namespace) is not str:
            raise _BadLine(f"namespace: must be text, got {_short(namespace)}")
        timestamp = self._time(record)
        packed = array("i", tokens).tobytes(), array("i", output).tobytes()
        self.token_requests.add(timestamp / 1000, *packed, namespace)
        self._timestamp = timestamp

    def _add_chat(self, record: dict[str, Any]) -> None:
        reader = self.chats or ChatReader(self._tokenizer or load_tokenizer(None))
        chats = reader.read(record)
        timestamp = self._time(record) if reader.holds_requests else 0.0
        self.chats = reader
        first = len(self.token_requests)
        for turn, chat in enumerate(chats):
            time = timestamp / 1000 if reader.holds_requests else turn * _TURN_SECONDS
            self.token_requests.add(time, chat.prompt, chat.answer, chat.namespace)
        if not reader.holds_requests:
            self.sessions.append(_Session(first, len(self.token_requests), len(chats) * _TURN_SECONDS))
        self._timestamp = timestamp

    def _add(
        self,
        time: float,
        num_prompt_tokens: int,
        num_output_tokens: int,
        placed: "array[int]",
        path: "array[int] | None" = None,
    ) -> None:
        prompt = self._prompt(placed)
        whole = _NOTHING if path is None else self._prompt(path)
        self.id_requests.add(time, num_prompt_tokens, num_output_tokens, prompt, whole)

    def _prompt(self, placed: "array[int]") -> int:
        last = placed[-2] << 32 | placed[-1] if placed else _NOTHING
        prompts = self.id_requests.runs
        prompt = self._prompts.setdefault(last, len(prompts))
        if prompt == len(prompts):
            prompts.append(placed)
        return prompt

    def _time(self, record: dict[str, Any]) -> float:
        """In the file's unit."""
        if "timestamp" not in record:
            return 0.0
        timestamp = _number(record, "timestamp")
        if timestamp < self._timestamp:
            raise _BadLine(f"timestamp: {timestamp:.15g} goes back, a line before has {self._timestamp:.15g}")
        return timestamp

    def _size(self, record: dict[str, Any]) -> int | None:
        if "block_size" not in record:
            return self._block_size
        size = _int(record, "block_size", least=1)
        if self._block_size not in (None, size):
            before = "before" if self._format else "was asked for"
            raise _BadLine(f"block_size: {size}, but {self._block_size} {before}")
        return size

    def _explain(self, size: int | None, name: str, num_tokens: int, num_blocks: int) -> tuple[int, int]:
        """The block sizes that explain this prompt and all before it: blocks are full, but for the last.

        Where the size is known, the partial last block may be left out. Raises: _BadLine if there is none.
        """
        least, most = self._sizes
        if size is not None:
            if not 0 <= -(-num_tokens // size) - num_blocks <= 1:
                raise _BadLine(f"{name}: {num_tokens} tokens are not {num_blocks} blocks of {size}")
            return least, most
        if num_blocks:
            least = max(least, -(-num_tokens // num_blocks))
        if num_blocks > 1:
            most = min(most, (num_tokens - 1) // (num_blocks - 1))
        if least > most:
            raise _BadLine(
                f"{name}: {num_tokens} tokens in {num_blocks} blocks; no block_size is given, and none explains this "
                "and the lines before"
            )
        return least, most


_FORMATS: dict[str, Callable[[_Lines, dict[str, Any]], None]] = {
    "hash_ids": _Lines._add_ids,
    "hash_runs": _Lines._add_runs,
    "requests": _Lines._add_session,
    "tokens": _Lines._add_tokens,
    **dict.fromkeys(("messages", "conversations", "conversation", "body", "request"), _Lines._add_chat),
}


def _read_lines(path: str | os.PathLike[str], progress: Progress | None) -> Iterator[tuple[int, bytes]]:
    """The objects of a file, each as one line, and the number of the line on which it begins."""
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size  # of a pipe 0
        stream = gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file
        is_array = stream.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        for count, (number, line) in enumerate(array_items(stream) if is_array else enumerate(stream, 1)):
            if progress is not None and size and count % 64 == 0:
                progress(file.tell() / size)
            yield number, line


def _open(path: str | os.PathLike[str]) -> io.BufferedReader:
    return open(0 if path == "-" else path, "rb", closefd=path != "-")  # 0: stdin, open or not


def _of_part(progress: Progress | None, part: int, num_parts: int) -> Progress | None:
    """The progress of one of several equal parts."""
    return progress and (lambda share: progress((part + share) / num_parts))


def _refuse(constant: str) -> NoReturn:
    raise _BadLine(f"not JSON: {constant} is no number")


_JSON = json.JSONDecoder(parse_constant=_refuse)


def _decode(line: bytes) -> dict[str, Any]:
    cut = "" if line.endswith(b"\n") else "; the file ends mid-line"
    try:
        record = _JSON.decode(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _BadLine(f"not UTF-8 text: byte 0x{line[error.start]:02x} at column {error.start + 1}{cut}") from None
    except json.JSONDecodeError as error:
        raise _BadLine(f"not JSON: {error.msg} (column {error.colno}){cut}") from None
    except RecursionError:
        raise _BadLine("not JSON that can be read: nested too deeply") from None
    except ValueError:  # subtle: Python refuses to convert an int of so many digits
        raise _BadLine("not JSON that can be read: an int of thousands of digits") from None
    if type(record) is not dict:
        raise _BadLine(f"must be a JSON object, got {_short(record)}")
    return record


def _not_chained(where: str, number: int) -> _BadLine:
    return _BadLine(f"{where}: id {number} is not behind the same ids as before; ids must be chained")


def _short(value: object) -> str:
    """On one line of bounded length."""
    return reprlib.repr(value)


def _get(record: dict[str, Any], name: str, where: str = "") -> Any:
    if name not in record:
        raise _BadLine(f"{where}{name}: missing")
    return record[name]


def _int(record: dict[str, Any], name: str, where: str = "", *, least: int = 0) -> int:
    value = _get(record, name, where)
    if type(value) is not int or not least <= value < _INT32_END:
        raise _BadLine(f"{where}{name}: must be an int in [{least}, 2^31), got {_short(value)}")
    return value


def _number(record: dict[str, Any], name: str, where: str = "", *, least: float = -1e18) -> float:
    value = _get(record, name, where)
    if type(value) not in (int, float) or not least <= value <= 1e18:
        raise _BadLine(f"{where}{name}: must be a number in [{least:g}, 1e+18], got {_short(value)}")
    return float(value)


def _ints(record: dict[str, Any], name: str, *, end: int | None = None) -> list[int]:
    values = _get(record, name)
    if type(values) is not list:
        raise _BadLine(f"{name}: must be a list of ints, got {_short(values)}")
    if values and not (set(map(type, values)) == {int} and min(values) >= 0 and (end is None or max(values) < end)):
        index = next(i for i, v in enumerate(values) if type(v) is not int or v < 0 or (end is not None and v >= end))
        bound = "of at least 0" if end is None else "in [0, 2^31)"
        raise _BadLine(f"{name}[{index}]: must be an int {bound}, got {_short(values[index])}")
    return values


def _runs(record: dict[str, Any], name: str, where: str = "") -> _Runs:
    """Runs with both ends included as half open ones; those that adjoin are one."""
    values = _get(record, name, where)
    if type(values) is not list:
        raise _BadLine(f"{where}{name}: must be a list of runs [first, last], got {_short(values)}")
    runs: _Runs = []
    num_blocks = 0
    for index, value in enumerate(values):
        if not (type(value) is list and [type(end) for end in value] == [int, int] and 0 <= value[0] <= value[1]):
            raise _BadLine(
                f"{where}{name}[{index}]: must be a run [first, last] with 0 <= first <= last, got {_short(value)}"
            )
        if runs and runs[-1][1] == value[0]:
            runs[-1] = (runs[-1][0], value[1] + 1)
        else:
            runs.append((value[0], value[1] + 1))
        num_blocks += value[1] + 1 - value[0]
        if num_blocks > MAX_REQUEST_BLOCKS:
            raise _BadLine(f"{where}{name}[{index}]: {_short(value)} makes the prompt longer than 2^24 blocks")
    return runs


def _as_runs(ids: list[int]) -> _Runs:
    runs: _Runs = []
    start = end = 0
    for number in ids:
        if number != end:
            if start < end:
                runs.append((start, end))
            start = number
        end = number + 1
    if start < end:
        runs.append((start, end))
    return runs


def _joined(runs: _Runs, others: _Runs) -> _Runs:
    if runs and others and runs[-1][1] == others[0][0]:
        return [*runs[:-1], (runs[-1][0], others[0][1]), *others[1:]]
    return [*runs, *others]


def _num_blocks(runs: _Runs) -> int:
    return sum(end - start for start, end in runs)


def _merge(sessions: list[_Session], times: "array[float]", concurrency: int, seed: int) -> list[int]:
    """Lay out sessions in time: `concurrency` slots, each starts the next session when its former one is over.

    Sessions come in shuffled order; the slots start at times spread evenly at random over the mean session. Times
    inside a session stay as they are. Sets `times`; returns the rows, session by session in that order.
    """
    rng = random.Random(seed)
    order = sessions[:]
    rng.shuffle(order)
    mean = sum(session.seconds for session in order) / len(order)
    slots = [rng.uniform(0, mean) for _ in range(min(concurrency, len(order)))]  # when each is free
    heapify(slots)
    rows = []
    for session in order:
        start = slots[0]
        heapreplace(slots, start + session.seconds)
        for row in range(session.first, session.end):
            times[row] += start
            rows.append(row)
    return rows


def _why_nothing(num_lines: int, skipped: Skipped) -> str:
    if skipped.reasons:
        return f"no request is left, {skipped.num_lines} bad lines were skipped, the first: {skipped.reasons[0]}"
    return "there is no request in it" if num_lines else "the file is empty"


def _numbered(requests: IdRequests, rows: Sequence[int]) -> tuple[IdRequests, int]:
    """The requests of `rows`, in that order, their blocks numbered [0, n); returns n too. O(runs)."""
    chosen = IdRequests()
    prompts: dict[int, int] = {}  # those that are asked for -> their new number
    for row in rows:
        prompt, path = requests.prompts[row], requests.paths[row]
        prompt = prompts.setdefault(prompt, len(prompts))
        path = path if path == _NOTHING else prompts.setdefault(path, len(prompts))
        chosen.add(requests.times[row], requests.num_prompt_tokens[row], requests.num_output_tokens[row], prompt, path)
    lengths: dict[int, int] = {}  # of stretches
    for prompt in prompts:
        placed = requests.runs[prompt]
        for stretch, length in zip(placed[::2], placed[1::2], strict=True):
            if length > lengths.get(stretch, 0):
                lengths[stretch] = length
    order = sorted(lengths)
    starts = dict(zip(order, accumulate(map(lengths.__getitem__, order), initial=0), strict=False))
    for prompt in prompts:
        placed, runs = requests.runs[prompt], array("q")
        for stretch, length in zip(placed[::2], placed[1::2], strict=True):
            start = starts[stretch]
            if runs and runs[-1] == start:
                runs[-1] += length
            else:
                runs.extend((start, start + length))
        chosen.runs.append(runs)
    return chosen, sum(lengths.values())
