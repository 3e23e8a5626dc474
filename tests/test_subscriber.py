"""The index follows workers over real sockets, through whatever happens to them."""

import logging
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from radixkv.cache import PrefixCache
from radixkv.events import ZmqPublisher
from radixkv.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, encode
from radixkv.router import PrefixIndex
from radixkv.subscriber import EventSubscriber

TIMEOUT_MS = 10_000  # of what must come


def stored(block: int, parent: int | None = None) -> BlockStored:
    """A block of two tokens, both its id."""
    return BlockStored([block], parent, [block, block], 2)


class Worker:
    """A worker as vLLM and SGLang publish: numbered batches, of which a replay sends those of its ring."""

    def __init__(self, *, ring: int = 10_000, port: int = 0, life: float = 0.0) -> None:
        self.context = zmq.Context()
        self.publisher = self.context.socket(zmq.XPUB)  # it hears of subscribers, so that nothing is sent too early
        self.replayer = self.context.socket(zmq.ROUTER)
        self.publisher.bind(f"tcp://127.0.0.1:{port or '*'}")
        self.replayer.bind(f"tcp://127.0.0.1:{port + 1 if port else '*'}")
        self.endpoint = self.publisher.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self.replayer.getsockopt_string(zmq.LAST_ENDPOINT)
        self.size = ring
        self.ring: dict[int, bytes] = {}
        self.requests: list[int] = []  # the replays that were asked for
        self.life = life
        self.number = 0

    def wait(self) -> None:
        """Until a subscriber is there."""
        assert self.publisher.poll(TIMEOUT_MS)
        assert self.publisher.recv() == b"\x01"

    def publish(self, *events: Event, lost: bool = False, payload: bytes | None = None) -> None:
        self.ring[self.number] = payload or encode(EventBatch(self.life + self.number, list(events), 0))
        self.ring.pop(self.number - self.size, None)
        if not lost:
            self.publisher.send_multipart([b"kv", self.number.to_bytes(8, "big"), self.ring[self.number]])
        self.number += 1

    def answer(self, *, with_topic: bool = True, with_end: bool = True) -> None:
        """One replay, once it is asked for."""
        assert self.replayer.poll(TIMEOUT_MS)
        self.asker, empty, start = self.replayer.recv_multipart()
        assert empty == b""
        self.requests.append(int.from_bytes(start, "big"))
        topic = [b"kv"] if with_topic else []
        for number, payload in self.ring.items():
            if number >= self.requests[-1]:
                self.replayer.send_multipart([self.asker, b"", *topic, number.to_bytes(8, "big"), payload])
        if with_end:
            self.end(with_topic=with_topic)

    def end(self, *, with_topic: bool = True) -> None:
        self.replayer.send_multipart([self.asker, b"", *([b""] if with_topic else []), b"\xff" * 8, b""])

    def is_asked(self) -> bool:
        return bool(self.replayer.poll(0))

    def stop(self) -> None:
        self.context.destroy(linger=0)


class Setup:
    def __init__(self, subscriber: EventSubscriber, index: PrefixIndex) -> None:
        self.subscriber = subscriber
        self.index = index
        self.workers: list[Worker] = []

    def start(self, name: str = "a", *, replay: bool = True, **settings: Any) -> Worker:
        worker = Worker(**settings)
        self.workers.append(worker)
        self.subscriber.connect(name, worker.endpoint, worker.replay_endpoint if replay else None)
        worker.wait()
        return worker

    def restart(self, worker: Worker, life: float) -> Worker:
        """Another life at the same ports."""
        port = int(worker.endpoint.rsplit(":", 1)[1])
        worker.stop()
        self.until(lambda: self.subscriber.stats.lost_connections > 0)
        again = Worker(port=port, life=life)
        self.workers.append(again)
        again.wait()
        return again

    def until(self, condition: Callable[[], bool], *, seconds: float = 10) -> None:
        for _ in range(int(seconds / 0.02)):
            self.subscriber.poll(0.02)
            self.index.check()
            if condition():
                return
        raise AssertionError("what was waited for did not happen")

    def follow(self, last: int, name: str = "a") -> None:
        self.until(lambda: self.index.last_sequence(name) == last)

    def has(self, *path: int) -> int:
        """How many blocks of a path worker a is known to have."""
        return self.index.match([token for block in path for token in (block, block)]).get("a", 0) // 2


