"""Keeps an index up to date with what workers publish over ZeroMQ. Needs the extra `events`.

Knows sockets, the numbers of batches and replays; what events mean is known to `radixkv.router`. The protocol is that
of vLLM, SGLang and `radixkv.events`, see docs/events.md.
"""

import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

try:
    import zmq
    from zmq.utils.monitor import recv_monitor_message

    from radixkv.kv_events import EventBatch, decode
except ModuleNotFoundError as error:
    raise ImportError(f"{error.name} is not installed: pip install 'radixkv[events]'", name=error.name) from None
from radixkv.router import PrefixIndex, begins_anew

logger = logging.getLogger("radixkv.subscriber")

_MAX_MESSAGE_BYTES = 256 << 20  # a longer one ends the connection
_MAX_UNREAD = 10_000  # batches of a worker that wait to be read; what comes beyond is lost, and asked for again
_MAX_HELD = 10_000  # batches of a worker that wait for a replay to end
_HEARTBEAT_MS = 5_000  # so that a machine that vanished is noticed
_HEARTBEAT_TIMEOUT_MS = 15_000
_END = (-1).to_bytes(8, "big", signed=True)
_NO_EVENTS = EventBatch(0.0, [])

_Socket: TypeAlias = "zmq.Socket[bytes]"


@dataclass(slots=True)
class SubscriberStats:
    """What came so far, over all workers."""

    batches: int = 0  # that were applied, replayed ones included
    replayed_batches: int = 0
    replays: int = 0  # that were asked for
    failed_replays: int = 0  # that were not answered in time
    restarts: int = 0  # of workers
    bad_messages: int = 0
    lost_connections: int = 0


@dataclass(slots=True)
class _Replay:
    socket: _Socket
    start: int  # the first number that was asked for
    deadline: float
    is_suspect: bool  # whether it is to tell if the worker has restarted
    has_begun: bool = False


@dataclass(slots=True, eq=False)
class _Feed:
    """One worker's sockets, and how far it was followed."""

    worker: Hashable
    endpoint: str
    replay_endpoint: str | None
    socket: _Socket
    monitor: _Socket
    last_live: int | None = None  # number, of what came by itself
    timestamp: float | None = None  # of the last batch applied, where it could be read: tells a worker's lives apart
    is_suspect: bool = False  # the connection was lost since: what comes may be of another life
    replay: _Replay | None = None
    held: "deque[tuple[int, EventBatch | None, bool]]" = field(default_factory=deque)  # what comes while a replay runs
    num_bad: int = 0


