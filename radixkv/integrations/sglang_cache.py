"""SGLang's prefix cache on our tree. Needs SGLang; `radixkv.integrations.sglang` registers it.

SGLang's allocator owns the slots, its scheduler the requests; this module knows which pages hold which prefixes.
A block of the tree is a *place*, a row of a table on the device that says which page lies there. So the host never
reads from the device: that would wait for the forward pass that runs meanwhile.
"""

import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    TreeLock,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from radixkv.explanation import Explanation, explain
from radixkv.integrations.sglang_events import Recorder
from radixkv.learner import Arrival
from radixkv.policy import POLICIES, Ranked
from radixkv.pool import BlockPool
from radixkv.tokens import TOKEN_BYTES
from radixkv.tree import NO_NODE, Name, Policy, RadixTree, typed_name


@dataclass(slots=True, eq=False)
class Prefix:
    """A cached prefix as SGLang keeps it, in `req.last_node`: what was matched or published, whatever splits since.

    It holds nothing. Once a part of it was evicted, locking it is an error.
    """

    num_tokens: int
    name: Name = None
    node: int = NO_NODE
    serial: int = 0
    tree: RadixTree | None = field(default=None, repr=False)  # in which node and serial are; another one after `reset`
    key: bytes | None = field(default=None, repr=False)  # what the tree compares; None of what was published
    end: int = 0  # bytes of what was matched, of which `key` is the beginning
    num_uses: int = -1  # of the tree, when it was matched


_EMPTY = Prefix(0)


