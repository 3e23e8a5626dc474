"""Traces of requests, and the files they are read from. Knows file formats; knows nothing of caches.

Formats, one JSON object a line, plain or gzipped (told by content, not by name):

- `{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}`: ids are chained, so that the same id
  means the same whole prefix; the last one may cover a partial block.
- the same with `"hash_runs": [[first, last], ...]` for the ids, both ends included.
- sessions: `{"block_size": n, "requests": [{"t": s, "in": n, "out": n, "h": [[first, last], ...]}, ...]}`, ids local to
  the session.
- `{"tokens": [...], "output_tokens": [...]}`.

`timestamp`, `output_length`, `block_size` and `output_tokens` may be left out, the first three from all lines or none.
"""

import gzip
import json
import os
import random
import reprlib
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from heapq import heapify, heapreplace
from typing import Any, NoReturn, TypeAlias

from radixkv.errors import TraceError
from radixkv.tokens import TOKEN_BYTES

Progress: TypeAlias = Callable[[float], None]  # called now and then with the share done, 0 to 1

DEFAULT_BLOCK_SIZE = 16  # tokens, where the trace does not say
DEFAULT_CONCURRENCY = 32  # sessions at once
MAX_REQUEST_BLOCKS = 1 << 24  # of one request, so that no line of a few bytes fills the memory
_INT32_END = 1 << 31
_OPTIONAL = {"timestamp", "output_length", "block_size"}  # fields that all lines have, or none
_NUM_REASONS = 3  # skipped lines whose reason is kept


