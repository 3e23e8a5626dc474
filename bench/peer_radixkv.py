"""radixkv for bench/peers.py: packed tokens in."""

import struct
from array import array
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from radixkv import PrefixCache, Request


class Manager:
    """What each manager of the comparison has.

    `form` is how it takes tokens, `prepare` makes that and is not timed; `note` says why its hits may differ.
    """

    name = "radixkv"
    form = "packed bytes"
    note = ""
    conversions: ClassVar[dict[str, Callable[[list[int]], object]]] = {
        "bytes by array('i')": lambda tokens: array("i", tokens).tobytes(),
        "bytes by struct.pack": lambda tokens: struct.pack(f"<{len(tokens)}i", *tokens),
        "bytes by numpy": lambda tokens: np.array(tokens, np.int32).tobytes(),
    }

    def __init__(self, num_blocks: int, block_size: int, max_tokens: int, max_running: int) -> None:
        self.cache = PrefixCache(num_blocks, block_size)
        self.size = block_size

    def prepare(self, prompt: np.ndarray, output: np.ndarray) -> tuple[object, object]:
        return prompt.tobytes(), output.tobytes()

    def serve(self, tokens: tuple[object, object]) -> int:
        """A request's whole life; returns the tokens that were cached."""
        cache = self.cache
        prompt, output = tokens
        request = cache.allocate(prompt)  # type: ignore[arg-type]
        cache.commit(request)
        if output:
            cache.append(request, output)  # type: ignore[arg-type]
            cache.commit(request, request.num_tokens - 1)
        cache.free(request)
        return request.num_cached_tokens

    def begin(self, tokens: tuple[object, object]) -> Request:
        """A request whose prompt is published, and which is going to decode."""
        request = self.cache.allocate(tokens[0])  # type: ignore[arg-type]
        self.cache.commit(request)
        return request

    def step(self, requests: list[Request], tokens: list[int]) -> None:
        """One token more for each request; full blocks are published."""
        self.cache.decode(requests, tokens)

    def end(self, request: Request) -> None:
        self.cache.commit(request)
        self.cache.free(request)

    def wait(self, tokens: tuple[object, object]) -> object:
        """Whatever may be kept of a request that waits."""
        return self.cache.lookup(tokens[0])  # type: ignore[arg-type]

    def match(self, waiting: object) -> int:
        """How many tokens of it are cached now."""
        return self.cache.match(waiting)  # type: ignore[arg-type]


class FromLists(Manager):
    """The same, given lists: packing them is part of the cost."""

    name = "radixkv, from lists"
    form = "list[int]"

    def prepare(self, prompt: np.ndarray, output: np.ndarray) -> tuple[object, object]:
        return prompt.tolist(), output.tolist()


class Session(Manager):
    """The same for one session, whose lookup is kept from turn to turn."""

    name = "radixkv, a lookup kept"

    def __init__(self, num_blocks: int, block_size: int, max_tokens: int, max_running: int) -> None:
        super().__init__(num_blocks, block_size, max_tokens, max_running)
        self.lookup = self.cache.lookup(b"")
        self.num_prepared = 0

    def prepare(self, prompt: np.ndarray, output: np.ndarray) -> tuple[object, object]:
        new = prompt[self.num_prepared :].tobytes()
        self.num_prepared = len(prompt) + len(output)
        return new, output.tobytes()

    def serve(self, tokens: tuple[object, object]) -> int:
        self.lookup.extend(tokens[0])  # type: ignore[arg-type]
        num_hit = super().serve((self.lookup, tokens[1]))
        self.lookup.extend(tokens[1])  # type: ignore[arg-type]
        return num_hit


MANAGERS = {"radixkv": Manager, "radixkv-lists": FromLists, "radixkv-lookup": Session}
