"""Other engines' caches, as simple as they can be: a dict of prefixes, and a queue of blocks that remember theirs.

They share nothing with radixkv, neither code nor words, and stand for the caches that `radixkv.testing` is for.
"""

from collections.abc import Hashable, Sequence
from typing import TypeAlias

Key: TypeAlias = tuple[str, tuple[int, ...]]  # salt and whole blocks of tokens


class Seq:
    """A running sequence: its tokens, its blocks, how many of the first blocks are shared through the index."""

    def __init__(self, salt: Hashable, ids: Sequence[int]) -> None:
        self.salt = salt
        self.ids = tuple(ids)
        self.blocks: list[int] = []
        self.num_hit_blocks = 0
        self.num_shared = 0


class BlockManager:
    """Blocks of `size` tokens; `index` maps every prefix of whole blocks to the block with its last tokens.

    The index is ordered: what ended last stands last, a prefix behind all that begin with it. O(tokens) for everything
    and O(index) to make room: a reference, not an engine.
    """

    def __init__(self, total: int, size: int) -> None:
        self.total = total
        self.size = size
        self.unused = list(range(total))
        self.index: dict[Key, int] = {}
        self.running: list[Seq] = []

    def lookup(self, ids: Sequence[int], salt: Hashable = None) -> int:
        """How many of the first blocks of `ids` are in the index."""
        hits = 0
        while (hits + 1) * self.size <= len(ids) and self.key(salt, ids, hits) in self.index:
            hits += 1
        return hits

    def begin(self, ids: Sequence[int], salt: Hashable = None) -> Seq | None:
        """A sequence with a block for every token of `ids`, the first of them from the index; None where it is full."""
        seq = Seq(salt, ids)
        seq.num_hit_blocks = seq.num_shared = min(self.lookup(ids, salt), (len(ids) - 1) // self.size)
        seq.blocks = [self.index[self.key(salt, ids, i)] for i in range(seq.num_shared)]
        self.running.append(seq)
        if not self.grow(seq):
            self.running.remove(seq)
            return None
        return seq

    def extend(self, seq: Seq, ids: Sequence[int]) -> bool:
        """More tokens for `seq`; False, and nothing changed, where there is no block for them."""
        before = seq.ids
        seq.ids = (*before, *ids)
        if self.grow(seq):
            return True
        seq.ids = before
        return False

    def publish(self, seq: Seq, num_tokens: int) -> None:
        """The KV of the first `num_tokens` is written: index their whole blocks, use what is there already."""
        for i in range(seq.num_shared, num_tokens // self.size):
            block = self.index.setdefault(self.key(seq.salt, seq.ids, i), seq.blocks[i])
            if block != seq.blocks[i]:
                self.unused.append(seq.blocks[i])
                seq.blocks[i] = block
            seq.num_shared = i + 1

    def end(self, seq: Seq) -> None:
        self.running.remove(seq)
        self.unused += seq.blocks[seq.num_shared :]
        for i in reversed(range(seq.num_shared)):
            self.refresh(self.key(seq.salt, seq.ids, i))

    # Inside

    def key(self, salt: Hashable, ids: Sequence[int], i: int) -> Key:
        return repr(salt), tuple(ids[: (i + 1) * self.size])

    def refresh(self, key: Key) -> None:
        self.index[key] = self.index.pop(key)

    def evictable(self) -> list[Key]:
        held = {self.key(seq.salt, seq.ids, i) for seq in self.running for i in range(seq.num_shared)}
        return [key for key in self.index if key not in held]

    def make_room(self, num: int) -> None:
        for key in self.evictable()[:num]:
            self.unused.append(self.index.pop(key))

    def grow(self, seq: Seq) -> bool:
        num = -(-len(seq.ids) // self.size) - len(seq.blocks)
        short = num - len(self.unused)
        if short > len(self.evictable()):
            return False
        self.make_room(max(short, 0))
        seq.blocks += [self.unused.pop() for _ in range(num)]
        return True


class QueueManager(BlockManager):
    """One queue of the blocks that nobody uses; each is known by its prefix until its turn comes to be used again.

    So it evicts while it has blocks that hold nothing, and keeps as many copies of a prefix as were computed.
    """

    def __init__(self, total: int, size: int) -> None:
        super().__init__(total, size)
        self.copies: dict[Key, list[int]] = {}
        self.known: dict[int, Key] = {}

    def begin(self, ids: Sequence[int], salt: Hashable = None) -> Seq | None:
        self.index = {key: copies[0] for key, copies in self.copies.items()}
        before = list(self.unused)
        hits = min(self.lookup(ids, salt), (len(ids) - 1) // self.size)
        held = [self.index[self.key(salt, ids, i)] for i in range(hits)]
        self.unused = [block for block in self.unused if block not in held]
        seq = super().begin(ids, salt)
        if seq is None:
            self.unused = before
        return seq

    def publish(self, seq: Seq, num_tokens: int) -> None:
        for i in range(seq.num_shared, num_tokens // self.size):
            key = self.known[seq.blocks[i]] = self.key(seq.salt, seq.ids, i)
            self.copies.setdefault(key, []).append(seq.blocks[i])
            seq.num_shared = i + 1

    def end(self, seq: Seq) -> None:
        self.running.remove(seq)
        used = {block for other in self.running for block in other.blocks}
        self.unused += [block for block in reversed(seq.blocks) if block not in used]

    def grow(self, seq: Seq) -> bool:
        num = -(-len(seq.ids) // self.size) - len(seq.blocks)
        if num > len(self.unused):
            return False
        for block in self.unused[:num]:
            seq.blocks.append(block)
            if block in self.known:
                key = self.known.pop(block)
                self.copies[key].remove(block)
                if not self.copies[key]:
                    del self.copies[key]
        del self.unused[:num]
        return True
