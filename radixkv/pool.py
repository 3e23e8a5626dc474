"""Which block ids are free. Knows nothing of tokens."""

from array import array


class BlockPool:
    """Free block ids: those that came back last go out first, then those that were never taken, in their order.

    A run of blocks keeps its order, so that what lay side by side does so again. Invariant: no id is in it twice.
    Not thread-safe. Built in O(num_blocks), 4 bytes a block.
    """

    __slots__ = ("_ids", "_num_returned", "_start", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # [0, _num_returned) came back; [_start, num_blocks) was never taken; never resized: that costs a copy
        self._ids = array("i", range(num_blocks))
        self._num_returned = 0
        self._start = 0

    def __len__(self) -> int:
        return self._num_returned + self.num_blocks - self._start

    def take(self, num: int) -> "array[int]":
        """Take `num` blocks, which must be there."""
        assert num <= len(self), f"{num} blocks asked of a pool of {len(self)} free ones"
        left = self._num_returned - num
        if left >= 0:
            taken = self._ids[left : self._num_returned]
            self._num_returned = left
            return taken
        taken = self._ids[: self._num_returned]
        self._num_returned = 0
        start = self._start
        self._start = start - left
        taken += self._ids[start : self._start]
        return taken

    def give(self, blocks: "array[int]") -> None:
        """Give blocks back."""
        end = self._num_returned + len(blocks)
        self._ids[self._num_returned : end] = blocks
        self._num_returned = end

    def free_blocks(self) -> "array[int]":
        """A copy of the free ids, for checks. O(free)."""
        return self._ids[: self._num_returned] + self._ids[self._start :]
