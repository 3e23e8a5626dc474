"""The test kit for prefix caches: a model made of plain dicts, strategies, and a Hypothesis state machine.

It knows what every prefix cache must do and nothing of how radixkv does it, so it runs on others as well: subclass
`PrefixCacheMachine`, give it `make`, and say in its class attributes what the cache promises beyond the protocol. See
docs/testing.md. Needs Hypothesis: `pip install radixkv[testing]`.
"""

import inspect
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from radixkv.errors import OutOfBlocksError

Tokens: TypeAlias = tuple[int, ...]
Space: TypeAlias = tuple[str, int]  # what KV depends on beside tokens: the namespace, and how often it was cleared
Prefix: TypeAlias = tuple[Space, Tokens]


class RequestHandle(Protocol):
    """What `allocate` returns. `num_tokens` and `num_committed_tokens` are checked too where they exist."""

    @property
    def num_cached_tokens(self) -> int: ...

    @property
    def block_table(self) -> Sequence[int]: ...


class CacheUnderTest(Protocol):
    """What every prefix cache can do, and all that the kit requires.

    `allocate` finds the longest cached prefix of whole blocks and takes blocks for the rest, all or nothing: where
    there is no room it raises `radixkv.OutOfBlocksError`. `commit` says that the KV of the first `num_tokens` is
    written, so that others may use it from then on; `free` ends the request.

    What else the kit knows is used where the cache has it, under radixkv's names and with radixkv's meaning: the
    methods `match`, `append`, `truncate`, `fork`, `evict`, `clear`, `reset`, `check`; the counts `num_free_blocks`,
    `num_cached_blocks`, `num_evictable_blocks`, `num_private_blocks`, `stats`; and of `allocate` the keywords
    `namespace`, `min_prefill_tokens`, `cacheable`, `priority`, `resumed`.
    """

    def allocate(self, tokens: Any, /) -> RequestHandle: ...

    def commit(self, request: Any, num_tokens: int, /) -> object: ...

    def free(self, request: Any, /) -> object: ...


# Strategies

TOKEN_FORMS: dict[str, Callable[[Tokens], Any]] = {
    "list": list,
    "tuple": tuple,
    "bytes": lambda tokens: array("i", tokens).tobytes(),
    "bytearray": lambda tokens: bytearray(array("i", tokens).tobytes()),
    "array": lambda tokens: array("i", tokens),
    "memoryview": lambda tokens: memoryview(array("i", tokens)),
    "numpy int32": lambda tokens: np.array(tokens, np.int32),
    "numpy int64": lambda tokens: np.array(tokens, np.int64),
}


