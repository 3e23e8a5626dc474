"""The test kit finds planted bugs: on every cache below it must fail, and say what is wrong.

Some bugs are planted in radixkv's cache, with `check` silenced so that they are found from outside; the others in
another engine's cache, behind the adapter of docs/testing.md.
"""

from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from naive_cache import BlockManager, Key, Seq
from test_state_machine import RadixKVMachine, names_in_docs

from radixkv import OutOfBlocksError, PrefixCache, Request
from radixkv.pool import BlockPool
from radixkv.tokens import pack
from radixkv.tree import typed_name

PLANTED: list[Any] = []


def fails_with(message: str) -> Callable[[type], type]:
    """The kit must fail on the class with this message, a regular expression."""

    def register(broken: type) -> type:
        PLANTED.append(pytest.param(broken, message, id=broken.__name__))
        return broken

    return register


# In radixkv's cache


class Broken(PrefixCache):
    def check(self) -> None:
        pass

    def pin(self, tokens: Any, namespace: Hashable) -> int:
        """Pin what `tokens` hit, as a request does; returns the node."""
        key, name = pack(tokens), typed_name(namespace)
        root = self._tree.root(name)
        path, _, part = self._tree.find(root, key, 0, len(key) - len(key) % self._tree.width)
        return self._tree.hold(root, name, path, part)[1]


@fails_with("no token left to prefill: .* leaves [0-9]+; at least [0-9]+ must be left")
class HitSparesNoToken(Broken):
    def allocate(self, tokens: Any, *, min_prefill_tokens: int = 1, **options: Any) -> Request:
        return super().allocate(tokens, min_prefill_tokens=0, **options)


@fails_with("failed call changed something|wrong count: num_evictable|no room where there is|blocks leaked")
class FailedAllocateLeavesPins(Broken):
    def allocate(self, tokens: Any, *, namespace: Hashable = None, **options: Any) -> Request:
        try:
            return super().allocate(tokens, namespace=namespace, **options)
        except OutOfBlocksError:
            self.pin(tokens, namespace)
            raise


@fails_with("wrong count: num_free_blocks is [0-9]+, it should be [0-9]+")
class DuplicatesLeakOnCommit(Broken):
    def commit(self, request: Request, num_tokens: int | None = None) -> range:
        pool, self._pool = self._pool, BlockPool(0)
        try:
            return super().commit(request, num_tokens)
        finally:
            self._pool = pool


@fails_with("wrong (block|victim)|hit too (long|short)")
class RecencyStampedOnWrongHalfOfSplit(Broken):
    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        tree, policy, split = self._tree, self._policy, self._tree._split

        def split_wrong(node: int, part: int) -> int:
            upper = split(node, part)
            if not tree._holds[node]:
                policy.discard(node)
                policy.add(node)
            return upper

        tree._split = split_wrong


@fails_with("hit too long")
class MatchableBeforeCommit(Broken):
    def allocate(self, tokens: Any, *, namespace: Hashable = None, **options: Any) -> Request:
        is_new = not self.match(tokens, namespace=namespace)
        request = super().allocate(tokens, namespace=namespace, **options)
        if is_new:
            self.commit(request)
            request._committed = 0
        return request


@fails_with("hit too (long|short)|table changed: commit")
class BufferReadAfterItWasOverwritten(Broken):
    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.views: dict[Request, Any] = {}

    def allocate(self, tokens: Any, **options: Any) -> Request:
        request = super().allocate(tokens, **options)
        self.views[request] = tokens
        return request

    def commit(self, request: Request, num_tokens: int | None = None) -> range:
        seen = pack(self.views.get(request, []))
        if len(seen) == len(request._prompt):  # neither a fork nor truncated
            request._prompt = seen
        return super().commit(request, num_tokens)


@fails_with("wrong (block|victim)|hit too (long|short)")
class MatchChangesRecency(Broken):
    def match(self, tokens: Any, *, namespace: Hashable = None) -> int:
        num_tokens = super().match(tokens, namespace=namespace)
        if num_tokens:
            self._tree.release(self.pin(tokens, namespace), 0)
        return num_tokens


@fails_with("hit too (long|short)")
class NamespacesJoinedAsText(Broken):
    def match(self, tokens: Any, *, namespace: Hashable = None) -> int:
        return super().match(tokens, namespace=str(namespace))

    def allocate(self, tokens: Any, *, namespace: Hashable = None, **options: Any) -> Request:
        return super().allocate(tokens, namespace=str(namespace), **options)

    def clear(self, namespace: Hashable) -> None:
        super().clear(str(namespace))


@fails_with("block in two hands")
class ForkSharesUncommittedBlock(Broken):
    def fork(self, request: Request) -> tuple[Request, list[tuple[int, int]]]:
        fork, copies = super().fork(request)
        for source, block in copies:
            fork._table[fork._table.index(block)] = source
            self._pool.give(array("i", [block]))
        return fork, []


@fails_with("wrong copies")
class ForkForgetsToCopy(Broken):
    def fork(self, request: Request) -> tuple[Request, list[tuple[int, int]]]:
        fork, copies = super().fork(request)
        return fork, copies[1:]


