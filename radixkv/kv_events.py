"""KV events as messages: what a cache tells routers, as msgpack. Needs msgspec (the extra `events`).

The format is that of vLLM, SGLang and Dynamo, see docs/events.md. Knows nothing of sockets, caches or indexes.
"""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from radixkv.tokens import TOKEN_BYTES

Wire: TypeAlias = Literal["map", "array"]
WIRES: tuple[Wire, ...] = ("map", "array")


class BlockStored(msgspec.Struct, frozen=True):
    """Blocks of one path can be matched now; the first continues `parent_block_hash`, None at the start of a prompt.

    Ids are in [0, 2^64); `token_ids` are those of all blocks, `block_size` each.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True):
    """Blocks that can no longer be matched."""

    block_hashes: list[int]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True):
    """Nothing can be matched any more."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True):
    """Events in the order in which they happened; `ts` is seconds since 1970."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


def encode(batch: EventBatch, wire: Wire = "map") -> bytes:
    """A batch as msgpack, each event as a map or as an array. Arrays have no place for a `cache_salt`.

    Raises: ValueError for another wire, or a salt in an array.
    """
    if wire not in WIRES:
        raise ValueError(f"wire must be one of {', '.join(WIRES)}, got {wire!r}")
    form = _as_map if wire == "map" else _as_array
    payload: list[object] = [batch.ts, [form(event) for event in batch.events]]
    if batch.data_parallel_rank is not None:
        payload.append(batch.data_parallel_rank)
    return _ENCODER.encode(payload)


def decode(payload: bytes) -> EventBatch:
    """A batch from msgpack, its events maps or arrays, ids ints or bytes, all folded to 64 bits.

    Missing optional fields are None, unknown ones ignored; an event of a type that is not known is left out.

    Raises: ValueError for anything that is not such a message; it says what is wrong where.
    """
    try:
        message = _PAYLOAD.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not a batch of KV events: {error}") from None
    events: list[Event] = []
    for number, raw in enumerate(message.events):
        try:
            event = _decode_event(raw)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ValueError(f"event {number} of a batch of KV events: {error}") from None
        if event is not None:
            events.append(event)
    return EventBatch(message.ts, events, message.data_parallel_rank)


def fold(block_hash: int | bytes) -> int:
    """A block's id in [0, 2^64): an int modulo 2^64, of bytes the last eight, big-endian."""
    number = block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash[-8:], "big")
    return number & _MAX_ID


# What is read off the wire. Fields of an array are in this order; a map has them by name, and more of them.

_MAX_ID = 2**64 - 1
_Hash: TypeAlias = int | bytes
_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 8 * TOKEN_BYTES - 1)]
_Size = Annotated[int, msgspec.Meta(ge=0)]  # 0 in vLLM's events of offloaded blocks, which have no tokens


class _Payload(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _TypeOfArray(msgspec.Struct, array_like=True):
    type: str


class _TypeOfMap(msgspec.Struct):
    type: str


class _StoredArray(msgspec.Struct, array_like=True):
    type: str
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[_Token]
    block_size: _Size
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class _StoredMap(msgspec.Struct, kw_only=True):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None = None
    token_ids: list[_Token]
    block_size: _Size
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    cache_salt: str | None = None


class _RemovedArray(msgspec.Struct, array_like=True):
    type: str
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None


class _RemovedMap(msgspec.Struct):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None


_ENCODER = msgspec.msgpack.Encoder()
_PAYLOAD = msgspec.msgpack.Decoder(_Payload)
_TYPES = msgspec.msgpack.Decoder(_TypeOfMap), msgspec.msgpack.Decoder(_TypeOfArray)
_STORED = msgspec.msgpack.Decoder(_StoredMap), msgspec.msgpack.Decoder(_StoredArray)
_REMOVED = msgspec.msgpack.Decoder(_RemovedMap), msgspec.msgpack.Decoder(_RemovedArray)


def _decode_event(raw: msgspec.Raw) -> Event | None:
    """None for a type that is not known."""
    first = memoryview(raw)[0]
    is_array = 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)
    kind = _TYPES[is_array].decode(raw).type
    if kind == "AllBlocksCleared":
        return AllBlocksCleared()
    if kind == "BlockRemoved":
        removed = _REMOVED[is_array].decode(raw)
        return BlockRemoved([fold(each) for each in removed.block_hashes], removed.medium, removed.group_idx)
    if kind != "BlockStored":
        return None
    stored = _STORED[is_array].decode(raw)
    return BlockStored(
        block_hashes=[fold(each) for each in stored.block_hashes],
        parent_block_hash=None if stored.parent_block_hash is None else fold(stored.parent_block_hash),
        token_ids=stored.token_ids,
        block_size=stored.block_size,
        lora_id=stored.lora_id,
        medium=stored.medium,
        lora_name=stored.lora_name,
        extra_keys=stored.extra_keys,
        group_idx=stored.group_idx,
        cache_salt=stored.cache_salt if isinstance(stored, _StoredMap) else None,
    )


def _as_map(event: Event) -> object:
    if isinstance(event, AllBlocksCleared):
        return {"type": "AllBlocksCleared"}
    if isinstance(event, BlockRemoved):
        removed = {"type": "BlockRemoved", "block_hashes": event.block_hashes, "medium": event.medium}
        return removed if event.group_idx is None else {**removed, "group_idx": event.group_idx}
    stored = {
        "type": "BlockStored",
        "block_hashes": event.block_hashes,
        "parent_block_hash": event.parent_block_hash,
        "token_ids": event.token_ids,
        "block_size": event.block_size,
        "lora_id": event.lora_id,
        "medium": event.medium,
        "lora_name": event.lora_name,
    }
    for name in ("extra_keys", "cache_salt", "group_idx"):
        value = getattr(event, name)
        if value is not None:
            stored[name] = value
    # the number of fields in two bytes, as vLLM writes it, so that the bytes are the same
    return msgspec.Raw(b"\xde\x00" + bytes((len(stored),)) + _ENCODER.encode(stored)[1:])


def _as_array(event: Event) -> list[object]:
    if isinstance(event, AllBlocksCleared):
        return ["AllBlocksCleared"]
    if isinstance(event, BlockRemoved):
        return ["BlockRemoved", event.block_hashes, event.medium, event.group_idx]
    if event.cache_salt is not None:
        raise ValueError(f"events as arrays have no place for the cache salt {event.cache_salt!r}; use maps")
    return [
        "BlockStored",
        event.block_hashes,
        event.parent_block_hash,
        event.token_ids,
        event.block_size,
        event.lora_id,
        event.medium,
        event.lora_name,
        event.extra_keys,
        event.group_idx,
    ]
