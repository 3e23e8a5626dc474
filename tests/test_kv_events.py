"""KV events as messages: the bytes that other routers read, and whatever else may arrive."""

import re
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from radixkv.hashing import SEED, block_hashes, namespace_salt, salt_seed
from radixkv.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode,
    encode,
)
from radixkv.tokens import pack

BATCH = EventBatch(
    1.5,
    [
        BlockStored([7], None, [1, 2, 3, 4], 4, medium="GPU", group_idx=0),
        BlockRemoved([7], "GPU", 0),
        AllBlocksCleared(),
    ],
    0,
)
# of a timestamp, one stored block, its removal and a clear, as vLLM's readers and Dynamo take them
GOLDEN: dict[Any, str] = {
    "map": "93cb3ff800000000000093de0009a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739107b1706172656e"
    "745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756d"
    "a3475055a96c6f72615f6e616d65c0a967726f75705f6964780084a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368"
    "65739107a66d656469756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656400",
    "array": "93cb3ff8000000000000939aab426c6f636b53746f7265649107c0940102030404c0a3475055c0c00094ac426c6f636b52656d6f"
    "7665649107a34750550091b0416c6c426c6f636b73436c656172656400",
}


@pytest.mark.parametrize("wire", GOLDEN)
def test_golden_bytes(wire: Any) -> None:
    assert encode(BATCH, wire).hex() == GOLDEN[wire]
    assert decode(bytes.fromhex(GOLDEN[wire])) == BATCH


def message(*events: object, rank: object = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, events, rank])


def test_what_sglang_sends_is_read() -> None:
    """Signed ids, absent fields, fields that are not known, a salt, no rank."""
    stored = {
        "type": "BlockStored",
        "block_hashes": [-1, 5],
        "token_ids": [1, 2],
        "block_size": 1,
        "lora_id": 3,
        "cache_salt": "tenant",
        "session_id": {"deep": [1, {"er": None}]},
    }
    removed = {"type": "BlockRemoved", "block_hashes": [-1]}
    assert decode(msgspec.msgpack.encode([1, [stored, removed]])) == EventBatch(
        1.0,
        [
            BlockStored([2**64 - 1, 5], None, [1, 2], 1, lora_id=3, cache_salt="tenant"),
            BlockRemoved([2**64 - 1]),
        ],
    )


def test_ids_as_bytes_are_folded_to_their_last_64_bits() -> None:
    event = ["BlockStored", [bytes(24) + b"\1" * 8, b"\2"], b"\3" * 32, [1, 2], 1, None, "GPU", "adapter"]
    (stored,) = decode(message(event)).events
    assert stored == BlockStored(
        [0x0101010101010101, 2], 0x0303030303030303, [1, 2], 1, medium="GPU", lora_name="adapter"
    )


def test_newer_fields_at_the_end_of_an_array_are_no_salt() -> None:
    event = ["BlockStored", [7], None, [1], 1, None, None, None, [["x"]], 1, "full", None, "local", None, "session"]
    assert decode(message(event)).events == [BlockStored([7], None, [1], 1, extra_keys=[["x"]], group_idx=1)]


def test_an_event_of_an_unknown_type_is_left_out_and_the_others_are_kept() -> None:
    payload = message(
        {"type": "BlockMoved", "block_hashes": "whatever"}, ["BlockMoved", 1], ["AllBlocksCleared"], {"type": "New"}
    )
    assert decode(payload).events == [AllBlocksCleared()]


STORED: dict[str, Any] = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1}


