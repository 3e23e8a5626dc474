"""The test kit for prefix caches: a model made of plain dicts, strategies, and a Hypothesis state machine.

It knows what every prefix cache must do and nothing of how radixkv does it, so it runs on others as well: subclass
`PrefixCacheMachine`, give it `make`, and say in its class attributes what the cache promises beyond the protocol. See
docs/testing.md. Needs Hypothesis: `pip install radixkv[testing]`.
"""

import inspect
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass
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

    `allocate` finds the longest cached prefix of whole blocks and takes blocks for the rest, all or nothing: where there
    is no room it raises `radixkv.OutOfBlocksError`. `commit` says that the KV of the first `num_tokens` is written, so
    that others may use it from then on; `free` ends the request.

    What else the kit knows is used where the cache has it, under radixkv's names and with radixkv's meaning: the methods
    `match`, `append`, `truncate`, `fork`, `evict`, `clear`, `reset`, `check`; the counts `num_free_blocks`,
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
    stem: Tokens = draw(st.sampled_from([(), *earlier]))
    if draw(st.booleans()):
        stem = stem[: draw(st.integers(0, len(stem)))]
    kinds = ((0,) * block_size, (1,) * block_size, (0,) * (block_size - 1) + (1,))
    blocks = draw(st.lists(st.sampled_from(kinds), max_size=max(max_blocks - len(stem) // block_size, 0)))
    tokens = sum(blocks, stem)
    return tokens[: max(len(tokens) - draw(st.integers(0, block_size - 1)), 1)] or (0,)


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
    cacheable: bool = True
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
        self._num_resets = 0
        self._num_clears: Counter[str] = Counter()
        self._tick = 0

    def space(self, namespace: Hashable) -> Space:
        name = repr(namespace)  # keeps 1, True, "1" and ("1",) apart
        return name, self._num_resets + self._num_clears[name]

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
        held = {self.cached[prefix] for prefix in self.pinned() if prefix in self.cached}
        return held.union(*(request.table for request in self.running))

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

    def clear(self, namespace: Hashable) -> None:
        self._num_clears[repr(namespace)] += 1
        self._forget()

    def reset(self) -> None:
        self._num_resets += 1
        self._forget()

    def _forget(self) -> None:
        current = {name: self._num_resets + self._num_clears[name] for (name, _), _ in self.cached}
        self.cached = {prefix: block for prefix, block in self.cached.items() if prefix[0][1] == current[prefix[0][0]]}


# The state machine


class PrefixCacheMachine(RuleBasedStateMachine):
    """Random lives of requests on a cache, step by step compared with the model. Subclass it, define `make`.

    The class attributes say what the cache promises; by default, as little as a prefix cache can. A promise that does
    not hold fails the test, with a message that has the numbers.
    """

    eviction: ClassVar[Literal["any", "as needed", "lru"]] = "any"
    """Which cached blocks may go. "any": all that no running request holds, once as many blocks were handed out as there
    are. "as needed": only where no block is free, and no more than are missing. "lru": those, least recently freed
    first, of one request the deepest first."""
    swaps_duplicates: ClassVar[bool | None] = None
    """Whether the table of a request that commits what is cached already switches to the cached blocks. None: unsaid."""
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
    max_blocks: ClassVar[int] = 10

    requests = Bundle("requests")
    ended = Bundle("ended")

    cache: Any
    model: Model

    def make(self, num_blocks: int, block_size: int) -> CacheUnderTest:
        """A new, empty cache."""
        raise NotImplementedError(f"{type(self).__name__} must define make(num_blocks, block_size)")
