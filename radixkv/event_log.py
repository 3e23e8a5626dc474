"""What a cache's changes are as KV events, numbered batches, and what a router that missed some is sent instead.

Knows nothing of sockets or threads: `radixkv.events` is what sends them. Needs msgspec and xxhash (the extra `events`).
"""

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from radixkv.hashing import SEED, block_hashes, namespace_salt, salt_seed
from radixkv.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, Wire, encode
from radixkv.tree import Run

logger = logging.getLogger("radixkv.events")

# A run that was stored, blocks that were removed, or None: everything was cleared.
Change: TypeAlias = "Run | array[int] | None"

_NO_BLOCK = -1
_CHANGE_BYTES = 512  # of a change beside its tokens and block ids, about


class EventRecorder:
    """Turns what a cache tells it into events, for a transport of one's own: they are kept until `take` is called.

    The `events` of one `PrefixCache`. Keeps the id of each block, 8 bytes a block, so that a removal needs no tokens.
    About half a microsecond a new block of 16 tokens (`python bench/events.py`). Not thread-safe, like the cache.
    """

    def __init__(self, *, medium: str = "GPU") -> None:
        """`medium` is where the blocks are: GPU, CPU, STORAGE, or what else the routers know.

        Raises: TypeError or ValueError for a `medium` that is no text.
        """
        check_text("medium", medium)
        self._medium = medium
        self._block_size = 0
        self._events: list[Event] = []
        self.hashes = array("Q")  # of blocks, by block id

    def attach(self, num_blocks: int, block_size: int, runs: "Callable[[], Iterable[Run]] | None" = None) -> None:
        """Called by the cache. Raises: ValueError if there was one already."""
        if self._block_size:
            raise ValueError("these events belong to another cache already")
        self._block_size = block_size
        self.hashes = array("Q", bytes(8 * num_blocks))
        self.cleared()

    def check_namespace(self, namespace: Hashable) -> None:
        """Raises: TypeError or ValueError, see `radixkv.hashing.namespace_salt`."""
        namespace_salt(namespace)

    def stored(self, namespace: Hashable, parent: int | None, tokens: bytes, blocks: "array[int]") -> None:
        salt = namespace_salt(namespace)
        above = None if parent is None else self.hashes[parent]
        hashes = block_hashes(tokens, self._block_size, parent=above, seed=SEED if salt is None else salt_seed(salt))
        for block, number in zip(blocks, hashes, strict=True):
            self.hashes[block] = number
        ids = memoryview(tokens).cast("i").tolist()
        self._events.append(BlockStored(hashes, above, ids, self._block_size, medium=self._medium, cache_salt=salt))

    def removed(self, blocks: "array[int]") -> None:
        hashes = self.hashes
        self._events.append(BlockRemoved([hashes[block] for block in blocks], self._medium))

    def cleared(self) -> None:
        self._events.append(AllBlocksCleared())

    def take(self) -> list[Event]:
        """The events since the last call, the first of all that everything is cleared."""
        events, self._events = self._events, []
        return events


