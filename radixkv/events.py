"""Tells routers what a cache holds, as KV events over ZeroMQ.

    with ZmqPublisher("tcp://*:5557", replay_endpoint="tcp://*:5558") as publisher:
        cache = PrefixCache(num_blocks, events=publisher)

Needs the extra `events`. The protocol, what is guaranteed and what it costs: docs/events.md.
"""

import errno
import logging
import re
import socket
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress

try:
    import zmq

    from radixkv.event_log import Changes, EventLog, EventRecorder, check_text
    from radixkv.hashing import namespace_salt
    from radixkv.kv_events import WIRES, Wire
except ModuleNotFoundError as error:
    raise ImportError(f"{error.name} is not installed: pip install 'radixkv[events]'", name=error.name) from None
from radixkv.tree import Run

__all__ = ["EventRecorder", "ZmqPublisher"]

logger = logging.getLogger("radixkv.events")

_END = b"", (-1).to_bytes(8, "big", signed=True), b""
_MAX_BATCHES = 10_000  # that are kept for a replay
_MAX_UNSENT = 1_000  # batches for a router that does not read, then it misses some
_MAX_ANSWERS = 16  # messages of a replay that wait for a router to read, then it is sent no more until it does
_MAX_WAIT_MS = 1_000  # until it is looked whether it has read
_MAX_REQUEST_BYTES = 1024  # who sends more is disconnected
_LINGER_MS = 200  # for what is unsent when it ends
_MAX_PORT = 65_535
_PORT = re.compile(r"(tcp://.*:)(\d+)")


