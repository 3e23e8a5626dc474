"""The index of many workers' caches: exact with its events, whatever they hold, and bounded."""

import gc
import subprocess
import sys
import tracemalloc
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from radixkv.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, decode, encode
from radixkv.router import PrefixIndex
from radixkv.shared_tree import MAX_RUN

Path = tuple[tuple[int, ...], ...]  # the tokens of blocks from the first on


def stored(hashes: list[int], parent: int | None, tokens: Iterable[int], size: int = 2, **more: Any) -> BlockStored:
    return BlockStored(hashes, parent, list(tokens), size, **more)


def index_of(**workers: list[Event]) -> PrefixIndex:
    index = PrefixIndex(2)
    for worker, events in workers.items():
        index.apply(worker, events)
        index.check()
    return index


def test_match_is_the_leading_whole_blocks_that_each_worker_holds() -> None:
    index = index_of(
        a=[stored([1, 2, 3], None, [1, 2, 3, 4, 5, 6])],
        b=[stored([1, 2], None, [1, 2, 7, 8])],
        c=[stored([9], None, [3, 4])],
    )
    assert index.match([1, 2, 3, 4, 5, 6, 7]) == {"a": 6, "b": 2}
    assert index.match([1, 2, 3, 4, 5]) == {"a": 4, "b": 2}
    assert index.match([1, 2, 7, 8]) == {"a": 2, "b": 4}
    assert index.match([1]) == index.match([2, 1]) == {}
    assert index.num_distinct_blocks == 5  # the first is in two workers, and kept once


def test_ids_are_a_workers_own() -> None:
    index = index_of(a=[stored([1], None, [1, 2])], b=[stored([1], None, [3, 4])])
    index.apply("b", [stored([2], 1, [5, 6])])
    assert index.match([3, 4, 5, 6]) == {"b": 4}
    index.apply("b", [BlockRemoved([1])])
    assert index.match([1, 2]) == {"a": 2}
    assert index.match([3, 4]) == {}


def test_a_hole_ends_the_match_until_it_is_filled() -> None:
    index = index_of(a=[stored([1, 2, 3], None, [1, 2, 3, 4, 5, 6]), BlockRemoved([2])])
    assert index.match([1, 2, 3, 4, 5, 6]) == {"a": 2}
    index.apply("a", [stored([2], 1, [3, 4])])
    assert index.match([1, 2, 3, 4, 5, 6]) == {"a": 6}
    index.check()


def test_one_event_a_block_is_one_run() -> None:
    index = PrefixIndex(2)
    for number in range(100):
        index.apply("a", [stored([number], number - 1 if number else None, [number, 7])])
    assert index.match([token for number in range(100) for token in (number, 7)]) == {"a": 200}
    index.apply("a", [BlockRemoved(list(range(99, 49, -1)))])
    assert index.match([token for number in range(100) for token in (number, 7)]) == {"a": 100}
    assert index.num_distinct_blocks == 50
    index.check()


def test_a_prefix_may_lie_in_several_media() -> None:
    index = index_of(
        a=[
            stored([1, 2, 3], None, [1, 2, 3, 4, 5, 6], medium="GPU"),
            stored([1, 2, 3], None, [1, 2, 3, 4, 5, 6], medium="CPU"),
            BlockRemoved([3, 2], "GPU"),
            BlockRemoved([1], "CPU"),
        ]
    )
    prompt = [1, 2, 3, 4, 5, 6]
    assert index.match(prompt) == {"a": 6}
    assert index.match(prompt, media=["GPU"]) == index.match(prompt, media="GPU") == {"a": 2}
    assert index.match(prompt, media=["CPU"]) == index.match(prompt, media=["DISK"]) == {}
    assert index.num_blocks("a") == 3
    index.apply("a", [stored([4], 3, [7, 8], medium="GPU")])  # its parent is in another medium
    assert index.match([*prompt, 7, 8]) == {"a": 8}


def test_an_offloaded_block_is_known_by_its_id() -> None:
    """vLLM's offloading names blocks without tokens, with a block size of 0 or more."""
    index = index_of(
        a=[stored([1, 2], None, [1, 2, 3, 4]), BlockStored([1, 2, 8], None, [], 16, medium="CPU"), BlockRemoved([2, 1])]
    )
    assert index.match([1, 2, 3, 4], media=["CPU"]) == index.match([1, 2, 3, 4]) == {"a": 4}
    assert index.stats.skipped_blocks == {"unknown_block": 1}


