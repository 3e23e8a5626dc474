"""Why a live cache misses, for whom, and how old its blocks get. Knows nothing of who reads it.

What `Stats` counts costs nothing more. What stands here does, so it is asked for, cache by cache: the calls that matter
are wrapped in that one cache.
"""

import random
from array import array
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable
from functools import wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.cache import Lookup, PrefixCache, Request
from radixkv.explanation import Explanation
from radixkv.tokens import TOKEN_BYTES
from radixkv.tree import Run, typed_name

REASONS = ("cold", "capacity", "broken_prefix", "block_rounding", "last_token", "namespace")  # as `radixkv.explain`
BOUNDS = (0, *(4**power for power in range(11)))  # ticks; upper, included
DEFAULT_NAMESPACES = 16
_FEW = 64  # blocks; below, a loop costs less than numpy's calls


class Histogram:
    """How many blocks had which age, in ticks, by `BOUNDS`; the last of `counts` is of what is older."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0

    def add(self, age: int, weight: int) -> None:
        self.counts[bisect_left(BOUNDS, age)] += weight
        self.total += age * weight

    def add_all(self, ages: NDArray[np.int64], weight: int = 1) -> None:
        """In runs of equal ages, for blocks that were let go together stand together."""
        changes = (ages[1:] != ages[:-1]).nonzero()[0]
        start = 0
        for last, age in zip(changes.tolist(), ages[changes].tolist(), strict=True):
            self.add(age, (last + 1 - start) * weight)
            start = last + 1
        self.add(int(ages[-1]), (len(ages) - start) * weight)


class Lookups:
    """What was asked for under one namespace, and found."""

    __slots__ = ("hit_tokens", "num", "prompt_tokens")

    def __init__(self) -> None:
        self.num = self.prompt_tokens = self.hit_tokens = 0


class Observer:
    """Watches one cache from now on, as long as that lives. Not thread-safe, like the cache; reading is, see `metrics`.

    Its clock ticks with every request that begins. A block's age is the ticks since a request that used it ended, or
    since it was touched: `idle` has that of evicted blocks when they go, `reuse_gap` that of hit blocks when they are
    hit, 0 for blocks whose first request still runs. What was cached before has the age of the observer.

    One lookup of `sample` on the average, drawn by a seed, is explained before it begins: its missed tokens by reason
    and the gaps of its hits count `sample` times, so that sums agree with those of `Stats` on the average, and exactly
    with a `sample` of 1. Resumed requests are no lookups.
    """

    def __init__(
        self, cache: PrefixCache, *, sample: int, max_namespaces: int = DEFAULT_NAMESPACES, seed: int = 0
    ) -> None:
        """Of more than `max_namespaces` namespaces, those that come last are counted together. 8 bytes a block.

        Raises: ValueError for a `sample` or `max_namespaces` out of bounds.
        """
        if not 1 <= sample <= 1 << 30:
            raise ValueError(f"sample must be from 1 to 2^30, got {sample}")
        if not 0 <= max_namespaces <= 10_000:
            raise ValueError(f"max_namespaces must be from 0 to 10,000, got {max_namespaces}")
        self.missed_tokens = dict.fromkeys(REASONS, 0)
        self.idle = Histogram()
        self.reuse_gap = Histogram()
        self.namespaces: dict[Hashable, Lookups] = {}
        self.other_namespaces = Lookups()
        self._sample = sample
        self._max_namespaces = max_namespaces
        self._random = random.Random(seed)
        self._left = self._draw()  # lookups up to the next sample
        self._tick = 1
        # when a request that used the block ended, 0 where none did; invariant: 0 for what is not cached
        self._last_use = array("q", bytes(8 * cache.num_blocks))
        self._ages = np.frombuffer(self._last_use, np.int64)
        self._ages[_indices(_blocks(cache._runs()))] = self._tick
        self._wrap(cache)

    def _draw(self) -> int:
        return self._random.randint(1, 2 * self._sample - 1)

    def _wrap(self, cache: PrefixCache) -> None:
        allocate, free, evict = cache.allocate, cache.free, cache._evict
        explain, touch, reset, clear = cache.explain, cache.touch, cache.reset, cache.clear
        size, tree = cache.block_size, cache._tree

        def observed_allocate(tokens: Any, **options: Any) -> Request:
            if options.get("resumed") or not options.get("cacheable", True):
                request = allocate(tokens, **options)
                self._tick += 1
                return request
            namespace = options.get("namespace")
            if namespace is None and tokens.__class__ is Lookup:
                namespace = tokens.namespace
            self._left -= 1
            if self._left:
                request = allocate(tokens, **options)
            else:
                self._left = self._draw()
                key = bytes(tokens._key) if tokens.__class__ is Lookup else tokens
                explanation = explain(key, namespace=namespace)
                request = allocate(tokens, **options)
                self._count(request, explanation, size)
            self._tick += 1
            lookups = self._of(namespace)
            lookups.num += 1
            lookups.prompt_tokens += request._num_tokens
            lookups.hit_tokens += request._num_cached
            return request

        def observed_free(request: Request) -> None:
            free(request)
            num = request._published // size
            if not num or not tree.is_live(request._root):
                return
            blocks = request._table[:num]
            if request._duplicates:
                blocks = tree.blocks_of(tree.path_to(request._node), 0)
            self._ages[_indices(blocks)] = self._tick

        def observed_touch(tokens: Any, **options: Any) -> int:
            lookup = tokens if isinstance(tokens, Lookup) else cache.lookup(tokens, **options)
            num_tokens = touch(lookup, **options)
            if num_tokens:
                path, _, part = tree.found(lookup._trail, num_tokens * TOKEN_BYTES)
                self._ages[_indices(tree.blocks_of(path, part))] = self._tick
            return num_tokens

        def observed_evict(num: int, **options: bool) -> "array[int]":
            evicted = evict(num, **options)
            if len(evicted) > _FEW:
                blocks = _indices(evicted)
                self.idle.add_all(self._tick - self._ages[blocks])
                self._ages[blocks] = 0
                return evicted
            last_use = self._last_use
            same, since = 0, 0  # as Histogram.add_all
            for block in evicted:
                if last_use[block] != since:
                    self.idle.add(self._tick - since, same)
                    same, since = 0, last_use[block]
                same += 1
                last_use[block] = 0
            self.idle.add(self._tick - since, same)
            return evicted

        def observed_reset() -> None:
            reset()
            self._ages[:] = 0

        def observed_clear(namespace: Hashable) -> None:
            gone = _blocks(tree.runs([typed_name(namespace)]))
            clear(namespace)
            self._ages[_indices(gone)] = 0

        wrappers: dict[str, Callable[..., Any]] = {
            "allocate": observed_allocate,
            "free": observed_free,
            "touch": observed_touch,
            "_evict": observed_evict,  # what needs room inside a call passes here
            "reset": observed_reset,
            "clear": observed_clear,
        }
        for name, wrapper in wrappers.items():
            setattr(cache, name, wraps(getattr(cache, name))(wrapper))

    def _count(self, request: Request, explanation: Explanation, size: int) -> None:
        """A sampled lookup that has just begun; `explanation` is from right before."""
        for reason, tokens in missed_tokens(explanation, request._num_cached).items():
            self.missed_tokens[reason] += tokens * self._sample
        num = request._num_cached // size
        if num:
            last_use = self._ages[_indices(request._table[:num])]
            self.reuse_gap.add_all(np.where(last_use, self._tick - last_use, 0), self._sample)

    def _of(self, namespace: Hashable) -> Lookups:
        key = namespace if namespace is None or namespace.__class__ is str else typed_name(namespace)
        lookups = self.namespaces.get(key)
        if lookups is None:
            if len(self.namespaces) >= self._max_namespaces:
                return self.other_namespaces
            lookups = self.namespaces[key] = Lookups()
        return lookups


def _blocks(runs: Iterable[Run]) -> "array[int]":
    """All that is cached in the runs."""
    blocks = array("i")
    for *_, more in runs:
        blocks += more
    return blocks


def _indices(blocks: "array[int]") -> NDArray[np.intp]:
    """Block ids as numpy wants them: converted once, they index twice as fast."""
    return np.frombuffer(blocks, np.int32).astype(np.intp)


def missed_tokens(explanation: Explanation, num_hit: int) -> dict[str, int]:
    """The tokens of a prompt behind the `num_hit` that were hit, by reason; they add up."""
    missed = dict.fromkeys(REASONS, 0)
    missed["last_token"] = explanation.num_cached_tokens - num_hit
    behind = explanation.num_tokens - explanation.num_cached_tokens
    lost = explanation.num_lost_tokens
    if explanation.reason == "shorter than a block":
        missed["block_rounding"] = behind
    elif explanation.reason == "evicted":
        missed["capacity"] = lost
    elif explanation.reason == "another namespace":
        missed["namespace"] = lost
    elif explanation.reason == "diverged":
        missed["broken_prefix"] = lost
        if not lost:  # else what comes before the difference is among it
            missed["block_rounding"] = explanation.position - explanation.num_cached_tokens
    missed["cold"] = explanation.num_tokens - num_hit - sum(missed.values())
    return missed
