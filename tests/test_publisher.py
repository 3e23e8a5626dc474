"""Events over real sockets: frames, replays, bad peers, ports in use, and an end that leaves nothing behind."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import zmq

from radixkv import PrefixCache
from radixkv.events import ZmqPublisher
from radixkv.kv_events import AllBlocksCleared, BlockStored, decode

ANY = "tcp://127.0.0.1:*"
END = [b"", b"\xff" * 8, b""]
WAIT_MS = 10_000


class Peers:
    """Sockets of other processes."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.sockets: list[Any] = []

    def connect(self, kind: int, endpoint: str | None, *, topic: bytes | None = None, max_unread: int = 1000) -> Any:
        peer = self.context.socket(kind)
        self.sockets.append(peer)
        peer.set(zmq.RCVHWM, max_unread)
        if topic is not None:
            peer.subscribe(topic)
        peer.connect(endpoint)
        return peer

    def subscribe(self, publisher: ZmqPublisher, cache: PrefixCache, topic: bytes = b"") -> Any:
        """A subscriber that has begun to hear, and has heard all so far."""
        subscriber = self.connect(zmq.SUB, publisher.endpoint, topic=topic)
        while not subscriber.poll(20):
            cache.reset()
            publisher.flush()
        while subscriber.poll(100):
            subscriber.recv_multipart()
        return subscriber

    def replay(self, publisher: ZmqPublisher, start: int) -> list[list[bytes]]:
        """What a DEALER that asks for a replay is sent, without the end."""
        dealer = self.connect(zmq.DEALER, publisher.replay_endpoint)
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
        answers = []
        while (frames := receive(dealer)) != [b"", *END]:
            assert frames.pop(0) == b""
            answers.append(frames)
        dealer.close()
        return answers


@pytest.fixture
def peers() -> Iterator[Peers]:
    peers = Peers()
    yield peers
    for peer in peers.sockets:
        peer.close(linger=0)
    peers.context.term()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def serve(cache: PrefixCache, *tokens: int, **options: Any) -> None:
    request = cache.allocate(tokens, **options)
    cache.commit(request)
    cache.free(request)


def receive(receiver: Any) -> list[bytes]:
    assert receiver.poll(WAIT_MS)
    return receiver.recv_multipart()  # type: ignore[no-any-return]


def number_of(frames: list[bytes]) -> int:
    return int.from_bytes(frames[-2], "big")


@pytest.mark.parametrize("wire", ["map", "array"])
def test_each_change_of_the_cache_is_a_batch(peers: Peers, wire: Any) -> None:
    with ZmqPublisher(ANY, topic="kv@host:1@model", wire=wire, medium="CPU", data_parallel_rank=0) as publisher:
        cache = PrefixCache(8, 2, events=publisher)
        subscriber = peers.subscribe(publisher, cache, b"kv@")
        serve(cache, 1, 2, 3, 4, 5)
        topic, number, payload = receive(subscriber)
        assert topic == b"kv@host:1@model"
        batch = decode(payload)
        (stored,) = batch.events
        assert isinstance(stored, BlockStored)
        assert (stored.token_ids, stored.block_size, stored.medium, stored.parent_block_hash) == (
            [1, 2, 3, 4],
            2,
            "CPU",
            None,
        )
        assert batch.data_parallel_rank == 0
        cache.evict(1)
        assert number_of(receive(subscriber)) == int.from_bytes(number, "big") + 1


def test_an_engine_may_end_the_batches_itself(peers: Peers) -> None:
    with ZmqPublisher(ANY, autoflush=False) as publisher:
        cache = PrefixCache(8, 2, events=publisher)
        subscriber = peers.subscribe(publisher, cache)
        serve(cache, 1, 2)
        serve(cache, 3, 4)
        cache.evict(1)
        assert not subscriber.poll(50)
        publisher.flush()
        publisher.flush()
        assert len(decode(receive(subscriber)[-1]).events) == 3
        assert not subscriber.poll(50)


def test_a_replay_sends_batches_or_all_that_is_cached(peers: Peers) -> None:
    with ZmqPublisher(ANY, ANY, topic="t") as publisher:
        cache = PrefixCache(8, 2, events=publisher)
        for first in range(3):
            serve(cache, first, first)
        (answer,) = peers.replay(publisher, 0)
        assert answer[0] == b"t"
        assert number_of(answer) == 3
        cleared, *stored = decode(answer[-1]).events
        assert cleared == AllBlocksCleared()
        assert [event.token_ids for event in stored if isinstance(event, BlockStored)] == [[0, 0], [1, 1], [2, 2]]
        assert [number_of(answer) for answer in peers.replay(publisher, 2)] == [2, 3]
        assert peers.replay(publisher, 4) == []
        # a REQ socket takes the first answer, which from 0 on is all that it needs
        request = peers.connect(zmq.REQ, publisher.replay_endpoint)
        request.send((0).to_bytes(8, "big"))
        topic, number, payload = receive(request)
        assert (topic, number, decode(payload).events) == (b"t", answer[1], decode(answer[2]).events)