class RadixKVCache(BasePrefixCache):
    """What SGLang asks of a tree cache, on `RadixTree`. Not thread-safe: the scheduler's thread calls it.

    Invariant: every place is free or in one node of the tree, and every cached page lies in one place. Deterministic:
    no clock, no randomness; ranks that make the same calls evict the same pages.
    """

    def __init__(self, params: CacheInitParams) -> None:
        """Raises: ValueError for an eviction policy, a kind of keys or an allocator that is not supported."""
        allocator = params.token_to_kv_pool_allocator
        if not isinstance(allocator, (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator)):
            raise ValueError(f"--radix-cache-backend radixkv does not support the slots of {type(allocator).__name__}")
        self.disable = params.disable
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = allocator
        self.page_size: int = params.page_size
        self._pairs: bool = params.is_eagle
        self._key_bytes = 16 if self._pairs else 8  # of what the tree compares a position by, see `_key`
        self.device = torch.device(allocator.device)
        self._make_policy = _policy_maker(params.eviction_policy, params.eviction_policy_config)
        self.kv_events = Recorder(
            enabled=params.enable_kv_cache_events and not params.disable,
            page_size=params.page_size,
            dynamo_format=params.dynamo_kv_event_format,
            lora_names=params.kv_event_lora_names,
        )
        if params.enable_metrics:
            self.init_metrics_collector()
        self._offsets = torch.arange(self.page_size, device=self.device)
        self._next_lock = 0
        self._num_matches = 0
        self.reset()

    def reset(self) -> None:
        """Forget every prefix. Frees no slot: whoever resets clears the allocator as well."""
        num_pages = self.token_to_kv_pool_allocator.size // self.page_size
        self._policy = self._make_policy()
        self._tree = RadixTree(self.page_size * self._key_bytes // TOKEN_BYTES, self._policy)
        self._places = BlockPool(num_pages)
        self._pages = torch.full((num_pages,), _FREE, dtype=torch.int64, device=self.device)
        # lock -> (node, the priority of the request that published it, and what `_begin` returned for it);
        # without a priority somebody only looks
        self._locks: dict[int, tuple[int, int | None, int | None]] = {}
        self._first_lock = self._next_lock  # older ones are of what was forgotten
        self.kv_events.clear()

    # Questions

    def supports_prefix_sharing(self) -> bool:
        return not self.disable

    def supports_fast_match_prefix(self) -> bool:
        """Whether every prompt that waits is to be matched in this pass; SGLang asks for reports of load too.

        So a policy that learns knows of all that wait. Where more wait than 128, not in every pass: some 128 matches a
        time that it asks, as many as SGLang makes itself at most.
        """
        if self._tree.learner is None:
            return False
        self._num_matches = max(0, self._num_matches - _MATCHES)
        return self._num_matches < _MATCHES

    @property
    def policy(self) -> Policy:
        """The policy in use until the next `reset`, which may have figures of its own: see `radixkv.reuse.Reuse`."""
        return self._policy

    def evictable_size(self) -> int:
        """Tokens in cached pages that nobody has locked."""
        return self._tree.num_evictable * self.page_size

    def protected_size(self) -> int:
        """Tokens in cached pages that are locked."""
        return (self._tree.num_blocks - self._tree.num_evictable) * self.page_size

    def total_size(self) -> int:
        """Tokens in cached pages."""
        return self._tree.num_blocks * self.page_size

    def root_node_handle(self, extra_key: str | None = None) -> Prefix:
        """The empty prefix, which is the same in all namespaces."""
        return _EMPTY

    def path_device_indices(self, node: Prefix) -> torch.Tensor:
        """The slots of a prefix, (num_tokens,) int64 on the device; valid as long as it is locked."""
        path, part = self._found(node)
        return self._slots(self._tree.blocks_of(path, part))

    def all_values_flatten(self) -> torch.Tensor:
        """The slots of everything that is cached, in no order. O(pool); reads from the device."""
        return self._slots_of(self._pages[self._pages != _FREE])

    def explain(
        self, tokens: Sequence[int], *, extra_key: str | None = None, cache_salt: str | None = None
    ) -> Explanation:
        """Why the hit of `tokens` ends where it does. Changes nothing; not for the hot path.

        Raises: ValueError with EAGLE, whose keys are pairs.
        """
        if self._pairs:
            raise ValueError("with EAGLE the cache's keys are pairs of tokens, which explain does not know")
        found = explain(self._tree, _name(extra_key, cache_salt), self._key(array("q", tokens), 0, len(tokens)))
        return replace(found, **{name: getattr(found, name) * TOKEN_BYTES // self._key_bytes for name in _COUNTS})

    def pretty_print(self) -> None:
        """Print the tree, at most 100 nodes of it, and its size. With EAGLE, pairs are shown one after the other."""
        tree = self._tree.draw(100, typecode="q")
        print(*tree, f"{self.total_size()} tokens, {self.protected_size()} of them locked", sep="\n")

    def dfs_weight_order(self, node_handles: Sequence[Prefix]) -> list[int]:
        """The order of requests in which those that share a prefix are neighbours, heavier branches first.

        As SGLang's: by depth first, a node's own requests after its children. O(sum of depths).
        """
        weights: Counter[int] = Counter()
        children: dict[int, dict[int, None]] = {}
        ending: dict[int, list[int]] = {}
        for index, handle in enumerate(node_handles):
            above = NO_NODE
            for node in self._found(handle)[0]:
                children.setdefault(above, {})[node] = None
                weights[node] += 1
                above = node
            ending.setdefault(above, []).append(index)
        order: list[int] = []
        stack = [(NO_NODE, False)]
        while stack:
            node, done = stack.pop()
            if done:
                order += ending.get(node, ())
                continue
            stack.append((node, True))
            family = sorted(children.get(node, ()), key=lambda child: -weights[child])
            stack += [(child, False) for child in reversed(family)]
        return order

    # A request's life

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest cached prefix, whole pages; it counts as recent now, exactly as far as it matched.

        For a policy that learns it is waited for now; a request begins where it first publishes.
        """
        self._num_matches += 1
        found = self._look(params.key, None if params.req is None else params.req.last_node)
        return MatchResult(found.num_tokens, found, found, found)

    def touch_prefix(self, key: RadixKey) -> None:
        """As `match_prefix`, for requests that wait."""
        self._look(key)

    def inc_lock_ref(self, node: Prefix) -> IncLockRefResult:
        """Lock a prefix: nothing of it is evicted until the receipt is given back.

        Raises: ValueError where a part of it was evicted since it was matched.
        """
        if self.disable:
            return IncLockRefResult(delta=0)
        before = self._tree.num_evictable
        held = node.node
        if held != NO_NODE:
            if self._stands(node):
                self._tree.hold_node(held)
            else:
                path, part = self._found(node)
                held = self._tree.hold(self._tree.root(node.name), node.name, path, part)[1]
        delta = (self._tree.num_evictable - before) * self.page_size
        return IncLockRefResult(delta=delta, node_id=self._new_lock(held, None, None))

    def dec_lock_ref(self, node: Prefix, params: DecLockRefParams | None = None) -> DecLockRefResult:
        """Give a lock back. One from before a `reset` is forgotten already.

        Raises: ValueError without a receipt, and for one that was given back before; nothing is changed.
        """
        if self.disable:
            return DecLockRefResult(delta=0)
        lock = self._given(params)
        if lock is None:
            return DecLockRefResult(delta=0)
        before = self._tree.num_evictable
        held, priority, num_known = self._locks.pop(lock)
        if held != NO_NODE:
            if priority is None:
                self._tree.let_go(held)
            else:
                self._tree.release(held, priority, num_known)
        return DecLockRefResult(delta=(self._tree.num_evictable - before) * self.page_size)

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Publish the whole pages of a request's first `up_to` tokens, and lock them for it.

        Where somebody else published the same tokens first, its row is pointed at their slots, and its own are freed.
        O(new tokens), with a policy that learns O(tokens) the first time; nothing is read from the device.

        Raises: ValueError where what the request has locked is not what counts as the cache's of its row, or its lock
        was released before.
        """
        kv, page, tree = req.kv, self.page_size, self._tree
        start = kv.cache_protected_len
        end = up_to - self._pairs
        end -= end % page
        if self.disable:
            return
        lock, node, priority, num_known = None, NO_NODE, None, None
        locked = req.lock.node.num_tokens if req.lock else 0
        if locked != start:
            raise ValueError(f"request {req.rid} has locked {locked} tokens, but {start} of its row are the cache's")
        if req.lock:
            lock = self._given(req.lock.receipt)
            if lock is None:
                return  # subtle: it began before a reset, and what it computed with is not to be matched
            node, priority, num_known = self._locks[lock]
        elif end <= start:
            return
        name = _name(req.extra_key, req.cache_salt)
        tokens = req.full_untruncated_fill_ids
        if priority is None and tree.learner is not None:
            num = len(tokens) - self._pairs
            prompt = self._key(tokens, 0, max(0, num - 1) // page * page)  # of the last token, logits are needed
            num_own = (kv.kv_allocated_len + page - 1) // page - start // page
            num_known = self._begin(node, name, prompt, (num + page - 1) // page, num_own, req.retracted_stain)
        if lock is not None:
            self._locks[lock] = node, req.priority or 0, num_known  # from now on it counts as a use
        if end <= start:
            return
        key = self._key(tokens, start, end)
        if node == NO_NODE:
            node = tree.hold(tree.root(name), name, [], 0)[1]
        node, known = tree.advance(node, key, 0, len(key))
        # row: [the cache's, start) [start, known, new) [new, end) [less than a page)
        row = self.req_to_token_pool.req_to_token[kv.req_pool_idx]
        new = start + len(known) * page
        if known:
            self.token_to_kv_pool_allocator.free_segment(row[start:new], start_pos=start)
            self.req_to_token_pool.write((kv.req_pool_idx, slice(start, new)), self._slots(known).to(row.dtype))
        if new < end:
            pages = row[new:end:page] // page
            node = self._insert(node, key[len(known) * tree.width :], pages, tokens, new, req, req.session_id)
        if lock is not None:
            del self._locks[lock]
        req.last_node = Prefix(end, name, node, tree.serial(node), tree)
        req.lock = TreeLock(req.last_node, DecLockRefParams(node_id=self._new_lock(node, req.priority or 0, num_known)))
        kv.cache_protected_len = kv.cache_inserted_len = end

    def insert(self, params: InsertParams) -> InsertResult:
        """Cache the whole pages of a key in the slots `value`, as a request that published them and ended.

        What is cached already stays where it is; slots given for it from `prev_prefix_len` on are freed. Checks more
        than `checkpoint`, which the scheduler uses, and reads from the device. O(pool).

        Raises: ValueError for too few slots, for slots that are not whole pages, and for pages that are cached already.
        """
        if self.disable:
            return InsertResult(prefix_len=0)
        page, tree, num = self.page_size, self._tree, self._num_keys(params.key)
        tokens = params.key.token_ids
        name = _name(params.key.extra_key, params.key.cache_salt)
        key = self._key(tokens, 0, num)
        path, num_cached, part = tree.find(tree.root(name), key, 0, len(key))
        known, start = num_cached * page, params.prev_prefix_len
        value = params.value
        if value is None:  # as SGLang's own trees, for tests
            value = torch.tensor(tokens[:num], dtype=torch.int64)
        value = value[:num].to(self.device, torch.int64)
        pages = value[known::page] // page
        if len(value) < num:
            raise ValueError(f"{num} tokens need {num} slots, got {len(value)}")
        if not torch.equal(self._slots_of(pages), value[known:]):
            raise ValueError(f"the slots of new tokens must be whole pages of {page}")
        if len(pages.unique()) < len(pages) or torch.isin(pages, self._pages).any() or len(pages) > len(self._places):
            raise ValueError("slots were given that hold cached tokens already")
        if known > start:
            given, cached = value[start:known], self._slots(tree.blocks_of(path, part))[start:]
            self.token_to_kv_pool_allocator.free_segment(given[given != cached], start_pos=start)
        num_known = None
        if tree.learner is not None:
            num_known = self._begin(NO_NODE, name, key, num // page, len(pages), False)
        node = tree.hold(tree.root(name), name, path, part)[1]
        if known < num:
            edge = key[num_cached * tree.width :]
            node = self._insert(node, edge, pages, tokens, known, params.key, params.session_id)
        tree.release(node, params.priority or 0, num_known)
        return InsertResult(prefix_len=known, last_device_node=Prefix(num, name, node, tree.serial(node), tree, key))

    def evict(self, params: EvictParams) -> EvictResult:
        """Evict `num_tokens`, rounded up to pages, or all that is not locked; their slots are free then.

        In the policy's order, each leaf from its tail; fewer than 16 tokens that would be left of one may go too.
        """
        return self._evict(-(-params.num_tokens // self.page_size))

    def evict_for_alloc(self, params: EvictParams, *, allocation_reclaim_satisfied: Any = None) -> EvictResult:
        """As `evict`, but at least a 256th of the pool, so that a full server does not evict in every step."""
        if allocation_reclaim_satisfied is not None:
            raise NotImplementedError("pools that share memory are not supported")
        num_pages = -(-params.num_tokens // self.page_size)
        return self._evict(max(num_pages, self._places.num_blocks // _SHARE) if num_pages > 0 else 0)

    # What proves

    def check(self) -> None:
        """Prove that each place has one owner, and each cached page one place. O(pool). Raises: AssertionError."""
        holds = Counter(node for node, _, _ in self._locks.values() if node != NO_NODE)
        cached = self._tree.check(holds)
        free = self._places.free_blocks()
        num = self._places.num_blocks
        assert sorted(cached + free) == list(range(num)), f"{len(cached)} places cached, {len(free)} free, of {num}"
        pages = self._pages.tolist()
        assert {pages[place] for place in free} <= {_FREE}, "a free place has a page"
        in_use = {pages[place] for place in cached} - {_FREE}
        assert len(in_use) == len(cached), f"{len(cached)} places are cached, in {len(in_use)} pages"
        self.kv_events.check(cached)

    sanity_check = check

    # Inside

    def _evict(self, num_pages: int) -> EvictResult:
        if self.disable or num_pages <= 0 or not self._tree.num_evictable:
            return EvictResult()
        start = time.perf_counter()  # for the metrics
        freed = array("i")
        self._tree.evict(num_pages, freed, _STUMP // self.page_size)
        index = self._index(freed)
        self.token_to_kv_pool_allocator.free_segment(self._slots_of(self._pages.index_select(0, index)), start_pos=0)
        self._pages.index_fill_(0, index, _FREE)
        self._places.give(freed)
        self.kv_events.removed(freed)
        num_tokens = len(freed) * self.page_size
        self.update_eviction_metrics(num_tokens, start)
        return EvictResult(num_tokens_evicted=num_tokens)

    def _look(self, key: RadixKey, last: Any = None) -> Prefix:
        """The longest cached prefix, which is waited for now; `last` is what the same request was told before."""
        num = self._num_keys(key)
        if self.disable or not num:
            return _EMPTY
        tree, name = self._tree, _name(key.extra_key, key.cache_salt)
        packed = self._key(key.token_ids, 0, num)
        if isinstance(last, Prefix) and self._look_again(last, name, packed):
            return last
        path, num_pages, part = tree.find(tree.root(name), packed, 0, len(packed))
        pos, end = num_pages * tree.width, len(packed)
        node = tree.look(name, path, part, packed, pos)
        serial = tree.serial(node) if path else 0
        return Prefix(num_pages * self.page_size, name, node, serial, tree, packed[:pos], end, tree.num_uses)

    def _look_again(self, last: Prefix, name: Name, packed: bytes) -> bool:
        """Whether `last` is what `_look` would find; a policy that learns need not hear of it before the next use."""
        tree = self._tree
        if tree.learner is None or last.tree is not tree or last.num_uses != tree.num_uses or last.key is None:
            return False
        pos = len(last.key)  # at the end of what is asked for, more may be cached that was not found then
        ended_there = pos < min(last.end, len(packed)) and last.name == name and packed.startswith(last.key)
        return ended_there and tree.look_again(name, last.node, last.serial, packed, pos)

    def _stands(self, prefix: Prefix) -> bool:
        """Whether all of a prefix is cached, and ends with its node."""
        return prefix.tree is self._tree and self._tree.ends(prefix.node, prefix.serial)

    def _num_keys(self, key: RadixKey) -> int:
        """How many positions of a key there are to match, whole pages."""
        num = len(key)
        if self._pairs and num and not key.is_bigram:
            num -= 1
        return num - num % self.page_size

    def _key(self, tokens: "array[int]", start: int, end: int) -> bytes:
        """What the tree compares of positions [start, end): tokens of 64 bits as they are, with EAGLE pairs of them."""
        if type(tokens) is not array or tokens.typecode != "q":
            tokens = array("q", tokens)
        if not self._pairs:
            return bytes(memoryview(tokens)[start:end])
        ids = np.frombuffer(tokens, np.int64)
        return np.stack((ids[start:end], ids[start + 1 : end + 1]), axis=1).tobytes()

    def _found(self, prefix: Prefix) -> tuple[list[int], int]:
        """The nodes of a prefix, and how many pages of the last where it ends inside. Raises: ValueError."""
        if prefix.node == NO_NODE:
            return [], 0
        tree = self._tree
        if self._stands(prefix):
            return tree.path_to(prefix.node), 0
        if prefix.key is not None:
            path, num, part = tree.find(tree.root(prefix.name), prefix.key, 0, len(prefix.key))
            if num * self.page_size == prefix.num_tokens:
                return path, part
        raise ValueError(f"of the prefix of {prefix.num_tokens} tokens that was matched, a part has been evicted since")

    def _begin(self, node: int, name: Name, key: bytes, num_pages: int, num_own: int, resumed: bool) -> int:
        """A request begins for the policy, which learns; it holds `node` and has `num_own` pages that are not cached.

        `key` is what may match of its prompt of `num_pages`. Returns how many of those are known.
        """
        tree, learner = self._tree, self._tree.learner
        assert learner is not None
        path: list[int] = []
        if node != NO_NODE:
            tree.let_go(node)  # subtle: else what it used again would pass for in use all the time
            path = tree.path_to(node)
        num_held = len(tree.blocks_of(path, 0))
        start = num_held * tree.width
        more, num, part = tree.find(path[-1] if path else tree.root(name), key, start, len(key))
        path += more
        place, pos = tree.place_after(name, path), start + num * tree.width
        num_free = self.token_to_kv_pool_allocator.available_size() // self.page_size
        room = num_free + num_own + tree.num_evictable
        num_known = learner.begin(Arrival(path, part, place, key, pos, len(key), num_pages, room, resumed))
        if node != NO_NODE:
            tree.hold_node(node)
        return num_known

    def _insert(
        self, node: int, edge: bytes, pages: torch.Tensor, tokens: "array[int]", start: int, whose: Any, session: Any
    ) -> int:
        """Cache `edge`, which is of `tokens` from `start` on, in `pages` behind `node`, which is held; returns its end.

        `whose` has the keys of the namespace.
        """
        places = self._places.take(len(edge) // self._tree.width)
        self._pages[self._index(places)] = pages.to(torch.int64)
        if self.kv_events.enabled:
            tokens = tokens[start : start + len(places) * self.page_size + self._pairs]
            key = RadixKey(tokens, whose.extra_key, self._pairs, cache_salt=whose.cache_salt)
            self.kv_events.stored(self._tree.last_block(node), places, key, session)
        return self._tree.insert(node, bytearray(edge), places)

    def _given(self, receipt: DecLockRefParams | None) -> int | None:
        """The lock of a receipt, None where it is of before a reset. Raises: ValueError."""
        lock: int | None = None if receipt is None else receipt.node_id
        if lock is None:
            raise ValueError("a lock is given back with the receipt that inc_lock_ref returned")
        if lock < self._first_lock:
            return None
        if lock not in self._locks:
            raise ValueError(f"lock {lock} was released before")
        return lock

    def _new_lock(self, node: int, priority: int | None, num_known: int | None) -> int:
        lock = self._next_lock
        self._next_lock = lock + 1
        self._locks[lock] = node, priority, num_known
        return lock

    def _index(self, places: "array[int]") -> torch.Tensor:
        """Places as an index on the device, (len(places),) int64, without waiting for it."""
        index = torch.from_numpy(np.array(places, np.int64))
        if self.device.type == "cpu":
            return index
        return index.pin_memory().to(self.device, non_blocking=True)

    def _slots(self, places: "array[int]") -> torch.Tensor:
        """The slots of the pages in `places`, (len(places) * page_size,) int64."""
        return self._slots_of(self._pages.index_select(0, self._index(places)))

    def _slots_of(self, pages: torch.Tensor) -> torch.Tensor:
        if self.page_size == 1:
            return pages
        return torch.add(self._offsets, pages[:, None], alpha=self.page_size).view(-1)


def _policy_maker(name: str, options: dict[str, Any] | None) -> Callable[[], Policy]:
    """SGLang's `--radix-eviction-policy` as ours. Raises: ValueError for another one, and for unknown options."""
    name = name.lower()
    options = dict(options or {})
    if name not in _POLICIES:
        raise ValueError(f"--radix-cache-backend radixkv has the eviction policies {', '.join(_POLICIES)}, not {name}")
    make = _POLICIES[name]
    if name == "slru":
        threshold = options.pop("protected_threshold", 2)
        make = lambda: Ranked(lambda usage, leaf: (usage.uses[leaf] >= threshold, usage.last_use[leaf]))  # noqa: E731
    if options:
        raise ValueError(f"eviction policy {name} has no option {', '.join(options)}")
    return make


_COUNTS = ("num_tokens", "num_cached_tokens", "position", "num_lost_tokens")  # of an explanation, in tokens
_FREE = -1  # the page of a free place
_SHARE = 256  # see `evict_for_alloc`
_MATCHES = 128  # see `supports_fast_match_prefix`
_STUMP = 15  # tokens that are not worth keeping when as many before them are evicted; matters to pages below 16
_POLICIES: dict[str, Callable[[], Policy]] = {
    **POLICIES,
    "mru": lambda: Ranked(lambda usage, leaf: -usage.last_use[leaf]),
    "filo": lambda: Ranked(lambda usage, leaf: -usage.created[leaf]),
}


def _name(extra_key: str | None, cache_salt: str | None) -> Name:
    """The namespace of a request: nothing is joined, so that no pair of keys can be taken for another."""
    salt = cache_salt or None
    return None if extra_key is None and salt is None else typed_name((extra_key, salt))
