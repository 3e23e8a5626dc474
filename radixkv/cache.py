"""The life of a request over cached prefixes: the only place where tree, pool and counters change in one call."""

import operator
import os
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from radixkv.errors import OutOfBlocksError
from radixkv.explanation import Explanation, explain
from radixkv.learner import Arrival
from radixkv.policy import make_policy
from radixkv.pool import BlockPool
from radixkv.stats import Stats
from radixkv.tokens import TOKEN_BYTES, Tokens, check_range, check_token, pack
from radixkv.tree import NO_NODE, Policy, RadixTree, Run, Trail, shown_name, typed_name

if TYPE_CHECKING:
    from radixkv.record import Recorder

_MAX_BLOCKS = 2**31 - 1  # block ids are int32
_MAX_BLOCK_SIZE = 2**20
_NOTHING = range(0)
_NO_BLOCKS = array("i")  # shared, never changed in place


class EventSink(Protocol):
    """Hears what can be matched and what no longer can, right after it changed; see `radixkv.events`.

    It must neither fail nor wait, nor call the cache but for `runs`. What it is given it may keep.
    """

    def attach(self, num_blocks: int, block_size: int, runs: "Callable[[], Iterable[Run]]") -> None:
        """Called once, by the new cache. `runs()` is all that is cached, parents before their children. O(tree)."""

    def check_namespace(self, namespace: Hashable) -> None:
        """Raises: ValueError or TypeError for a namespace that cannot be named outside."""

    def stored(self, namespace: Hashable, parent: int | None, tokens: bytes, blocks: "array[int]") -> None:
        """`blocks` hold `tokens`, packed, and continue block `parent`; None: the start of a prompt."""

    def removed(self, blocks: "array[int]") -> None:
        """No block stands before one that was built on it."""

    def cleared(self) -> None:
        """Nothing is cached any more."""


class Request:
    """One request's hold on its prefix, and its block table. Made by `PrefixCache.allocate` and `fork`; single-use.

    The first `num_published` tokens of the table are blocks of the tree, the rest are the request's own.
    """

    __slots__ = (
        "_cache",
        "_committed",
        "_duplicates",
        "_generated",
        "_node",
        "_num_cached",
        "_num_known",
        "_num_prompt",
        "_num_tokens",
        "_priority",
        "_prompt",
        "_published",
        "_root",
        "_table",
    )

    def __init__(
        self, cache: "PrefixCache", prompt: bytes | bytearray, num_tokens: int, table: "array[int]", priority: int
    ) -> None:
        self._cache: PrefixCache | None = cache  # None once freed
        self._prompt = prompt  # a lookup's own, where it came from one, which may go on behind `_num_prompt`
        self._generated = array("i")
        self._num_prompt = self._num_tokens = num_tokens
        self._num_cached = 0
        self._committed = 0
        self._published = 0
        self._root = self._node = NO_NODE
        self._priority = priority
        self._num_known: int | None = None  # what the learner said when it began
        self._table = table
        self._duplicates = _NO_BLOCKS  # blocks of its own in the published part, where tables are append-only

    @property
    def num_tokens(self) -> int:
        """Prompt and appended tokens."""
        return self._num_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Tokens whose KV was there when the request began, whole blocks: prefill starts behind them."""
        return self._num_cached

    @property
    def num_committed_tokens(self) -> int:
        """Tokens whose KV is known to be written; the whole blocks among them are what others can match."""
        return self._committed

    @property
    def num_published_tokens(self) -> int:
        """Tokens in blocks that the tree owns: what was matched, and what was committed as whole blocks."""
        return self._published

    @property
    def block_table(self) -> "array[int]":
        """The block ids that hold tokens [0, num_tokens), in order: a copy, 4 bytes a block, that numpy and torch can
        read in place. It stays readable after `free`, but the blocks are no longer the request's."""
        return self._table[:]

    def __repr__(self) -> str:
        state = "" if self._cache else "freed, "
        return (
            f"Request({state}num_tokens={self._num_tokens}, num_cached_tokens={self._num_cached}, "
            f"num_committed_tokens={self._committed}, blocks={len(self._table)})"
        )

    def _key(self, start: int, end: int) -> tuple[bytes, int]:
        """Packed tokens that include [start, end), and the byte at which `start` lies in them."""
        prompt, split = self._prompt, self._num_prompt
        if start >= split:
            return self._generated[start - split : end - split].tobytes(), 0
        if end <= split:
            if prompt.__class__ is bytes:
                return prompt, start * TOKEN_BYTES
            return bytes(memoryview(prompt)[start * TOKEN_BYTES : end * TOKEN_BYTES]), 0
        head = memoryview(prompt)[start * TOKEN_BYTES : split * TOKEN_BYTES]
        return b"".join((head, self._generated[: end - split])), 0