@dataclass(frozen=True, slots=True)
class IdRequest:
    """A request known by the ids of its prompt's blocks; `runs` is start, end, start, end, ..., half open."""

    time: float  # s
    num_prompt_tokens: int
    num_output_tokens: int
    runs: "array[int]"

    @property
    def num_blocks(self) -> int:
        return sum(self.runs[1::2]) - sum(self.runs[::2])


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A request known by its tokens, packed."""

    time: float  # s
    tokens: bytes
    output_tokens: bytes

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_tokens) // TOKEN_BYTES


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

    requests: list[IdRequest]


@dataclass(frozen=True, slots=True)
class TokenTrace(_Trace):
    """Requests in the order they came; `num_blocks` counts whole blocks, of prompts and outputs."""

    requests: list[TokenRequest]


Trace: TypeAlias = IdTrace | TokenTrace


def read_trace(
    path: str | os.PathLike[str],
    *,
    limit: int | None = None,
    block_size: int | None = None,
    skip_bad: bool = False,
    concurrency: int = DEFAULT_CONCURRENCY,
    seed: int = 0,
    progress: Progress | None = None,
) -> Trace:
    """Read a trace of any of the formats above.

    `limit`: the first so many requests. `block_size`: tokens; else the file's own, else for ids what explains their
    number and `input_length`, for tokens 16. `skip_bad`: leave bad lines out, and count them in the trace.
    `concurrency` and `seed` merge session files, see `_merge`.

    Ids that are not dense are numbered anew; consecutive ones stay so. Cost: some 20 us a request, of a token
    0.1 us; memory by requests and runs (or tokens), not by blocks.

    Raises: TraceError, with file, line and field; ValueError for an argument below 1.
    """
    for argument, value in (("limit", limit), ("block_size", block_size), ("concurrency", concurrency)):
        if value is not None and value < 1:
            raise ValueError(f"{argument} must be at least 1, got {value}")
    name = os.fspath(path)
    lines = _Lines(block_size)
    number = 0
    skipped = Skipped()

    def skip(line: int, message: str) -> None:
        error = TraceError(name, line, message)
        if not skip_bad:
            raise error
        skipped.num_lines += 1
        if skipped.num_lines <= _NUM_REASONS:
            skipped.reasons.append(error)

    try:
        for number, line in enumerate(_read_lines(name, progress), 1):
            try:
                lines.add(line)
            except _BadLine as error:
                skip(number, str(error))
            if limit is not None and lines.num_requests >= limit:
                break
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        skip(number + 1, f"the gzip stream is broken: {error}")
    except OSError as error:
        raise TraceError(name, 0, error.strerror or str(error)) from None

    if lines.token_requests:
        size = block_size or DEFAULT_BLOCK_SIZE
        num_blocks = count_blocks(lines.token_requests, size)
        return TokenTrace(name, lines.token_requests, block_size=size, num_blocks=num_blocks, skipped=skipped)
    requests = _merge(lines.sessions, concurrency, seed)[:limit] if lines.sessions else lines.requests
    if not requests:
        raise TraceError(name, 0, _why_nothing(number, skipped))
    size = lines.block_size or _infer_block_size(requests)
    if not size:
        raise TraceError(name, 0, "block_size: not given, and no size explains input_length and the number of ids")
    dense, num_blocks = _densify(requests)
    if num_blocks >= _INT32_END:
        raise TraceError(name, 0, f"there are {num_blocks} distinct blocks, the bound is 2^31")
    return IdTrace(name, dense, block_size=size, num_blocks=num_blocks, skipped=skipped)


def count_blocks(requests: Iterable[TokenRequest], block_size: int) -> int:
    """How many distinct whole blocks the requests have: a block is its tokens and all before them."""
    width = block_size * TOKEN_BYTES
    seen: set[int] = set()
    for request in requests:
        tokens = request.tokens + request.output_tokens
        prefix = 0
        for end in range(width, len(tokens) + 1, width):
            prefix = hash((prefix, tokens[end - width : end]))
            seen.add(prefix)
    return len(seen)


class _BadLine(Exception):
    """What is wrong with a line, and in which field."""


@dataclass(slots=True)
class _FileRequest:
    """A request with ids as its file has them; `runs` are half open."""

    time: float  # s
    num_prompt_tokens: int
    num_output_tokens: int
    runs: list[tuple[int, int]]


@dataclass(slots=True)
class _Session:
    """Requests of one client, times from its first one on; it lasts until its last answer."""

    requests: list[_FileRequest]
    seconds: float


class _Lines:
    """What the good lines of a file have told so far. A bad one changes nothing."""

    def __init__(self, block_size: int | None) -> None:
        self.block_size = block_size
        self.requests: list[_FileRequest] = []
        self.sessions: list[_Session] = []
        self.token_requests: list[TokenRequest] = []
        self._format = ""
        self._fields: set[str] = set()  # of those that may be left out, the ones that the first line has
        self._numbers: dict[int, int] = {}  # id -> its rank among the ids, by first appearance
        self._first_free_id = 0  # after those of the sessions so far

    @property
    def num_requests(self) -> int:
        """How many requests are known in their final order: none of a session file before its end."""
        return len(self.requests) or len(self.token_requests)

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
        size = self._block_size(record) if known != "tokens" else self.block_size
        _FORMATS[known](self, record)
        if not self._format:
            self._format, self._fields = known, _OPTIONAL & record.keys()
        self.block_size = size

    def _block_size(self, record: dict[str, Any]) -> int | None:
        if "block_size" not in record:
            return self.block_size
        size = _int(record, "block_size", least=1)
        if self.block_size not in (None, size):
            raise _BadLine(f"block_size: {size}, but {self.block_size} {'before' if self._format else 'was asked for'}")
        return size

    def _add_ids(self, record: dict[str, Any]) -> None:
        request = _id_request(record)
        ids = _ints(record, "hash_ids")
        numbers = self._numbers
        request.runs = _as_runs([numbers.setdefault(number, len(numbers)) for number in ids])
        self.requests.append(request)

    def _add_runs(self, record: dict[str, Any]) -> None:
        request = _id_request(record)
        request.runs = _runs(record, "hash_runs")
        self.requests.append(request)

    def _add_session(self, record: dict[str, Any]) -> None:
        if self.block_size is None and "block_size" not in record:
            raise _BadLine("block_size: missing")
        items = _get(record, "requests")
        if type(items) is not list:
            raise _BadLine(f"requests: must be a list, got {_short(items)}")
        requests: list[_FileRequest] = []
        end = 0.0  # of the last answer
        for index, item in enumerate(items):
            where = f"requests[{index}]."
            if type(item) is not dict:
                raise _BadLine(f"{where[:-1]}: must be an object, got {_short(item)}")
            time = _number(item, "t", where)
            answered = time + (0.0 if item.get("api") is None else _number(item, "api", where, least=0))
            end = max(end, answered) if requests else answered
            sizes = _int(item, "in", where), _int(item, "out", where)
            requests.append(_FileRequest(time, *sizes, _runs(item, "h", where)))
        if not requests:
            return
        start = min(request.time for request in requests)
        offset = self._first_free_id
        for request in requests:
            request.time -= start
            request.runs = [(first + offset, end + offset) for first, end in request.runs]
            self._first_free_id = max([self._first_free_id, *(end for _, end in request.runs)])
        self.sessions.append(_Session(requests, end - start))

    def _add_tokens(self, record: dict[str, Any]) -> None:
        tokens = _ints(record, "tokens", end=_INT32_END)
        if not tokens:
            raise _BadLine("tokens: must have at least one token")
        output = _ints(record, "output_tokens", end=_INT32_END) if "output_tokens" in record else []
        time = _number(record, "timestamp") / 1000 if "timestamp" in record else 0.0
        self.token_requests.append(TokenRequest(time, array("i", tokens).tobytes(), array("i", output).tobytes()))


_FORMATS: dict[str, Callable[[_Lines, dict[str, Any]], None]] = {
    "hash_ids": _Lines._add_ids,
    "hash_runs": _Lines._add_runs,
    "requests": _Lines._add_session,
    "tokens": _Lines._add_tokens,
}


def _read_lines(name: str, progress: Progress | None) -> Iterator[bytes]:
    with open(name, "rb") as file:
        size = os.fstat(file.fileno()).st_size  # of a pipe 0
        stream = gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file
        for number, line in enumerate(stream):
            if progress is not None and size and number % 64 == 0:
                progress(file.tell() / size)
            yield line


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


def _id_request(record: dict[str, Any]) -> _FileRequest:
    """All but the runs."""
    return _FileRequest(
        _number(record, "timestamp") / 1000 if "timestamp" in record else 0.0,
        _int(record, "input_length"),
        _int(record, "output_length") if "output_length" in record else 0,
        [],
    )


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


def _runs(record: dict[str, Any], name: str, where: str = "") -> list[tuple[int, int]]:
    """Runs with both ends included as half open ones."""
    values = _get(record, name, where)
    if type(values) is not list:
        raise _BadLine(f"{where}{name}: must be a list of runs [first, last], got {_short(values)}")
    runs = []
    num_blocks = 0
    for index, value in enumerate(values):
        if not (type(value) is list and [type(end) for end in value] == [int, int] and 0 <= value[0] <= value[1]):
            raise _BadLine(
                f"{where}{name}[{index}]: must be a run [first, last] with 0 <= first <= last, got {_short(value)}"
            )
        runs.append((value[0], value[1] + 1))
        num_blocks += value[1] + 1 - value[0]
        if num_blocks > MAX_REQUEST_BLOCKS:
            raise _BadLine(f"{where}{name}[{index}]: {_short(value)} makes the prompt longer than 2^24 blocks")
    return runs


def _as_runs(ids: list[int]) -> list[tuple[int, int]]:
    runs = []
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


def _merge(sessions: list[_Session], concurrency: int, seed: int) -> list[_FileRequest]:
    """All sessions as one stream: `concurrency` slots, each starts the next session when its former one is over.

    Sessions come in shuffled order; the slots start at times spread evenly at random over the mean session. Times
    inside a session stay as they are.
    """
    rng = random.Random(seed)
    order = sessions[:]
    rng.shuffle(order)
    mean = sum(session.seconds for session in order) / len(order)
    slots = [rng.uniform(0, mean) for _ in range(min(concurrency, len(order)))]  # when each is free
    heapify(slots)
    merged = []
    for session in order:
        start = slots[0]
        heapreplace(slots, start + session.seconds)
        for request in session.requests:
            request.time += start
            merged.append(request)
    merged.sort(key=lambda request: request.time)
    return merged


def _why_nothing(num_lines: int, skipped: Skipped) -> str:
    if skipped.reasons:
        return f"no request is left, {skipped.num_lines} bad lines were skipped, the first: {skipped.reasons[0]}"
    return "there is no request in it" if num_lines else "the file is empty"


def _infer_block_size(requests: list[_FileRequest]) -> int:
    """The block size, a power of two if any is, of which every prompt fills its blocks but for the last; 0 if none."""
    least, most = 1, _INT32_END
    for request in requests:
        num_tokens, num_blocks = request.num_prompt_tokens, sum(end - start for start, end in request.runs)
        if num_blocks:
            least = max(least, -(-num_tokens // num_blocks))
        if num_blocks > 1:
            most = min(most, (num_tokens - 1) // (num_blocks - 1))
    power = 1 << (least - 1).bit_length()
    return power if power <= most else least if least <= most else 0


def _densify(requests: list[_FileRequest]) -> tuple[list[IdRequest], int]:
    """Number all ids [0, n) in their order, so that consecutive ones stay so; returns n too. O(runs x log runs)."""
    starts: list[int] = []  # of the stretches of ids that are in use
    bases: list[int] = []  # their new numbers
    num_blocks = top = 0
    for start, end in sorted({run for request in requests for run in request.runs}):
        if not starts or start > top:
            starts.append(start)
            bases.append(num_blocks)
            top = start
        if end > top:
            num_blocks += end - top
            top = end
    dense = []
    for request in requests:
        runs = array("q")
        for start, end in request.runs:
            stretch = bisect_right(starts, start) - 1
            shift = bases[stretch] - starts[stretch]
            if runs and runs[-1] == start + shift:
                runs[-1] = end + shift
            else:
                runs.extend((start + shift, end + shift))
        dense.append(IdRequest(request.time, request.num_prompt_tokens, request.num_output_tokens, runs))
    return dense, num_blocks