def test_namespaces_share_nothing_however_the_engine_sends_them() -> None:
    index = index_of(
        sglang=[stored([1], None, [1, 2], cache_salt="x"), stored([2], 1, [3, 4])],
        vllm=[stored([1, 2], None, [1, 2, 3, 4], extra_keys=[["x"], None])],
        plain=[stored([1], None, [1, 2])],
        adapter=[stored([1, 2], None, [1, 2, 3, 4], lora_name="l", extra_keys=[["l", "x"], ["l"]])],
        number=[stored([1], None, [1, 2], lora_id=3)],
    )
    assert index.match([1, 2, 3, 4], namespace="x") == {"sglang": 4, "vllm": 4}
    assert index.match([1, 2, 3, 4]) == {"plain": 2}
    assert index.match([1, 2, 3, 4], lora="l", namespace="x") == {"adapter": 4}
    assert index.match([1, 2], lora=3) == {"number": 2}
    assert index.match([1, 2], namespace=7) == {}


@pytest.mark.parametrize("keys", [[["image", 0]], ["image"], "image", 5])
def test_a_block_that_holds_more_than_its_tokens_is_left_out(keys: object) -> None:
    index = index_of(a=[stored([1, 2, 3], None, [1, 2, 3, 4, 5, 6], extra_keys=[None, keys, None])])
    assert index.match([1, 2, 3, 4, 5, 6]) == {"a": 2}
    assert index.stats.skipped_blocks == {"extra_keys": 2}


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (stored([8], 77, [5, 6]), "unknown_parent"),
        (stored([8], 1, [5]), "partial"),
        (stored([8], 1, [5, 6, 7]), "partial"),
        (stored([8], 1, [5, 6, 7, 8], 4), "block_size"),
        (stored([8], 1, [5, -6]), "tokens"),
        (stored([8], 1, [5, 2**31]), "tokens"),
        (stored([8], 1, [5, 6], extra_keys=[["salt"]]), "extra_keys"),
        (stored([8], 1, [5, 6], group_idx=1), "group"),
        (stored([1], None, [5, 6]), "conflict"),
        (stored([1], 1, [5, 6]), "conflict"),
        (stored([1], None, [5, 6], cache_salt="x"), "conflict"),
        (stored([8], None, [1, 2]), "duplicate"),
        (BlockRemoved([8]), "unknown_block"),
        (BlockRemoved([1], "CPU"), "unknown_block"),
        (BlockRemoved([1], group_idx=1), "group"),
    ],
)
def test_what_cannot_be_used_is_counted_and_harms_nothing(event: Event, reason: str) -> None:
    index = index_of(a=[stored([1], None, [1, 2]), event, stored([2], 1, [3, 4])])
    assert index.match([1, 2, 3, 4]) == {"a": 4}
    assert index.match([1, 2, 5, 6]) == {"a": 2}
    assert index.match([5, 6]) == {}
    assert index.stats.skipped_blocks == {reason: 1}


def test_an_id_that_comes_twice_in_one_event_is_a_conflict() -> None:
    index = index_of(a=[stored([1, 2, 1], None, [1, 2, 3, 4, 5, 6])])
    assert index.match([1, 2, 3, 4, 5, 6]) == {"a": 4}
    assert index.stats.skipped_blocks == {"conflict": 1}


def test_what_is_stored_again_changes_nothing() -> None:
    event = stored([1, 2], None, [1, 2, 3, 4])
    index = index_of(a=[event, event, stored([1, 2, 3], None, [1, 2, 3, 4, 5, 6])])
    assert index.match([1, 2, 3, 4, 5, 6]) == {"a": 6}
    assert index.num_blocks("a") == 3
    assert not index.stats.skipped_blocks


def test_a_number_that_goes_backwards_is_a_restart() -> None:
    index = PrefixIndex(2)
    index.apply("a", [stored([1], None, [1, 2])], 0)
    index.apply("b", [stored([1], None, [1, 2])], 0)
    index.apply("a", [stored([2], 1, [3, 4])], 1)
    assert index.match([1, 2, 3, 4]) == {"a": 4, "b": 2}
    assert index.apply("a", [stored([5], None, [5, 6])], 0) == range(0)
    assert index.match([1, 2, 3, 4]) == {"b": 2}
    assert index.match([5, 6]) == {"a": 2}
    assert index.stats.restarts == 1
    index.check()