def test_a_request_that_is_no_number_is_answered_with_the_end(peers: Peers, caplog: Any) -> None:
    with ZmqPublisher(ANY, ANY) as publisher:
        PrefixCache(8, 2, events=publisher)
        dealer = peers.connect(zmq.DEALER, publisher.replay_endpoint)
        for poison in ([b"", b"what was there?"], [b"", b""], [b"a", b"b", b"c"]):
            dealer.send_multipart(poison)
            assert receive(dealer)[-3:] == END
        dealer.send_multipart([b"", bytes(1 << 20)])
        assert len(peers.replay(publisher, 0)) == 1
    assert caplog.text.count("must be a number of 8 bytes") == 2  # the first, second, fourth, ...


def test_who_asks_and_never_reads_has_one_answer_waiting(peers: Peers, caplog: Any) -> None:
    with ZmqPublisher(ANY, ANY) as publisher:
        cache = PrefixCache(256, 1024, events=publisher)
        cache.commit(cache.allocate(range(1 << 18)))  # a message of a megabyte
        dealer = peers.connect(zmq.DEALER, publisher.replay_endpoint, max_unread=1)
        for _ in range(150):
            dealer.send_multipart([b"", (1).to_bytes(8, "big")])
        for _ in range(150):
            assert [number_of(answer) for answer in peers.replay(publisher, 1)] == [1]  # others are answered
            if "(bad requests so far: 64)" in caplog.text:
                break
        num_batches = 0
        while dealer.poll(200):
            num_batches += number_of(dealer.recv_multipart()) == 1
        assert 0 < num_batches < 100
        assert "a request for a replay came before the last one was read" in caplog.text
        dealer.send_multipart([b"", (1).to_bytes(8, "big")])
        assert number_of(receive(dealer)) == 1
        assert receive(dealer) == [b"", *END]


def test_a_replay_of_many_batches_is_sent_whole_to_who_reads_slowly(peers: Peers) -> None:
    with ZmqPublisher(ANY, ANY) as publisher:
        cache = PrefixCache(8, 2, events=publisher)
        for first in range(1500):
            serve(cache, first, first)
        last = 2 * 1500 - 8  # from the ninth on each evicts one before
        while not peers.replay(publisher, last):
            pass
        dealer = peers.connect(zmq.DEALER, publisher.replay_endpoint, max_unread=1)
        dealer.send_multipart([b"", (1).to_bytes(8, "big")])
        assert [number_of(receive(dealer)) for _ in range(last)] == list(range(1, last + 1))
        assert receive(dealer) == [b"", *END]


def test_another_thread_may_close_in_the_middle_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = ZmqPublisher(ANY)
    cache = PrefixCache(8, 2, events=publisher)
    flush = publisher._changes.flush

    def close_meanwhile() -> bool:
        monkeypatch.undo()
        has_more = flush()
        closer = threading.Thread(target=publisher.close)
        closer.start()
        closer.join()
        return has_more

    monkeypatch.setattr(publisher._changes, "flush", close_meanwhile)
    serve(cache, 1, 2, 3)
    assert cache.match([1, 2]) == 2
    cache.check()


def test_a_rank_has_ports_of_its_own(peers: Peers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ZmqPublisher(f"tcp://127.0.0.1:{port - 1}", ANY, data_parallel_rank=1) as publisher:
        assert publisher.endpoint == f"tcp://127.0.0.1:{port}"
        PrefixCache(8, 2, events=publisher)
        assert decode(peers.replay(publisher, 0)[0][-1]).data_parallel_rank == 1


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "tcp://127.0.0.1:0"])
def test_a_rank_of_any_free_port_is_on_any_free_port(endpoint: str) -> None:
    with ZmqPublisher(endpoint, data_parallel_rank=1) as publisher:
        assert int(publisher.endpoint.rsplit(":", 1)[1]) > 1023