@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        (b"", "not a batch of KV events"),
        (b"\xc1", "not a batch of KV events"),
        (b"\x93\xcb", "not a batch of KV events"),
        (b"\xdd\xff\xff\xff\xff", "not a batch of KV events"),
        (b"\x91" * 100_000, "not a batch of KV events"),
        (msgspec.msgpack.encode({"ts": 1.0}), "not a batch of KV events: Expected `array`, got `object`"),
        (msgspec.msgpack.encode([1.5]), "not a batch of KV events"),
        (message()[:-1], "not a batch of KV events"),
        (message() + b"\0", "not a batch of KV events"),
        (message(rank="first"), "not a batch of KV events"),
        (message(7), "event 0 of a batch"),
        (message({}), "event 0 of a batch of KV events: Object missing required field `type`"),
        (message([]), "event 0 of a batch"),
        (message(["AllBlocksCleared"], {"type": 3}), "event 1 of a batch"),
        (message({"type": "BlockStored"}), "event 0 of a batch of KV events: Object missing required field"),
        (message({**STORED, "token_ids": [-1]}), r"`int` >= 0 - at `\$.token_ids"),
        (message({**STORED, "token_ids": [2**31]}), r"`int` <= 2147483647 - at `\$.token_ids"),
        (message({**STORED, "token_ids": [1.5]}), r"at `\$.token_ids"),
        (message({**STORED, "block_size": -1}), r"`int` >= 0 - at `\$.block_size"),
        (message({**STORED, "block_hashes": ["one"]}), r"at `\$.block_hashes"),
        (message({**STORED, "cache_salt": 7}), r"at `\$.cache_salt"),
        (message(["BlockRemoved"]), "event 0 of a batch"),
        (b"\x93\x01\x91\x81\xa4type\xa2\xff\xff\x00", "event 0 of a batch"),
    ],
)
def test_a_poisoned_message_is_one_clear_error(payload: bytes, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        decode(payload)


@given(st.binary(max_size=60) | st.binary(max_size=30).map(lambda tail: bytes.fromhex(GOLDEN["map"])[:-5] + tail))
def test_whatever_arrives_is_a_batch_or_a_value_error(payload: bytes) -> None:
    try:
        batch = decode(payload)
    except ValueError:
        return
    assert isinstance(batch, EventBatch)


ids = st.integers(0, 2**64 - 1)
optional = st.none() | st.text(max_size=5)
events = st.one_of(
    st.builds(
        BlockStored,
        st.lists(ids, max_size=3),
        st.none() | ids,
        st.lists(st.integers(0, 2**31 - 1), max_size=9),
        st.integers(1, 99),
        st.none() | st.integers(0, 99),
        optional,
        optional,
        st.none() | st.lists(st.none() | st.lists(st.text(max_size=3), max_size=2), max_size=2),
        st.none() | st.integers(0, 3),
    ),
    st.builds(BlockRemoved, st.lists(ids, max_size=3), optional, st.none() | st.integers(0, 3)),
    st.just(AllBlocksCleared()),
)


@given(st.lists(events, max_size=4), st.none() | st.integers(0, 7), st.sampled_from(["map", "array"]))
def test_what_is_written_is_read(written: list[Any], rank: int | None, wire: Any) -> None:
    batch = EventBatch(1.5, written, rank)
    assert decode(encode(batch, wire)) == batch


def test_a_salt_has_a_place_in_maps_only() -> None:
    batch = EventBatch(1.5, [BlockStored([7], None, [1], 1, cache_salt="tenant")])
    assert decode(encode(batch, "map")) == batch
    with pytest.raises(ValueError, match="no place for the cache salt 'tenant'"):
        encode(batch, "array")


def test_an_unknown_wire_is_refused() -> None:
    with pytest.raises(ValueError, match="wire must be one of map, array, got 'json'"):
        encode(BATCH, "json")  # type: ignore[arg-type]


# Ids


def test_ids_are_a_rolling_xxh3_of_blocks() -> None:
    tokens = pack(range(1, 11))
    local = [xxh3_64_intdigest(struct.pack("<4I", *range(i, i + 4)), 1337) for i in (1, 5)]
    assert block_hashes(tokens, 4) == [local[0], xxh3_64_intdigest(struct.pack("<2Q", *local), 1337)]
    assert local == [14643705804678351452, 16777012769546811212]  # as Dynamo's compute_block_hash_for_seq says


def test_ids_go_on_where_a_parent_ends() -> None:
    tokens = pack(range(12))
    whole = block_hashes(tokens, 2)
    assert len(whole) == 6
    for cut in range(1, 6):
        assert block_hashes(tokens[cut * 8 :], 2, parent=whole[cut - 1]) == whole[cut:]


NAMESPACES = [
    None,
    "7",
    7,
    True,
    1,
    b"7",
    (),
    ("lora", 7),
    ("lora", "7"),
    (("lora", 7),),
    "('lora', 7)",
    "radixkv:7",
    "radixkv:'7'",
    "\ud800",
    "\\ud800",
    "",
    (None,),
    2**256 - 1,
]


def test_every_namespace_has_a_salt_and_a_chain_of_its_own() -> None:
    salts = [namespace_salt(namespace) for namespace in NAMESPACES]
    assert len(set(salts)) == len(NAMESPACES)
    tokens = pack(range(8))
    chains = [block_hashes(tokens, 4, seed=salt_seed(salt)) for salt in salts]
    assert len({number for chain in chains for number in chain}) == 2 * len(NAMESPACES)
    assert salt_seed(None) == SEED


def test_the_salts_that_the_docs_name() -> None:
    assert namespace_salt("tenant") == "tenant"
    assert namespace_salt(7) == "radixkv:7"
    assert namespace_salt(("é",)) == r"radixkv:('\xe9',)"
    assert namespace_salt("") == "radixkv:''"  # to Dynamo an empty salt is none
    assert namespace_salt(("lora", 7)) == "radixkv:('lora', 7)"
    assert salt_seed("tenant") == (1337 + xxh3_64_intdigest(b"tenant")) % 2**64


class Text(str):
    pass


deep: Any = ()
for _ in range(20):
    deep = (deep,)


@pytest.mark.parametrize(
    ("namespace", "error"),
    [
        (1.5, TypeError("got 1.5")),
        (frozenset(), TypeError("got frozenset()")),
        (("lora", 1.5), TypeError("got ('lora', 1.5)")),
        (Text("tenant"), TypeError("got 'tenant'")),
        (2**256, ValueError("at most 256 bits")),
        (deep, ValueError("at most 16 tuples deep")),
    ],
)
def test_a_namespace_without_a_lasting_name_is_refused(namespace: Any, error: Exception) -> None:
    with pytest.raises(type(error), match=re.escape(str(error))):
        namespace_salt(namespace)


def test_offloaded_blocks_without_tokens_are_read() -> None:
    """vLLM's offloading names blocks that it copied, with no tokens and a block size of 0."""
    event = {"type": "BlockStored", "block_hashes": [1], "token_ids": [], "block_size": 0, "medium": "CPU"}
    assert decode(message(event)).events == [BlockStored([1], None, [], 0, medium="CPU")]