class Changes:
    """Changes on their way from the cache to an `EventLog`, in numbered batches, of at most `max_bytes` together.

    A batch that does not fit is dropped, and its number with it. The next one, once all that waited has been taken, is
    all that is cached, however much it is: so whoever takes the batches in order is right after each of them.

    One thread fills it, that of the cache; one other may take.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_dropped = 0
        self._max_bytes = max_bytes
        self._runs: Callable[[], Iterable[Run]] = tuple
        self._open: list[Change] = []  # the batch that is being filled
        self._open_bytes = 0
        self._next = 0
        self._is_lost = False  # something was dropped, and not made good yet
        self._waiting: deque[tuple[int, list[Change], int]] = deque()  # number, changes, bytes
        # subtle: two counts that each have one writer need no lock
        self._bytes_in = 0
        self._bytes_out = 0

    def begin(self, runs: "Callable[[], Iterable[Run]]") -> None:
        """`runs()` is all that is cached; the first batch says that everything is cleared."""
        self._runs = runs
        self.cleared()
        self.flush()

    def stored(self, namespace: Hashable, parent: int | None, tokens: bytes, blocks: "array[int]") -> None:
        self._add((namespace, parent, tokens, blocks), len(tokens) + blocks.itemsize * len(blocks))

    def removed(self, blocks: "array[int]") -> None:
        self._add(blocks, blocks.itemsize * len(blocks))

    def cleared(self) -> None:
        self._add(None, 0)

    def flush(self) -> bool:
        """End the batch; returns whether there is something to take that was not there before.

        O(1), but O(tree) where batches were dropped and all that waited is taken: then all that is cached is sent.
        """
        waiting_bytes = self._bytes_in - self._bytes_out
        changes, size = self._open, self._open_bytes
        if self._is_lost and not waiting_bytes:
            changes = [None, *self._runs()]
            size = self._max_bytes // 2  # subtle: however much it is, there must be room beside it, or it is never over
            self._is_lost = False
        elif not changes:
            return False
        elif self._is_lost or waiting_bytes + size > self._max_bytes:
            self._drop(waiting_bytes)
            return False
        self._open, self._open_bytes = [], 0
        self._bytes_in += size
        self._waiting.append((self._next, changes, size))
        self._next += 1
        return True

    def take(self) -> Iterator[tuple[int, list[Change]]]:
        """The batches that wait, with their numbers; a batch counts as waiting until the next is asked for."""
        for _ in range(len(self._waiting)):
            number, changes, size = self._waiting.popleft()
            yield number, changes
            self._bytes_out += size

    def _add(self, change: Change, size: int) -> None:
        self._open.append(change)
        self._open_bytes += size + _CHANGE_BYTES
        if self._open_bytes > self._max_bytes:  # nobody calls flush, or one step is more than may wait
            self._drop(self._bytes_in - self._bytes_out)

    def _drop(self, waiting_bytes: int) -> None:
        if not self._is_lost:
            logger.warning(
                "KV events: batch %d is dropped, for %d bytes of changes wait to be sent, its own are %d, the limit is "
                "%d; all that is cached is sent later",
                self._next,
                waiting_bytes,
                self._open_bytes,
                self._max_bytes,
            )
        self._is_lost = True
        self._open, self._open_bytes = [], 0
        self._next += 1
        self.num_dropped += 1


class EventLog:
    """The batches that were sent last, and all that can be matched after the last of them.

    Keeps the last `max_batches`, of `max_bytes` together, and for every block of the cache 20 bytes and its tokens, 4
    bytes each; where it is in a namespace about 60 more. Not thread-safe.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        wire: Wire = "map",
        medium: str = "GPU",
        data_parallel_rank: int = 0,
        max_batches: int = 10_000,
        max_bytes: int = 64 << 20,
    ) -> None:
        self._wire = wire
        self._medium = medium
        self._rank = data_parallel_rank
        self._block_size = block_size
        self._recorder = EventRecorder(medium=medium)
        self._recorder.attach(num_blocks, block_size)
        self._recorder.take()
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._last: deque[tuple[int, bytes]] = deque()  # number, payload
        # by block id
        self._order = np.zeros(num_blocks, np.int64)  # when it was stored, 0: it is not
        self._parents = np.zeros(num_blocks, np.int32)
        self._tokens = np.zeros((num_blocks, block_size), np.int32)
        self._salts: dict[int, str] = {}
        self._num_stored = 0  # since the beginning

    def write(self, number: int, changes: "Iterable[Change]") -> bytes:
        """Batch `number`: what happened after the last; returns the message. Below 1 us a new block of 16."""
        for change in changes:
            if change is None:
                self._recorder.cleared()
                self._order[:] = 0
                self._salts.clear()
            elif isinstance(change, tuple):
                self._recorder.stored(*change)
                self._store(*change)
            else:
                self._recorder.removed(change)
                self._order[change] = 0
                if self._salts:
                    for block in change:
                        self._salts.pop(block, None)
        payload = self._encode(self._recorder.take())
        self._last.append((number, payload))
        self._num_bytes += len(payload)
        while len(self._last) > self._max_batches or (self._num_bytes > self._max_bytes and len(self._last) > 1):
            self._num_bytes -= len(self._last.popleft()[1])
        return payload

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        """What a router needs that has not had batch `start` nor any later one, as numbers and messages.

        The batches themselves where all are still there; else, and from 0 on, one message with all that can be matched,
        under the number of the last batch. O(batches kept), or O(num_blocks).
        """
        last = self._last[-1][0] if self._last else -1
        if start > last:
            return []
        batches = [batch for batch in self._last if batch[0] >= start]
        if start > 0 and len(batches) == last - start + 1:
            return batches
        return [(last, self._encode([AllBlocksCleared(), *self._snapshot()]))]

    def _encode(self, events: list[Event]) -> bytes:
        return encode(EventBatch(time.time(), events, self._rank), self._wire)

    def _store(self, namespace: Hashable, parent: int | None, tokens: bytes, blocks: "array[int]") -> None:
        self._order[blocks] = np.arange(self._num_stored + 1, self._num_stored + len(blocks) + 1)
        self._num_stored += len(blocks)
        self._parents[blocks[1:]] = blocks[:-1]
        self._parents[blocks[0]] = _NO_BLOCK if parent is None else parent
        self._tokens[blocks] = np.frombuffer(tokens, np.int32).reshape(len(blocks), self._block_size)
        salt = namespace_salt(namespace)
        if salt is not None:
            self._salts.update(dict.fromkeys(blocks, salt))

    def _snapshot(self) -> Iterator[BlockStored]:
        """All that is stored, in the order in which it was, so that no block comes before the one that it continues."""
        stored = np.flatnonzero(self._order)
        blocks = stored[np.argsort(self._order[stored])]
        starts = np.flatnonzero(self._parents[blocks[1:]] != blocks[:-1]) + 1  # of blocks that continue another
        for run in np.split(blocks, starts):
            if len(run):
                yield self._event(run)

    def _event(self, run: "npt.NDArray[np.int64]") -> BlockStored:
        hashes = self._recorder.hashes
        above = int(self._parents[run[0]])
        return BlockStored(
            [hashes[block] for block in run.tolist()],
            None if above == _NO_BLOCK else hashes[above],
            self._tokens[run].ravel().tolist(),
            self._block_size,
            medium=self._medium,
            cache_salt=self._salts.get(int(run[0])),
        )


def check_text(name: str, value: object) -> None:
    """Raises: TypeError for what is no str, ValueError for one that has no UTF-8."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate
        raise ValueError(f"{name} must be text that can be sent as UTF-8, got {value!a}") from None
