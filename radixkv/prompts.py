"""Requests known by their tokens, each distinct prefix stored once. Knows nothing of files, text or blocks."""

from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from radixkv.tokens import TOKEN_BYTES

_CHUNK_BYTES = 64 * TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A request known by its tokens, packed."""

    time: float  # s
    tokens: bytes
    output_tokens: bytes
    namespace: Hashable = None  # what shares nothing with others: a model, a cache salt

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_tokens) // TOKEN_BYTES


class TokenRequests(Sequence[TokenRequest]):
    """A list of `TokenRequest`s whose common prefixes take memory once; items are made when asked for.

    Memory: some 10 bytes a distinct token, 40 a request. Prompt and output of a request are one chain of chunks of 64
    tokens, and a chunk is found by its tokens and the one before it. Cost of an item: a memcpy of its tokens.
    """

    def __init__(self) -> None:
        # (chunk before, tokens) -> chunk; before the first chunk is -1 - the index of the namespace
        self._nodes: dict[tuple[int, bytes], int] = {}
        self._parents = array("q")
        self._chunks: list[bytes] = []
        self.namespaces: list[Hashable] = []
        self.times = array("d")  # s
        self._ends = array("q")  # the last chunk of each request
        self._prompts = array("q")  # tokens
        self._names = array("i")  # index of the namespace
        self._numbers: dict[Hashable, int] = {}  # of namespaces

    def add(self, time: float, tokens: bytes, output_tokens: bytes, namespace: Hashable = None) -> None:
        """Append a request; `tokens` and `output_tokens` are packed."""
        nodes, parents, chunks = self._nodes, self._parents, self._chunks
        whole = tokens + output_tokens
        name = self._numbers.setdefault(namespace, len(self._numbers))
        if name == len(self.namespaces):
            self.namespaces.append(namespace)
        node = -1 - name
        for start in range(0, len(whole), _CHUNK_BYTES):
            chunk = whole[start : start + _CHUNK_BYTES]
            known = nodes.get((node, chunk))
            if known is None:
                known = nodes[node, chunk] = len(chunks)
                parents.append(node)
                chunks.append(chunk)
            node = known
        self.times.append(time)
        self._ends.append(node)
        self._prompts.append(len(tokens) // TOKEN_BYTES)
        self._names.append(name)

    def sort(self) -> None:
        """Order by time; among equals as before."""
        order = np.argsort(np.frombuffer(self.times, np.float64), kind="stable")
        for name in ("times", "_ends", "_prompts", "_names"):
            column: array[int] = getattr(self, name)
            values = np.frombuffer(column, column.typecode)[order]
            setattr(self, name, array(column.typecode, values.tobytes()))

    def truncate(self, num: int) -> None:
        """Keep the first `num` requests."""
        for column in (self.times, self._ends, self._prompts, self._names):
            del column[num:]

    @property
    def num_distinct_tokens(self) -> int:
        """At least the distinct prefixes, at most 63 tokens a request more."""
        return sum(map(len, self._chunks)) // TOKEN_BYTES

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[TokenRequest]:
        return map(self._item, range(len(self)))

    @overload
    def __getitem__(self, index: int) -> TokenRequest: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenRequest]: ...
    def __getitem__(self, index: int | slice) -> TokenRequest | list[TokenRequest]:
        if isinstance(index, slice):
            return [self._item(i) for i in range(len(self))[index]]
        return self._item(range(len(self))[index])

    def _item(self, index: int) -> TokenRequest:
        pieces = []
        node = self._ends[index]
        while node >= 0:
            pieces.append(self._chunks[node])
            node = self._parents[node]
        whole = b"".join(reversed(pieces))
        end = self._prompts[index] * TOKEN_BYTES
        return TokenRequest(self.times[index], whole[:end], whole[end:], self.namespaces[self._names[index]])