def test_a_gap_is_told_before_and_after() -> None:
    index = PrefixIndex(2)
    assert index.missing("a", 3) == range(3)
    assert index.missing("a", 0) == range(0)
    index.apply("a", [], 0)
    assert index.missing("a", 1) == range(0)
    assert list(index.missing("a", 4)) == [1, 2, 3]
    assert not index.missing("a", 0)
    assert index.apply("a", [], 4) == range(1, 4)
    assert index.apply("a", [], 5) == range(0)
    assert index.stats.missed_batches == 3
    assert index.apply("a", [AllBlocksCleared()], 9) == range(0)  # what was missed does not matter
    index.apply("a", [], 10)
    index.apply("b", [], None)
    assert index.stats.missed_batches == 3
    assert index.last_sequence("a") == 10
    assert index.last_sequence("b") is None


def test_a_removed_worker_is_gone_and_its_number_free() -> None:
    index = index_of(a=[stored([1, 2], None, [1, 2, 3, 4])], b=[stored([1], None, [1, 2])])
    index.remove("a")
    index.remove("nobody")
    index.check()
    assert index.match([1, 2, 3, 4]) == {"b": 2}
    assert (index.workers, index.num_distinct_blocks) == (["b"], 1)
    index.apply("c", [stored([1], None, [1, 2])])
    assert index.match([1, 2]) == {"b": 2, "c": 2}
    index.check()


def test_clear_forgets_blocks_and_number() -> None:
    index = PrefixIndex(2)
    index.apply("a", [stored([1], None, [1, 2])], 7)
    index.clear("a")
    index.clear("nobody")
    assert (index.match([1, 2]), index.last_sequence("a"), index.workers) == ({}, None, ["a"])
    index.check()


@pytest.mark.parametrize("wire", ["map", "array"])
def test_both_wire_forms_are_applied(wire: Any) -> None:
    index = PrefixIndex(2)
    events: list[Event] = [stored([2**64 - 1, 2], None, [1, 2, 3, 4]), BlockRemoved([2])]
    index.apply("a", decode(encode(EventBatch(1.0, events), wire)), 0)
    assert index.match([1, 2, 3, 4]) == {"a": 2}


