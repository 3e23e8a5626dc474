"""Which prefixes are cached, in which blocks, held by how many requests. Knows nothing of the order of eviction.

A node is a number; its facts are columns. Tokens and block ids are packed bytes in dicts that hold nothing Python's
garbage collector looks at, so a full collection at a million leaves costs nothing (see docs/log.md).
"""

from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Protocol, TypeAlias, cast

from radixkv.evicted import EvictedPrefixes, Place
from radixkv.learner import LearningPolicy
from radixkv.tokens import TOKEN_BYTES, common_units
from radixkv.waiting import Waiting

BLOCK_BYTES = 4  # a block id, packed
NO_NODE = -1
Name: TypeAlias = Hashable  # a namespace as a typed value, see `typed_name`
# Blocks of one path: namespace, the block that they continue (None at the start of a prompt), packed tokens, block ids.
Run: TypeAlias = "tuple[Hashable, int | None, bytes, array[int]]"
# Where a prompt was matched before: its root and the nodes behind that, each with its id and the byte where it ends.
Trail: TypeAlias = "list[tuple[int, int, int]]"


class Policy(Protocol):
    """Which evictable leaf goes next. Leaves are ints, meaningful only until they are discarded.

    Two things may be defined besides: `bind(usage)` gets the `Usage` columns that keys can be read from, and
    `wants_inner_nodes = True` asks for every node that nobody holds, the deepest of a path first. A policy that is a
    `radixkv.learner.Learner` too hears of everything.
    """

    def add(self, leaf: int, /) -> None:
        """`leaf` may be evicted from now on."""

    def discard(self, leaf: int, /) -> None:
        """`leaf` was added, and is held, extended or gone now. With inner nodes, it may be new and held at once."""

    def victim(self) -> int:
        """The leaf to evict from next; it stays added until it is discarded. Only called where there is one."""


class Usage:
    """How each node was used, by ticks of a logical clock: what policies rank by. Kept only for a policy that asks.

    `created` and `last_use` are ticks, the last use that of who let go last; `uses` counts requests that ended;
    `priority` is the highest of theirs.
    """

    __slots__ = ("_tick", "created", "last_use", "priority", "uses")

    def __init__(self) -> None:
        self._tick = 0
        self.created, self.last_use, self.uses, self.priority = array("q"), array("q"), array("q"), array("q")

    def start(self, node: int) -> None:
        missing = node + 1 - len(self.created)
        if missing > 0:
            for column in (self.created, self.last_use, self.uses, self.priority):
                column.frombytes(bytes(8 * missing))
        self._tick += 1
        self.created[node] = self.last_use[node] = self._tick
        self.uses[node] = 0
        self.priority[node] = -(2**63)

    def copy(self, source: int, node: int) -> None:
        for column in (self.created, self.last_use, self.uses, self.priority):
            column[node] = column[source]

    def look(self, node: int) -> None:
        self._tick += 1
        self.last_use[node] = self._tick

    def touch(self, node: int, priority: int) -> None:
        self.look(node)
        self.uses[node] += 1
        if priority > self.priority[node]:
            self.priority[node] = priority


