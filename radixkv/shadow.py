"""What least recently used would have hit, beside any other order. Knows only when each block was used last.

A request uses its whole path, so the blocks that it was the last to use are a suffix of that path. LRU keeps those of the
latest requests whole, and of one more request the head; so a block's last use and its place on that path tell whether it
would be there, and no second cache is needed (the idea is that of one-pass stack distances, Mattson et al. 1970).
"""


class ShadowLRU:
    """Exact where requests follow one another, else as if a request used its path when it ended. Not thread-safe."""

    __slots__ = ("_edge", "_lengths", "_num_after", "_num_last", "room")

    def __init__(self) -> None:
        self.room = 0
        """Blocks that it has."""
        self._edge = 0  # of this request's blocks it keeps the head, of those after it all
        self._num_after = 0  # blocks last used after that
        self._num_last: dict[int, int] = {}  # request -> blocks that it was the last to use, from the edge on
        self._lengths: dict[int, int] = {}  # request -> blocks of its path

    def hits(self, use: int, start: int, num: int) -> int:
        """How many of `num` blocks, last used by request `use`, from block `start` of their path on, are there."""
        if use > self._edge:
            return num
        if use < self._edge or use not in self._lengths:
            return 0
        first = self._lengths[use] - self._num_last[use]
        return min(num, max(0, self.room - self._num_after - (start - first)))

    def forget(self, use: int, num: int) -> None:
        """`num` blocks last used by request `use` are gone, or used again."""
        if use >= self._edge and use in self._num_last:
            self._num_last[use] -= num
            if use > self._edge:
                self._num_after -= num

    def use(self, request: int, length: int) -> None:
        """`request`, after all before, used a path of so many blocks, which were forgotten."""
        self._num_last[request] = self._lengths[request] = length
        self._num_after += length
        while self._num_after > self.room:
            self._num_last.pop(self._edge, None)
            self._lengths.pop(self._edge, None)
            self._edge += 1
            self._num_after -= self._num_last.get(self._edge, 0)