def test_bad_arguments_are_named_and_apply_nothing() -> None:
    index = PrefixIndex(2)
    with pytest.raises(ValueError, match="block_size must be in"):
        PrefixIndex(0)
    with pytest.raises(TypeError, match="max_blocks must be an int"):
        PrefixIndex(2, max_blocks=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sequence must be in"):
        index.apply("a", [], -1)
    with pytest.raises(ValueError, match="sequence must be in"):
        index.apply("a", [], 2**63)
    with pytest.raises(TypeError, match="sequence must be an int, got '1'"):
        index.apply("a", [], "1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="event 1 must be one of"):
        index.apply("a", [stored([1], None, [1, 2]), {"type": "BlockStored"}])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="outside"):
        index.match([1, -2])
    assert (index.workers, index.num_distinct_blocks) == ([], 0)


@pytest.mark.parametrize("module", ["router", "subscriber", "routing"])
def test_without_the_extra_its_name_is_told(module: str) -> None:
    code = f"import sys; sys.modules['msgspec'] = None; import radixkv.{module}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: msgspec is not installed: pip install 'radixkv[events]'" in ran.stderr


def test_the_number_of_blocks_is_bounded() -> None:
    index = PrefixIndex(2, max_blocks=3)
    index.apply("a", [stored([1, 2, 3, 4], None, range(8)), stored([5], 4, [8, 9]), stored([6], None, [9, 9])])
    index.apply("b", [stored([1, 2], None, range(4))])
    index.check()
    assert index.match(range(10)) == {"a": 6, "b": 4}
    assert (index.num_blocks("a"), index.num_blocks("b")) == (3, 2)
    assert index.stats.skipped_blocks == {"full": 3}
    index.apply("a", [BlockRemoved([3]), stored([7], None, [9, 9])])
    assert index.match([9, 9]) == {"a": 2}


def test_what_others_hold_is_bounded_too() -> None:
    index = PrefixIndex(2, max_blocks=3)
    index.apply("b", [stored([1, 2, 3], None, range(6))])
    index.apply("a", [stored([7, 8], None, [9, 9, 9, 9]), stored([1, 2, 3], None, range(6))])
    index.check()
    assert index.match(range(6)) == {"a": 2, "b": 6}
    assert index.stats.skipped_blocks == {"full": 2}


def test_the_tokens_of_holes_are_bounded_too() -> None:
    """A worker that keeps only the ends of long paths does not fill the memory."""
    index = PrefixIndex(1, max_blocks=10)
    for number in range(50):
        ids = [number * 10 + i for i in range(9)]
        index.apply("a", [stored(ids, None, [number] * 9, 1), BlockRemoved(ids[:-1])])
        index.check()
        assert index.num_distinct_blocks <= 10


def test_media_are_bounded() -> None:
    index = PrefixIndex(1)
    for number in range(20):
        index.apply("a", [stored([1], None, [1], 1, medium=f"m{number}")])
    assert index.num_blocks("a") == 16
    assert index.stats.skipped_blocks == {"medium": 4}


def test_more_blocks_than_a_node_has_room_for() -> None:
    """In one event, and then in small ones."""
    index = PrefixIndex(1)
    num = 2 * MAX_RUN + 10
    ids, tokens = list(range(num)), np.arange(num + 10, dtype=np.int32)
    index.apply("a", [stored(ids, None, tokens[:num].tolist(), 1)])
    for number in range(num, num + 10):
        index.apply("a", [stored([number], number - 1, [number], 1)])
    assert index.match(tokens) == {"a": num + 10}
    index.apply("b", [stored(ids[: MAX_RUN + 3], None, tokens[: MAX_RUN + 3].tolist(), 1)])
    assert index.match(tokens) == {"a": num + 10, "b": MAX_RUN + 3}
    index.apply("a", [BlockRemoved([MAX_RUN])])
    assert index.match(tokens) == {"a": MAX_RUN, "b": MAX_RUN + 3}
    index.check()


def test_a_garbage_collection_walks_no_block() -> None:
    index = PrefixIndex(2)
    gc.collect()
    before = len(gc.get_objects())
    for number in range(2_000):
        index.apply(number % 7, [stored([number], None, [number, 1]), stored([number + 10_000], number, [1, 1])])
    gc.collect()
    assert len(gc.get_objects()) - before < 1_000


def test_memory_is_given_back() -> None:
    index = PrefixIndex(2)
    index.apply("a", [stored([1], None, [1, 2])])
    events = [
        stored(list(range(i, i + 50)), None, [token for j in range(50) for token in (i, j)]) for i in range(2, 5000, 50)
    ]
    tracemalloc.start()
    try:
        index.apply("a", events)
        index.apply("a", [AllBlocksCleared()])
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()
    assert index.num_distinct_blocks == 0


IDS = st.integers(0, 5)
MEDIUM = st.sampled_from([None, "GPU", "CPU"])
GROUP = st.sampled_from([None, None, 0, 1])
KEYS = st.lists(st.sampled_from([None, [], ["x"], [["image", 0]], "x", 5]), max_size=4)
ANY_EVENT = st.one_of(
    st.builds(
        lambda hashes, surplus, tokens, **fields: BlockStored(
            hashes, token_ids=tokens[: 2 * len(hashes) + surplus], **fields
        ),
        hashes=st.lists(IDS, max_size=4),
        surplus=st.sampled_from([0, 0, 0, -1, 1]),
        tokens=st.one_of(st.lists(st.integers(0, 1), min_size=9, max_size=9), st.lists(st.integers(-1, 1), max_size=9)),
        parent_block_hash=st.none() | IDS,
        block_size=st.sampled_from([2, 2, 2, 0, 1]),
        lora_id=st.sampled_from([None, None, 1]),
        medium=MEDIUM,
        lora_name=st.sampled_from([None, None, "x"]),
        extra_keys=st.none() | KEYS,
        group_idx=GROUP,
        cache_salt=st.sampled_from([None, None, "x"]),
    ),
    st.builds(BlockRemoved, st.lists(IDS, max_size=4), MEDIUM, GROUP),
    st.builds(AllBlocksCleared),
)


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.lists(ANY_EVENT, max_size=3), st.none() | st.integers(0, 3)), max_size=8
    ),
    st.integers(1, 8),
)
def test_whatever_a_worker_sends_the_index_stays_whole(
    batches: list[tuple[str, list[Event], int | None]], max_blocks: int
) -> None:
    index = PrefixIndex(2, max_blocks=max_blocks)
    for worker, events, number in batches:
        index.apply(worker, events, number)
        index.check()
        assert index.num_blocks(worker) <= max_blocks
        assert index.num_distinct_blocks <= max_blocks * len(index.workers)
        for event in events:
            if isinstance(event, BlockStored) and min(event.token_ids, default=0) >= 0:
                index.match(event.token_ids, namespace=event.cache_salt)


