"""Which prefixes many workers hold, in one radix tree. Knows nothing of events, block ids of engines or sockets.

A worker is a small int here, and a bit of the sets of workers. As in `radixkv.tree`, a node is a number and its facts
are columns, packed bytes and ints in dicts that hold nothing Python's garbage collector looks at.
"""

from collections.abc import Hashable, Iterable, Iterator

from radixkv.tokens import common_units

NO_NODE = -1
MAX_RUN = 1 << 14  # blocks in a node, as its sets of blocks are ints; node and index fit one int


class Tier:
    """What is held in one medium: the workers that hold any block of a node, or all, and each worker's blocks as bits.

    A worker usually holds the first blocks of a node, but an engine may evict any: bit `i` stands for block `i`.
    """

    __slots__ = ("all_of", "any_of", "held")

    def __init__(self) -> None:
        self.any_of: dict[int, int] = {}  # node -> workers, as bits
        self.all_of: dict[int, int] = {}
        self.held: dict[int, dict[int, int]] = {}  # worker -> node -> blocks, as bits


class SharedTree:
    """Prefixes of whole blocks, each once however many hold it. Not thread-safe.

    Invariants: the first blocks of siblings differ; the last block of a leaf is held by somebody. A block keeps its
    place, (node, index) as it was stored, while anybody holds it: where a node is cut, its number stays with the upper
    part, and `settle` finds the lower ones.
    """

    def __init__(self, width: int) -> None:
        self.width = width  # bytes of a block's tokens
        self.num_blocks = 0
        self._roots: dict[Hashable, int] = {}
        self._names: dict[int, Hashable] = {}  # of roots
        self._edges: dict[int, bytearray] = {}
        self._children: dict[int, dict[bytes, int]] = {}  # of inner nodes: tokens of the first block -> child
        self._parents: dict[int, int] = {}
        self._tails: dict[int, int] = {}  # of what was cut: the child that is its former lower part
        self._tiers: list[Tier] = []
        self._next_node = 0  # subtle: numbers are never used again, so no place can name another node

    # Questions

    def match(self, name: Hashable, key: bytes, tiers: Iterable[Tier]) -> dict[int, int]:
        """How many leading blocks of `key` each worker holds, in any of `tiers`; those that hold none are left out.

        Exact: tokens are compared. One memcmp a node, and one look at each worker where what it holds ends.
        """
        tiers = list(tiers)
        found: dict[int, int] = {}
        node = self._roots.get(name, NO_NODE)
        width, edges, children = self.width, self._edges, self._children
        pos, end = 0, len(key) - len(key) % width
        alive = 0
        while pos < end:
            family = children.get(node)
            child = None if family is None else family.get(key[pos : pos + width])
            if child is None:
                break
            edge = edges[child]
            stop = pos + len(edge)
            is_whole = stop <= end and key.startswith(edge, pos)
            some = every = 0
            for tier in tiers:
                some |= tier.any_of.get(child, 0)
                every |= tier.all_of.get(child, 0)
            for worker in bits_of(alive & ~some):
                found[worker] = pos // width
            alive = alive & some if pos else some
            ending = alive & ~every if is_whole else alive
            if ending:
                num = (stop - pos) // width
                if not is_whole:
                    num = common_units(key, pos, edge, width)
                for worker in bits_of(ending):
                    held = 0
                    for tier in tiers:
                        held |= tier.held[worker].get(child, 0) if worker in tier.held else 0
                    length = min((~held & (held + 1)).bit_length() - 1, num)  # of the ones that `held` ends with
                    if is_whole and length == num:
                        continue  # in parts, each in another tier
                    found[worker] = pos // width + length
                    alive ^= 1 << worker
            if not alive:
                break
            pos, node = stop, child
        for worker in bits_of(alive):
            found[worker] = pos // width
        return {worker: num for worker, num in found.items() if num}

    def settle(self, node: int, index: int) -> tuple[int, int]:
        """The node and index where the block stored as (node, index) is now. O(cuts of its run)."""
        width, edges = self.width, self._edges
        while (num := len(edges[node]) // width) <= index:
            index -= num
            node = self._tails[node]
        return node, index

    def held(self, tier: Tier, worker: int, node: int) -> int:
        """The blocks of `node` that a worker holds, as bits."""
        return tier.held.get(worker, {}).get(node, 0)

    # Changes

    def add_tier(self) -> Tier:
        tier = Tier()
        self._tiers.append(tier)
        return tier

    def root(self, name: Hashable) -> int:
        """The root of a namespace, made where there is none. `trim` it if nothing is stored below."""
        root = self._roots.get(name)
        if root is None:
            root = self._new_node(NO_NODE, bytearray())
            self._roots[name] = root
            self._names[root] = name
        return root

    def descend(self, node: int, start: int, key: bytes, pos: int) -> tuple[int, int, int]:
        """Where `key` from byte `pos` on goes, after the first `start` blocks of `node`.

        Returns (node, start, num): its next `num` blocks are those of `node` from `start` on. Where `num` is 0 they are
        new, and belong after all of `node`, which was cut there if need be.
        """
        edge = self._edges[node]
        num = len(edge) // self.width
        if start < num:
            if start == 0 and key.startswith(edge, pos):
                return node, 0, num
            same = common_units(key, pos, edge[start * self.width :], self.width)
            if same:
                return node, start, same
            self._cut(node, start)
        child = self._children.get(node, {}).get(key[pos : pos + self.width])
        if child is None:
            return node, min(start, num), 0
        return self.descend(child, 0, key, pos)

    def extend(self, node: int, run: bytes) -> tuple[int, int]:
        """Put `run`, of whole blocks, after all of `node`; returns the node and index of its first block.

        A leaf grows in place, so that a session that grows block by block stays one node. The caller holds all of it at
        once, or calls `trim`.
        """
        num = len(run) // self.width
        self.num_blocks += num
        edge = self._edges[node]
        start = len(edge) // self.width
        if node in self._children or self._parents[node] == NO_NODE or start + num > MAX_RUN:
            return self._new_node(node, bytearray(run)), 0
        edge += run
        for tier in self._tiers:
            tier.all_of.pop(node, None)
        return node, start

    def hold(self, tier: Tier, worker: int, node: int, blocks: int) -> None:
        """A worker holds these blocks of `node`, as bits, besides those it has."""
        held = tier.held.setdefault(worker, {})
        blocks |= held.get(node, 0)
        held[node] = blocks
        bit = 1 << worker
        tier.any_of[node] = tier.any_of.get(node, 0) | bit
        if blocks == self._all_blocks(node):
            tier.all_of[node] = tier.all_of.get(node, 0) | bit

    def let_go(self, tier: Tier, worker: int, node: int, blocks: int) -> None:
        """A worker that held these blocks of `node`, as bits, does not any more."""
        held = tier.held[worker]
        left = held[node] & ~blocks
        _without(tier.all_of, node, worker)
        if left:
            held[node] = left
        else:
            del held[node]
            _without(tier.any_of, node, worker)
        if blocks.bit_length() == len(self._edges[node]) // self.width:
            self.trim(node)

    def forget(self, worker: int) -> None:
        """A worker holds nothing any more. O(nodes that it held, and the workers that share them)."""
        for tier in self._tiers:
            nodes = tier.held.pop(worker, {})
            for node in nodes:
                _without(tier.any_of, node, worker)
                _without(tier.all_of, node, worker)
            for node in nodes:
                if node in self._edges:
                    self.trim(node)

    def trim(self, node: int) -> None:
        """Forget the end of a leaf that nobody holds, the leaf if that is all of it, and so on upwards."""
        width = self.width
        while node not in self._children:
            parent = self._parents[node]
            if parent == NO_NODE:
                del self._roots[self._names.pop(node)], self._parents[node], self._edges[node]
                return
            edge = self._edges[node]
            num = len(edge) // width
            keep = self._num_in_use(node)
            self.num_blocks -= num - keep
            if keep:
                if keep < num:
                    del edge[keep * width :]
                    self._count_whole(node)
                return
            family = self._children[parent]
            del family[bytes(edge[:width])]
            if not family:
                del self._children[parent]
            if self._tails.get(parent) == node:
                del self._tails[parent]
            del self._edges[node], self._parents[node]
            node = parent

    def check(self) -> None:
        """Prove every invariant. O(tree). Raises: AssertionError."""
        num_blocks = 0
        reached = set(self._roots.values())
        assert {root: name for name, root in self._roots.items()} == self._names, "roots and names disagree"
        nodes = list(reached)
        for node in nodes:  # grows meanwhile
            edge, family = self._edges[node], self._children.get(node)
            num = len(edge) // self.width
            num_blocks += num
            assert (self._parents[node] == NO_NODE) == (not num), f"node {node} has {num} blocks"
            assert family is None or family, f"node {node} has an empty family"
            assert family is not None or self._num_in_use(node) == num > 0, f"leaf {node} ends with what nobody holds"
            for first, child in (family or {}).items():
                assert bytes(self._edges[child][: self.width]) == first, f"node {child} begins with other tokens"
                assert self._parents[child] == node, f"node {child} is not its parent's"
                nodes.append(child)
            if node in self._tails:
                assert self._parents[self._tails[node]] == node, f"the lower part of node {node} is not its child"
            for tier in self._tiers:
                held = {worker: nodes[node] for worker, nodes in tier.held.items() if node in nodes}
                every = sum(1 << worker for worker, blocks in held.items() if blocks == (1 << num) - 1)
                assert all(0 < blocks < 1 << num for blocks in held.values()), f"node {node}: {held} of {num} blocks"
                assert sum(1 << worker for worker in held) == tier.any_of.get(node, 0), f"node {node}: any of {held}"
                assert every == tier.all_of.get(node, 0), f"node {node}: all of {held}"
        known = set(nodes)
        named = self._edges.keys() | self._parents.keys() | self._children.keys() | self._tails.keys()
        for tier in self._tiers:
            named |= tier.any_of.keys() | tier.all_of.keys()
            named.update(*tier.held.values())
        assert named <= known, f"nodes {named - known} cannot be reached"
        assert num_blocks == self.num_blocks, f"{self.num_blocks} blocks are counted, {num_blocks} found"

    def _new_node(self, parent: int, edge: bytearray) -> int:
        node = self._next_node
        self._next_node += 1
        self._parents[node] = parent
        self._edges[node] = edge
        if parent != NO_NODE:
            self._children.setdefault(parent, {})[bytes(edge[: self.width])] = node
        return node

    def _cut(self, node: int, num: int) -> None:
        """Make what comes after the first `num` blocks of `node` a child of it."""
        edge = self._edges[node]
        family = self._children.pop(node, None)
        lower = self._new_node(node, edge[num * self.width :])
        del edge[num * self.width :]
        if family is not None:
            self._children[lower] = family
            for child in family.values():
                self._parents[child] = lower
        if node in self._tails:
            self._tails[lower] = self._tails[node]
        self._tails[node] = lower
        for tier in self._tiers:
            for worker in bits_of(tier.any_of.pop(node, 0)):
                held = tier.held[worker]
                blocks = held.pop(node)
                for part, of_part in ((node, blocks & (1 << num) - 1), (lower, blocks >> num)):
                    if of_part:
                        held[part] = of_part
                        tier.any_of[part] = tier.any_of.get(part, 0) | 1 << worker
        self._count_whole(node)
        self._count_whole(lower)

    def _count_whole(self, node: int) -> None:
        """Find anew who holds all of `node`, which has changed its length."""
        whole = self._all_blocks(node)
        for tier in self._tiers:
            tier.all_of.pop(node, None)
            every = 0
            for worker in bits_of(tier.any_of.get(node, 0)):
                if tier.held[worker][node] == whole:
                    every |= 1 << worker
            if every:
                tier.all_of[node] = every

    def _num_in_use(self, node: int) -> int:
        """How many blocks of `node` there are up to the last that anybody holds. O(workers that hold any)."""
        num = 0
        for tier in self._tiers:
            for worker in bits_of(tier.any_of.get(node, 0)):
                num = max(num, tier.held[worker][node].bit_length())
        return num

    def _all_blocks(self, node: int) -> int:
        return (1 << len(self._edges[node]) // self.width) - 1


def bits_of(bits: int) -> Iterator[int]:
    """Which bits are set: the workers of a set, the blocks of a run."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def _without(column: dict[int, int], node: int, worker: int) -> None:
    bits = column.get(node, 0) & ~(1 << worker)
    if bits:
        column[node] = bits
    else:
        column.pop(node, None)
