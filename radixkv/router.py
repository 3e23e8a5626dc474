"""Which worker has which prefix cached, learned from the events that inference engines publish.

Needs the extra `events`. Knows nothing of sockets (see `radixkv.subscriber`) and of load (see `radixkv.balance`).
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

try:
    from radixkv.hashing import namespace_salt
    from radixkv.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
except ModuleNotFoundError as error:
    raise ImportError(f"{error.name} is not installed: pip install 'radixkv[events]'", name=error.name) from None
from radixkv.shared_tree import MAX_RUN, SharedTree, Tier, bits_of
from radixkv.tokens import TOKEN_BYTES, Tokens, check_range, pack

DEFAULT_MEDIUM = "GPU"  # of events that name none
MAX_MEDIA = 16
DEFAULT_MAX_BLOCKS = 1 << 20


@dataclass(frozen=True, slots=True)
class IndexStats:
    """What was applied so far, over all workers.

    `skipped_blocks` are blocks of events that could not be used, by reason: "unknown_parent", "partial", "block_size",
    "tokens" (values that are no token ids), "extra_keys" (they hold more than their tokens: an image, say), "group" (of
    another cache group than the first), "medium" (one too many), "full" (of the worker's `max_blocks`), "conflict" (the
    id names another prefix), "duplicate" (the worker has the block under another id), "unknown_block" (its removal).
    """

    batches: int
    events: int
    missed_batches: int  # numbers that never came
    restarts: int  # numbers that went backwards
    skipped_blocks: Counter[str] = field(default_factory=Counter)


class _Worker:
    """What one worker told: in each medium, the engine's block ids and their places in the tree."""

    __slots__ = ("last_sequence", "num_blocks", "number", "places")

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_blocks = 0
        self.last_sequence: int | None = None
        self.places: dict[str, dict[int, int]] = {}