SIZE = 2
WORKERS = st.sampled_from(["a", "b", "c"])
MEDIA = st.sampled_from(["GPU", "CPU"])
SALTS = st.sampled_from([None, "salt"])
BLOCKS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=5)


@settings(max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
class IndexMachine(RuleBasedStateMachine):
    """The index beside plain sets of prefixes, one a worker and medium."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(SIZE)
        self.held: dict[tuple[str, str], set[tuple[str | None, Path]]] = {}
        self.ids: dict[tuple[str, str | None, Path], int] = {}

    def id_of(self, worker: str, salt: str | None, path: Path) -> int:
        return self.ids.setdefault((worker, salt, path), len(self.ids) % 7 * 2**61 + len(self.ids))

    def of(self, worker: str) -> set[tuple[str | None, Path]]:
        return {path for (name, _), paths in self.held.items() if name == worker for path in paths}

    @rule(worker=WORKERS, medium=MEDIA, salt=SALTS, blocks=BLOCKS, data=st.data())
    def store(
        self, worker: str, medium: str, salt: str | None, blocks: list[tuple[int, int]], data: st.DataObject
    ) -> None:
        parents = sorted(self.of(worker), key=repr)
        before: Path = ()
        parent = None
        if parents and data.draw(st.booleans()):
            salt, before = data.draw(st.sampled_from(parents))
            parent = self.id_of(worker, salt, before)
        paths = [(*before, *blocks[: i + 1]) for i in range(len(blocks))]
        hashes = [self.id_of(worker, salt, path) for path in paths]
        tokens = [token for block in blocks for token in block]
        self.index.apply(worker, [stored(hashes, parent, tokens, medium=medium, cache_salt=salt)])
        self.held.setdefault((worker, medium), set()).update((salt, path) for path in paths)

    @rule(worker=WORKERS, medium=MEDIA, data=st.data())
    def take_out(self, worker: str, medium: str, data: st.DataObject) -> None:
        held = self.held.get((worker, medium), set())
        paths = data.draw(st.lists(st.sampled_from(sorted(held, key=repr)), unique=True)) if held else []
        self.index.apply(worker, [BlockRemoved([self.id_of(worker, *path) for path in paths], medium)])
        held.difference_update(paths)

    @rule(worker=WORKERS, other=WORKERS, medium=MEDIA)
    def take_out_what_another_holds(self, worker: str, other: str, medium: str) -> None:
        if worker != other:
            hashes = [self.id_of(other, *path) for path in sorted(self.of(other), key=repr)]
            self.index.apply(worker, [BlockRemoved(hashes, medium)])

    @rule(worker=WORKERS)
    def offload(self, worker: str) -> None:
        paths = sorted(self.held.get((worker, "GPU"), ()), key=repr)
        hashes = [self.id_of(worker, *path) for path in paths]
        self.index.apply(worker, [BlockStored(hashes, None, [], 1, medium="CPU")])
        self.held.setdefault((worker, "CPU"), set()).update(paths)

    @rule(worker=WORKERS, how=st.sampled_from(["event", "clear", "remove", "restart"]))
    def forget(self, worker: str, how: str) -> None:
        if how == "event":
            self.index.apply(worker, [AllBlocksCleared()])
        elif how == "restart":
            self.index.apply(worker, [], 0)
            self.index.apply(worker, [], 0)
        else:
            getattr(self.index, how)(worker)
        for name, medium in self.held:
            if name == worker:
                self.held[name, medium].clear()

    @invariant()
    def matches_are_the_models(self) -> None:
        self.index.check()
        everything = {path for worker in ("a", "b", "c") for path in self.of(worker)}
        for salt, path in everything:
            prompt = [*(token for block in path for token in block), 1]
            for media in (None, ["GPU"], ["CPU"]):
                expected = {}
                for worker in ("a", "b", "c"):
                    paths: set[Any] = set()
                    for medium in media or ["GPU", "CPU"]:
                        paths |= self.held.get((worker, medium), set())
                    num = next((i for i in range(len(path)) if (salt, path[: i + 1]) not in paths), len(path))
                    if num:
                        expected[worker] = num * SIZE
                assert self.index.match(prompt, namespace=salt, media=media) == expected
        distinct = {(salt, path[: i + 1]) for salt, path in everything for i in range(len(path))}
        assert self.index.num_distinct_blocks <= len(distinct)


TestIndexMachine = IndexMachine.TestCase