def free_ports() -> int:
    """A port that is free, as is the next."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


@pytest.fixture
def setup() -> Iterator[Setup]:
    index = PrefixIndex(2)
    with EventSubscriber(index, replay_timeout=10) as subscriber:
        made = Setup(subscriber, index)
        yield made
        for worker in made.workers:
            worker.stop()


def test_what_is_published_is_applied(setup: Setup) -> None:
    a, b = setup.start("a"), setup.start("b")
    a.publish(stored(1), stored(2, 1))
    b.publish(stored(1))
    setup.follow(0)
    setup.follow(0, "b")
    assert setup.index.match([1, 1, 2, 2]) == {"a": 4, "b": 2}
    a.publish(BlockRemoved([2]))
    setup.follow(1)
    assert setup.index.match([1, 1, 2, 2]) == {"a": 2, "b": 2}
    assert setup.subscriber.workers == ["a", "b"]
    assert (setup.subscriber.stats.batches, setup.subscriber.stats.replays) == (3, 0)


def test_a_late_subscriber_is_told_what_came_before(setup: Setup) -> None:
    a = Worker()
    setup.workers.append(a)
    a.publish(stored(1))
    a.publish(stored(2, 1))
    setup.subscriber.connect("a", a.endpoint, a.replay_endpoint)
    a.wait()
    a.publish(stored(3, 2))
    setup.until(a.is_asked)
    a.answer()
    setup.follow(2)
    assert a.requests == [0]
    assert setup.has(1, 2, 3) == 3


@pytest.mark.parametrize("with_topic", [True, False])
def test_a_gap_is_replayed_in_order_and_others_go_on_meanwhile(setup: Setup, with_topic: bool) -> None:
    a, b = setup.start("a"), setup.start("b")
    a.publish(stored(1))
    setup.follow(0)
    a.publish(stored(2, 1), lost=True)
    a.publish(BlockRemoved([2]), lost=True)
    a.publish(stored(2, 1))
    a.publish(stored(3, 2))
    setup.until(a.is_asked)
    b.publish(stored(7))
    setup.follow(0, "b")
    assert setup.has(1, 2) == 1
    a.publish(stored(4, 3))  # in the replay and by itself
    a.answer(with_topic=with_topic)
    a.publish(stored(5, 4))
    setup.follow(6)
    assert setup.has(1, 2, 3, 4, 5) == 5
    assert a.requests == [0]
    assert setup.index.stats.missed_batches == 0
    assert setup.index.stats.restarts == 0
    assert setup.subscriber.stats.replayed_batches == 5
    assert not setup.index.stats.skipped_blocks


def test_a_ring_that_does_not_reach_back_replaces_what_was_known(setup: Setup) -> None:
    """What was removed in the batches that are lost must not stay in the index."""
    a = setup.start(ring=2)
    a.publish(stored(1))
    setup.follow(0)
    a.publish(BlockRemoved([1]), lost=True)
    a.publish(stored(5), lost=True)
    a.publish(stored(6, 5))
    setup.until(a.is_asked)
    a.answer()
    setup.follow(3)
    assert setup.has(1) == 0
    assert setup.has(5, 6) == 2


def test_a_batch_that_begins_anew_needs_no_replay(setup: Setup) -> None:
    a = setup.start()
    a.publish(stored(1))
    setup.follow(0)
    a.publish(stored(2, 1), lost=True)
    a.publish(AllBlocksCleared(), stored(3))
    setup.follow(2)
    assert (setup.has(1), setup.has(3)) == (0, 1)
    assert setup.subscriber.stats.replays == 0


def test_a_hole_that_the_worker_left_is_asked_for_once(setup: Setup) -> None:
    a = setup.start()
    a.publish(stored(1))
    a.number += 1  # its queue was full
    a.publish(stored(2, 1))
    setup.until(a.is_asked)
    a.answer()
    setup.follow(2)
    a.publish(stored(3, 2))
    setup.follow(3)
    assert a.requests == [0]
    assert setup.has(1, 2, 3) == 3
    assert setup.index.stats.missed_batches == 1


def test_a_worker_goes_on_without_a_replay(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    a = setup.start(replay=False)
    a.publish(stored(1))
    a.publish(stored(2, 1), lost=True)
    a.publish(stored(3, 2), stored(4, 1))
    setup.follow(2)
    assert (setup.has(1, 2, 3), setup.has(1, 4)) == (1, 2)
    assert setup.index.stats.missed_batches == 1
    assert setup.index.stats.skipped_blocks == {"unknown_parent": 1}
    assert "batches [1, 2) are lost" in caplog.text


def test_a_replay_that_never_comes_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    index = PrefixIndex(2)
    with EventSubscriber(index, replay_timeout=0.2) as subscriber:
        setup = Setup(subscriber, index)
        a = setup.start()
        a.publish(stored(1), lost=True)
        a.publish(stored(2))
        setup.follow(1)
        a.publish(stored(3, 2))
        setup.follow(2)
        assert setup.has(2, 3) == 2
        assert subscriber.stats.failed_replays == 1
        assert "no replay from" in caplog.text
        a.stop()


def test_a_replay_that_stops_in_the_middle_is_given_up() -> None:
    index = PrefixIndex(2)
    with EventSubscriber(index, replay_timeout=0.2) as subscriber:
        setup = Setup(subscriber, index)
        a = setup.start()
        a.publish(stored(1), lost=True)
        a.publish(stored(2, 1))
        setup.until(a.is_asked)
        a.answer(with_end=False)
        setup.until(lambda: subscriber.stats.failed_replays == 1)
        assert setup.has(1, 2) == 2
        a.stop()


def test_what_comes_during_a_replay_is_bounded_and_asked_for_again(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.subscriber._MAX_HELD", 2)
    a = setup.start()
    a.publish(stored(0), lost=True)
    a.publish(stored(1, 0))
    setup.until(a.is_asked)
    a.answer(with_end=False)
    setup.follow(1)
    for block in range(2, 10):
        a.publish(stored(block, block - 1))
    setup.until(lambda: not setup.subscriber.poll(0.1))
    a.end()
    setup.follow(2)  # and no more
    a.publish(stored(10, 9))
    setup.until(a.is_asked)
    a.answer()
    setup.follow(10)
    assert a.requests == [0, 2]
    assert setup.has(*range(11)) == 11


def test_numbers_that_begin_again_are_another_life(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    a = setup.start()
    a.publish(stored(1))
    a.publish(stored(2, 1))
    setup.follow(1)
    a.number, a.ring = 0, {}
    a.publish(stored(3))
    setup.until(lambda: setup.has(3) == 1)
    assert setup.has(1) == 0
    assert setup.subscriber.stats.restarts == 1
    assert "has restarted" in caplog.text


def test_numbers_that_begin_again_in_the_middle_are_replayed(setup: Setup) -> None:
    a = setup.start()
    for block in range(3):
        a.publish(stored(block, block - 1 if block else None))
    setup.follow(2)
    a.number, a.ring = 0, {}
    a.publish(stored(7), lost=True)
    a.publish(stored(8, 7))
    setup.until(a.is_asked)
    a.answer()
    setup.follow(1)
    assert (setup.has(0), setup.has(7, 8)) == (0, 2)


@pytest.mark.parametrize("num_before", [1, 2, 5])
def test_a_restart_is_noticed_whatever_its_numbers(num_before: int, setup: Setup) -> None:
    """Lost with its connection, back with another life: whose next number is below, right behind, or above the last."""
    a = setup.start(port=free_ports())
    for block in range(3):
        a.publish(stored(block))
    setup.follow(2)
    again = setup.restart(a, life=100.0)
    for block in range(num_before):
        again.publish(stored(10 + block), lost=True)
    again.publish(stored(99))

    def answered() -> bool:
        if again.is_asked():
            again.answer()
        return setup.index.last_sequence("a") == num_before and setup.has(99) == 1

    setup.until(answered)
    assert [setup.has(block) for block in (0, 1, 2)] == [0, 0, 0]
    assert all(setup.has(10 + block) for block in range(num_before))


def test_a_lost_connection_alone_loses_nothing(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    """The same life, back at the same ports: a replay shows that it is."""
    a = setup.start(port=free_ports())
    a.publish(stored(1))
    a.publish(stored(2, 1))
    setup.follow(1)
    again = setup.restart(a, life=0.0)
    again.ring, again.number = dict(a.ring), a.number
    assert setup.has(1, 2) == 2
    again.publish(stored(3, 2))
    setup.until(again.is_asked)
    again.answer()
    setup.follow(2)
    assert setup.has(1, 2, 3) == 3
    assert again.requests == [1]
    assert setup.subscriber.stats.restarts == 0
    assert "the connection was lost; its 2 blocks stay" in caplog.text


def test_an_endpoint_that_always_hangs_up_is_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, EventSubscriber(PrefixIndex(2)) as subscriber:
        server.settimeout(TIMEOUT_MS / 1000)
        subscriber.connect("a", f"tcp://127.0.0.1:{server.getsockname()[1]}")
        for _ in range(3):
            server.accept()[0].close()
        Setup(subscriber, PrefixIndex(2)).until(lambda: subscriber.stats.lost_connections == 3)
    assert caplog.text.count("the connection was lost; its 0 blocks stay") == 1


def test_without_a_replay_a_lost_connection_and_a_gap_are_another_life(setup: Setup) -> None:
    a = setup.start(port=free_ports(), replay=False)
    a.publish(stored(1))
    setup.follow(0)
    again = setup.restart(a, life=100.0)
    again.number = 2
    again.publish(stored(2))
    setup.follow(2)
    assert (setup.has(1), setup.has(2)) == (0, 1)


@pytest.mark.parametrize(
    "frames",
    [
        [b"kv"],
        [b"kv", b"\0" * 7, b"payload"],
        [b"kv", b"\xff" * 8, b"payload"],
        [b"kv", (1).to_bytes(8, "big"), b"payload"],
        [b"kv", (1).to_bytes(8, "big"), b""],
        [b"kv", (1).to_bytes(8, "big"), msgspec.msgpack.encode([1.0, [["BlockStored", "no"]], 0])],
        [b"kv", (1).to_bytes(8, "big"), msgspec.msgpack.encode({"version": 2, "batches": []})],
    ],
)
def test_a_bad_message_is_logged_and_harms_nothing(
    setup: Setup, frames: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    a = setup.start()
    a.publish(stored(1))
    a.publisher.send_multipart(frames)
    if (1).to_bytes(8, "big") in frames:
        a.number += 1
    a.publish(stored(2, 1))
    setup.until(lambda: setup.has(1, 2) == 2)
    assert setup.subscriber.stats.bad_messages == 1
    assert setup.subscriber.stats.replays == 0
    assert "worker 'a' at tcp://127.0.0.1:" in caplog.text
    assert "cannot be read" in caplog.text


def test_bad_messages_in_a_replay_are_passed_over(setup: Setup) -> None:
    a = setup.start()
    a.publish(stored(1), lost=True)
    a.publish(payload=b"poison", lost=True)
    a.publish(stored(2, 1))
    setup.until(a.is_asked)
    a.answer()
    setup.follow(2)
    assert setup.has(1, 2) == 2
    assert setup.subscriber.stats.bad_messages == 1


def test_a_flood_of_bad_messages_is_a_few_log_lines(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    a = setup.start()
    for _ in range(1_000):
        a.publisher.send_multipart([b"poison"])
    setup.until(lambda: setup.subscriber.stats.bad_messages == 1_000)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 10


def test_a_worker_that_leaves_is_removed(setup: Setup) -> None:
    a = setup.start()
    a.publish(stored(1))
    setup.follow(0)
    setup.subscriber.disconnect("a")
    setup.subscriber.disconnect("nobody")
    assert (setup.has(1), setup.index.workers, setup.subscriber.workers) == (0, [], [])
    setup.subscriber.poll()
    setup.subscriber.connect("a", a.endpoint)


def test_leaving_while_a_replay_runs(setup: Setup) -> None:
    a = setup.start()
    a.publish(stored(1), lost=True)
    a.publish(stored(2, 1))
    setup.until(a.is_asked)
    setup.subscriber.disconnect("a")
    a.answer()
    setup.subscriber.poll(0.1)
    assert setup.index.workers == []


def test_bad_arguments_are_named(setup: Setup) -> None:
    a = setup.start()
    with pytest.raises(ValueError, match="worker 'a' is followed already, at tcp"):
        setup.subscriber.connect("a", a.endpoint)
    for endpoints in (("nowhere",), (5,), (a.endpoint, "tcp://")):
        with pytest.raises(ValueError, match=r"cannot connect to ['5]"):
            setup.subscriber.connect("b", *endpoints)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="topic must be a str, got 5"):
        setup.subscriber.connect("b", a.endpoint, topic=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="replay_timeout must be above 0"):
        EventSubscriber(setup.index, replay_timeout=0)
    assert setup.subscriber.workers == ["a"]


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_a_worker_is_followed_over_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no address of IPv6")
    index = PrefixIndex(2)
    with ZmqPublisher("tcp://[::1]:*", "tcp://[::1]:*") as publisher, EventSubscriber(index) as subscriber:
        cache = PrefixCache(30, 2, events=publisher)
        subscriber.connect("a", publisher.endpoint, publisher.replay_endpoint)
        Setup(subscriber, index).until(lambda: bool(cache.reset() or index.last_sequence("a")))


def test_a_subscriber_that_was_never_closed_does_not_stop_the_garbage_collector() -> None:
    code = (
        "import gc\n"
        "from radixkv.router import PrefixIndex\n"
        "from radixkv.subscriber import EventSubscriber\n"
        "cycle = [EventSubscriber(PrefixIndex(2))]\n"
        "cycle[0].connect('a', 'tcp://127.0.0.1:5557')\n"
        "cycle.append(cycle)\n"
        "del cycle\n"
        "gc.collect()\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, env=os.environ)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("wire", ["map", "array"])
def test_two_caches_are_followed_through_their_lives(wire: Any) -> None:
    """Real publishers of real caches, one of which the subscriber joins late: the index says what they do."""
    rng = random.Random(0)
    index = PrefixIndex(2)
    publishers = [ZmqPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", wire=wire) for _ in range(2)]
    caches = [PrefixCache(30, 2, events=publisher) for publisher in publishers]
    with EventSubscriber(index) as subscriber:
        setup = Setup(subscriber, index)
        for step in range(300):
            if step in (0, 150):
                each = publishers[step // 150]
                subscriber.connect(step // 150, each.endpoint, each.replay_endpoint)
            cache = caches[rng.randrange(2)]
            request = cache.allocate([rng.randrange(3) for _ in range(rng.randint(1, 20))])
            cache.commit(request)
            cache.free(request)
            subscriber.poll()

        for number in range(50):  # the last batches may come before the subscription does
            marker = [1000 + number, 0]
            for cache in caches:
                request = cache.allocate(marker)
                cache.commit(request)
                cache.free(request)
            try:
                setup.until(lambda marker=marker: len(index.match(marker)) == 2, seconds=0.5)  # type: ignore[misc]
                break
            except AssertionError:
                continue
        for _ in range(200):
            prompt = [rng.randrange(3) for _ in range(20)]
            expected = {worker: cache.match(prompt) for worker, cache in enumerate(caches) if cache.match(prompt)}
            assert index.match(prompt) == expected
        assert not index.stats.skipped_blocks
    for publisher in publishers:
        publisher.close()
