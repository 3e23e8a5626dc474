"""What the tree tells a policy that learns, and asks of it. Knows nothing of how it learns."""

from array import array
from typing import NamedTuple, Protocol

from radixkv.evicted import Place


class Arrival(NamedTuple):
    """What a request asks for, and what is there."""

    path: list[int]  # nodes that match
    part: int  # blocks of the last of them that match, 0 for all
    place: Place  # where the path ends, if it ends with a whole node
    key: bytes | bytearray  # tokens of the prompt
    pos: int  # bytes that match
    end: int  # bytes that may match
    num_blocks: int  # of the prompt
    room: int  # blocks that no running request holds
    resumed: bool


class Learner(Protocol):
    """What a policy defines besides that hears of every use, and remembers prefixes that were evicted.

    Nodes that were used by different requests stay apart for it: a leaf is extended in place only while it is new, and
    nodes become one only where it says that they are alike.
    """

    def attach(self, width: int, holds: "array[int]", blocks: dict[int, bytearray]) -> None:
        """Gets, once, the bytes of a block's tokens and two columns of the tree: holds and blocks of each node."""

    def begin(self, arrival: Arrival, /) -> int:
        """A request begins; nothing is held for it yet. Returns how many blocks of its prompt are known, cached or not.

        Comes before the request's `touch`, and may come without.
        """

    def start(self, node: int, /) -> None:
        """`node` is new, and held."""

    def is_new(self, node: int, /) -> bool:
        """Whether nobody used `node` yet, but the request that made it."""

    def is_like(self, node: int, ghost: int, /) -> bool:
        """Whether `node` and an evicted run behind it were used by the same requests."""

    def split(self, node: int, upper: int, part: int, /) -> None:
        """The first `part` blocks of `node` are `upper` now, used alike."""

    def merge(self, upper: int, node: int, /) -> None:
        """The blocks of `upper`, which is gone, are the first of `node` now, used alike."""

    def num_behind(self, place: Place, /) -> int:
        """How many evicted runs continue `place`."""

    def find(self, place: Place, key: bytes | bytearray, pos: int, end: int, /) -> list[tuple[int, int]]:
        """Which evicted runs, one after the other, continue `place` as `key[pos:end]` does: (ghost, blocks of it)."""

    def revive(self, ghost: int, num: int, node: int, serial: int, /) -> int:
        """The first `num` blocks of an evicted run are the end of `node` now, at `serial`. Returns the serial to use
        instead: what was evicted behind the run is remembered under that."""

    def look(self, path: list[int], place: Place, key: bytes | bytearray, pos: int, end: int, /) -> None:
        """Somebody who waits for `key[:end]` looked: `path`, whole nodes up to byte `pos`, is cached, and now held."""

    def touch(self, path: list[int], num_known: int | None, /) -> list[int]:
        """A request that used `path` ended; its `begin` returned `num_known`. None: it was a fork, or no request.

        Returns the nodes of the path that are like the one before them, and stay so as long as they are used together.
        """

    def evicted(self, leaf: int, place: Place, run: bytearray, end: int, /) -> None:
        """The last blocks of `leaf`, or all, were evicted: `run`, which continues `place` and ended at serial `end`."""

    def forget(self, nodes: list[int], places: list[Place], /) -> None:
        """`nodes` are gone for good, and what was evicted behind `places`."""

    def forget_evicted(self) -> None:
        """All that was evicted is gone for good."""


class LearningPolicy(Learner, Protocol):
    """A policy that learns: see `radixkv.tree.Policy`."""

    def add(self, leaf: int, /) -> None: ...
    def discard(self, leaf: int, /) -> None: ...
    def victim(self) -> int: ...

    def nodes(self) -> set[int]:
        """What was added and not discarded: for checks, and when somebody waits for the first time."""
