"""The live cache's own record: a trace of what it was asked, that `radixkv replay` reads. Hashed, never text.

Knows the format of a line; reads of a request only its counts and tokens. A line is written when its request ends, in
the order in which the requests began:

    {"timestamp": ms, "input_length": n, "output_length": n, "block_size": n,
     "hash_ids": [...], "output_hash_ids": [...]}

Ids are chained and keyed: 64 bits of BLAKE2b over a block's tokens and the id before it. Without the salt nobody can
tell which text is behind an id, but equal prefixes have equal ids, in all records that were made with one salt.
"""

import gzip
import json
import os
import secrets
import time
import warnings
import weakref
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from hashlib import blake2b
from typing import IO, Any

from radixkv.tokens import TOKEN_BYTES
from radixkv.tree import typed_name

_ID_BYTES = 8
_FLUSH_BYTES = 1 << 18


@dataclass(slots=True)
class _Line:
    timestamp: int  # ms
    seed: bytes  # what the first block's id is chained to
    block_size: int
    num_tokens: int  # when the request began
    num_asked_tokens: int
    text: bytes = b""  # once the request has ended


class Recorder:
    """Writes the record of one cache. Not thread-safe, like the cache.

    What is there already is appended to. A file whose name ends in .gz is gzipped, each flush as a member of its own,
    so that what a killed process leaves is whole up to its last flush: at most 256 KiB of lines and the requests that
    were running are missing. An error of the disk ends the record with a warning, never a request.
    """

    def __init__(self, path: str | os.PathLike[str], *, salt: bytes | None = None) -> None:
        """`salt`: up to 64 bytes; those who know it can tell whether a text was sent. Default: random, kept nowhere.

        Raises: OSError if the file cannot be written, ValueError for a longer salt.
        """
        salt = secrets.token_bytes(16) if salt is None else salt
        if len(salt) > 64:
            raise ValueError(f"salt must be at most 64 bytes, got {len(salt)}")
        self._salt = salt
        self._path = os.fspath(path)
        self._file: IO[bytes] | None = open(self._path, "ab")  # noqa: SIM115  until close
        self._lines: dict[Any, _Line] = {}  # by request, in the order in which they began
        self._waiting: list[bytes] = []  # lines to be written
        self._waiting_bytes = 0
        self._seeds: dict[Hashable, bytes] = {}  # of namespaces: what their first blocks' ids are chained to
        self._epoch = 0  # how often anything was forgotten
        self._last_ms = 0

    def began(self, request: Any, namespace: Hashable, block_size: int, num_asked_tokens: int) -> None:
        """A request that has just begun. Of its prompt `num_asked_tokens` could have been hit; 0 for no lookup."""
        if self._file is None:
            return
        name = typed_name(namespace)
        seed = self._seeds.get(name)
        if seed is None:
            seed = self._seeds[name] = namespace_seed((self._epoch, name), self._salt)
        self._lines[request] = _Line(self._now(), seed, block_size, request.num_tokens, num_asked_tokens)

    def forked(self, request: Any, source: Any) -> None:
        """A fork of a request has just begun."""
        line = self._lines.get(source)
        if line is not None:
            self._lines[request] = _Line(self._now(), line.seed, line.block_size, request.num_tokens, 0)

    def ended(self, request: Any) -> None:
        """A request that was freed, or never will be. About 1 us a block."""
        line = self._lines.get(request)
        if line is None or line.text:
            return
        line.text = self._text(request, line)
        lines = self._lines
        while lines:
            first = next(iter(lines))
            text = lines[first].text
            if not text:
                break
            del lines[first]
            self._waiting.append(text)
            self._waiting_bytes += len(text)
        if self._waiting_bytes >= _FLUSH_BYTES:
            self.flush()

    def forgot(self, namespace: Hashable) -> None:
        """What was cached under a namespace is forgotten: ids before and after are never the same."""
        self._epoch += 1
        self._seeds.pop(typed_name(namespace), None)

    def forgot_all(self) -> None:
        """As `forgot`, of every namespace."""
        self._epoch += 1
        self._seeds.clear()

    def flush(self) -> None:
        """Write all requests that ended before any that still runs."""
        lines, self._waiting, self._waiting_bytes = b"".join(self._waiting), [], 0
        if self._file is None or not lines:
            return
        try:
            self._file.write(gzip.compress(lines, 6) if self._path.endswith(".gz") else lines)
            self._file.flush()
        except OSError as error:
            with suppress(OSError):
                self._file.close()
            self._file = None
            warnings.warn(f"the record {self._path} ends here: {error.strerror}", RuntimeWarning, stacklevel=2)

    def close(self) -> None:
        """Write everything, requests that still run as they stand, and end the record. Happens at exit by itself."""
        for request in [request for request, line in self._lines.items() if not line.text]:
            self.ended(request)
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _now(self) -> int:
        self._last_ms = max(self._last_ms, time.time_ns() // 1_000_000)  # subtle: a clock may be set back
        return self._last_ms

    def _text(self, request: Any, line: "_Line") -> bytes:
        size = line.block_size
        num_committed = request.num_committed_tokens // size * size
        key, start = request._key(0, num_committed)
        tokens = key[start : start + num_committed * TOKEN_BYTES]
        ids = chained_ids(tokens, size, line.seed, self._salt)
        num_asked = line.num_asked_tokens // size
        prompt, output = ids[:num_asked], ids[num_asked:]
        # subtle: a block that was asked for and never committed must not be found later
        prompt += [secrets.randbits(8 * _ID_BYTES) for _ in range(num_asked - len(prompt))]
        num_prompt = line.num_tokens if line.num_asked_tokens else 0
        fields = {
            "timestamp": line.timestamp,
            "input_length": num_prompt,
            "output_length": max(0, request.num_tokens - line.num_tokens),
            "block_size": size,
            "hash_ids": prompt,
            "output_hash_ids": output,
        }
        return json.dumps(fields).encode() + b"\n"


def namespace_seed(name: object, salt: bytes) -> bytes:
    """What the ids of a namespace are chained to."""
    return keyed_hash(repr(name).encode("utf-8", "surrogatepass"), salt)


def chained_ids(tokens: bytes, block_size: int, seed: bytes, salt: bytes) -> list[int]:
    """The ids of the whole blocks of packed tokens. About 1 us a block."""
    width = block_size * TOKEN_BYTES
    ids = []
    for end in range(width, len(tokens) + 1, width):
        seed = keyed_hash(seed + tokens[end - width : end], salt)
        ids.append(int.from_bytes(seed, "little"))
    return ids


def keyed_hash(data: bytes, salt: bytes) -> bytes:
    return blake2b(data, digest_size=_ID_BYTES, key=salt).digest()


def start_record(cache: Any, recorder: Recorder) -> None:
    """Record a new cache from now on, until it is gone, the program ends, or the recorder is closed.

    The calls that matter are wrapped in this one cache, so that without a record there is nothing to pay.
    """
    allocate, fork, free, reset, clear = cache.allocate, cache.fork, cache.free, cache.reset, cache.clear
    size = cache.block_size

    def recorded_allocate(tokens: Any, **options: Any) -> Any:
        request = allocate(tokens, **options)
        if options.get("cacheable", True):
            spare = min(1, options.get("min_prefill_tokens", 1))  # what else is left to prefill is not told
            asked = 0 if options.get("resumed", False) else request.num_tokens - spare
            namespace = getattr(tokens, "namespace", options.get("namespace"))  # a lookup has its own
            recorder.began(request, namespace, size, asked)
        return request

    def recorded_fork(request: Any) -> Any:
        forked, copies = fork(request)
        recorder.forked(forked, request)
        return forked, copies

    def recorded_free(request: Any) -> None:
        free(request)
        recorder.ended(request)

    def recorded_reset() -> None:
        reset()
        recorder.forgot_all()

    def recorded_clear(namespace: Hashable) -> None:
        clear(namespace)
        recorder.forgot(namespace)

    for wrapper in (recorded_allocate, recorded_fork, recorded_free, recorded_reset, recorded_clear):
        name = wrapper.__name__.removeprefix("recorded_")
        setattr(cache, name, wraps(getattr(type(cache), name))(wrapper))
    weakref.finalize(cache, recorder.close)
