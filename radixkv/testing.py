"""The test kit for prefix caches: a model made of plain dicts, strategies, and a Hypothesis state machine.

It knows what every prefix cache must do, and nothing of how radixkv does it, so that it runs on any other as well:
subclass `PrefixCacheMachine`, give it `make`, and say in its class attributes what the cache promises beyond the
protocol. See docs/testing.md. Needs Hypothesis (`pip install radixkv[testing]`).
"""

import inspect
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
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
Space: TypeAlias = tuple[str, int]  # what KV depends on beside tokens: the namespace, how often it was cleared
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
    that others may use it; `free` ends the request.

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
    "int": lambda tokens: tokens[0] if len(tokens) == 1 else list(tokens),  # for `append` only
}


@st.composite
def prompts(draw: st.DrawFn, block_size: int, *, max_blocks: int = 6, earlier: Sequence[Tokens] = ()) -> Tokens:
    """Prompts that collide all the time: two token ids, three kinds of blocks, often the start of an `earlier` one."""
    stem: Tokens = draw(st.sampled_from([(), *earlier]))
    if draw(st.booleans()):
        stem = stem[: draw(st.integers(0, len(stem)))]
    kinds = ((0,) * block_size, (1,) * block_size, (0,) * (block_size - 1) + (1,))
    blocks = draw(st.lists(st.sampled_from(kinds), max_size=max(max_blocks - len(stem) // block_size, 0)))
    tokens = stem + sum(blocks, ())
    return tokens[: max(len(tokens) - draw(st.integers(0, block_size - 1)), 1)] or (0,)


def overwrite(buffer: Any) -> None:
    """Turn what a caller passed into other valid tokens, as a caller who reuses a buffer does."""
    if isinstance(buffer, (list, array, bytearray, memoryview, np.ndarray)):
        for i in range(0, len(buffer), 4 if isinstance(buffer, bytearray) else 1):
            buffer[i] ^= 1


# The model


@dataclass(slots=True, eq=False)
class Running:
    """A running request as the model sees it. Its first `num_shared` blocks were hit, or committed as whole blocks."""

    name: str
    handle: Any
    namespace: Hashable
    space: Space
    tokens: Tokens
    table: list[int]
    num_shared: int
    num_committed: int
    cacheable: bool

    def __repr__(self) -> str:
        return self.name


class Model:
    """What a prefix cache holds, in plain dicts; everything else is worked out from them when asked. Not fast.

    `cached` maps a prefix of whole blocks to the block with its last tokens; `released` to the tick at which the last
    request that used it ended. `content` is the content oracle: block -> the prefix whose last tokens' KV the engine
    wrote there, whoever owns the block now.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.cached: dict[Prefix, int] = {}
        self.released: dict[Prefix, int] = {}
        self.content: dict[int, Prefix] = {}
        self.running: list[Running] = []
        self.forgotten: Counter[str] = Counter()  # namespace -> how often it was cleared
        self.stats: Counter[str] = Counter()

    def space(self, namespace: Hashable) -> Space:
        name = repr(namespace)  # keeps 1, True, "1" and ("1",) apart
        return name, self.forgotten[name] + self.forgotten["all"]

    def prefix(self, space: Space, tokens: Tokens, i: int) -> Prefix:
        """What block `i` of a table for `tokens` holds: the KV of its tokens, which depends on all before."""
        return space, tokens[: (i + 1) * self.block_size]

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def depth(self, space: Space, tokens: Tokens, prefixes: Iterable[Prefix]) -> int:
        """How many whole blocks of `tokens`, from the first on, are among `prefixes`."""
        return next(
            (i for i in range(len(tokens) // self.block_size) if self.prefix(space, tokens, i) not in prefixes),
            len(tokens) // self.block_size,
        )

    def is_live(self, request: Running) -> bool:
        """Whether nobody has cleared what the request is made of: if not, it neither shares nor publishes any more."""
        return request.space == self.space(request.namespace)

    def path(self, request: Running) -> list[Prefix]:
        """The cached prefixes that the request holds."""
        if not self.is_live(request):
            return []
        return [self.prefix(request.space, request.tokens, i) for i in range(request.num_shared)]

    def pinned(self) -> set[Prefix]:
        return {prefix for request in self.running for prefix in self.path(request)}

    def used(self) -> set[int]:
        """The blocks that no eviction can give back."""
        tables = {block for request in self.running for block in request.table}
        return tables | {self.cached[prefix] for prefix in self.pinned() if prefix in self.cached}

    def counts(self) -> dict[str, int]:
        num_cached = len(self.cached)
        num_private = len(self.used() - set(self.cached.values()))
        return {
            "num_blocks": self.num_blocks,
            "num_free_blocks": self.num_blocks - num_cached - num_private,
            "num_cached_blocks": num_cached,
            "num_evictable_blocks": num_cached - len(self.pinned()),
            "num_private_blocks": num_private,
        }

    def victims(self, num: int) -> list[Prefix]:
        """The prefixes that go next, least recently released first: so a prefix goes after all that begin with it."""
        pinned = self.pinned()
        unpinned = [prefix for prefix in self.cached if prefix not in pinned]
        return sorted(unpinned, key=lambda prefix: self.released[prefix])[:num]

    def lose(self, prefixes: Iterable[Prefix]) -> None:
        for prefix in prefixes:
            del self.cached[prefix]

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
                self.released[prefix] = (len(self.released),)