class PrefixIndex:
    """An index over the caches of many workers, kept up to date by their events. Not thread-safe.

    A worker is what publishes one stream of events: an engine, or one rank of a data-parallel group; any hashable names
    it. Engines' block ids are opaque and a worker's own: prefixes are found by their tokens, which are compared, in one
    radix tree for all workers, so a match is exact as far as the events were. `max_blocks` bounds the memory.
    """

    def __init__(self, block_size: int = 16, *, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        """For engines whose blocks (SGLang: pages) have `block_size` tokens, at most `max_blocks` of them a worker.

        `max_blocks` counts each medium; what a worker stores beyond it is not indexed, see `IndexStats`.
        """
        for name, value in (("block_size", block_size), ("max_blocks", max_blocks)):
            if type(value) is not int:
                raise TypeError(f"{name} must be an int, got {value!r}")
            if not 1 <= value < 2**31:
                raise ValueError(f"{name} must be in [1, 2^31), got {value}")
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._tree = SharedTree(block_size * TOKEN_BYTES)
        self._tiers: dict[str, Tier] = {}
        self._workers: dict[Hashable, _Worker] = {}
        self._names: list[Hashable] = []  # of each number
        self._unused: list[int] = []
        self._batches = self._events = self._missed = self._restarts = 0
        self._skipped: Counter[str] = Counter()

    # Questions

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._block_size

    @property
    def workers(self) -> list[Hashable]:
        """Those that sent anything and were not removed."""
        return list(self._workers)

    @property
    def num_distinct_blocks(self) -> int:
        """Blocks whose tokens are kept, each once however many workers hold it."""
        return self._tree.num_blocks

    @property
    def stats(self) -> IndexStats:
        """A snapshot of the counters."""
        return IndexStats(self._batches, self._events, self._missed, self._restarts, self._skipped.copy())

    def num_blocks(self, worker: Hashable) -> int:
        """How many blocks a worker holds, each medium counted; 0 for one that is not known."""
        return self._workers[worker].num_blocks if worker in self._workers else 0

    def last_sequence(self, worker: Hashable) -> int | None:
        """The number of the last batch of a worker, None before the first."""
        return self._workers[worker].last_sequence if worker in self._workers else None

    def match(
        self,
        tokens: Tokens,
        *,
        namespace: Hashable = None,
        lora: str | int | None = None,
        media: str | Collection[str] | None = None,
    ) -> dict[Hashable, int]:
        """How many leading tokens of a prompt each worker has cached, in whole blocks; who has none is left out.

        `namespace` is that of a `PrefixCache`, for other engines the cache salt; `lora` the adapter's name, or its
        number where the engine sends no name. `media` counts only what is in these ("GPU", "CPU", ...), of which one
        prefix may lie in several; None counts all. Changes nothing. O(tokens) as one memcmp a node plus packing them,
        and O(workers that have any of it).
        """
        key = pack(tokens)
        media = (media,) if isinstance(media, str) else media
        tiers = [tier for medium, tier in self._tiers.items() if media is None or medium in media]
        found = self._tree.match((namespace_salt(namespace), lora), key, tiers)
        check_range(key, max(found.values(), default=0) * self._tree.width)
        return {self._names[number]: num * self._block_size for number, num in found.items()}

    def missing(self, worker: Hashable, sequence: int) -> range:
        """The numbers of batches that should have come before `sequence`: what to ask the worker's replay for.

        Empty where it is the next, and where it goes backwards.
        """
        last = self.last_sequence(worker)
        return range(0 if last is None else last + 1, sequence)

    # Changes

    def apply(self, worker: Hashable, events: EventBatch | Iterable[Event], sequence: int | None = None) -> range:
        """Apply a batch of a worker's events, in order; returns the numbers that were missed before it.

        A missed batch may leave blocks in the index that are gone: ask `missing` first and apply a replay before, to
        stay exact. A `sequence` that is not above the last one means that the worker has restarted: what was known of
        it is forgotten. What cannot be used of an event is left out and counted in `stats`.

        Raises: ValueError or TypeError for a bad `sequence` or an event that is none; then nothing was applied.
        """
        batch = list(events.events if isinstance(events, EventBatch) else events)
        for number, event in enumerate(batch):
            if not isinstance(event, (BlockStored, BlockRemoved, AllBlocksCleared)):
                raise TypeError(f"event {number} must be one of radixkv.kv_events, got {event!r}")
        if sequence is not None and type(sequence) is not int:
            raise TypeError(f"sequence must be an int, got {sequence!r}")
        if sequence is not None and not 0 <= sequence < 2**63:
            raise ValueError(f"sequence must be in [0, 2^63), got {sequence}")
        known = self._worker(worker)
        missed = range(0)
        if sequence is not None:
            missed = range(0) if begins_anew(batch) else self.missing(worker, sequence)
            self._missed += len(missed)
            if known.last_sequence is not None and sequence <= known.last_sequence:
                self._restarts += 1
                self._clear(known)
            known.last_sequence = sequence
        self._batches += 1
        self._events += len(batch)
        for event in batch:
            if isinstance(event, BlockStored):
                self._store(known, event)
            elif isinstance(event, BlockRemoved):
                self._remove(known, event)
            else:
                self._clear(known)
        return missed

    def clear(self, worker: Hashable) -> None:
        """Forget what a worker holds, and the number of its last batch. O(what it held)."""
        if worker in self._workers:
            self._clear(self._workers[worker])
            self._workers[worker].last_sequence = None

    def remove(self, worker: Hashable) -> None:
        """Forget a worker. O(what it held)."""
        if worker in self._workers:
            known = self._workers.pop(worker)
            self._clear(known)
            self._names[known.number] = None
            self._unused.append(known.number)

    def check(self) -> None:
        """Prove every invariant. O(index). Raises: AssertionError."""
        self._tree.check()
        for name, known in self._workers.items():
            assert self._names[known.number] == name, f"worker {known.number} is {self._names[known.number]}"
            assert known.num_blocks == sum(map(len, known.places.values())), f"{name}: {known.num_blocks} blocks"
            for medium, places in known.places.items():
                found = {self._tree.settle(*divmod(place, MAX_RUN)) for place in places.values()}
                assert len(found) == len(places), f"{name}: two ids of one block in {medium}"
                nodes = self._tiers[medium].held.get(known.number, {})
                held = {(node, i) for node, blocks in nodes.items() for i in bits_of(blocks)}
                assert found == held, f"{name}: ids and blocks in {medium} disagree"
        numbers = {known.number for known in self._workers.values()}
        assert numbers.isdisjoint(self._unused), f"workers {numbers & set(self._unused)} are in use and not"
        assert len(numbers) + len(self._unused) == len(self._names), f"{len(self._names)} numbers, some are lost"
        assert all(tier.held.keys() <= numbers for tier in self._tiers.values()), "a removed worker holds blocks"

    def _worker(self, name: Hashable) -> _Worker:
        known = self._workers.get(name)
        if known is None:
            if self._unused:
                number = self._unused.pop()
                self._names[number] = name
            else:
                number = len(self._names)
                self._names.append(name)
            known = self._workers[name] = _Worker(number)
        return known

    def _clear(self, known: _Worker) -> None:
        known.places.clear()
        known.num_blocks = 0
        self._tree.forget(known.number)

    def _tier(self, medium: str) -> Tier | None:
        """None for one too many."""
        tier = self._tiers.get(medium)
        if tier is None and len(self._tiers) < MAX_MEDIA:
            tier = self._tiers[medium] = self._tree.add_tier()
        return tier

    def _skip(self, reason: str, num_blocks: int) -> None:
        if num_blocks > 0:
            self._skipped[reason] += num_blocks

    def _store(self, known: _Worker, event: BlockStored) -> None:
        hashes, medium = event.block_hashes, event.medium or DEFAULT_MEDIUM
        num = len(hashes)
        tier = self._tier(medium)
        if tier is None:
            return self._skip("medium", num)
        if event.group_idx:
            return self._skip("group", num)
        places = known.places.setdefault(medium, {})
        if not event.token_ids:
            return self._copy(known, tier, places, hashes)
        if event.block_size != self._block_size:
            return self._skip("block_size", num)
        if len(event.token_ids) != num * self._block_size:
            return self._skip("partial", num)
        try:
            key = pack(event.token_ids)
            check_range(key)
        except (ValueError, TypeError):
            return self._skip("tokens", num)
        salt, plain = _salt(event)
        self._skip("extra_keys", num - plain)
        room = self._max_blocks - known.num_blocks
        self._skip("full", plain - room)
        hashes = hashes[: min(plain, room)]
        key = key[: len(hashes) * self._tree.width]
        if event.parent_block_hash is None:
            lora = event.lora_name if event.lora_name is not None else event.lora_id
            root = self._tree.root((salt, lora))
            self._insert(known, tier, places, root, 0, key, hashes)
            self._tree.trim(root)  # where nothing was stored
            return
        place = self._find(known, event.parent_block_hash)
        if place is None:
            return self._skip("unknown_parent", len(hashes))
        node, index = place
        self._insert(known, tier, places, node, index + 1, key, hashes)

    def _insert(
        self, known: _Worker, tier: Tier, places: dict[int, int], node: int, start: int, key: bytes, hashes: list[int]
    ) -> None:
        """Store the blocks of `key` under their ids after the first `start` blocks of `node`."""
        tree, number, width = self._tree, known.number, self._tree.width
        is_fresh = places.keys().isdisjoint(hashes) and len(set(hashes)) == len(hashes)
        done = 0
        while done < len(hashes):
            node, start, same = tree.descend(node, start, key, done * width)
            if not same:
                break
            part = hashes[done : done + same]
            if is_fresh and not tree.held(tier, number, node) >> start & (1 << same) - 1:
                place = node * MAX_RUN + start
                places.update(zip(part, range(place, place + same), strict=True))
                known.num_blocks += same
                tree.hold(tier, number, node, (1 << same) - 1 << start)
            elif not self._insert_some(known, tier, places, node, start, part):
                return self._skip("conflict", len(hashes) - done)
            done += same
            start += same
        new = hashes[done:]
        if not is_fresh:
            new = new[: _num_fresh(new, places)]
            self._skip("conflict", len(hashes) - done - len(new))
        room = self._max_blocks * len(self._workers) - tree.num_blocks
        self._skip("full", len(new) - max(room, 0))
        new = new[: max(room, 0)]
        while new:
            part, new = new[:MAX_RUN], new[MAX_RUN:]
            node, start = tree.extend(node, key[done * width : (done + len(part)) * width])
            place = node * MAX_RUN + start
            places.update(zip(part, range(place, place + len(part)), strict=True))
            known.num_blocks += len(part)
            tree.hold(tier, number, node, (1 << len(part)) - 1 << start)
            done += len(part)

    def _insert_some(
        self, known: _Worker, tier: Tier, places: dict[int, int], node: int, start: int, hashes: list[int]
    ) -> bool:
        """As `_insert` for blocks of one node that the worker may hold already; False at an id of another prefix."""
        held = self._tree.held(tier, known.number, node)
        blocks = 0
        for index, block_hash in enumerate(hashes, start):
            place = places.get(block_hash)
            if place is not None:
                if self._tree.settle(*divmod(place, MAX_RUN)) != (node, index):
                    break
            elif held >> index & 1:
                self._skip("duplicate", 1)
            else:
                places[block_hash] = node * MAX_RUN + index
                known.num_blocks += 1
                blocks |= 1 << index
        else:
            index = start + len(hashes)
        if blocks:
            self._tree.hold(tier, known.number, node, blocks)
        return index == start + len(hashes)

    def _copy(self, known: _Worker, tier: Tier, places: dict[int, int], hashes: list[int]) -> None:
        """Blocks that are in another medium too now: vLLM's offloading names them without their tokens."""
        for block_hash in hashes:
            if block_hash in places:
                continue
            place = self._find(known, block_hash)
            if place is None or known.num_blocks >= self._max_blocks:
                self._skip("unknown_block" if place is None else "full", 1)
                continue
            node, index = place
            if self._tree.held(tier, known.number, node) >> index & 1:
                self._skip("duplicate", 1)
                continue
            places[block_hash] = node * MAX_RUN + index
            known.num_blocks += 1
            self._tree.hold(tier, known.number, node, 1 << index)

    def _find(self, known: _Worker, block_hash: int) -> tuple[int, int] | None:
        """The place of a block of a worker, in whatever medium."""
        for places in known.places.values():
            place = places.get(block_hash)
            if place is not None:
                return self._tree.settle(*divmod(place, MAX_RUN))
        return None

    def _remove(self, known: _Worker, event: BlockRemoved) -> None:
        if event.group_idx:
            return self._skip("group", len(event.block_hashes))
        medium = event.medium or DEFAULT_MEDIUM
        places = known.places.get(medium, {})
        gone: dict[int, int] = {}  # node -> blocks, as bits
        num_unknown = 0
        for block_hash in event.block_hashes:
            place = places.pop(block_hash, None)
            if place is None:
                num_unknown += 1
                continue
            node, index = self._tree.settle(place // MAX_RUN, place % MAX_RUN)
            gone[node] = gone.get(node, 0) | 1 << index
        self._skip("unknown_block", num_unknown)
        known.num_blocks -= len(event.block_hashes) - num_unknown
        for node, blocks in gone.items():
            self._tree.let_go(self._tiers[medium], known.number, node, blocks)


def begins_anew(events: Sequence[Event]) -> bool:
    """Whether a batch begins with `AllBlocksCleared`: then nothing that was missed before it matters."""
    return bool(events) and isinstance(events[0], AllBlocksCleared)


def _num_fresh(hashes: list[int], places: dict[int, int]) -> int:
    """How many ids come before one that is known or repeated."""
    seen: set[int] = set()
    for num, block_hash in enumerate(hashes):
        if block_hash in places or block_hash in seen:
            return num
        seen.add(block_hash)
    return len(hashes)


def _salt(event: BlockStored) -> tuple[str | None, int]:
    """The cache salt of an event, and how many of its blocks, from the first on, are told by their tokens alone.

    vLLM puts the salt into the extra keys of a prompt's first block, beside the adapter's name, which is in all.
    """
    salt = event.cache_salt
    for number, keys in enumerate(event.extra_keys or ()):
        several = keys if isinstance(keys, (list, tuple)) else () if keys is None else (keys,)
        rest = [key for key in several if key != event.lora_name and key != salt]
        if rest and not number and event.parent_block_hash is None and salt is None and isinstance(rest[0], str):
            salt = rest.pop(0)
        if rest:
            return salt, number
    return salt, len(event.block_hashes)
