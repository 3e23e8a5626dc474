"""What a cache tells its listener, and an index built from it that equals the cache whatever gets lost on the way."""

import logging
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixkv import OutOfBlocksError, PrefixCache, Request
from radixkv.event_log import Changes, EventLog, EventRecorder
from radixkv.hashing import block_hashes, namespace_salt, salt_seed
from radixkv.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, decode
from radixkv.tokens import pack


class Heard:
    """A sink that writes down what it hears."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.runs: Callable[[], Iterable[Any]] = tuple

    def attach(self, num_blocks: int, block_size: int, runs: Callable[[], Iterable[Any]]) -> None:
        self.runs = runs

    def check_namespace(self, namespace: Hashable) -> None:
        namespace_salt(namespace)

    def stored(self, namespace: Hashable, parent: int | None, tokens: bytes, blocks: "array[int]") -> None:
        self.said.append(("stored", namespace, parent, array("i", tokens).tolist(), blocks.tolist()))

    def removed(self, blocks: "array[int]") -> None:
        self.said.append(("removed", blocks.tolist()))

    def cleared(self) -> None:
        self.said.append(("cleared",))

    def take(self) -> list[tuple[Any, ...]]:
        said, self.said = self.said, []
        return said


def serve(cache: PrefixCache, tokens: Iterable[int], **options: Any) -> None:
    request = cache.allocate(list(tokens), **options)
    cache.commit(request)
    cache.free(request)


# What is said


def test_whole_blocks_are_told_when_they_are_committed() -> None:
    heard = Heard()
    cache = PrefixCache(8, 2, events=heard)
    request = cache.allocate([1, 2, 3, 4, 5])
    assert heard.take() == []
    cache.commit(request, 3)
    assert heard.take() == [("stored", None, None, [1, 2], [0])]
    cache.commit(request, 5)
    assert heard.take() == [("stored", None, 0, [3, 4], [1])]
    cache.append(request, 6)
    cache.commit(request)
    assert heard.take() == [("stored", None, 1, [5, 6], [2])]
    cache.free(request)
    assert heard.take() == []


def test_a_branch_continues_the_block_where_it_left() -> None:
    heard = Heard()
    cache = PrefixCache(8, 2, events=heard)
    serve(cache, [1, 2, 3, 4, 5, 6])
    serve(cache, [1, 2, 3, 4, 9, 9], namespace=None)
    serve(cache, [8, 8, 9, 9])
    assert heard.take() == [
        ("stored", None, None, [1, 2, 3, 4, 5, 6], [0, 1, 2]),
        ("stored", None, 1, [9, 9], [3]),
        ("stored", None, None, [8, 8, 9, 9], [4, 5]),
    ]


@pytest.mark.parametrize("swap", [True, False], ids=["swap", "append-only"])
@pytest.mark.parametrize("at_once", [True, False])
def test_of_two_copies_one_is_told(swap: bool, at_once: bool) -> None:
    """And what was built on the other continues the one that is cached."""
    heard = Heard()
    cache = PrefixCache(8, 2, swap_duplicates=swap, events=heard)
    first, second = cache.allocate([1, 2, 3, 4, 5, 6]), cache.allocate([1, 2, 3, 4, 7, 8])
    cache.commit(first, 4)
    assert heard.take() == [("stored", None, None, [1, 2, 3, 4], [0, 1])]
    if not at_once:
        cache.commit(second, 4)
        assert heard.take() == []
    cache.commit(second)
    assert heard.take() == [("stored", None, 1, [7, 8], [5])]
    cache.free(first)
    cache.free(second)
    cache.check()
    assert heard.take() == []


def test_evicted_blocks_are_told_in_the_order_in_which_they_went() -> None:
    heard = Heard()
    cache = PrefixCache(4, 2, events=heard)
    serve(cache, [1, 2, 3, 4, 5, 6])
    heard.take()
    serve(cache, [7, 8, 7, 8, 7, 8])
    assert heard.take() == [("removed", [2, 1]), ("stored", None, None, [7, 8] * 3, [2, 1, 3])]
    assert cache.evict(2) == [0, 3]
    assert heard.take() == [("removed", [0, 3])]


def test_clearing_a_namespace_removes_what_running_requests_hold_too() -> None:
    heard = Heard()
    cache = PrefixCache(8, 2, events=heard)
    serve(cache, [1, 2], namespace="other")
    running = cache.allocate([1, 2, 3, 4, 5], namespace="mine")
    cache.commit(running)
    serve(cache, [1, 2, 3, 4, 7, 8], namespace="mine")
    heard.take()
    cache.clear("mine")
    ((what, blocks),) = heard.take()
    assert what == "removed"
    assert blocks[0] == 4  # the branch before the two that it continues
    assert sorted(blocks) == [1, 2, 4]
    cache.append(running, 6)
    cache.commit(running)
    cache.free(running)
    cache.clear("mine")
    cache.clear("never used")
    assert heard.take() == []
    assert cache.num_cached_blocks == 1


def test_a_reset_clears() -> None:
    heard = Heard()
    cache = PrefixCache(8, 2, events=heard)
    running = cache.allocate([1, 2, 3])
    cache.commit(running)
    heard.take()
    cache.reset()
    assert heard.take() == [("cleared",)]
    cache.append(running, 4)
    cache.commit(running)
    cache.free(running)
    assert heard.take() == []


def test_a_namespace_without_a_lasting_name_is_refused_before_anything_changed() -> None:
    cache = PrefixCache(4, 2, events=Heard())
    serve(cache, [1, 2, 3])
    before = repr(cache), cache.stats
    with pytest.raises(TypeError, match=r"namespace must be None, a str, .* got \('lora', 1.5\)"):
        cache.allocate([1, 2, 3], namespace=("lora", 1.5))
    assert (repr(cache), cache.stats) == before
    assert PrefixCache(4, 2).allocate([1, 2, 3], namespace=("lora", 1.5)).num_tokens == 3


@pytest.mark.parametrize("events", ["tcp://*:5557", EventRecorder, 7])
def test_what_is_no_listener_is_refused(events: Any) -> None:
    with pytest.raises(TypeError, match="events must be an object such as"):
        PrefixCache(4, events=events)


def test_what_is_cached_can_be_read_parents_first() -> None:
    heard = Heard()
    cache = PrefixCache(16, 2, events=heard)
    serve(cache, [1, 2, 3, 4, 5, 6])
    serve(cache, [1, 2, 3, 4, 7, 8], namespace=None)
    serve(cache, [1, 2, 9, 9], namespace=7)
    runs = [
        (namespace, parent, array("i", tokens).tolist(), list(blocks))
        for namespace, parent, tokens, blocks in heard.runs()
    ]
    assert runs == [
        (None, None, [1, 2, 3, 4], [0, 1]),
        (None, 1, [5, 6], [2]),
        (None, 1, [7, 8], [3]),
        (7, None, [1, 2, 9, 9], [4, 5]),
    ]


# As events


def test_a_recorder_makes_events_of_it() -> None:
    recorder = EventRecorder(medium="CPU")
    cache = PrefixCache(4, 2, events=recorder)
    serve(cache, [1, 2, 3, 4], namespace="tenant")
    serve(cache, [1, 2, 5, 6], namespace="tenant")
    cache.evict(1)
    first = block_hashes(pack([1, 2, 3, 4]), 2, seed=salt_seed("tenant"))
    second = block_hashes(pack([1, 2, 5, 6]), 2, seed=salt_seed("tenant"))
    assert recorder.take() == [
        AllBlocksCleared(),
        BlockStored(first, None, [1, 2, 3, 4], 2, medium="CPU", cache_salt="tenant"),
        BlockStored(second[1:], second[0], [5, 6], 2, medium="CPU", cache_salt="tenant"),
        BlockRemoved(first[1:], "CPU"),
    ]
    assert recorder.take() == []


def test_a_medium_that_is_no_text_is_refused() -> None:
    with pytest.raises(TypeError, match="medium must be a str, got 5"):
        EventRecorder(medium=5)  # type: ignore[arg-type]


def test_a_recorder_belongs_to_one_cache() -> None:
    recorder = EventRecorder()
    PrefixCache(4, events=recorder)
    with pytest.raises(ValueError, match="belong to another cache already"):
        PrefixCache(4, events=recorder)


def test_a_record_that_cannot_be_written_leaves_the_events_to_another_cache(tmp_path: Any) -> None:
    recorder = EventRecorder()
    with pytest.raises(FileNotFoundError):
        PrefixCache(4, events=recorder, record=tmp_path / "nowhere" / "trace.jsonl")
    assert recorder.take() == []
    PrefixCache(4, events=recorder)
    assert recorder.take() == [AllBlocksCleared()]


# On the way


def test_a_batch_that_does_not_fit_leaves_a_hole_and_all_that_is_cached_follows(caplog: Any) -> None:
    changes = Changes(2000)
    recorder = Heard()
    cache = PrefixCache(16, 2, events=recorder)
    changes.begin(recorder.runs)  # number 0
    for batch in range(1, 6):
        changes.stored(None, None, pack([batch]), array("i", [batch]))
        assert changes.flush() == (batch < 3)  # three changes of 512 bytes and more fit in
    assert changes.num_dropped == 3
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "batch 3 is dropped" in caplog.text
    serve(cache, [1, 2, 3])
    assert [number for number, _ in changes.take()] == [0, 1, 2]
    assert changes.flush()
    ((number, batch_changes),) = changes.take()
    assert number == 6
    assert batch_changes == [None, (None, None, pack([1, 2]), array("i", [0]))]
    assert not changes.flush()


def test_nothing_is_sent_between_a_drop_and_all_that_is_cached() -> None:
    """A small batch would fit, but may continue a block that routers never heard of."""
    changes = Changes(2000)
    changes.begin(tuple)
    changes.stored(None, None, bytes(4000), array("i", [1]))
    changes.flush()
    changes.stored(None, 1, bytes(4), array("i", [2]))
    assert not changes.flush()
    assert [number for number, _ in changes.take()] == [0]
    assert changes.flush()
    assert list(changes.take()) == [(3, [None])]


def test_what_nobody_flushes_is_bounded() -> None:
    changes = Changes(10_000)
    changes.begin(tuple)
    for number in range(1000):
        changes.stored(None, None, bytes(400), array("i", [number]))
    assert changes.num_dropped > 50
    assert len([*changes.take()]) == 1


def test_more_than_may_wait_is_sent_whole_and_once() -> None:
    """The tree is larger than what may wait: room is left for what follows, so that it is over some time."""
    heard = Heard()
    cache = PrefixCache(64, 2, events=heard)
    changes = Changes(3000)
    changes.begin(heard.runs)
    for first in range(20):
        serve(cache, [first, 1, 2])
        changes.stored(*next(iter(heard.runs())))
        changes.flush()
    list(changes.take())
    assert changes.flush()
    for number, batch in changes.take():
        assert len(batch) == 21
        changes.stored(None, None, bytes(8), array("i", [1]))
        assert changes.flush(), number  # while it is being sent
    assert len(list(changes.take())) == 1


def test_a_replay_is_the_batches_or_all_that_is_cached() -> None:
    log = EventLog(8, 2, max_batches=3)
    assert log.replay(0) == []
    batches = {
        number: log.write(number, [(None, None, pack([number, 0]), array("i", [number]))]) for number in range(5)
    }
    assert log.replay(5) == []
    assert log.replay(2) == [(number, batches[number]) for number in (2, 3, 4)]
    ((number, payload),) = log.replay(1)  # no longer kept
    assert number == 4
    events = decode(payload).events
    assert events[0] == AllBlocksCleared()
    assert [event.token_ids for event in events[1:] if isinstance(event, BlockStored)] == [[i, 0] for i in range(5)]
    assert log.replay(0)[0][0] == 4
    log.write(7, [None])  # 5 and 6 were dropped
    assert [number for number, _ in log.replay(7)] == [7]
    for start in (4, 5, 6):
        ((number, payload),) = log.replay(start)
        assert number == 7
        assert decode(payload).events == [AllBlocksCleared()]


def test_the_batches_that_are_kept_are_bounded_in_bytes() -> None:
    log = EventLog(8, 2, max_bytes=1000)
    for number in range(100):
        payload = log.write(number, [(None, None, pack([number, 0]), array("i", [0]))])
    kept = [number for number, _ in log.replay(100 - 1000 // len(payload))]
    assert len(kept) == 1000 // len(payload)
    assert len(log.replay(99 - 1000 // len(payload))) == 1


# An index built from the stream


class Index:
    """A router's index of one worker, as the rules for consumers say; its pipe loses what it is told to."""

    def __init__(self, replay: Callable[[int], list[tuple[int, bytes]]]) -> None:
        self.replay = replay
        self.pipe: deque[tuple[int, bytes]] = deque()
        self.blocks: dict[int, tuple[str | None, bytes]] = {}  # id -> salt and the tokens of the whole prefix
        self.last = -1  # what was applied
        self.replayed = -1  # up to here what is still in the pipe is known
        self.num_to_lose = 0
        self.is_asleep = False

    def read(self) -> None:
        """Take one batch out of the pipe."""
        number, payload = self.pipe.popleft()
        if number == 0:  # a worker that began anew
            self.last = self.replayed = -1
        if number <= self.replayed:
            return
        self.replayed = -1
        if number != self.last + 1:
            self.catch_up(0 if number <= self.last else self.last + 1)
            self.replayed = self.last
            if number <= self.last:
                return
        self.apply(number, payload)

    def catch_up(self, start: int) -> None:
        for number, payload in self.replay(start):
            self.apply(number, payload)

    def apply(self, number: int, payload: bytes) -> None:
        for event in decode(payload).events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlockRemoved):
                for each in event.block_hashes:
                    del self.blocks[each]
            else:
                prefix = b""
                if event.parent_block_hash is not None:
                    salt, prefix = self.blocks[event.parent_block_hash]
                    assert salt == event.cache_salt
                for position, each in enumerate(event.block_hashes):
                    first = position * event.block_size
                    prefix += pack(event.token_ids[first : first + event.block_size])
                    assert each not in self.blocks
                    self.blocks[each] = event.cache_salt, prefix
        self.last = number

    def content(self, prompts: Iterable[tuple[Hashable, tuple[int, ...]]], size: int) -> Any:
        known = set(self.blocks.values())
        assert len(known) == len(self.blocks)
        hits = {}
        for namespace, tokens in prompts:
            salt, num = namespace_salt(namespace), 0
            while (num + 1) * size <= len(tokens) and (salt, pack(tokens[: (num + 1) * size])) in known:
                num += 1
            hits[namespace, tokens] = num * size
        return len(self.blocks), hits