@fails_with("hit too (long|short)|wrong KV|table changed")
class TruncatedTokensStayMatchable(Broken):
    def truncate(self, request: Request, num_tokens: int) -> None:
        prompt, generated = request._prompt, request._generated[:]
        super().truncate(request, num_tokens)
        request._prompt, request._generated = prompt, generated


@fails_with("hit too long|wrong count: num_cached_blocks")
class ResetKeepsPrefixesInUse(Broken):
    def reset(self) -> None:
        num_evicted = self._stats.evicted_blocks
        self.evict(self.num_blocks)
        self._stats.evicted_blocks = num_evicted


@fails_with("wrong range")
class CommitHidesWhatChanged(Broken):
    def commit(self, request: Request, num_tokens: int | None = None) -> range:
        super().commit(request, num_tokens)
        return range(0)


@fails_with("misuse accepted: free of requests_[0-9]+, which was freed")
class DoubleFreeIsIgnored(Broken):
    def free(self, request: Request) -> None:
        if request._cache is not None:
            super().free(request)


@fails_with("failed call changed something: .* stats.lookups was [0-9]+ and is [0-9]+")
class FailedLookupsAreCounted(Broken):
    def allocate(self, tokens: Any, **options: Any) -> Request:
        try:
            return super().allocate(tokens, **options)
        except OutOfBlocksError:
            self._stats.lookups += 1
            raise


# In another engine's cache


@fails_with("no room where there is|blocks leaked|wrong block")
class ParentNeverBecomesEvictable(BlockManager):
    def evictable(self) -> list[Key]:
        self.parents = getattr(self, "parents", set()) | {(salt, ids[: -self.size]) for salt, ids in self.index}
        return [key for key in super().evictable() if key not in self.parents]


@fails_with("block in two hands")
class EvictsWhatIsInUse(BlockManager):
    def evictable(self) -> list[Key]:
        return list(self.index)


@fails_with("block in two hands")
class HitIsPinnedAfterEviction(BlockManager):
    def grow(self, seq: Seq) -> bool:
        self.running.remove(seq)
        grown = super().grow(seq)
        self.running.append(seq)
        return grown


@fails_with("wrong block|no room where there is|blocks leaked")
class PartlyFilledBlockKeptOnFree(BlockManager):
    def end(self, seq: Seq) -> None:
        del seq.blocks[len(seq.ids) // self.size :]
        super().end(seq)


@fails_with("wrong table: after append")
class BlockForgottenAtTheBoundary(BlockManager):
    def extend(self, seq: Seq, ids: Sequence[int]) -> bool:
        if len(seq.ids) % self.size == 0 and len(ids) == 1:
            seq.ids = (*seq.ids, *ids)
            return True
        return super().extend(seq, ids)


@fails_with("hit too (long|short)|wrong KV")
class KeysOfOneBlockOnly(BlockManager):
    def key(self, salt: Hashable, ids: Sequence[int], i: int) -> Key:
        salt, prefix = super().key(salt, ids, i)
        return salt, prefix[-self.size :]


@fails_with("hit too long|wrong KV")
class HashesAreTrusted(BlockManager):
    def key(self, salt: Hashable, ids: Sequence[int], i: int) -> Key:
        salt, prefix = super().key(salt, ids, i)
        return salt, (i, sum(prefix))


@fails_with("wrong (block|victim)")
class FirstInFirstOut(BlockManager):
    def refresh(self, key: Key) -> None:
        pass


@fails_with("wrong (block|victim)")
class RootGoesFirst(BlockManager):
    def end(self, seq: Seq) -> None:
        super().end(seq)
        for i in range(seq.num_shared):
            self.refresh(self.key(seq.salt, seq.ids, i))


@fails_with("no room where there is|blocks leaked")
class LaterCommitReplacesEarlier(BlockManager):
    def publish(self, seq: Seq, num_tokens: int) -> None:
        for i in range(seq.num_shared, num_tokens // self.size):
            self.index.pop(self.key(seq.salt, seq.ids, i), None)
        super().publish(seq, num_tokens)


@fails_with("no room where there is|wrong table")
class FailedAppendKeepsTokens(BlockManager):
    def extend(self, seq: Seq, ids: Sequence[int]) -> bool:
        seq.ids = (*seq.ids, *ids)
        return self.grow(seq)


FIXED = settings(
    max_examples=2000,
    stateful_step_count=30,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],  # no shrinking
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)


def machine_for(broken: Any, promise: str) -> Any:
    names = names_in_docs()
    names["Adapter"].manager_class = broken

    class RadixKV(RadixKVMachine):
        eviction = promise

        def make(self, num_blocks: int, block_size: int) -> Any:
            return broken(num_blocks, block_size)

    class Other(names["Machine"]):
        eviction = promise

    return RadixKV if issubclass(broken, PrefixCache) else Other


@pytest.mark.parametrize(("broken", "message"), PLANTED)
def test_kit_finds(broken: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run_state_machine_as_test(machine_for(broken, "lru"), settings=FIXED)


@pytest.mark.parametrize(("broken", "message"), [planted for planted in PLANTED if "victim" not in planted.values[1]])
def test_kit_finds_without_promises(broken: Any, message: str) -> None:
    """Only the bugs in the order of eviction need a cache that promises one."""
    with pytest.raises(AssertionError, match=f"{message}|no room where there is|blocks leaked"):
        run_state_machine_as_test(machine_for(broken, "any"), settings=FIXED)