@st.composite
def prompts(draw: st.DrawFn, block_size: int, *, max_blocks: int = 6, earlier: Sequence[Tokens] = ()) -> Tokens:
    """Prompts that collide all the time: two token ids, three kinds of blocks, often the start of an `earlier` one."""
    stem: Tokens = draw(st.sampled_from([(), *earlier, *earlier]))
    if draw(st.booleans()):
        stem = stem[: draw(st.integers(0, len(stem)))]
    kinds = ((0,) * block_size, (1,) * block_size, (0,) * (block_size - 1) + (1,))
    num = draw(st.integers(0 if stem else 1, max(max_blocks - len(stem) // block_size, 1)))
    tokens = sum((draw(st.sampled_from(kinds)) for _ in range(num)), stem)
    return tokens[: max(len(tokens) - draw(st.integers(0, block_size - 1)), 1)]


def overwrite(buffer: Any) -> None:
    """Turn the tokens that a caller passed into other valid ones, as a caller does who uses a buffer again."""
    if isinstance(buffer, (list, array, bytearray, memoryview, np.ndarray)):
        for i in range(0, len(buffer), 4 if isinstance(buffer, bytearray) else 1):
            buffer[i] ^= 1


# The model


@dataclass(slots=True, eq=False)
class Running:
    """A running request as the model sees it. Its first `num_shared` blocks were hit, or committed as whole blocks."""

    handle: Any
    namespace: Hashable
    space: Space
    tokens: Tokens
    table: list[int]
    num_shared: int
    num_committed: int
    cacheable: bool
    held: frozenset[int] = frozenset()  # blocks that it keeps since its namespace was cleared
    name: str = "the new request"

    def __repr__(self) -> str:
        return self.name


class Model:
    """What a prefix cache holds, in plain dicts; all else is worked out from them when asked, so nothing here is fast.

    `cached` maps a prefix of whole blocks to the block that holds its last tokens; `released` a prefix to the tick at
    which the last request that held it let go. `content` is the content oracle: block -> the prefix whose last tokens'
    KV the engine wrote into it last, whoever owns the block now.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.cached: dict[Prefix, int] = {}
        self.released: dict[Prefix, int] = {}
        self.content: dict[int, Prefix] = {}
        self.running: list[Running] = []
        self.stats: Counter[str] = Counter()
        self._num_clears: Counter[str] = Counter()
        self._tick = 0

    def space(self, namespace: Hashable) -> Space:
        name = repr(namespace)  # keeps 1, True, "1" and ("1",) apart
        return name, self._num_clears[name]

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def prefix(self, space: Space, tokens: Tokens, i: int) -> Prefix:
        """Whose KV block `i` of a table for `tokens` holds: that of its own tokens, after all before them."""
        return space, tokens[: (i + 1) * self.block_size]

    def depth(self, space: Space, tokens: Tokens, prefixes: Container[Prefix]) -> int:
        """How many whole blocks of `tokens`, from the first on without a gap, are among `prefixes`."""
        i = 0
        while (i + 1) * self.block_size <= len(tokens) and self.prefix(space, tokens, i) in prefixes:
            i += 1
        return i

    def is_current(self, request: Running) -> bool:
        """Whether nobody has cleared what the request is made of; else it neither shares nor publishes any more."""
        return request.space == self.space(request.namespace)

    def path(self, request: Running) -> list[Prefix]:
        """The cached prefixes that the request holds, short ones first."""
        num = request.num_shared if self.is_current(request) else 0
        return [self.prefix(request.space, request.tokens, i) for i in range(num)]

    def pinned(self) -> set[Prefix]:
        return {prefix for request in self.running for prefix in self.path(request)}

    def used(self) -> set[int]:
        """The blocks that no eviction can give back."""
        pinned = {self.cached[prefix] for prefix in self.pinned() if prefix in self.cached}
        return pinned.union(*(request.table for request in self.running), *(request.held for request in self.running))

    def counts(self) -> dict[str, int]:
        """The public counts of blocks, by name."""
        num_cached = len(self.cached)
        num_private = len(self.used() - set(self.cached.values()))
        return {
            "num_free_blocks": self.num_blocks - num_cached - num_private,
            "num_cached_blocks": num_cached,
            "num_evictable_blocks": num_cached - len(self.pinned()),
            "num_private_blocks": num_private,
        }

    def victims(self, num: int) -> list[Prefix]:
        """The prefixes that go next, least recently released first, which is a prefix after all that extend it."""
        unpinned = self.cached.keys() - self.pinned()
        return sorted(unpinned, key=lambda prefix: self.released[prefix])[:num]

    def write(self, request: Running, start: int = 0) -> None:
        """The engine writes the KV of the tokens from position `start` on."""
        for i in range(start // self.block_size, len(request.table)):
            self.content[request.table[i]] = self.prefix(request.space, request.tokens, i)

    def end(self, request: Running) -> None:
        """The request lets go of its path, the deepest block first."""
        self.running.remove(request)
        pinned = self.pinned()
        for prefix in reversed(self.path(request)):
            if prefix not in pinned:
                self._tick += 1
                self.released[prefix] = self._tick

    def clear(self, *namespaces: Hashable) -> None:
        """Forget what is cached under the namespaces; requests that hold some of it keep those blocks."""
        for namespace in namespaces:
            space = self.space(namespace)
            for request in self.running:
                if request.space == space:
                    request.held |= {self.cached[prefix] for prefix in self.path(request) if prefix in self.cached}
            self.cached = {prefix: block for prefix, block in self.cached.items() if prefix[0] != space}
            self._num_clears[repr(namespace)] += 1


# The state machine

_PROMPTS: Any = st.runner().flatmap(lambda machine: machine._draw_prompts())
_TOKENS: Any = st.runner().flatmap(lambda machine: machine._draw_tokens())
_FORMS: Any = st.runner().flatmap(lambda machine: st.sampled_from(machine.token_forms))
_NAMESPACES: Any = st.runner().flatmap(
    lambda machine: st.sampled_from((machine.namespaces[0],) * 6 + machine.namespaces)
)


class PrefixCacheMachine(RuleBasedStateMachine):
    """Random lives of requests on a cache, step by step compared with the model. Subclass it, define `make`.

    The class attributes say what the cache promises; by default, as little as a prefix cache can. A promise that does
    not hold fails the test, with a message that has the numbers.
    """

    eviction: ClassVar[Literal["any", "as needed", "lru"]] = "any"
    """Which cached blocks may go. "any": all that no running request holds, once as many blocks were handed out as
    there are. "as needed": only where no block is free, and no more than are missing. "lru": those, least recently
    freed first, of one request the deepest first."""
    swaps_duplicates: ClassVar[bool | None] = None
    """Whether the table of a request that commits what is cached already switches to those blocks; None: either."""
    min_prefill_tokens: ClassVar[int] = 1
    """How many tokens of a prompt a hit must leave, unless `allocate` takes that as an argument."""
    token_forms: ClassVar[tuple[str, ...]] = ("list",)
    """The forms of tokens, out of TOKEN_FORMS, that all methods take."""
    appends_int: ClassVar[bool] = False
    """Whether `append` takes a plain int as well."""
    namespaces: ClassVar[tuple[Hashable, ...]] = (None, 1, True, "1", ("1",))
    """Values for the keyword `namespace`; they must not share anything."""
    rejects_misuse: ClassVar[bool] = False
    """Whether calls that make no sense raise ValueError or RuntimeError and change nothing."""
    block_sizes: ClassVar[tuple[int, ...]] = (1, 2, 4)
    max_blocks: ClassVar[int] = 12

    requests = Bundle("requests")
    ended = Bundle("ended")

    cache: Any
    model: Model

    def make(self, num_blocks: int, block_size: int) -> CacheUnderTest:
        """A new, empty cache."""
        raise NotImplementedError(f"{type(self).__name__} must define make(num_blocks, block_size)")

    # Rules

    @initialize(
        num_blocks=st.runner().flatmap(lambda machine: st.integers(2, machine.max_blocks)),
        block_size=st.runner().flatmap(lambda machine: st.sampled_from(machine.block_sizes)),
    )
    def start(self, num_blocks: int, block_size: int) -> None:
        self.cache = self.make(num_blocks, block_size)
        self.model = Model(num_blocks, block_size)
        parameters = inspect.signature(self.cache.allocate).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self._options = {name for name in _OPTIONS if takes_all or name in parameters}
        self._earlier: list[tuple[Hashable, Tokens]] = []
        self._namespaces: dict[str, Hashable] = {}
        self._num_named = 0
        self._num_handed_out = 0
        self._unsure_of_duplicates = False
        self._exact = True  # whether model.cached is what is cached; else it is what may be cached

    @rule(
        target=requests,
        tokens=_PROMPTS,
        namespace=_NAMESPACES,
        form=_FORMS,
        min_prefill=st.sampled_from((1, 0, 2, 5)),
        cacheable=st.sampled_from((True, True, True, False)),
        priority=st.integers(0, 2),
        commit=st.booleans(),
    )
    def allocate(
        self,
        tokens: Tokens,
        namespace: Hashable,
        form: str,
        min_prefill: int,
        cacheable: bool,
        priority: int,
        commit: bool,
    ) -> Running | MultipleResults[Running]:
        options = {"min_prefill_tokens": min_prefill, "cacheable": cacheable, "priority": priority}
        request = self._allocate(tokens, namespace, form, options)
        if request and commit:
            self._commit(request, len(tokens))
        return self._named(request)

    @rule(
        prompts=st.lists(st.tuples(_PROMPTS, _NAMESPACES), min_size=1, max_size=3),
        priority=st.integers(0, 2),
    )
    def serve(self, prompts: list[tuple[Tokens, Hashable]], priority: int) -> None:
        """Whole lives in one step: they are what fills a cache."""
        for tokens, namespace in prompts:
            request = self._allocate(tokens, namespace, self.token_forms[0], {"priority": priority})
            if request:
                self._commit(request, len(tokens))
                self._free(request)

    @rule(request=requests, share=st.sampled_from((1, 0.75, 0.5, 0.25, 0)))
    def commit(self, request: Running, share: float) -> None:
        """Commits all that is left or a share of it, as chunked prefill does."""
        left = len(request.tokens) - request.num_committed
        self._commit(request, request.num_committed + int(left * share))

    @precondition(lambda self: hasattr(self.cache, "append"))
    @rule(request=requests, tokens=_TOKENS, form=_FORMS, commit=st.booleans())
    def append(self, request: Running, tokens: Tokens, form: str, commit: bool) -> None:
        self._append(request, tokens, form)
        if commit:
            self._commit(request, len(request.tokens))

    @precondition(lambda self: hasattr(self.cache, "truncate"))
    @rule(request=requests, num_dropped=st.integers(0, 9), tokens=st.just(()) | _TOKENS, form=_FORMS)
    def truncate(self, request: Running, num_dropped: int, tokens: Tokens, form: str) -> None:
        """Drops tokens, as far as they are not published, and goes on with others, as speculative decoding does."""
        fewest = max(1, request.num_shared * self.model.block_size)
        self._truncate(request, max(fewest, len(request.tokens) - num_dropped))
        if tokens and hasattr(self.cache, "append"):
            self._append(request, tokens, form)
            self._commit(request, len(request.tokens))

    @precondition(lambda self: hasattr(self.cache, "fork"))
    @rule(target=requests, request=requests)
    def fork(self, request: Running) -> Running | MultipleResults[Running]:
        return self._named(self._fork(request))

    @rule(target=ended, request=consumes(requests))
    def free(self, request: Running) -> Running:
        self._free(request)
        return request

    @rule(target=requests, request=consumes(requests), form=_FORMS)
    def preempt(self, request: Running, form: str) -> Running | MultipleResults[Running]:
        """Frees the request and allocates it again, with what it has generated."""
        self._free(request)
        options = {"cacheable": request.cacheable, "resumed": True}
        return self._named(self._allocate(request.tokens, request.namespace, form, options))

    @precondition(lambda self: hasattr(self.cache, "match") and self.model.cached)
    @rule(tokens=_PROMPTS, namespace=_NAMESPACES, form=_FORMS)
    def match(self, tokens: Tokens, namespace: Hashable, form: str) -> None:
        buffer = TOKEN_FORMS[form](tokens)
        self._check_match(tokens, namespace if "namespace" in self._options else None, buffer)
        overwrite(buffer)

    @precondition(lambda self: hasattr(self.cache, "evict") and self.model.cached)
    @rule(num=st.integers(1, 4))
    def evict(self, num: int) -> None:
        self._evict(num)

    @precondition(lambda self: hasattr(self.cache, "clear") or hasattr(self.cache, "reset"))
    @precondition(lambda self: self.model.cached)
    @rule(
        namespace=st.runner().flatmap(lambda machine: st.sampled_from(machine.namespaces)),
        everything=st.sampled_from((False, False, False, True)),
    )
    def forget(self, namespace: Hashable, everything: bool) -> None:
        before = list(self.model.cached)
        if hasattr(self.cache, "reset") and (everything or not hasattr(self.cache, "clear")):
            self.cache.reset()
            self.model.clear(None, *self.namespaces)
        else:
            self.cache.clear(namespace)
            self.model.clear(namespace)
        if hasattr(self.cache, "match"):
            for (name, _), tokens in before:
                self._check_match(tokens, self._namespaces[name], list(tokens))

    @precondition(lambda self: self.rejects_misuse)
    @rule(request=ended, call=st.sampled_from(("commit", "append", "truncate", "fork", "free")))
    def misuse_ended(self, request: Running, call: str) -> None:
        self._check_rejected(f"{call} of {request}, which was freed", call, request.handle)

    @precondition(lambda self: self.rejects_misuse)
    @rule(request=requests, call=st.sampled_from(("commit", "append", "truncate", "fork", "free")))
    def misuse(self, request: Running, call: str) -> None:
        foreign: Any = self.make(self.model.num_blocks, self.model.block_size).allocate([0])
        self._check_rejected(f"{call} of another cache's request", call, foreign)
        self._check_rejected("allocate of no tokens", "allocate", [])
        num_tokens, num_shared_tokens = len(request.tokens), request.num_shared * self.model.block_size
        for name in ("commit", "truncate"):
            what = f"{name} of {request}, which has {num_tokens} tokens, at {num_tokens + 1}"
            self._check_rejected(what, name, request.handle, num_tokens + 1)
        if num_shared_tokens and self.model.is_current(request):
            what = f"truncate of {request} below the {num_shared_tokens} tokens that others can match"
            self._check_rejected(what, "truncate", request.handle, num_shared_tokens - 1)

    # After every step

    @invariant()
    def agrees_with_the_model(self) -> None:
        self._check_requests()
        self._check_blocks()
        self._check_matches()
        self._check_counts()
        self._check_stats()
        if hasattr(self.cache, "check"):
            self.cache.check()

    def teardown(self) -> None:
        """When all requests are freed, every block can be had again."""
        if sys.exc_info()[0] is not None or not hasattr(self, "model"):
            return  # the failure that ends the run is the one to report
        for request in list(self.model.running):
            self._free(request)
        num_blocks, tokens = self.model.num_blocks, [2] * (self.model.num_blocks * self.model.block_size)
        try:
            table = list(self.cache.allocate(tokens).block_table)
        except OutOfBlocksError as error:
            raise AssertionError(
                f"blocks leaked: no request runs, but a prompt of {num_blocks} blocks fails: {error}"
            ) from error
        assert len(set(table)) == num_blocks, f"block in two hands: a table of {num_blocks} blocks is {table}"

    def _check_requests(self) -> None:
        for request in self.model.running:
            handle, num_tokens = request.handle, len(request.tokens)
            table = list(handle.block_table)
            assert table == request.table, f"table changed: that of {request} was {request.table}, and is {table} now"
            for name, expected in (("num_tokens", num_tokens), ("num_committed_tokens", request.num_committed)):
                value = getattr(handle, name, expected)
                assert value == expected, f"wrong count: {name} of {request} is {value}, it should be {expected}"

    def _check_blocks(self) -> None:
        model = self.model
        users: dict[int, tuple[Running, int]] = {}
        for request in model.running:
            for i, block in enumerate(request.table):
                held, needed = model.content.get(block), model.prefix(request.space, request.tokens, i)
                assert held == needed, (
                    f"wrong KV: block {block}, at position {i} of the table of {request}, holds the KV of "
                    f"{_shown(held)}, but {request} needs that of {_shown(needed)}"
                )
                other, at = users.setdefault(block, (request, i))
                assert other is request or i < min(request.num_shared, other.num_shared), (
                    f"block in two hands: {request} and {other} both use block {block}, at positions {i} and {at}, and "
                    f"only their first {request.num_shared} and {other.num_shared} blocks may be shared"
                )
                cached = model.cached.get(needed, block)
                assert other is request or cached == block or not self._exact or self.swaps_duplicates is None, (
                    f"block in two hands: {request} and {other} both use block {block}, at position {i}, which is a "
                    f"duplicate of the cached block {cached}"
                )

    def _check_counts(self) -> None:
        if not self._exact:
            return
        expected = self.model.counts()
        counts = {name: getattr(self.cache, name) for name in expected if hasattr(self.cache, name)}
        for name, value in counts.items():
            assert value == expected[name], (
                f"wrong count: {name} is {value}, it should be {expected[name]}; of {self.model.num_blocks} blocks the "
                f"cache has {counts} and should have {expected}"
            )

    def _check_matches(self) -> None:
        if hasattr(self.cache, "match"):
            for namespace, tokens in self._earlier:
                self._check_match(tokens, namespace, list(tokens))

    def _check_stats(self) -> None:
        stats = getattr(self.cache, "stats", None)
        for name, expected in self.model.stats.items():
            if name == "evicted_blocks" and not self._exact:
                continue
            value = getattr(stats, name, expected)
            assert value == expected, f"wrong counter: stats.{name} is {value}, it should be {expected}"

    # Calls, each compared with what the model says about it

    def _allocate(self, tokens: Tokens, namespace: Hashable, form: str, options: dict[str, Any]) -> Running | None:
        model = self.model
        options = {name: value for name, value in ({"namespace": namespace} | options).items() if name in self._options}
        namespace, cacheable = options.get("namespace"), options.get("cacheable", True)
        least = options.get("min_prefill_tokens", self.min_prefill_tokens)
        space = model.space(namespace)
        cap = max(len(tokens) - least, 0) // model.block_size if cacheable else 0
        low, high = (min(bound, cap) for bound in self._bounds(space, tokens))
        used, num_free = model.used(), model.counts()["num_free_blocks"]
        hits = {model.cached[model.prefix(space, tokens, i)] for i in range(low)}
        total = model.num_blocks_for(len(tokens))
        most = total - (0 if self._unsure_of_duplicates else len(hits & used))
        what = f"allocate({list(tokens)}{_listed(options)})"
        buffer = TOKEN_FORMS[form](tokens)
        handle = self._attempt(what, lambda: self.cache.allocate(buffer, **options), total=total, most=most)
        overwrite(buffer)
        self._remember(namespace, tokens)
        if handle is None:
            return None

        num_cached = handle.num_cached_tokens
        assert num_cached == 0 or len(tokens) - num_cached >= least, (
            f"no token left to prefill: {what} says that {num_cached} of {len(tokens)} tokens are cached, and leaves "
            f"{len(tokens) - num_cached}; at least {least} must be left, for their logits"
        )
        num_hit, rest = divmod(num_cached, model.block_size)
        assert rest == 0, f"wrong hit: {what} says {num_cached} tokens, which is not in blocks of {model.block_size}"
        self._check_hit(what, num_hit, low, high)
        table = list(handle.block_table)
        for i in range(num_hit):
            prefix = model.prefix(space, tokens, i)
            assert model.content.get(table[i]) == prefix, (
                f"wrong KV: {what} hits block {table[i]} at position {i} of its table, which holds the KV of "
                f"{_shown(model.content.get(table[i]))}, not of {_shown(prefix)}"
            )
            model.cached[prefix] = table[i]
        request = Running(handle, namespace, space, tokens, table, num_hit, num_cached, cacheable)
        model.running.append(request)
        self._check_taken(what, request, table[num_hit:], num_free)
        model.write(request, num_cached)
        kind = "resumed_" if options.get("resumed") else ""
        for name, count in (("lookups", 1), ("prompt_tokens", len(tokens)), ("hit_tokens", num_cached)):
            model.stats[kind + name] += count * (cacheable or bool(kind))
        return request

    def _commit(self, request: Running, num_tokens: int) -> None:
        model, before = self.model, request.table
        what = f"commit({request}, {num_tokens})"
        result = self.cache.commit(request.handle, num_tokens)
        table = request.table = list(request.handle.block_table)
        assert len(table) == len(before), f"table changed: {what} made {table} of {before}"
        request.num_committed = num_tokens
        num_whole = num_tokens // model.block_size if request.cacheable and model.is_current(request) else 0
        for i, (own, block) in enumerate(zip(before, table, strict=True)):
            prefix = model.prefix(request.space, request.tokens, i)
            cached = model.cached.setdefault(prefix, own) if request.num_shared <= i < num_whole else own
            if cached == own:
                allowed = {own}
            elif self.swaps_duplicates is None or not self._exact:
                allowed = {own, cached}
            else:
                allowed = {cached if self.swaps_duplicates else own}
            held = model.content.get(block)
            assert block == own or held == prefix, (
                f"wrong KV: {what} put block {block} for {own} at position {i} of the table; that holds the KV of "
                f"{_shown(held)}, not of {_shown(prefix)}"
            )
            assert block in allowed, (
                f"table changed: {what} made {table} of {before}; position {i} should be one of {sorted(allowed)}"
            )
            if cached != own and block == own:
                self._unsure_of_duplicates |= self.eviction == "any"  # which copy the next hit gets
                if not self._exact:
                    model.cached[prefix] = own
            model.stats["duplicates_freed"] += block != own
        request.num_shared = max(request.num_shared, num_whole)
        self._remember(request.namespace, request.tokens)
        self._check_counts()
        changed = [i for i in range(len(table)) if table[i] != before[i]]
        if isinstance(result, range):
            assert list(result) == changed, (
                f"wrong range: {what} made {table} of {before}, but says that {result} changed"
            )

    def _append(self, request: Running, more: Tokens, form: str) -> None:
        model = self.model
        start, table = len(request.tokens), request.table
        total = model.num_blocks_for(start + len(more))
        num_free = model.counts()["num_free_blocks"]
        what = f"append({request}, {list(more)})"
        is_int = self.appends_int and len(more) == 1 and form == self.token_forms[0]
        buffer = more[0] if is_int else TOKEN_FORMS[form](more)
        result = self._attempt(
            what, lambda: (self.cache.append(request.handle, buffer),), total=total, most=total - len(table)
        )
        overwrite(buffer)
        if result is None:
            return
        request.tokens += more
        request.table = list(request.handle.block_table)
        assert request.table[: len(table)] == table, f"table changed: {what} made {request.table} of {table}"
        self._check_taken(what, request, request.table[len(table) :], num_free)
        model.write(request, start)

    def _truncate(self, request: Running, num_tokens: int) -> None:
        model = self.model
        expected = request.table[: model.num_blocks_for(num_tokens)]
        self.cache.truncate(request.handle, num_tokens)
        table = list(request.handle.block_table)
        assert table == expected, (
            f"table changed: truncate({request}, {num_tokens}) made {table} of {request.table}, it should be {expected}"
        )
        request.table = table
        request.tokens = request.tokens[:num_tokens]
        request.num_committed = min(request.num_committed, num_tokens)
        model.write(request, num_tokens - 1)  # what is left of the last block

    def _fork(self, request: Running) -> Running | None:
        model, table = self.model, request.table
        what = f"fork({request})"
        used, num_free = model.used(), model.counts()["num_free_blocks"]
        most = len(table) - request.num_shared
        if not model.is_current(request) or self.swaps_duplicates is None:
            most = len(table)  # it may copy what it could have shared
        result = self._attempt(what, lambda: self.cache.fork(request.handle), total=len(table), most=most)
        if result is None:
            return None
        handle, copies = result
        fork = replace(request, handle=handle, table=list(handle.block_table), name="the fork")
        new = [block for block in fork.table if block not in used]
        needed = {(source, block) for source, block in zip(table, fork.table, strict=False) if block in new}
        assert set(copies) == needed, (
            f"wrong copies: {what} made {fork.table} of {table} and asks for {copies}, it should be {sorted(needed)}"
        )
        for source, block in copies:
            model.content[block] = model.content[source]
        model.running.append(fork)
        self._check_taken(what, fork, new, num_free)
        return fork

    def _free(self, request: Running) -> None:
        self.cache.free(request.handle)
        self.model.end(request)

    def _evict(self, num: int) -> None:
        model = self.model
        blocks = list(self.cache.evict(num))
        for request in model.running:
            clash = set(blocks).intersection(request.table)
            assert not clash, f"evicted in use: evict({num}) took {blocks}, but {request} uses {sorted(clash)}"
        if self.eviction == "any":
            self._exact = False
        if not self._exact:
            return
        expected = min(num, model.counts()["num_evictable_blocks"])
        assert len(set(blocks)) == len(blocks) == expected, (
            f"wrong number evicted: evict({num}) took {blocks}, it should be {expected} blocks"
        )
        lost = [prefix for prefix, block in model.cached.items() if block in blocks]
        self._lose(f"evict({num})", lost, len(blocks))

    # What the calls have in common

    def _attempt(self, what: str, call: Callable[[], Any], *, total: int, most: int) -> Any:
        """A call that needs some blocks beside those in use. None where it rightly failed, and so changed nothing."""
        model = self.model
        room = model.num_blocks - len(model.used())
        before = self._observe() if most > room else {}
        try:
            return call()
        except OutOfBlocksError as error:
            assert most > room, (
                f"no room where there is: {what} fails ({error}), but it needs {most} blocks that are not in use, and "
                f"{room} of {model.num_blocks} are free or evictable"
            )
            free, evictable = before["num_free_blocks"], before["num_evictable_blocks"]
            assert free is None or evictable is None or (error.free == free and error.evictable <= evictable), (
                f"wrong error: {what} fails ({error}), but {free} blocks are free and {evictable} evictable"
            )
            self._check_unchanged(before, what)
            model.stats["failed_allocations"] += 1
            return None
        except ValueError:
            if total <= model.num_blocks:
                raise
            self._check_unchanged(before, what)  # it can never fit
            return None

    def _check_taken(self, what: str, request: Running, new: Sequence[int], num_free: int) -> None:
        """`request` was given the blocks `new`: as many as it needs, nobody else's, and no more lost than needed."""
        model, table = self.model, request.table
        needed = model.num_blocks_for(len(request.tokens))
        assert len(table) == needed, (
            f"wrong table: after {what}, {len(request.tokens)} tokens need {needed} blocks of {model.block_size}, the "
            f"table is {table}"
        )
        assert len(set(table)) == needed, f"block in two hands: {what} made the table {table}"
        for other in model.running:
            clash = set() if other is request else set(new).intersection(other.table)
            assert not clash, f"block in two hands: {what} was given {sorted(clash)}, which {other} uses"
        self._num_handed_out += len(new)
        num_short = max(len(new) - num_free, 0)
        lost: list[Prefix] = []
        if self.eviction == "any":
            self._exact = self._exact and self._num_handed_out <= model.num_blocks
        elif self.eviction == "lru":
            lost = model.victims(num_short)
        elif hasattr(self.cache, "match"):
            lost = [prefix for prefix in model.cached if not self._is_cached(prefix)]
        else:
            self._exact = self._exact and not num_short
        if self._exact:
            kept = {
                block: _shown(prefix) for prefix, block in model.cached.items() if prefix not in lost and block in new
            }
            assert not kept, (
                f"wrong block: {what} was given blocks {new}, but {kept} should stay cached; it should have taken "
                f"{len(new) - num_short} free blocks and evicted {[_shown(prefix) for prefix in lost]}"
            )
            self._lose(what, lost, num_short)

    def _lose(self, what: str, lost: Sequence[Prefix], num: int) -> None:
        """The cached prefixes `lost` went to make room for `num` blocks."""
        model = self.model
        held = [_shown(prefix) for prefix in lost if prefix in model.pinned()]
        assert not held, f"evicted in use: {what} lost the prefixes {held}, which running requests hold"
        assert len(lost) == num, (
            f"wrong number evicted: {what} had to evict {num} blocks, and lost {[_shown(prefix) for prefix in lost]}"
        )
        expected = model.victims(num)
        assert self.eviction != "lru" or set(lost) == set(expected), (
            f"wrong victim: {what} evicted {[_shown(prefix) for prefix in lost]}, it should be the least recently "
            f"freed {[_shown(prefix) for prefix in expected]}"
        )
        for prefix in lost:
            del model.cached[prefix]
        model.stats["evicted_blocks"] += num

    def _bounds(self, space: Space, tokens: Tokens) -> tuple[int, int]:
        """How many blocks of `tokens` must be cached, and how many can be."""
        model = self.model
        high = model.depth(space, tokens, model.cached)
        return (high if self._exact else model.depth(space, tokens, model.pinned())), high

    def _check_hit(self, what: str, num: int, low: int, high: int) -> None:
        size = self.model.block_size
        assert num <= high, (
            f"hit too long: {what} says that {num * size} tokens are cached, but no more than {high * size} were "
            "committed and are neither cleared nor evicted since"
        )
        assert num >= low, (
            f"hit too short: {what} says that {num * size} tokens are cached, but {low * size} were committed and are "
            "neither cleared nor evicted since"
        )

    def _check_match(self, tokens: Tokens, namespace: Hashable, buffer: Any) -> None:
        options = {"namespace": namespace} if "namespace" in self._options else {}
        what = f"match({list(tokens)}{_listed(options)})"
        num, rest = divmod(self.cache.match(buffer, **options), self.model.block_size)
        assert rest == 0, f"wrong hit: {what} is not in whole blocks, {rest} tokens too many"
        self._check_hit(what, num, *self._bounds(self.model.space(namespace), tokens))

    def _is_cached(self, prefix: Prefix) -> bool:
        (name, _), tokens = prefix
        options = {"namespace": self._namespaces[name]} if "namespace" in self._options else {}
        return bool(self.cache.match(list(tokens), **options) == len(tokens))

    def _check_rejected(self, what: str, call: str, *args: Any) -> None:
        method = getattr(self.cache, call, None)
        if method is None:
            return
        before = self._observe()
        try:
            method(*args, *(_SECOND_ARGUMENTS.get(call, ()) if len(args) == 1 else ()))
        except (ValueError, TypeError, RuntimeError) as error:
            assert not isinstance(error, OutOfBlocksError), f"misuse misunderstood: {what} raises {error!r}"
        else:
            raise AssertionError(f"misuse accepted: {what} should raise ValueError or RuntimeError")
        self._check_unchanged(before, what)

    def _observe(self) -> dict[str, Any]:
        """All that can be seen of the cache from outside, but the count of failures."""
        seen = {name: getattr(self.cache, name, None) for name in self.model.counts()}
        stats = getattr(self.cache, "stats", None)
        seen |= {
            f"stats.{name}": getattr(stats, name, None) for name in self.model.stats if name != "failed_allocations"
        }
        for request in self.model.running:
            seen[f"the table of {request}"] = list(request.handle.block_table)
        if hasattr(self.cache, "match"):
            for prefix in self.model.cached:
                seen[f"whether {_shown(prefix)} is cached"] = self._is_cached(prefix)
        return seen

    def _check_unchanged(self, before: dict[str, Any], what: str) -> None:
        after = self._observe()
        changed = [f"{name} was {before[name]} and is {after[name]}" for name in before if before[name] != after[name]]
        assert not changed, f"failed call changed something: {what} failed, but {'; '.join(changed)}"

    def _remember(self, namespace: Hashable, tokens: Tokens) -> None:
        self._namespaces[repr(namespace)] = namespace
        self._earlier = [*self._earlier, (namespace, tokens)][-8:]

    def _named(self, request: Running | None) -> "Running | MultipleResults[Running]":
        """The request under the name that Hypothesis will print for it."""
        if request is None:
            return multiple()
        request.name = f"requests_{self._num_named}"
        self._num_named += 1
        return request

    def _draw_prompts(self) -> st.SearchStrategy[Tokens]:
        size, num_blocks = self.model.block_size, self.model.num_blocks
        earlier = [tokens for _, tokens in (*self.model.cached, *self._earlier)]
        short = prompts(size, max_blocks=num_blocks // 2 + 1, earlier=earlier)
        return short | short | prompts(size, max_blocks=num_blocks + 1, earlier=earlier)

    def _draw_tokens(self) -> st.SearchStrategy[Tokens]:
        return st.lists(st.integers(0, 1), min_size=1, max_size=self.model.block_size + 1).map(tuple)


_OPTIONS = ("namespace", "min_prefill_tokens", "cacheable", "priority", "resumed")
_SECOND_ARGUMENTS: dict[str, tuple[Any, ...]] = {"commit": (1,), "append": ([0],), "truncate": (1,)}


def _shown(prefix: Prefix | None) -> str:
    if prefix is None:
        return "nothing"
    (name, _), tokens = prefix
    return f"{list(tokens)}" + (f" in namespace {name}" if name != "None" else "")


def _listed(options: dict[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in options.items())