class Lookup:
    """A prompt that is kept, and what of it matched: nothing is compared twice. Made by `PrefixCache.lookup`.

    For requests that wait, which are matched in every step, and for chats that go on. Takes the place of tokens in
    `match` and `allocate`, any number of times. Holds nothing: what matched may be evicted meanwhile.
    """

    __slots__ = ("_cache", "_key", "_name", "_trail", "namespace")

    def __init__(self, cache: "PrefixCache", namespace: Hashable) -> None:
        self.namespace = namespace
        self._name = typed_name(namespace)
        self._cache = cache
        self._key = bytearray()
        self._trail: Trail = []

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt so far."""
        return len(self._key) // TOKEN_BYTES

    def extend(self, tokens: Tokens) -> None:
        """The prompt goes on with `tokens`. O(new tokens). Raises: ValueError and TypeError for bad tokens."""
        packed = pack(tokens)
        check_range(packed)
        self._key += packed

    def __repr__(self) -> str:
        return f"Lookup(num_tokens={self.num_tokens})"


class PrefixCache:
    """KV blocks under a radix tree of token prefixes: matched, shared, and evicted when room is needed.

    Every block is free, cached or private to running requests; `num_blocks` is their sum after every call. A failed
    call leaves the cache as it was, but for the count of failures. Not thread-safe: it takes no lock, so that an
    engine's scheduler thread pays for none. Deterministic: the same calls evict the same blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        policy: str | Policy = "lru",
        swap_duplicates: bool = True,
        events: EventSink | None = None,
        record: "str | os.PathLike[str] | Recorder | None" = None,
    ) -> None:
        """A cache of `num_blocks` blocks of `block_size` tokens each, 4 bytes a block before anything is cached.

        `policy` is "lru", "lfu", "fifo", "slru", "priority", "reuse", "arc" or an object of one's own (see
        `radixkv.policy` and docs/policies.md). Where two requests computed the same block, the later table is switched
        to the cached copy by `commit`; with `swap_duplicates=False` tables only ever grow, and the request keeps its
        copy until it is freed. `events` hears what can be matched, to tell routers (see `radixkv.events`). `record`
        names a file to which a trace is written that can be replayed, of hashes (see `radixkv.record`).
        """
        self._num_blocks = _integer("num_blocks", num_blocks, 1, _MAX_BLOCKS)
        self._block_size = _integer("block_size", block_size, 1, _MAX_BLOCK_SIZE)
        self._swap_duplicates = swap_duplicates
        self._pool = BlockPool(self._num_blocks)
        self._policy = make_policy(policy)
        self._tree = RadixTree(self._block_size, self._policy)
        self._stats = Stats()
        self._running: set[Request] = set()
        self._events = events
        if events is not None:
            for name in ("attach", "check_namespace", "stored", "removed", "cleared"):
                if isinstance(events, type) or not callable(getattr(events, name, None)):
                    raise TypeError(f"events must be an object such as radixkv.events.ZmqPublisher, got {events!r}")
        if record is not None:
            from radixkv.record import Recorder, start_record  # here: importing radixkv stays fast

            record = record if isinstance(record, Recorder) else Recorder(record)
        if events is not None:  # subtle: after the record, or a path that cannot be written would use them up
            events.attach(self._num_blocks, self._block_size, self._runs)
        self.record: Recorder | None = record
        if record is not None:
            start_record(self, record)

    # Questions

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._block_size

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return self._num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return len(self._pool)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be matched, in use or not."""
        return self._tree.num_blocks

    @property
    def num_evictable_blocks(self) -> int:
        """Cached blocks that no running request uses."""
        return self._tree.num_evictable

    @property
    def num_private_blocks(self) -> int:
        """Blocks of running requests that nobody can match: not committed, partly filled, or from before a reset."""
        return self._num_blocks - len(self._pool) - self._tree.num_blocks

    @property
    def policy(self) -> Policy:
        """The policy in use, which may have figures of its own: see `radixkv.reuse.Reuse`."""
        return self._policy

    @property
    def stats(self) -> Stats:
        """A snapshot of the counters."""
        return replace(self._stats)

    def lookup(self, tokens: Tokens, *, namespace: Hashable = None) -> Lookup:
        """A prompt to match or allocate later and again: see `Lookup`. Matches nothing yet. O(tokens)."""
        lookup = Lookup(self, namespace)
        lookup.extend(tokens)
        return lookup

    def match(self, tokens: Tokens | Lookup, *, namespace: Hashable = None) -> int:
        """How many of `tokens` are cached, from position zero, in whole blocks. Changes nothing, not even recency.

        O(tokens) as one memcmp a node, plus packing them (see `radixkv.tokens`). O(1) for a lookup where nothing
        changed, else O(what was added to it, or cached or evicted where its match ended); its namespace is its own.
        """
        if isinstance(tokens, Lookup):
            self._follow(tokens, namespace)
            return tokens._trail[-1][2] // TOKEN_BYTES if tokens._trail else 0
        key = pack(tokens)
        root = self._tree.root(typed_name(namespace))
        hit = self._tree.find(root, key, 0, len(key) - len(key) % self._tree.width)[1]
        check_range(key, hit * self._tree.width)
        return hit * self._block_size

    def num_missing_blocks(self, tokens: Tokens | Lookup, *, namespace: Hashable = None) -> int:
        """How many blocks `allocate` would need beyond those that are free or evictable: 0 where it fits now.

        For schedulers that ask before they take. Changes nothing. Cost as `match`.
        """
        lookup = tokens if isinstance(tokens, Lookup) else self.lookup(tokens, namespace=namespace)
        self._follow(lookup, namespace)
        tree, size, num_tokens = self._tree, self._block_size, lookup.num_tokens
        path, num_hit, part = tree.found(lookup._trail, (num_tokens - 1) // size * tree.width)
        num_room = len(self._pool) + tree.num_evictable - tree.num_evictable_on(path, part)
        return max(0, (num_tokens + size - 1) // size - num_hit - num_room)

    # The life of a request

    def allocate(
        self,
        tokens: Tokens | Lookup,
        *,
        namespace: Hashable = None,
        priority: int = 0,
        min_prefill_tokens: int = 1,
        cacheable: bool = True,
        resumed: bool = False,
    ) -> Request:
        """Begin a request: hold the longest cached prefix of `tokens` and take blocks for the rest, all or nothing.

        A lookup goes on belonging to the caller, who may extend it; the request's tokens are those it has now.
        At least `min_prefill_tokens` are left to prefill (the last token's logits are needed). May evict anything that
        no running request holds; what was just matched is held first. `cacheable=False` neither matches nor publishes.
        `priority` matters to the policy of that name. `resumed` marks a preempted request that comes back, to be
        counted apart. O(tokens) as memcmp, O(blocks) as memcpy, O(nodes on the path); of a lookup, only tokens that
        were not matched before.

        Raises: OutOfBlocksError when it does not fit now; ValueError for an empty prompt, one that can never fit, and
        for bad values, TypeError for bad types.
        """
        lookup, key = None, b""
        if isinstance(tokens, Lookup):
            lookup = tokens
            self._follow(lookup, namespace)
        else:
            key = pack(tokens)
        prompt = lookup._key if lookup else key
        num_tokens = len(prompt) // TOKEN_BYTES
        if type(priority) is not int or not -(2**63) < priority < 2**63:
            priority = _integer("priority", priority, -(2**63) + 1, 2**63 - 1)
        if type(min_prefill_tokens) is not int or min_prefill_tokens < 0:
            min_prefill_tokens = _integer("min_prefill_tokens", min_prefill_tokens, 0, None)
        name = lookup._name if lookup else None if namespace is None else typed_name(namespace)
        if name is not None and self._events is not None:
            self._events.check_namespace(shown_name(name))
        if not num_tokens:
            raise ValueError("a prompt must have at least 1 token, got 0")
        size = self._block_size
        num_needed = (num_tokens + size - 1) // size
        if num_needed > self._num_blocks:
            raise ValueError(
                f"{num_tokens} tokens need {num_needed} blocks, but the cache has {self._num_blocks} in all"
            )
        tree = self._tree
        root = NO_NODE
        path: list[int] = []
        num_hit = part = 0
        if cacheable:
            limit = (num_tokens - min_prefill_tokens) // size * tree.width
            root = tree.root(name)
            path, num_hit, part = tree.found(lookup._trail, limit) if lookup else tree.find(root, key, 0, limit)
        if not lookup:
            check_range(key, num_hit * tree.width)
        num_needed -= num_hit
        num_short = num_needed - len(self._pool)
        if num_short > 0:
            num_evictable = tree.num_evictable - tree.num_evictable_on(path, part)
            if num_short > num_evictable:
                self._stats.failed_allocations += 1
                raise OutOfBlocksError(num_needed, len(self._pool), num_evictable)

        table = tree.blocks_of(path, part)
        request = Request(self, prompt, num_tokens, table, priority)
        if cacheable:
            if tree.learner is not None:
                place, room = tree.place_after(name, path), len(self._pool) + tree.num_evictable
                pos, num_blocks = num_hit * tree.width, num_hit + num_needed
                arrival = Arrival(path, part, place, prompt, pos, limit, num_blocks, room, resumed)
                request._num_known = tree.learner.begin(arrival)
            request._root, request._node = tree.hold(root, name, path, part)
        try:
            table += self._take(num_needed)
        except BaseException:  # a policy of somebody's own
            if cacheable:
                tree.release(request._node, priority)
            raise
        request._num_cached = request._committed = request._published = num_hit * size
        self._running.add(request)
        stats = self._stats
        if resumed:
            stats.resumed_lookups += 1
            stats.resumed_prompt_tokens += num_tokens
            stats.resumed_hit_tokens += num_hit * size
        elif cacheable:
            stats.lookups += 1
            stats.prompt_tokens += num_tokens
            stats.hit_tokens += num_hit * size
        return request

    def touch(self, tokens: Tokens | Lookup, *, namespace: Hashable = None) -> int:
        """What is cached of `tokens` is waited for: it is evicted later. No use is counted.

        For prompts in a queue, in any step before they begin, and again as more is cached. It is recent then, the last
        touched the most; a policy that learns gets it for eviction only where nothing else is left, the latest comer's
        first (see `radixkv.waiting`). Nothing has to be taken back where one gives up. Returns the number of tokens.
        Cost as `match`, and O(nodes).
        """
        lookup = tokens if isinstance(tokens, Lookup) else self.lookup(tokens, namespace=namespace)
        num_tokens = self.match(lookup, namespace=namespace)
        pos = num_tokens * TOKEN_BYTES
        path, _, part = self._tree.found(lookup._trail, pos)
        self._tree.look(lookup._name, path, part, lookup._key, pos)
        return num_tokens

    def commit(self, request: Request, num_tokens: int | None = None) -> range:
        """The KV of the request's first `num_tokens` (default: all) is written: others can match its whole blocks now.

        Returns the positions of the block table that changed: where somebody else had committed the same tokens, the
        table is switched to the cached blocks and the request's own are freed. Fewer tokens than before change nothing.
        O(new tokens).
        """
        if request.__class__ is not Request or request._cache is not self:
            raise self._not_ours(request)
        if num_tokens is None:
            num_tokens = request._num_tokens
        else:
            num_tokens = _integer("num_tokens", num_tokens, 0, request._num_tokens)
        if num_tokens > request._committed:
            request._committed = num_tokens
        size, tree = self._block_size, self._tree
        start = request._published
        end = num_tokens - num_tokens % size
        if end <= start or not tree.is_live(request._root):
            return _NOTHING
        key, pos = request._key(start, end)
        stop = pos + (end - start) * TOKEN_BYTES
        first = start // size
        node, known = tree.advance(request._node, key, pos, stop)
        table = request._table
        changed = _NOTHING
        if known:
            after = first + len(known)
            own = table[first:after]
            pos += len(known) * tree.width
            if self._swap_duplicates:
                changed = range(first, after)
                table[first:after] = known
                self._pool.give(own)
                self._stats.duplicates_freed += len(own)
            else:
                request._duplicates = request._duplicates + own
            first = after
        request._published = end
        if pos == stop:
            request._node = node
            return changed
        blocks = table[first : end // size]
        before = None if self._events is None else tree.last_block(node)
        request._node = tree.insert(node, bytearray(memoryview(key)[pos:stop]), blocks)
        if self._events is not None:
            self._events.stored(shown_name(tree.name(request._root)), before, key[pos:stop], blocks)
        return changed

    def append(self, request: Request, tokens: int | Tokens) -> None:
        """Append one token, or several, all or nothing; takes a block wherever the last one is full.

        May evict, as `allocate`. One token costs O(1) and allocates nothing within a block.

        Raises: OutOfBlocksError; ValueError and TypeError for bad tokens.
        """
        if request.__class__ is not Request or request._cache is not self:
            raise self._not_ours(request)
        num_tokens = request._num_tokens
        if type(tokens) is int:
            if not 0 <= tokens < 2**31:
                check_token(tokens, 0)
            if not num_tokens % self._block_size:
                request._table.append(self._take(1)[0])
            request._generated.append(tokens)
            request._num_tokens = num_tokens + 1
            return
        if hasattr(tokens, "__index__") and not getattr(tokens, "ndim", 0):  # bool, a numpy or torch scalar
            return self.append(request, check_token(tokens, 0))
        packed = pack(tokens)
        check_range(packed)
        num_tokens += len(packed) // TOKEN_BYTES
        size = self._block_size
        request._table += self._take((num_tokens + size - 1) // size - len(request._table))
        request._generated.frombytes(packed)
        request._num_tokens = num_tokens

    def decode(self, requests: Sequence[Request], tokens: Sequence[int]) -> list[Request]:
        """One decode step: the KV of all tokens so far is written, and `tokens[i]` comes next in `requests[i]`.

        As `commit` and `append` for each, all or nothing, and a third cheaper. Returns the requests whose block table
        changed. New blocks are taken before duplicates come back, so it may lack room where one by one would fit.

        Raises: OutOfBlocksError; ValueError and TypeError for bad tokens and requests, and for one given twice.
        """
        if len(requests) != len(tokens):
            raise ValueError(f"{len(requests)} requests, but {len(tokens)} tokens")
        if requests and (set(map(type, tokens)) != {int} or min(tokens) < 0 or max(tokens) >= 2**31):
            tokens = [check_token(token, position) for position, token in enumerate(tokens)]
        size = self._block_size
        due, changed = [], []
        for request in requests:
            if request.__class__ is not Request or request._cache is not self:
                raise self._not_ours(request)
            if request._num_tokens - request._published >= size:
                due.append(request)
            if not request._num_tokens % size:
                changed.append(request)
        if len(set(requests)) < len(requests):
            raise ValueError("a request is given twice")
        blocks = self._take(len(changed)) if changed else _NO_BLOCKS
        grown = list(zip(changed, blocks, strict=True))
        changed += [request for request in due if self.commit(request) and request._num_tokens % size]
        for request, block in grown:
            request._table.append(block)
        for request, token in zip(requests, tokens, strict=True):
            num_tokens = request._num_tokens
            request._committed = num_tokens
            request._num_tokens = num_tokens + 1
            request._generated.append(token)
        return changed

    def truncate(self, request: Request, num_tokens: int) -> None:
        """Drop the tokens from `num_tokens` on (rejected drafts, a stop string) and give back the blocks left empty.

        Raises: ValueError below what is published, which others may be using.
        """
        if request.__class__ is not Request or request._cache is not self:
            raise self._not_ours(request)
        num_tokens = _integer("num_tokens", num_tokens, request._published, request._num_tokens)
        request._num_prompt = min(request._num_prompt, num_tokens)
        del request._generated[num_tokens - request._num_prompt :]
        keep = (num_tokens + self._block_size - 1) // self._block_size
        self._pool.give(request._table[keep:])
        del request._table[keep:]
        request._num_tokens = num_tokens
        request._committed = min(request._committed, num_tokens)

    def fork(self, request: Request) -> tuple[Request, list[tuple[int, int]]]:
        """A second request with the same tokens: published blocks are shared, the others are the fork's own.

        Returns the fork and the blocks whose KV the engine must copy, as (from, to), before either goes on.

        Raises: OutOfBlocksError.
        """
        if request.__class__ is not Request or request._cache is not self:
            raise self._not_ours(request)
        num_shared = request._published // self._block_size
        own = request._table[num_shared:]
        copies = self._take(len(own))
        table = request._table[:num_shared]
        if request._duplicates:  # those are the request's; the tree's hold the same
            table = self._tree.blocks_of(self._tree.path_to(request._node), 0)
        fork = Request(self, request._prompt, request._num_prompt, table + copies, request._priority)
        fork._generated = request._generated[:]
        fork._num_tokens = request._num_tokens
        fork._num_cached = fork._published = request._published
        fork._committed = request._committed
        fork._root, fork._node = request._root, request._node
        if request._node != NO_NODE:
            self._tree.hold_node(request._node)
        self._running.add(fork)
        return fork, list(zip(own, copies, strict=True))

    def free(self, request: Request) -> None:
        """End a request: what it published stays cached and becomes evictable, the rest of its blocks are free.

        O(nodes on its path) at most.
        """
        if request.__class__ is not Request or request._cache is not self:
            raise self._not_ours(request)
        self._running.remove(request)
        request._cache = None
        self._pool.give(request._table[request._published // self._block_size :])
        if request._duplicates:
            self._pool.give(request._duplicates)
        if request._node == NO_NODE:
            return
        if self._tree.is_live(request._root):
            self._tree.release(request._node, request._priority, request._num_known)
        else:
            self._pool.give(self._tree.release_detached(request._node))

    # The cache as a whole

    def evict(self, num_blocks: int) -> list[int]:
        """Evict `num_blocks` cached blocks that nobody uses, or as many as there are; returns their ids, now free.

        In the policy's order, each leaf from its tail, so no block goes before what was built on it.
        """
        return self._evict(_integer("num_blocks", num_blocks, 0, None), by_call=True).tolist()

    def reset(self) -> None:
        """Forget every prefix (new weights, say). Running requests go on, but nothing old and nothing that they commit
        from now on is matched; their blocks come back when they are freed. O(tree)."""
        self._stats.forgotten_blocks += self._tree.num_blocks
        for name in self._tree.names():
            self._pool.give(self._tree.drop(name))
        self._tree.forget_evicted()
        if self._events is not None:
            self._events.cleared()

    def clear(self, namespace: Hashable) -> None:
        """As `reset`, for one namespace (an adapter was reloaded, say). O(its part of the tree)."""
        name = typed_name(namespace)
        gone = array("i")
        if self._events is not None:
            for _, _, _, blocks in self._tree.runs([name]):
                gone += blocks
            gone.reverse()
        num_cached = self._tree.num_blocks
        self._pool.give(self._tree.drop(name))
        self._stats.forgotten_blocks += num_cached - self._tree.num_blocks
        if self._events is not None and gone:
            self._events.removed(gone)

    def explain(self, tokens: Tokens, *, namespace: Hashable = None) -> Explanation:
        """Why the hit of `tokens` ends where it does. Changes nothing.

        What would have matched is counted too. Not for the hot path: O(tokens x namespaces + children where it ends).
        """
        key = pack(tokens)
        check_range(key)
        return explain(self._tree, typed_name(namespace), key)

    def draw(self, *, max_nodes: int = 100) -> str:
        """The tree as text: token ranges, block ids, and how many hold them; at most `max_nodes` nodes."""
        return "\n".join(self._tree.draw(_integer("max_nodes", max_nodes, 0, None)))

    def check(self) -> None:
        """Prove every invariant: each block has one owner, counts agree, what is held is in use. O(blocks).

        Raises: AssertionError with the numbers and the block or node that breaks it.
        """
        owners: dict[int, str] = {}
        holds = Counter(request._node for request in self._running)
        holds.pop(NO_NODE, None)
        for owner, blocks in (
            ("the free list", self._pool.free_blocks()),
            ("the tree", self._tree.check(holds)),
            *((repr(request), self._check_request(request)) for request in self._running),
        ):
            for block in blocks:
                assert 0 <= block < self._num_blocks, f"block {block} of {owner} is not in [0, {self._num_blocks})"
                assert block not in owners, f"block {block} belongs to {owners[block]} and to {owner}"
                owners[block] = owner
        assert len(owners) == self._num_blocks, (
            f"{self._num_blocks} blocks, but only {len(owners)} have an owner; "
            f"lost: {sorted(set(range(self._num_blocks)) - owners.keys())[:8]}"
        )

    def _check_request(self, request: Request) -> "array[int]":
        """Check one running request; returns the blocks that it owns."""
        size = self._block_size
        table, published = request._table, request._published
        assert request._cache is self, f"{request!r} is running, but not of this cache"
        assert len(table) == -(-request._num_tokens // size), f"{request!r}: {len(table)} blocks of {size} tokens"
        assert published % size == 0, f"{request!r}: {published} published tokens are not whole blocks"
        assert request._num_cached <= published <= request._committed <= request._num_tokens, (
            f"{request!r}: cached {request._num_cached}, published {published}, committed {request._committed}"
        )
        shared = array("i")
        if request._node != NO_NODE:
            shared = self._tree.blocks_of(self._tree.path_to(request._node), 0)
        assert len(shared) == published // size, f"{request!r}: published {published}, but {len(shared)} blocks"
        own = array("i", [block for block, cached in zip(table, shared, strict=False) if block != cached])
        assert own == request._duplicates, f"{request!r}: keeps {own} beside cached blocks, not {request._duplicates}"
        return own + table[len(shared) :]

    def _follow(self, lookup: Lookup, namespace: Hashable) -> None:
        """Bring a lookup up to date. Raises: ValueError where it is another cache's, or of another namespace."""
        if lookup._cache is not self:
            raise ValueError(f"{lookup!r} belongs to another cache")
        if namespace is not None and typed_name(namespace) != lookup._name:
            raise ValueError(f"{lookup!r} is of namespace {lookup.namespace!r}, not {namespace!r}")
        end = len(lookup._key)
        self._tree.follow(lookup._name, lookup._trail, lookup._key, end - end % self._tree.width)

    def _take(self, num: int) -> "array[int]":
        """Blocks from the pool, after evicting what is missing; nothing held goes. Raises: OutOfBlocksError."""
        short = num - len(self._pool)
        if short > 0:
            if short > self._tree.num_evictable:
                self._stats.failed_allocations += 1
                raise OutOfBlocksError(num, len(self._pool), self._tree.num_evictable)
            self._evict(short)
        return self._pool.take(num)

    def _evict(self, num: int, *, by_call: bool = False) -> "array[int]":
        freed = array("i")
        try:
            self._tree.evict(num, freed)
        finally:  # whatever a policy of somebody's own raises, no block is lost
            self._pool.give(freed)
            self._stats.evicted_blocks += len(freed)
            if by_call:
                self._stats.evicted_by_call += len(freed)
            else:
                self._stats.evicted_for_room += len(freed)
            if self._events is not None and freed:
                self._events.removed(freed)
        return freed

    def _runs(self) -> Iterable[Run]:
        return self._tree.runs(self._tree.names())

    def _not_ours(self, request: object) -> Exception:
        if not isinstance(request, Request):
            return TypeError(f"expected a Request, got {request!r}")
        if request._cache is None:
            return ValueError(f"{request!r} was freed and cannot be used again")
        return ValueError(f"{request!r} belongs to another cache")

    def __repr__(self) -> str:
        return (
            f"PrefixCache(num_blocks={self._num_blocks}, block_size={self._block_size}, free={self.num_free_blocks}, "
            f"cached={self.num_cached_blocks}, evictable={self.num_evictable_blocks}, "
            f"private={self.num_private_blocks}, running={len(self._running)})"
        )


def _integer(name: str, value: Any, low: int, high: int | None) -> int:
    """`value` as an int in [low, high]. Raises: TypeError or ValueError with name, value and bound."""
    if type(value) is not int:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be an int, got {value!r}")
        value = operator.index(value)
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    if high is not None and value > high:
        raise ValueError(f"{name} must be at most {high}, got {value}")
    return int(value)