class EventSubscriber:
    """Follows the events of workers and applies them to one `PrefixIndex`, in order and each once. Not thread-safe.

    The caller's loop calls `poll`; nothing runs beside it. What was missed is asked for at the worker's replay endpoint
    while others go on: after a gap, where the first number is above 0, and where a connection was lost. Bad messages
    and lost connections are logged and counted. Memory: the index's, and 10,000 batches a worker that wait.
    """

    def __init__(self, index: PrefixIndex, *, replay_timeout: float = 5.0) -> None:
        """`replay_timeout`: seconds without a message after which a replay has failed; the worker goes on without."""
        if not replay_timeout > 0:
            raise ValueError(f"replay_timeout must be above 0 seconds, got {replay_timeout}")
        self._index = index
        self._replay_timeout = replay_timeout
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._feeds: dict[Hashable, _Feed] = {}
        self._stats = SubscriberStats()
        weakref.finalize(self, _close, self._context, self._feeds).atexit = False

    @property
    def workers(self) -> list[Hashable]:
        """Those that are followed."""
        return list(self._feeds)

    @property
    def stats(self) -> SubscriberStats:
        """A snapshot of the counters."""
        return replace(self._stats)

    def connect(self, worker: Hashable, endpoint: str, replay_endpoint: str | None = None, *, topic: str = "") -> None:
        """Follow a worker from now on; it need not be there yet. `topic` is how those to hear begin.

        What it has cached already comes by a replay, with its next batch; without a replay endpoint it stays unknown.

        Raises: ValueError for a worker that is followed already, or an endpoint that is none; TypeError for a topic
        that is no str. Then nothing was connected.
        """
        if worker in self._feeds:
            raise ValueError(f"worker {worker!r} is followed already, at {self._feeds[worker].endpoint}")
        if not isinstance(topic, str):
            raise TypeError(f"topic must be a str, got {topic!r}")
        prefix = topic.encode()
        if replay_endpoint is not None:
            self._connected(zmq.DEALER, replay_endpoint).close()  # to see that it is one
        socket = self._connected(zmq.SUB, endpoint)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.subscribe(prefix)
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        self._feeds[worker] = _Feed(worker, endpoint, replay_endpoint, socket, monitor)

    def disconnect(self, worker: Hashable) -> None:
        """Follow a worker no more, and remove it from the index."""
        feed = self._feeds.pop(worker, None)
        if feed is not None:
            self._end_replay(feed)
            self._poller.unregister(feed.socket)
            self._poller.unregister(feed.monitor)
            feed.socket.disable_monitor()
            feed.monitor.close()
            feed.socket.close()
        self._index.remove(worker)

    def poll(self, timeout: float = 0.0, *, max_messages: int = 1_000) -> int:
        """Apply what has come, at most `max_messages` of a worker; returns how many batches were applied.

        Waits at most `timeout` seconds for something to come. Raises nothing for what a worker sends.
        """
        now = time.monotonic()
        deadlines = [feed.replay.deadline - now for feed in self._feeds.values() if feed.replay is not None]
        ready = dict(self._poller.poll(math.ceil(1000 * max(0.0, min([timeout, *deadlines])))))
        before = self._stats.batches
        for feed in self._feeds.values():
            if feed.monitor in ready:
                self._note_lost_connection(feed)
        for feed in self._feeds.values():
            if feed.replay is not None and feed.replay.socket in ready:
                self._read_replay(feed, feed.replay, max_messages)
            if feed.socket in ready:
                for _ in range(max_messages):
                    frames = _receive(feed.socket)
                    if frames is None:
                        break
                    self._read(feed, frames)
            if feed.replay is not None and feed.replay.deadline < time.monotonic():
                self._fail_replay(feed, feed.replay)
        return self._stats.batches - before

    def close(self) -> None:
        """Follow nobody any more; the index stays as it is."""
        _close(self._context, self._feeds)

    def __enter__(self) -> "EventSubscriber":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connected(self, kind: int, endpoint: str) -> _Socket:
        socket: _Socket = self._context.socket(kind)
        socket.set_hwm(_MAX_UNREAD)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.setsockopt(zmq.IPV6, "[" in endpoint)
            socket.connect(endpoint)
        except (zmq.ZMQError, TypeError) as error:
            socket.close()
            raise ValueError(f"cannot connect to {endpoint!r}: {error}") from None
        return socket

    # What a worker publishes

    def _read(self, feed: _Feed, frames: list[bytes]) -> None:
        number, batch = self._decode(feed, frames)
        if number is None:
            return
        has_restarted = feed.last_live is not None and number <= feed.last_live
        feed.last_live = number
        if feed.replay is None:
            self._follow(feed, number, batch, has_restarted)
        elif len(feed.held) < _MAX_HELD:  # else there will be a gap
            feed.held.append((number, batch, has_restarted))

    def _follow(
        self, feed: _Feed, number: int, batch: EventBatch | None, has_restarted: bool, *, may_ask: bool = True
    ) -> None:
        """Apply what came by itself, or ask for a replay first."""
        index = self._index
        if has_restarted:
            logger.warning("worker %r at %s has restarted: batch %d came again", feed.worker, feed.endpoint, number)
            self._stats.restarts += 1
            index.clear(feed.worker)
            feed.is_suspect = False
        last = index.last_sequence(feed.worker)
        is_gap = bool(index.missing(feed.worker, number)) and not (batch and begins_anew(batch.events))
        if feed.replay_endpoint is not None and may_ask and (is_gap or (feed.is_suspect and last is not None)):
            self._ask(feed, feed.replay_endpoint, last or 0)
            feed.held.append((number, batch, False))
            return
        if last is not None and number <= last and not feed.is_suspect:
            return  # a replay has brought it already
        if feed.is_suspect and (is_gap or (last is not None and number <= last)):
            index.clear(feed.worker)  # nobody can tell whether it is still the same life
        if is_gap:
            logger.warning(
                "worker %r at %s: batches [%d, %d) are lost",
                feed.worker,
                feed.endpoint,
                0 if last is None else last + 1,
                number,
            )
        feed.is_suspect = False
        self._apply(feed, number, batch)

    def _apply(self, feed: _Feed, number: int, batch: EventBatch | None) -> None:
        self._index.apply(feed.worker, _NO_EVENTS if batch is None else batch, number)
        feed.timestamp = None if batch is None else batch.ts
        self._stats.batches += 1

    def _decode(self, feed: _Feed, frames: list[bytes]) -> tuple[int | None, EventBatch | None]:
        """Number and batch; None for what cannot be read of them, which is logged and counted."""
        number = int.from_bytes(frames[-2], "big", signed=True) if len(frames) >= 2 and len(frames[-2]) == 8 else None
        try:
            if number is None or number < 0:
                number = None
                frame = f", the last but one {frames[-2][:20]!r}" if len(frames) >= 2 else ""
                raise ValueError(f"{len(frames)} frames{frame}, not topic, number of 8 bytes and payload")
            return number, decode(frames[-1])
        except ValueError as error:
            self._stats.bad_messages += 1
            feed.num_bad += 1
            if feed.num_bad & (feed.num_bad - 1) == 0:  # the first, second, fourth, ...
                logger.warning(
                    "worker %r at %s: message %s cannot be read (its number %d that cannot): %.300s",
                    *(feed.worker, feed.endpoint, "" if number is None else number, feed.num_bad, error),
                )
            return number, None

    def _note_lost_connection(self, feed: _Feed) -> None:
        while feed.monitor.poll(0):
            recv_monitor_message(feed.monitor)
            self._stats.lost_connections += 1
            if feed.is_suspect:  # it is logged already, and what answers there may hang up many times a second
                continue
            feed.is_suspect = True
            logger.warning(
                "worker %r at %s: the connection was lost; its %d blocks stay in the index until it is back or removed",
                *(feed.worker, feed.endpoint, self._index.num_blocks(feed.worker)),
            )

    # Replays

    def _ask(self, feed: _Feed, replay_endpoint: str, start: int) -> None:
        """Ask for a replay from the last batch that was applied: if it is another than it was, so is the life."""
        socket = self._connected(zmq.DEALER, replay_endpoint)
        socket.send_multipart((b"", start.to_bytes(8, "big")))
        self._poller.register(socket, zmq.POLLIN)
        feed.replay = _Replay(socket, start, time.monotonic() + self._replay_timeout, feed.is_suspect)
        feed.is_suspect = False
        self._stats.replays += 1

    def _read_replay(self, feed: _Feed, running: _Replay, max_messages: int) -> None:
        for _ in range(max_messages):
            frames = _receive(running.socket)
            if frames is None:
                return
            running.deadline = time.monotonic() + self._replay_timeout
            is_end = len(frames) >= 2 and frames[-2] == _END
            number, batch = (None, None) if is_end else self._decode(feed, frames)
            if number is None and not is_end:
                continue
            if not running.has_begun:
                running.has_begun = True
                if self._has_changed_life(feed, number, batch):
                    logger.info("worker %r at %s: what is known of it is replaced", feed.worker, feed.endpoint)
                    self._index.clear(feed.worker)
                    if running.start and (number is None or number <= running.start):
                        self._end_replay(feed)
                        self._ask(feed, str(feed.replay_endpoint), 0)
                        return
                elif number is not None and number == self._index.last_sequence(feed.worker):
                    continue  # it was applied already
            if number is None:
                self._end_replay(feed)
                self._catch_up(feed)
                return
            self._apply(feed, number, batch)
            self._stats.replayed_batches += 1

    def _has_changed_life(self, feed: _Feed, number: int | None, batch: EventBatch | None) -> bool:
        """Whether a replay that was to begin with the last applied batch begins with something else.

        Then the worker has restarted, or does not reach back so far, or sends all that it has: what the index has of it
        must go in each case.
        """
        last = self._index.last_sequence(feed.worker)
        if last is None:
            return False
        if number != last:
            return True
        return feed.timestamp is not None and batch is not None and batch.ts != feed.timestamp

    def _fail_replay(self, feed: _Feed, running: _Replay) -> None:
        self._stats.failed_replays += 1
        feed.is_suspect = feed.is_suspect or running.is_suspect
        logger.warning(
            "worker %r: no replay from %s within %g s; it goes on without",
            *(feed.worker, feed.replay_endpoint, self._replay_timeout),
        )
        self._end_replay(feed)
        self._catch_up(feed)

    def _end_replay(self, feed: _Feed) -> None:
        if feed.replay is not None:
            self._poller.unregister(feed.replay.socket)
            feed.replay.socket.close()
            feed.replay = None

    def _catch_up(self, feed: _Feed) -> None:
        """Go on with what came while the replay ran; the first of it was what the replay was asked for."""
        held, feed.held = feed.held, deque()
        may_ask = False
        while held:
            number, batch, has_restarted = held.popleft()
            self._follow(feed, number, batch, has_restarted, may_ask=may_ask)
            may_ask = True
            if feed.replay is not None:
                feed.held += held
                return


def _close(context: "zmq.Context[_Socket]", feeds: dict[Hashable, _Feed]) -> None:
    # subtle: feeds only now, as a context that the garbage collector gets with its sockets waits for them forever
    context.destroy(linger=0)
    feeds.clear()


def _receive(socket: _Socket) -> list[bytes] | None:
    """The next message, None if none has come."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