class RadixTree:
    """Cached prefixes of whole blocks, one root a namespace. Not thread-safe.

    Invariants: a node but a root has at least one block and as many blocks of tokens; the first blocks of siblings
    differ. `holds` of a node counts the requests that end there and its children that are held, so a held node's
    ancestors are held; what nobody holds can be evicted, leaves first.
    """

    def __init__(self, block_size: int, policy: Policy) -> None:
        self.width = block_size * TOKEN_BYTES  # bytes of a block's tokens
        self.num_blocks = 0  # that can be matched
        self.num_evictable = 0
        self.num_detached = 0  # of dropped namespaces, held by requests that still run
        self.num_uses = 0  # requests that ended
        self.evicted = EvictedPrefixes(self.width)
        self._policy = policy
        self._every_node = bool(getattr(policy, "wants_inner_nodes", False))
        self._usage: Usage | None = None
        if hasattr(policy, "bind"):
            self._usage = Usage()
            policy.bind(self._usage)
        self.learner = cast(LearningPolicy, policy) if hasattr(policy, "attach") else None
        self._waiting: Waiting | None = None  # stands between where somebody waited once
        self._roots: dict[Name, int] = {}
        self._names: dict[int, Name] = {}  # of roots; a root without a name is detached
        self._edges: dict[int, bytearray] = {}
        self._blocks: dict[int, bytearray] = {}
        self._children: dict[int, dict[bytes, int]] = {}  # of inner nodes: tokens of the first block -> child
        self._parents = array("i")
        self._holds = array("i")
        self._serials = array("q")  # of the prefix that ends with the node
        self._ids = array("q")  # of the node itself: new when it is made, and when its tail is evicted
        self._serial = 0
        self._unused = array("i")
        if self.learner is not None:
            self.learner.attach(self.width, self._holds, self._blocks)

    # Questions

    def root(self, name: Name) -> int:
        """The root of a namespace, NO_NODE where nothing is cached under it."""
        return self._roots.get(name, NO_NODE)

    def name(self, root: int) -> Name:
        """The namespace of a live root."""
        return self._names[root]

    def is_live(self, root: int) -> bool:
        """Whether what is cached under `root` can be matched."""
        return root in self._names

    def find(self, node: int, key: bytes, pos: int, end: int) -> tuple[list[int], int, int]:
        """The longest continuation of `node` by `key[pos:end]`, whole blocks. Changes nothing.

        Returns the nodes on the way, how many blocks of them match, and how many of those are in the last node where
        that matches in part only (else 0). One memcmp a node, O(log) in the last; `end - pos` is whole blocks.
        """
        width, edges, children = self.width, self._edges, self._children
        path: list[int] = []
        start = pos
        while pos < end:
            family = children.get(node)
            if family is None:
                break
            child = family.get(key[pos : pos + width])
            if child is None:
                break
            path.append(child)
            edge = edges[child]
            stop = pos + len(edge)
            if stop <= end and key.startswith(edge, pos):
                pos, node = stop, child
                continue
            part = min(common_units(key, pos, edge, width), (end - pos) // width)
            return path, (pos - start) // width + part, part
        return path, (pos - start) // width, 0

    def follow(self, name: Name, trail: Trail, key: bytearray, end: int) -> None:
        """Bring `trail`, left by an earlier call for what `key` was then, up to date for `key[:end]`, whole blocks.

        O(1) where nothing changed, else O(what is new, and the last node where it was split or lost its tail).
        """
        ids, parents, width = self._ids, self._parents, self.width
        root = self.root(name)
        if root == NO_NODE or not trail or trail[0] != (root, ids[root], 0):
            trail.clear()
            if root == NO_NODE:
                return
            trail.append((root, ids[root], 0))
        while len(trail) > 1:
            node, node_id, _ = trail[-1]
            above, above_id, _ = trail[-2]
            if ids[node] == node_id and parents[node] == above and ids[above] == above_id:
                break  # subtle: so the prefix is there, and the node begins where it did, whatever merged before that
            trail.pop()
        node, node_id, pos = trail[-1]
        if len(trail) > 1:  # the match may end inside, and a leaf may have grown
            edge, start = self._edges[node], pos - trail[-2][2]
            if start < len(edge):
                if pos == end or not key.startswith(edge[start : start + width], pos):
                    return
                pos += min(common_units(key, pos, edge[start:], width), (end - pos) // width) * width
                trail[-1] = node, node_id, pos
                if pos - trail[-2][2] < len(edge):
                    return
        family = self._children.get(node)
        if family is None or bytes(key[pos : min(end, pos + width)]) not in family:
            return
        path, _, part = self.find(node, bytes(memoryview(key)[pos:end]), 0, end - pos)
        for child in path:
            pos += len(self._edges[child])
            trail.append((child, ids[child], pos))
        if part:
            child, node_id, pos = trail[-1]
            trail[-1] = child, node_id, pos - len(self._edges[child]) + part * width

    def found(self, trail: Trail, end: int) -> tuple[list[int], int, int]:
        """What `find` from the root on returns for the first `end` bytes, of a trail that is up to date. O(depth)."""
        end = min(end, trail[-1][2]) if trail else 0
        if end <= 0:
            return [], 0, 0
        path = []
        start = stop = 0
        for node in self.path_to(trail[-1][0]):
            path.append(node)
            start, stop = stop, stop + len(self._edges[node])
            if stop >= end:
                break
        return path, end // self.width, 0 if stop == end else (end - start) // self.width

    def serial(self, node: int) -> int:
        """The number of the prefix that ends with `node`, which no other prefix ever gets."""
        return self._serials[node]

    def ends(self, node: int, serial: int) -> bool:
        """Whether `node` is there, and ends with the prefix of that number still."""
        return node in self._edges and self._serials[node] == serial

    def blocks_of(self, path: list[int], part: int) -> "array[int]":
        """The block ids along `path`, of its last node the first `part` only if that is not 0."""
        blocks = array("i")
        for node in path:
            blocks.frombytes(self._blocks[node])
        if part:
            surplus = len(self._blocks[path[-1]]) // BLOCK_BYTES - part
            del blocks[len(blocks) - surplus :]
        return blocks

    def path_to(self, node: int) -> list[int]:
        """The nodes from below the root down to `node`. O(depth)."""
        path = []
        while self._parents[node] != NO_NODE:
            path.append(node)
            node = self._parents[node]
        path.reverse()
        return path

    def num_evictable_on(self, path: list[int], part: int) -> int:
        """How many blocks of a match are evictable now, and will not be once it is held. O(path)."""
        num = 0
        for node in reversed(path):
            if self._holds[node]:
                break
            num += part or len(self._blocks[node]) // BLOCK_BYTES
            part = 0
        return num

    def place_after(self, name: Name, path: list[int]) -> Place:
        """What records of evicted runs behind the whole nodes of `path` are kept under."""
        return self._serials[path[-1]] if path else name

    # Changes

    def hold(self, root: int, name: Name, path: list[int], part: int) -> tuple[int, int]:
        """Hold what `find` found from a root on; returns (root, node). Splits the last node where it is held in part.

        Makes the namespace's root where there is none yet.
        """
        if root == NO_NODE:
            root = self._new_node(NO_NODE)
            self._roots[name] = root
            self._names[root] = name
        node = root
        if path:
            node = self._split(path[-1], part) if part else path[-1]
        self.hold_node(node)
        return root, node

    def hold_node(self, node: int) -> None:
        """One more request ends at `node`. O(nodes that were not held)."""
        holds = self._holds
        while not holds[node]:
            holds[node] = 1
            parent = self._parents[node]
            if parent == NO_NODE:
                return
            self.num_evictable -= len(self._blocks[node]) // BLOCK_BYTES
            if self._every_node or node not in self._children:
                self._policy.discard(node)
            node = parent
        holds[node] += 1

    def release(self, node: int, priority: int, num_known: int | None = None) -> None:
        """A request that ended at `node` is gone: what nobody holds now is evictable, the deepest node first to go.

        `num_known` is what the learner's `begin` returned, None where there was none.
        """
        self.num_uses += 1
        if self._usage is not None:
            for used in reversed(self.path_to(node)):
                self._usage.touch(used, priority)
        if self.learner is not None:
            path = self.path_to(node)
            alike = self.learner.touch(path, num_known)
            if self._waiting is not None:
                self._waiting.use(path)
            for used in alike:
                self._merge(used, self.learner)
        self._let_go(node)

    def look(self, name: Name, path: list[int], part: int, key: bytes | bytearray, pos: int) -> int:
        """Somebody waits for `key`, of which `find` found `path` and `part` up to byte `pos`; returns the last node.

        What was found is held and let go. Splits the last node where the match ends inside.
        """
        node = self.hold(self.root(name), name, path, part)[1] if path else NO_NODE
        if self.learner is not None:
            path = self.path_to(node) if path else path
            self.learner.look(path, self.place_after(name, path), key, pos, len(key) - len(key) % self.width)
        if path:
            self.let_go(node)
        return node

    def look_again(self, name: Name, node: int, serial: int, key: bytes, pos: int) -> bool:
        """As `look`, which returned `node`, of that serial then, for a policy that learns. O(1).

        False, and nothing is changed, where the match does not end there any more, or `node` was used meanwhile. Not
        after `drop`.
        """
        family = self._children.get(self.root(name) if node == NO_NODE else node, {})
        if key[pos : pos + self.width] in family:
            return False
        if node != NO_NODE:
            if self._waiting is None or not self.ends(node, serial) or not self._waiting.is_waited_for(node):
                return False
            self._waiting.look(node)
        return True

    def let_go(self, node: int) -> None:
        """As `release`, of who held `node` only to look, and waits: it is recent now, but no use is counted.

        For a policy that learns, what it learns is the time between uses; see `radixkv.waiting`. One that wants inner
        nodes is given them anew, and that is all.
        """
        # subtle: among inner nodes too, a leaf that is kept from the policy would leave it one that is none
        if self.learner is not None and not self._every_node and self._parents[node] != NO_NODE:
            if self._waiting is None:
                self._policy = self._waiting = Waiting(self.learner)
            self._waiting.look(node)
        if self._usage is not None:
            for seen in reversed(self.path_to(node)):
                self._usage.look(seen)
        self._let_go(node)

    def _let_go(self, node: int) -> None:
        holds = self._holds
        while True:
            holds[node] -= 1
            if holds[node]:
                return
            parent = self._parents[node]
            if parent == NO_NODE:
                self._drop_empty_root(node)
                return
            self.num_evictable += len(self._blocks[node]) // BLOCK_BYTES
            if self._every_node or node not in self._children:
                self._policy.add(node)
            node = parent

    def release_detached(self, node: int) -> "array[int]":
        """As `release` under a root that is not live: what nobody holds now is gone; returns its blocks."""
        freed = array("i")
        holds = self._holds
        while True:
            holds[node] -= 1
            if holds[node]:
                return freed
            parent = self._parents[node]
            if parent == NO_NODE:
                self._forget(node)
                return freed
            freed.frombytes(self._blocks[node])
            self.num_detached -= len(self._blocks[node]) // BLOCK_BYTES
            self._unlink(node)
            node = parent

    def advance(self, node: int, key: bytes, pos: int, end: int) -> tuple[int, "array[int]"]:
        """Move a request's hold from `node` down over what is cached of `key[pos:end]` already.

        Returns the node it is held at now and the blocks passed.
        """
        if node not in self._children:
            return node, _NO_BLOCKS
        path, num, part = self.find(node, key, pos, end)
        if not num:
            return node, _NO_BLOCKS
        blocks = self.blocks_of(path, part)
        lower = self._split(path[-1], part) if part else path[-1]
        self.hold_node(lower)
        self._holds[node] -= 1  # subtle: held by its child still, so never the last
        return lower, blocks

    def insert(self, node: int, edge: bytearray, blocks: "array[int]") -> int:
        """Cache `edge` in `blocks` after `node`, which a request holds, and move its hold to the end.

        None of `edge` is cached yet; it is kept. A leaf that only this request holds is extended in place, so that a
        session that grows turn by turn stays one node: O(len(edge)) amortised.
        """
        self.num_blocks += len(blocks)
        learner = self.learner
        if learner is None:
            return self._append(node, edge, blocks, True)
        if self._waiting is not None:
            self._waiting.cached(len(blocks), self.num_blocks)
        done = 0
        for ghost, num in learner.find(self._place(node), edge, 0, len(edge)):
            run = edge[done * self.width : (done + num) * self.width]
            in_place = learner.is_like(node, ghost) and learner.num_behind(self._place(node)) == 1
            node = self._append(node, run, blocks[done : done + num], in_place)
            self._serials[node] = learner.revive(ghost, num, node, self._serials[node])
            done += num
        if done == len(blocks):
            return node
        if done:
            edge, blocks = edge[done * self.width :], blocks[done:]
        return self._append(node, edge, blocks, learner.is_new(node))

    def evict(self, num: int, freed: "array[int]", stump: int = 0) -> None:
        """Evict `num` blocks, or all that are evictable; adds their ids to `freed` in the order in which they went.

        The policy's leaf goes block by block from its tail, never more than asked, but that a rest of at most `stump`
        blocks goes too where it is no longer than what was taken. O(num / leaf size) policy calls.

        Raises: RuntimeError where the policy chooses what is no evictable leaf.
        """
        record = self.evicted.record if self.learner is None else self.learner.evicted
        while num > 0 and self.num_evictable:
            leaf = self._policy.victim()
            if leaf not in self._edges or leaf in self._children or self._holds[leaf]:
                raise RuntimeError(f"policy {self._policy!r} chose {leaf!r}, which is not an evictable leaf")
            blocks = self._blocks[leaf]
            have = len(blocks) // BLOCK_BYTES
            take = min(num, have)
            if have - take <= min(take, stump):
                take = have
            num -= take
            self.num_blocks -= take
            self.num_evictable -= take
            tail = array("i", bytes(blocks[(have - take) * BLOCK_BYTES :]))
            tail.reverse()
            freed += tail
            if take < have:
                edge = self._edges[leaf]
                keep = (have - take) * self.width
                run = edge[keep:]
                del edge[keep:]
                del blocks[(have - take) * BLOCK_BYTES :]
                end = self._serials[leaf]
                self._serials[leaf] = self._ids[leaf] = self._next_serial()
                record(leaf, self._serials[leaf], run, end)
                break
            parent = self._parents[leaf]
            self._policy.discard(leaf)
            record(leaf, self._place(parent), self._edges[leaf], self._serials[leaf])
            self._unlink(leaf)
            if parent in self._children:
                continue
            if self._parents[parent] == NO_NODE:
                self._drop_empty_root(parent)
            elif not self._holds[parent] and not self._every_node:
                self._policy.add(parent)

    def drop(self, name: Name) -> "array[int]":
        """Forget a namespace; returns the blocks that nobody holds. What is held is detached. O(its nodes)."""
        self.evicted.forget(name)
        freed = array("i")
        root = self._roots.pop(name, NO_NODE)
        if root == NO_NODE:
            if self.learner is not None:
                self.learner.forget([], [name])
            return freed
        del self._names[root]
        nodes = self._descendants(root)
        for node in nodes:
            if not self._holds[node] and (self._every_node or node not in self._children):
                self._policy.discard(node)
        if self.learner is not None:
            self.learner.forget(nodes, [name, *(self._serials[node] for node in nodes)])
        for node in reversed(nodes):  # children before their parents
            num = len(self._blocks[node]) // BLOCK_BYTES
            self.num_blocks -= num
            if self._holds[node]:
                self.num_detached += num
            else:
                self.num_evictable -= num
                freed.frombytes(self._blocks[node])
                self._unlink(node)
        if not self._holds[root]:
            self._forget(root)
        return freed

    def forget_evicted(self) -> None:
        """Forget what was evicted, in namespaces that are empty too."""
        self.evicted.clear()
        if self.learner is not None:
            self.learner.forget_evicted()

    def names(self) -> list[Name]:
        """The namespaces under which something is cached or held."""
        return list(self._roots)

    def runs(self, names: Iterable[Name]) -> Iterator[Run]:
        """All that is cached under the namespaces, a run a node, parents before their children. O(their part)."""
        for name in names:
            namespace = shown_name(name)
            for node in self._descendants(self._roots.get(name, NO_NODE)):
                blocks = array("i", bytes(self._blocks[node]))
                yield namespace, self.last_block(self._parents[node]), bytes(self._edges[node]), blocks

    def last_block(self, node: int) -> int | None:
        """The block that ends with `node`; None for a root."""
        blocks = self._blocks.get(node)
        return None if blocks is None else int.from_bytes(blocks[-BLOCK_BYTES:], "little")

    # What explains and proves

    def continuations(self, node: int, part: int) -> Iterator[tuple[int, int]]:
        """Where everything that is cached after a match that ended at `node`, inside it where `part`, goes on.

        As (node, blocks of it that come before). O(children of the node).
        """
        if part:
            yield node, part
        else:
            for child in self._children.get(node, {}).values():
                yield child, 0

    def block_at(self, node: int, start: int) -> bytearray:
        """The tokens of block `start` of a node."""
        return self._edges[node][start * self.width : (start + 1) * self.width]

    def run_beside(self, node: int, start: int, key: bytes, pos: int) -> bytearray:
        """What is cached from block `start` of `node` on, into children that agree with `key`, there at byte `pos`."""
        run = self._edges[node][start * self.width :]
        while family := self._children.get(node):
            child = family.get(key[pos + len(run) : pos + len(run) + self.width])
            if child is None:
                break
            run += self._edges[child]
            node = child
        return run

    def num_evicted_behind(self, name: Name, path: list[int], key: bytes, pos: int) -> int:
        """How many blocks of `key` from byte `pos` on were evicted from behind the whole nodes of `path`."""
        place = self.place_after(name, path)
        if self.learner is not None:
            return sum(num for _, num in self.learner.find(place, key, pos, len(key) - len(key) % self.width))
        return self.evicted.match(place, key, pos)

    def draw(self, max_nodes: int, typecode: str = "i") -> Iterator[str]:
        """The tree as lines of text, children below their parents; no recursion. `typecode` is that of its tokens."""
        size = self.width // array(typecode).itemsize
        left = max_nodes
        for name, root in self._roots.items():
            yield "root" if name is None else f"root of {shown_name(name)!r}"
            stack = [(child, "", 0) for child in reversed(self._children.get(root, {}).values())]
            last = {stack[0][0]} if stack else set()
            while stack:
                node, indent, start = stack.pop()
                if not left:
                    yield f"{indent}... {len(stack) + 1} more branches"
                    break
                left -= 1
                tokens = array(typecode, bytes(self._edges[node]))
                blocks = array("i", bytes(self._blocks[node])).tolist()
                held = f", held by {self._holds[node]}" if self._holds[node] else ""
                end = start + len(blocks) * size
                branch, below = ("└── ", "    ") if node in last else ("├── ", "│   ")
                text = f"tokens [{start}, {end}): {_short(tokens.tolist())} in blocks {_short(blocks)}{held}"
                yield indent + branch + text
                family = list(reversed(self._children.get(node, {}).values()))
                last.update(family[:1])
                stack += [(child, indent + below, end) for child in family]

    def check(self, holds: Mapping[int, int]) -> "array[int]":
        """Prove every invariant of the tree, given how many requests end at each node; returns the blocks it owns.

        O(tree). Raises: AssertionError.
        """
        owned = array("i")
        evictable: set[int] = set()
        num_blocks = num_evictable = num_detached = 0
        live = set(self._names)
        assert {self._roots[name]: name for name in self._roots} == self._names, "roots and names disagree"
        roots = [node for node in range(len(self._parents)) if self._is_root(node)]
        assert live <= set(roots), f"named nodes {live - set(roots)} are no roots"
        seen = 0
        for root in roots:
            assert root in live or self._holds[root], f"detached root {root} is held by nobody"
            assert self._holds[root] or root in self._children, f"root {root} is empty and held by nobody"
            self._check_holds(root, holds, f"root {root}")
            for node in self._descendants(root):
                seen += 1
                edge, blocks = self._edges[node], self._blocks[node]
                num = len(blocks) // BLOCK_BYTES
                where = f"node {node} (blocks {_short(array('i', bytes(blocks)).tolist())})"
                assert num > 0, f"{where} has no block"
                assert len(edge) == num * self.width, f"{where} has {len(edge)} bytes of tokens for {num} blocks"
                parent = self._parents[node]
                assert self._children[parent].get(bytes(edge[: self.width])) == node, f"{where} is not its parent's"
                family = self._children.get(node)
                assert family is None or family, f"{where} has an empty family"
                self._check_holds(node, holds, where)
                assert edge[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii(), f"{where} has a token outside [0, 2^31)"
                owned.frombytes(blocks)
                if root not in live:
                    assert self._holds[node], f"{where} is detached and held by nobody"
                    num_detached += num
                    continue
                num_blocks += num
                if not self._holds[node]:
                    num_evictable += num
                    if self._every_node or not family:
                        evictable.add(node)
        assert seen == len(self._edges) == len(self._blocks), f"{len(self._edges)} nodes, {seen} can be reached"
        for name, counted, found in (
            ("num_blocks", self.num_blocks, num_blocks),
            ("num_evictable", self.num_evictable, num_evictable),
            ("num_detached", self.num_detached, num_detached),
        ):
            assert counted == found, f"tree.{name} is {counted}, but {found} blocks are found"
        if hasattr(self._policy, "nodes"):
            added = self._policy.nodes()
            assert added == evictable, f"the policy has nodes {added - evictable} too many, {evictable - added} too few"
        if self._waiting is not None:
            self._waiting.check(set(self._edges))
        return owned

    def _check_holds(self, node: int, holds: Mapping[int, int], where: str) -> None:
        requests = holds.get(node, 0)
        children = sum(self._holds[child] > 0 for child in self._children.get(node, {}).values())
        assert self._holds[node] == requests + children, (
            f"{where} is held {self._holds[node]} times, but by {requests} requests and {children} children"
        )

    @property
    def num_nodes(self) -> int:
        """Nodes that hold blocks."""
        return len(self._edges)

    # Nodes

    def _new_node(self, parent: int) -> int:
        if self._unused:
            node = self._unused.pop()
            self._parents[node] = parent
            self._holds[node] = 0
        else:
            node = len(self._parents)
            self._parents.append(parent)
            self._holds.append(0)
            self._serials.append(0)
            self._ids.append(0)
        self._serials[node] = self._ids[node] = self._next_serial()
        if self._usage is not None:
            self._usage.start(node)
        if self.learner is not None:
            self.learner.start(node)
        return node

    def _append(self, node: int, edge: bytearray, blocks: "array[int]", in_place: bool) -> int:
        """Cache `edge`, which is kept, after `node`, and move a request's hold there: into the node, if that is
        `in_place` and the request alone uses it, else into a child."""
        family = self._children.get(node)
        if in_place and family is None and self._holds[node] == 1 and self._parents[node] != NO_NODE:
            self._edges[node] += edge
            self._blocks[node] += blocks.tobytes()
            self._serials[node] = self._next_serial()
            return node
        child = self._new_node(node)
        self._edges[child] = edge
        self._blocks[child] = bytearray(blocks.tobytes())
        self._holds[child] = 1  # the request's hold on `node` becomes its child's
        first = bytes(edge[: self.width])
        if family is None:
            self._children[node] = {first: child}
        else:
            family[first] = child
        return child

    def _split(self, node: int, part: int) -> int:
        """Cut `node` after `part` blocks; returns the new upper node, which the caller holds at once.

        The lower half keeps its number, place in the policy, holds and children.
        """
        parent = self._parents[node]
        edge, blocks = self._edges[node], self._blocks[node]
        cut = part * self.width
        upper = self._new_node(parent)
        if self._usage is not None:
            self._usage.copy(node, upper)
        self._edges[upper] = edge[:cut]
        self._blocks[upper] = blocks[: part * BLOCK_BYTES]
        self._holds[upper] = 1 if self._holds[node] else 0
        self._children[parent][bytes(edge[: self.width])] = upper
        self._children[upper] = {bytes(edge[cut : cut + self.width]): node}
        self._parents[node] = upper
        del edge[:cut]
        del blocks[: part * BLOCK_BYTES]
        if self.learner is not None:
            self.learner.split(node, upper, part)
        return upper

    def _merge(self, node: int, learner: LearningPolicy) -> None:
        """Take the parent of `node`, which is held, into it, if nothing else continues it, cached or evicted, and no
        request ends there. O(blocks of `node`) amortised; it keeps its number, holds and children."""
        upper = self._parents[node]
        if len(self._children[upper]) > 1 or self._holds[upper] > 1 or learner.num_behind(self._serials[upper]):
            return
        edge, blocks = self._edges.pop(upper), self._blocks.pop(upper)
        self._parents[node] = parent = self._parents[upper]
        self._children[parent][bytes(edge[: self.width])] = node
        del self._children[upper]
        edge += self._edges[node]  # subtle: the upper one may be long, and is not copied
        blocks += self._blocks[node]
        self._edges[node], self._blocks[node] = edge, blocks
        self._holds[upper] = 0
        self._forget(upper)
        learner.merge(upper, node)

    def _unlink(self, node: int) -> None:
        """Take a leaf from its parent and forget it."""
        parent = self._parents[node]
        family = self._children[parent]
        del family[bytes(self._edges[node][: self.width])]
        if not family:
            del self._children[parent]
        del self._edges[node], self._blocks[node]
        self._forget(node)

    def _drop_empty_root(self, root: int) -> None:
        if root not in self._children and not self._holds[root]:
            del self._roots[self._names.pop(root)]
            self._forget(root)

    def _forget(self, node: int) -> None:
        self._parents[node] = _UNUSED
        if self._waiting is not None:
            self._waiting.forget(node)
        self._unused.append(node)

    def _is_root(self, node: int) -> bool:
        return self._parents[node] == NO_NODE

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def _place(self, node: int) -> Name:
        """What records of evicted runs behind `node` are kept under: namespaces outlive their roots."""
        return self._names[node] if self._parents[node] == NO_NODE else self._serials[node]

    def _descendants(self, root: int) -> list[int]:
        """All nodes below `root`, parents before their children. O(their number)."""
        nodes = list(self._children.get(root, {}).values())
        for node in nodes:  # grows meanwhile
            if node in self._children:
                nodes += self._children[node].values()
        return nodes


_NO_BLOCKS = array("i")  # shared, never changed
_UNUSED = -2  # in the column of parents


def typed_name(namespace: Hashable) -> Name:
    """A namespace as a key that keeps types apart: 1, True, 1.0 and "1" differ, inside tuples too.

    Raises: TypeError if it is not hashable.
    """
    if namespace is None:
        return None
    try:
        hash(namespace)
    except TypeError:
        raise TypeError(f"namespace must be hashable, got {namespace!r}") from None
    if type(namespace) is tuple:
        return tuple, tuple(typed_name(part) for part in namespace)
    return type(namespace), namespace


def shown_name(name: Name) -> Hashable:
    """The namespace of a `typed_name`."""
    if not isinstance(name, tuple):
        return name  # None
    kind, value = name
    return tuple(shown_name(part) for part in value) if kind is tuple else value


def _short(numbers: list[int]) -> str:
    """At most six of the numbers, the middle left out."""
    shown = [str(number) for number in numbers]
    return " ".join(shown if len(shown) <= 6 else [*shown[:3], "...", *shown[-2:]])