class ZmqPublisher:
    """Publishes what a cache holds; the `events` of one `PrefixCache`.

    The cache's thread only notes what changed; a thread of the publisher's own hashes, encodes and sends. Whatever
    routers do, the cache never waits: where more than `max_queue_bytes` of changes wait, a batch is dropped, its number
    is missing, and all that is cached is sent in its place later.
    """

    def __init__(
        self,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        topic: str = "",
        *,
        wire: Wire = "map",
        medium: str = "GPU",
        data_parallel_rank: int = 0,
        autoflush: bool = True,
        max_queue_bytes: int = 64 << 20,
        max_replay_bytes: int = 64 << 20,
    ) -> None:
        """Binds its sockets, so that routers can connect; the rank is added to the ports.

        Each commit, eviction, clear and reset is a batch; with `autoflush=False` the engine ends them with `flush()`,
        once a step. For replays the last 10,000 batches are kept, `max_replay_bytes` at most; who asks for more gets
        all that is cached in one.

        Raises: OSError if an endpoint is in use or cannot be bound; ValueError and TypeError for bad values.
        """
        check_text("endpoint", endpoint)
        if replay_endpoint is not None:
            check_text("replay_endpoint", replay_endpoint)
        check_text("topic", topic)
        check_text("medium", medium)
        if wire not in WIRES:
            raise ValueError(f"wire must be one of {', '.join(WIRES)}, got {wire!r}")
        for name, number, low in (
            ("data_parallel_rank", data_parallel_rank, 0),
            ("max_queue_bytes", max_queue_bytes, 4096),
            ("max_replay_bytes", max_replay_bytes, 0),
        ):
            if type(number) is not int:
                raise TypeError(f"{name} must be an int, got {number!r}")
            if number < low:
                raise ValueError(f"{name} must be at least {low}, got {number}")
        self._topic = topic.encode()
        self._wire: Wire = wire
        self._medium = medium
        self._rank = data_parallel_rank
        self._autoflush = autoflush
        self._max_replay_bytes = max_replay_bytes
        self._changes = Changes(max_queue_bytes)
        self._log: EventLog | None = None  # once there is a cache
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._context = zmq.Context()
        self._replays: zmq.Socket[bytes] | None = None
        self._answers: dict[bytes, deque[tuple[bytes, ...]]] = {}  # who asked for a replay: what is left to send
        self._num_complaints = 0
        try:
            self._publications, self.endpoint = self._bind(zmq.PUB, endpoint, _MAX_UNSENT)
            self.replay_endpoint: str | None = None
            if replay_endpoint is not None:
                self._replays, self.replay_endpoint = self._bind(zmq.ROUTER, replay_endpoint, _MAX_ANSWERS)
                self._replays.set(zmq.ROUTER_MANDATORY, 1)  # tell where there is no room, rather than drop
            self._bell, self._ears = socket.socketpair()  # wakes the thread; safe in any, unlike a ZeroMQ socket
        except BaseException:
            self._context.destroy(linger=0)
            raise
        sockets = self._publications, self._replays
        weakref.finalize(self, _destroy, self._context, sockets).atexit = False
        self._bell.setblocking(False)
        self._ears.setblocking(False)

    @property
    def num_dropped(self) -> int:
        """Batches that were dropped because too much waited to be sent."""
        return self._changes.num_dropped

    # What the cache calls

    def attach(self, num_blocks: int, block_size: int, runs: "Callable[[], Iterable[Run]]") -> None:
        """Called by the new cache. Raises: ValueError if there was one already, or the publisher is closed."""
        if self._log is not None or self._is_closed:
            raise ValueError(f"{self!r} {'is closed' if self._is_closed else 'belongs to another cache already'}")
        self._log = EventLog(
            num_blocks,
            block_size,
            wire=self._wire,
            medium=self._medium,
            data_parallel_rank=self._rank,
            max_batches=_MAX_BATCHES,
            max_bytes=self._max_replay_bytes,
        )
        self._changes.begin(runs)
        self._thread = threading.Thread(target=self._run, args=(self._log,), name="radixkv events", daemon=True)
        self._thread.start()

    def check_namespace(self, namespace: Hashable) -> None:
        """Raises: TypeError or ValueError for a namespace that has no name on the wire, see docs/events.md."""
        salt = namespace_salt(namespace)
        if salt is not None and self._wire == "array":
            raise ValueError(
                f"namespace {namespace!r} cannot be published: wire='array' has no place for it, 'map' has"
            )

    def stored(self, namespace: Hashable, parent: int | None, tokens: bytes, blocks: "array[int]") -> None:
        if not self._is_closed:
            self._changes.stored(namespace, parent, tokens, blocks)
            self._changed()

    def removed(self, blocks: "array[int]") -> None:
        if not self._is_closed:
            self._changes.removed(blocks)
            self._changed()

    def cleared(self) -> None:
        if not self._is_closed:
            self._changes.cleared()
            self._changed()

    # What the engine calls

    def flush(self) -> None:
        """Publish what changed since the last call as one batch; does not wait for it to be sent.

        In the cache's thread. O(1), but for the first call after a drop for which there is room: it reads the tree.
        """
        if not self._is_closed and self._changes.flush():
            self._wake()

    def close(self) -> None:
        """Publish what is left and release the ports. The cache may go on, unheard.

        In the thread of the cache; in another, what changes just then may be missing.
        """
        if self._is_closed:
            return
        self.flush()
        self._is_closed = True
        self._wake()
        if self._thread is not None:
            self._thread.join()
        self._context.destroy(linger=_LINGER_MS)
        self._bell.close()
        self._ears.close()

    def __enter__(self) -> "ZmqPublisher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ZmqPublisher({self.endpoint!r}, replay_endpoint={self.replay_endpoint!r})"

    def _changed(self) -> None:
        if self._autoflush and self._changes.flush():
            self._wake()

    # Its thread

    def _run(self, log: EventLog) -> None:
        poller = zmq.Poller()
        poller.register(self._ears, zmq.POLLIN)
        if self._replays is not None:
            poller.register(self._replays, zmq.POLLIN)
        wait_ms = 1
        while True:
            is_last = self._is_closed  # subtle: before what is taken, so that nothing flushed before it is left
            for number, changes in self._changes.take():
                payload = log.write(number, changes)
                self._publications.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
            if self._replays is not None:
                self._take_request(self._replays, log)
                wait_ms = 1 if self._answer(self._replays) else min(2 * wait_ms, _MAX_WAIT_MS)
            if is_last:
                return
            poller.poll(wait_ms if self._answers else None)
            self._listen()

    def _take_request(self, replays: "zmq.Socket[bytes]", log: EventLog) -> None:
        """Take one request for a replay, if there is one; the next is taken after what is new was sent."""
        if not replays.poll(0):
            return
        *sender, request = replays.recv_multipart()
        answer: deque[tuple[bytes, ...]] = deque()
        if len(request) == 8:
            for number, payload in log.replay(int.from_bytes(request, "big")):
                answer.append((*sender, self._topic, number.to_bytes(8, "big"), payload))
        else:
            self._complain(f"must be a number of 8 bytes, got {request[:80]!r}")
        answer.append((*sender, *_END))
        if sender[0] in self._answers:  # subtle: one answer a router, or what waits for who never reads has no bound
            self._complain("came before the last one was read, whose answer ends here")
        self._answers[sender[0]] = answer

    def _answer(self, replays: "zmq.Socket[bytes]") -> bool:
        """Send of the replays what routers have room for; returns whether that was anything."""
        has_sent = False
        for router, answer in [*self._answers.items()]:
            try:
                while answer:
                    replays.send_multipart(answer[0], zmq.NOBLOCK)
                    answer.popleft()
                    has_sent = True
            except zmq.Again:
                continue
            except zmq.ZMQError:  # it is gone
                pass
            del self._answers[router]
        return has_sent

    def _complain(self, what: str) -> None:
        self._num_complaints += 1
        if self._num_complaints & (self._num_complaints - 1) == 0:  # the first, second, fourth, ...
            logger.warning("a request for a replay %s (bad requests so far: %d)", what, self._num_complaints)

    def _wake(self) -> None:
        with suppress(OSError):  # it has been woken often enough, or another thread is closing
            self._bell.send(b"\0")

    def _listen(self) -> None:
        with suppress(BlockingIOError):  # it was a request for a replay
            self._ears.recv(4096)

    def _bind(self, kind: int, endpoint: str, max_unsent: int) -> "tuple[zmq.Socket[bytes], str]":
        """A socket bound to the endpoint of this rank, and what that is."""
        bound = self._context.socket(kind)
        bound.set_hwm(max_unsent)
        bound.set(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        bound.set(zmq.IPV6, "[" in endpoint)
        ranked = _ranked(endpoint, self._rank)
        port = _PORT.fullmatch(ranked)
        if port and int(port[2]) > _MAX_PORT:  # subtle: ZeroMQ would take it modulo 2^16
            raise ValueError(f"KV events cannot be published on {ranked}: a port is at most {_MAX_PORT}")
        try:
            bound.bind(ranked)
        except zmq.ZMQError as error:
            message = f"KV events cannot be published on {ranked}: {error.strerror}"
            if error.errno in (errno.EINVAL, errno.EPROTONOSUPPORT):
                raise ValueError(message) from None
            raise OSError(error.errno, message) from None
        return bound, bound.getsockopt_string(zmq.LAST_ENDPOINT)


def _destroy(context: "zmq.Context[zmq.Socket[bytes]]", _sockets: object) -> None:
    """End a context whose owner was never closed.

    subtle: the sockets are kept alive for it, as a context that the garbage collector gets together with its sockets
    waits for them forever.
    """
    context.destroy(linger=0)


def _ranked(endpoint: str, rank: int) -> str:
    """The endpoint of a data-parallel rank: its port is that many higher, a path has the rank at its end."""
    if not rank or endpoint.endswith((":*", ":0")):  # any port that is free
        return endpoint
    found = _PORT.fullmatch(endpoint)
    return f"{found[1]}{int(found[2]) + rank}" if found else f"{endpoint}_dp{rank}"
