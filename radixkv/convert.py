"""Any trace as anonymous `hash_ids` lines, at a block size of one's choice. Knows nothing of files.

Of tokens and text only whole blocks have an id: `hash_ids` are those that a prompt can hit, which leaves at least its
last token, and `output_hash_ids` those that are cached behind them. Ids are chained and keyed as in `radixkv.record`.
"""

from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from radixkv.record import chained_ids, keyed_hash, namespace_seed
from radixkv.replay import packed_ids
from radixkv.tokens import TOKEN_BYTES
from radixkv.trace import IdRequest, IdTrace, TokenRequest, TokenTrace, Trace, count_blocks

_Ids = npt.NDArray[np.int32]


def converted(trace: Trace, block_size: int, salt: bytes) -> Iterator[dict[str, Any]]:
    """The requests of a trace as records, one JSON line each. About 1 us a block.

    `salt`, up to 64 bytes: equal prefixes of tokens have equal ids in all traces that are converted with it; what has
    ids already is kept apart by the trace's name. Raises: ValueError, see `with_block_size`.
    """
    if isinstance(trace, TokenTrace):
        return (_of_tokens(request, block_size, salt) for request in trace.requests)
    return _of_ids(with_block_size(trace, block_size), salt)


def with_block_size(trace: Trace, block_size: int) -> Trace:
    """The trace in blocks of another size. O(blocks).

    Raises: ValueError if the trace has ids, and the size is no multiple of its own.
    """
    if isinstance(trace, TokenTrace):
        return replace(trace, block_size=block_size, num_blocks=count_blocks(trace.requests, block_size))
    factor, rest = divmod(block_size, trace.block_size)
    if rest or not factor:
        raise ValueError(f"block_size must be a multiple of the trace's own, {trace.block_size}, got {block_size}")
    if factor == 1:
        return trace
    numbers = np.full(trace.num_blocks, -1, np.int32)  # of the last of `factor` blocks -> of them as one
    num_blocks = 0
    requests = []
    for request in trace.requests:
        known = request.path is not None
        prompt = _grouped(request.runs, factor, partial=not known)
        path = _grouped(request.path, factor, partial=False) if request.path is not None else prompt
        new = path[numbers[path] < 0]
        numbers[new] = np.arange(num_blocks, num_blocks + len(new), dtype=np.int32)
        num_blocks += len(new)
        runs = _as_runs(numbers[prompt])
        path_runs = _as_runs(numbers[path]) if known else None
        counts = request.num_prompt_tokens, request.num_output_tokens
        requests.append(IdRequest(request.time, *counts, runs, path_runs))
    return replace(trace, requests=requests, block_size=block_size, num_blocks=num_blocks)


def _of_tokens(request: TokenRequest, block_size: int, salt: bytes) -> dict[str, Any]:
    written = request.tokens + request.output_tokens[:-TOKEN_BYTES]  # the last token of an answer never has KV
    ids = chained_ids(written, block_size, namespace_seed(request.namespace, salt), salt)
    return _record(request, block_size, ids, (request.num_prompt_tokens - 1) // block_size)


def _of_ids(trace: Trace, salt: bytes) -> Iterator[dict[str, Any]]:
    assert isinstance(trace, IdTrace)
    name = trace.name.encode("utf-8", "surrogateescape")
    hashes = np.zeros(trace.num_blocks, np.uint64)  # 0 where it was not asked for yet
    for request in trace.requests:
        path = np.frombuffer(packed_ids(request.runs if request.path is None else request.path), np.int32)
        for number in path[hashes[path] == 0].tolist():
            hashes[number] = int.from_bytes(keyed_hash(b"%d %b" % (number, name), salt), "little")
        yield _record(request, trace.block_size, hashes[path].tolist(), request.num_blocks)


def _record(request: IdRequest | TokenRequest, block_size: int, ids: list[int], num_prompt: int) -> dict[str, Any]:
    record: dict[str, Any] = {
        "timestamp": round(request.time * 1000, 3),
        "input_length": request.num_prompt_tokens,
        "output_length": request.num_output_tokens,
        "block_size": block_size,
        "hash_ids": ids[:num_prompt],
    }
    if len(ids) > num_prompt:
        record["output_hash_ids"] = ids[num_prompt:]
    return record


def _grouped(runs: "array[int]", factor: int, *, partial: bool) -> _Ids:
    """The last block of each `factor` blocks; of a rest too where that is `partial`."""
    ids = np.frombuffer(packed_ids(runs), np.int32)
    last = ids[factor - 1 :: factor]
    return np.append(last, ids[-1:]) if partial and len(ids) % factor else last


def _as_runs(ids: _Ids) -> "array[int]":
    breaks = np.flatnonzero(np.diff(ids) != 1)
    starts, ends = np.concatenate([ids[:1], ids[breaks + 1]]), np.concatenate([ids[breaks], ids[-1:]]) + 1
    return array("q", np.stack([starts, ends], axis=1).ravel().tolist())