def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        for endpoints in ((endpoint,), (ANY, endpoint)):
            with pytest.raises(OSError, match=f"KV events cannot be published on {endpoint}: Address already in use"):
                ZmqPublisher(*endpoints)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"endpoint": "nowhere"}, "cannot be published on nowhere: "),
        ({"endpoint": "http://localhost:1"}, "cannot be published on http://localhost:1: "),
        ({"endpoint": 5557}, "endpoint must be a str, got 5557"),
        ({"replay_endpoint": 5558}, "replay_endpoint must be a str, got 5558"),
        ({"endpoint": "tcp://127.0.0.1:65536"}, "on tcp://127.0.0.1:65536: a port is at most 65535"),
        ({"endpoint": "tcp://127.0.0.1:65530", "data_parallel_rank": 6}, "on tcp://127.0.0.1:65536: a port is at most"),
        ({"topic": None}, "topic must be a str, got None"),
        ({"topic": "\ud800"}, r"topic must be text that can be sent as UTF-8, got '\\ud800'"),
        ({"medium": None}, "medium must be a str, got None"),
        ({"medium": "\ud800"}, r"medium must be text that can be sent as UTF-8, got '\\ud800'"),
        ({"wire": "json"}, "wire must be one of map, array, got 'json'"),
        ({"data_parallel_rank": -1}, "data_parallel_rank must be at least 0, got -1"),
        ({"data_parallel_rank": True}, "data_parallel_rank must be an int, got True"),
        ({"max_queue_bytes": 0}, "max_queue_bytes must be at least 4096, got 0"),
        ({"max_replay_bytes": 1.5}, "max_replay_bytes must be an int, got 1.5"),
    ],
)
def test_bad_values_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises((ValueError, TypeError), match=complaint):
        ZmqPublisher(**{"endpoint": ANY, **options})


def test_a_publisher_belongs_to_one_cache_until_it_is_closed() -> None:
    with ZmqPublisher(ANY) as publisher:
        cache = PrefixCache(8, 2, events=publisher)
        with pytest.raises(ValueError, match="belongs to another cache already"):
            PrefixCache(8, 2, events=publisher)
    publisher.close()
    serve(cache, 1, 2, 3)
    publisher.flush()
    assert cache.match([1, 2, 3]) == 2
    with closing(ZmqPublisher(ANY)) as unused:
        pass
    with pytest.raises(ValueError, match="is closed"):
        PrefixCache(8, 2, events=unused)


def test_arrays_have_no_place_for_a_namespace() -> None:
    with ZmqPublisher(ANY, wire="array") as publisher:
        cache = PrefixCache(8, 2, events=publisher)
        with pytest.raises(
            ValueError, match="namespace 'tenant' cannot be published: wire='array' has no place for it"
        ):
            cache.allocate([1, 2, 3], namespace="tenant")
        assert cache.num_free_blocks == 8


def test_what_was_published_last_arrives_although_it_is_closed_at_once(peers: Peers) -> None:
    with ZmqPublisher(ANY, autoflush=False) as publisher:
        cache = PrefixCache(8, 2, events=publisher)
        subscriber = peers.subscribe(publisher, cache)
        serve(cache, 1, 2, 3)
    (stored,) = decode(receive(subscriber)[-1]).events
    assert isinstance(stored, BlockStored)


def test_a_router_that_never_reads_misses_some_and_a_replay_has_all(peers: Peers) -> None:
    with ZmqPublisher(ANY, ANY) as publisher:
        cache = PrefixCache(64, 2, events=publisher)
        sleeper = peers.subscribe(publisher, cache)
        serve(cache, 1, 2)
        before = number_of(receive(sleeper))
        for first in range(3000):
            serve(cache, *([first] * 120))
        assert publisher.num_dropped == 0
        for _ in range(1000):
            (answer,) = peers.replay(publisher, 0)
            if number_of(answer) == before + 2 * 3000 - 1:  # each is stored, and evicts the one before
                break
        else:
            pytest.fail("the publisher has sent nothing for long")
        events = decode(answer[-1]).events
        num_blocks = sum(len(event.block_hashes) for event in events if isinstance(event, BlockStored))
        assert num_blocks == cache.num_cached_blocks == 64


@pytest.mark.parametrize("missing", ["zmq", "msgspec", "xxhash"])
def test_without_the_extra_it_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import radixkv, radixkv.events"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"ImportError: {missing} is not installed: pip install 'radixkv[events]'" in ran.stderr


def test_a_program_that_never_closes_ends() -> None:
    code = (
        "from radixkv import PrefixCache\n"
        "from radixkv.events import ZmqPublisher\n"
        f"publisher = ZmqPublisher({ANY!r}, {ANY!r})\n"
        "cache = PrefixCache(8, 2, events=publisher)\n"
        "cache.commit(cache.allocate([1, 2, 3]))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_publisher_that_was_never_closed_does_not_stop_the_garbage_collector() -> None:
    code = (
        "import gc\n"
        "from radixkv.events import ZmqPublisher\n"
        f"cycle = [ZmqPublisher({ANY!r}, {ANY!r})]\n"
        "cycle.append(cycle)\n"
        "del cycle\n"
        "gc.collect()\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, env=os.environ)
    assert (ran.returncode, ran.stderr) == (0, "")