SIZE = 2


PROMPTS = st.builds(lambda first, rest: (first, *rest), st.integers(0, 2), st.lists(st.integers(0, 1), max_size=9))
NAMESPACES = st.sampled_from([None, None, "tenant", ("lora", 7)])


class StreamMachine(RuleBasedStateMachine):
    """A cache, its log, and routers that come and go. The sender stalls, pipes lose, routers sleep.

    Whatever a router has applied last, its index is the cache as it was when that batch was made.
    """

    @initialize(swap=st.booleans(), autoflush=st.booleans(), max_bytes=st.sampled_from([1500, 3000, 100_000]))
    def start(self, swap: bool, autoflush: bool, max_bytes: int) -> None:
        self.swap, self.autoflush, self.max_bytes = swap, autoflush, max_bytes
        self.routers: list[Index] = []
        self.start_worker()
        self.routers = [Index(self.replay), Index(self.replay)]

    def start_worker(self) -> None:
        self.prompts: list[tuple[Hashable, tuple[int, ...]]] = []
        self.running: list[Request] = []
        self.contents: dict[int, Any] = {0: (0, {})}  # of the cache, by the number of the batch that was made then
        self.num_flushed = 1
        self.is_stalled = False
        self.changes = Changes(self.max_bytes)
        self.log = EventLog(12, SIZE, max_batches=4)
        self.cache = PrefixCache(12, SIZE, swap_duplicates=self.swap, events=self)
        self.send()

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        return self.log.replay(start)

    # the sink: what a publisher does, without its thread

    def attach(self, num_blocks: int, block_size: int, runs: Callable[[], Iterable[Any]]) -> None:
        self.changes.begin(runs)

    def check_namespace(self, namespace: Hashable) -> None:
        namespace_salt(namespace)

    def stored(self, *run: Any) -> None:
        self.changes.stored(*run)

    def removed(self, blocks: "array[int]") -> None:
        self.changes.removed(blocks)

    def cleared(self) -> None:
        self.changes.cleared()

    def content(self) -> Any:
        hits = {
            (namespace, tokens): self.cache.match(tokens, namespace=namespace) for namespace, tokens in self.prompts
        }
        return self.cache.num_cached_blocks, hits

    def flush(self) -> None:
        if self.changes.flush():
            self.num_flushed += 1
            self.contents[self.num_flushed + self.changes.num_dropped - 1] = self.content()

    def send(self) -> None:
        for number, changes in self.changes.take():
            payload = self.log.write(number, changes)
            for router in self.routers:
                if router.num_to_lose:
                    router.num_to_lose -= 1
                else:
                    router.pipe.append((number, payload))

    def go_on(self, *, flush: bool = True) -> None:
        """What happens after each step, unless somebody is held up."""
        if flush:
            self.flush()
        if not self.is_stalled:
            self.send()
        for router in self.routers:
            while router.pipe and not router.is_asleep:
                router.read()
                self.routers_are_right()

    # the engine

    @rule(requests=st.lists(st.tuples(PROMPTS, NAMESPACES, st.booleans(), st.booleans()), min_size=1, max_size=5))
    def serve(self, requests: list[tuple[tuple[int, ...], Hashable, bool, bool]]) -> None:
        """Requests one after the other; some ask what the last did and more, some go on running while there is room."""
        for prompt, namespace, goes_on, runs_on in requests:
            if goes_on and self.prompts:
                namespace, last = self.prompts[-1]
                prompt = (*last, *prompt)[:16]
            self.prompts.append((namespace, prompt))
            try:
                request = self.cache.allocate(prompt, namespace=namespace)
            except OutOfBlocksError:
                self.end(num=3)
                continue
            self.running.append(request)
            self.cache.commit(request, len(prompt) // 2 if runs_on else None)
            if not runs_on:
                self.cache.free(self.running.pop())
            self.go_on(flush=self.autoflush)

    @precondition(lambda self: self.running)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def decode(self, tokens: list[int]) -> None:
        for token in tokens:
            with suppress(OutOfBlocksError):
                self.cache.decode(self.running, [token] * len(self.running))
            self.go_on(flush=self.autoflush)

    @precondition(lambda self: self.running)
    @rule(num=st.integers(1, 3))
    def end(self, num: int) -> None:
        for request in self.running[:num]:
            self.cache.commit(request)
            self.cache.free(request)
        del self.running[:num]
        self.go_on(flush=self.autoflush)

    @rule(what=st.sampled_from(["1", "2", "3", "None", "tenant", "everything"]))
    def forget(self, what: str) -> None:
        if what.isdigit():
            self.cache.evict(int(what))
        elif what == "everything":
            self.cache.reset()
        else:
            self.cache.clear(None if what == "None" else what)
        self.go_on(flush=self.autoflush)

    @precondition(lambda self: self.num_flushed > 12)
    @rule()
    def worker_restarts(self) -> None:
        """Routers that are connected hear its first batch."""
        for router in self.routers:
            router.num_to_lose = 0
            router.pipe.clear()
        self.start_worker()
        for router in self.routers:
            router.read()

    # what goes wrong

    @rule()
    def sender_stalls_or_wakes(self) -> None:
        self.is_stalled = not self.is_stalled
        self.go_on(flush=False)

    @rule()
    def router_joins(self) -> None:
        self.routers = [*self.routers[-2:], Index(self.replay)]

    @rule(data=st.data(), num=st.sampled_from([0, 1, 2, 6]))
    def router_sleeps_or_loses(self, data: st.DataObject, num: int) -> None:
        router = data.draw(st.sampled_from(self.routers))
        router.is_asleep, router.num_to_lose = not num, num

    @rule()
    def all_catch_up(self) -> None:
        self.is_stalled = False
        for router in self.routers:
            router.is_asleep, router.num_to_lose = False, 0
        self.go_on()
        self.go_on()  # where batches were dropped, there is room now
        for router in self.routers:
            router.catch_up(router.last + 1)
            assert router.content(self.prompts, SIZE) == self.content()

    @invariant()
    def routers_are_right(self) -> None:
        for router in getattr(self, "routers", []):
            if router.last >= 0:
                expected = self.contents[router.last]
                assert router.content(expected[1], SIZE) == expected


TestStream = StreamMachine.TestCase
_quick = settings()
TestStream.settings = settings(max_examples=2 * _quick.max_examples, stateful_step_count=2 * _quick.stateful_step_count)
