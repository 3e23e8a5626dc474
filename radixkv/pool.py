"""Which block ids are free. Knows nothing of tokens."""

from array import array


class BlockPool:
    """A stack of free block ids; what came back last goes out first. Invariant: no id is in it twice.

    Not thread-safe. Built in O(num_blocks), 4 bytes a block.
    """

    __slots__ = ("_free", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = array("i", range(num_blocks - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._free)

    def take(self, num: int) -> "array[int]":
        """Take `num` blocks, which must be there, in the order of their ids while the pool is fresh."""
        start = len(self._free) - num
        assert start >= 0, f"{num} blocks asked of a pool of {len(self._free)} free ones"
        taken = self._free[start:]
        del self._free[start:]
        taken.reverse()
        return taken

    def give(self, blocks: "array[int]") -> None:
        """Give blocks back; the first of them goes out first."""
        self._free.extend(blocks[::-1])

    def free_blocks(self) -> "array[int]":
        """A copy of the free ids, for checks. O(free)."""
        return self._free[:]
