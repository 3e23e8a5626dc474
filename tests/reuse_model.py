"""The order "reuse" once more, block by block and as plainly as can be, to compare `radixkv.reuse` with.

Nothing is fast; requests come one after the other. A block is its whole prefix, a tuple of ids; what is true of a block
is an entry in a dict. Blocks that were always used together are a run, numbered: a node of the tree, or what was one.
"""

from dataclasses import dataclass
from itertools import pairwise

Prefix = tuple[int, ...]

EDGES = [2 ** (b / 2) - 1 for b in range(35)]


@dataclass
class Block:
    run: int
    last: int = 0  # the request that used it last
    kind: tuple[int, int] = (0, 0)
    uses: int = 0
    cached: bool = True
    density: float = 0.0  # runs a block, before some became one


class Model:
    def __init__(self, num_blocks: int, remembered: int = 4096, max_uses: int = 32) -> None:
        self.num_blocks, self.remembered, self.max_uses = num_blocks, remembered, max_uses
        self.blocks: dict[Prefix, Block] = {}  # cached or remembered
        self.evicted: list[int] = []  # runs that are not cached, those that went first first
        self.leaf_since: dict[int, int] = {}  # run -> when it became a leaf
        self.tails: dict[int, int] = {}  # run -> that of its end which was evicted before
        self.hits = self.lru_hits = self.time = self.num_runs = self.tick = 0
        self.recency: dict[Prefix, int] = {}  # of an LRU cache beside it
        # by class and bin: blocks used at an age, blocks that passed it
        self.used: dict[tuple[int, int], list[float]] = {}
        self.passed: dict[tuple[int, int], list[float]] = {}
        self.num_used_blocks = self.num_used_runs = 0.0
        self.index: dict[tuple[int, int], list[float]] = {}
        self.lesson, self.next_lesson = 0, 32

    # One request

    def serve(self, path: Prefix) -> int:
        path = path[: self.num_blocks]
        prefixes = [path[: i + 1] for i in range(len(path))]
        self.time += 1
        known = []
        for prefix in prefixes:
            if prefix not in self.blocks:
                break
            known.append(prefix)
        hit = 0
        while hit < len(known) and self.blocks[known[hit]].cached:
            hit += 1
        self.hits += hit
        self.serve_lru(prefixes)
        self.cut_at(known)
        for run in dict.fromkeys(self.blocks[prefix].run for prefix in known):
            self.count_use(run)
        for prefix in known:
            self.leaf_since.pop(self.blocks[prefix].run, None)
        self.evict(len(self.cached()) + len(path) - hit - self.num_blocks, held=set(known[:hit]))
        for prefix in known[hit:]:
            block = self.blocks[prefix]
            above = self.blocks.get(prefix[:-1])
            if block.run in self.evicted:
                self.evicted.remove(block.run)
            if above and self.like(above, block) and self.children(prefix[:-1]) == [prefix]:
                for other in self.of_run(block.run):
                    self.blocks[other].run = above.run
            block.cached = True
        if len(known) < len(path):
            self.num_runs += 1
            for prefix in prefixes[len(known) :]:
                self.blocks[prefix] = Block(self.num_runs, density=1 / (len(path) - len(known)))
        size = min(5, (len(path) - len(known)).bit_length() // 2)
        for prefix in prefixes:
            block = self.blocks[prefix]
            block.uses = min(block.uses + 1, self.max_uses)
            block.last, block.kind = self.time, (use_bucket(block.uses), size)
        self.forget()
        self.learn()
        self.merge(prefixes)
        if path and not self.cached_children(path):
            self.become_leaf(self.blocks[path].run)
        return hit

    def serve_lru(self, prefixes: list[Prefix]) -> None:
        for prefix in prefixes:
            if prefix not in self.recency:
                break
            self.lru_hits += 1
        for prefix in reversed(prefixes):
            self.tick += 1
            self.recency[prefix] = self.tick
        for prefix in sorted(self.recency, key=self.recency.__getitem__)[: max(0, len(self.recency) - self.num_blocks)]:
            del self.recency[prefix]

    # Runs

    def cached(self) -> list[Prefix]:
        return [prefix for prefix, block in self.blocks.items() if block.cached]

    def of_run(self, run: int) -> list[Prefix]:
        return sorted((prefix for prefix, block in self.blocks.items() if block.run == run), key=len)

    def children(self, prefix: Prefix) -> list[Prefix]:
        return [p for p in self.blocks if p[:-1] == prefix]

    def cached_children(self, prefix: Prefix) -> bool:
        return any(self.blocks[p].cached for p in self.children(prefix))

    def cut_at(self, known: list[Prefix]) -> None:
        """The request takes a part of a run only: the rest is one of its own."""
        if not known:
            return
        run = self.blocks[known[-1]].run
        lower = [prefix for prefix in self.of_run(run) if len(prefix) > len(known[-1])]
        if not lower:
            return
        self.num_runs += 1
        for prefix in lower:
            self.blocks[prefix].run = self.num_runs
        if run in self.evicted:
            self.evicted[self.evicted.index(run)] = self.num_runs
            self.tails = {above: self.num_runs if tail == run else tail for above, tail in self.tails.items()}
        for facts in (self.leaf_since, self.tails):
            if run in facts:
                facts[self.num_runs] = facts.pop(run)

    def merge(self, prefixes: list[Prefix]) -> None:
        """What was used as often as is counted, by the same requests, is one run, if nothing else goes on inside."""
        for above, prefix in pairwise(prefixes):
            old, run = self.blocks[above].run, self.blocks[prefix].run
            if old != run and self.blocks[prefix].uses == self.max_uses and self.children(above) == [prefix]:
                runs = self.of_run(old), self.of_run(run)
                density = sum(len(each) * self.blocks[each[0]].density for each in runs) / sum(map(len, runs))
                for other in [*runs[0], *runs[1]]:
                    self.blocks[other].run, self.blocks[other].density = run, density
                self.tails.pop(old, None)

    def become_leaf(self, run: int) -> None:
        self.tick += 1
        self.leaf_since[run] = self.tick

    def evict(self, num: int, held: set[Prefix]) -> None:
        follow = None
        while num > 0:
            run = self.victim() if follow is None else follow
            blocks = self.of_run(run)
            gone = blocks[-num:]
            num -= len(gone)
            self.go(blocks, gone)
            if len(gone) < len(blocks):
                return
            del self.leaf_since[run]
            parent, last = blocks[0][:-1], self.blocks[blocks[0]]
            follow = None
            if parent and parent not in held and not self.cached_children(parent):
                above = self.blocks[parent]
                self.become_leaf(above.run)
                if (above.last, above.kind) == (last.last, last.kind):
                    follow = above.run

    def go(self, blocks: list[Prefix], gone: list[Prefix]) -> None:
        """The end of a run is evicted, and one with its tail that was evicted before if that was used like it."""
        first = self.blocks[gone[0]]
        tails = [self.blocks[p] for p in self.children(blocks[-1]) if not self.blocks[p].cached]
        run = old = first.run
        alike = any(block.run == self.tails.get(old) and self.like(block, first) for block in tails)
        if alike:
            run = self.tails[old]
        elif len(gone) < len(blocks):
            self.num_runs += 1
            run = self.num_runs
        if not alike:
            self.evicted.append(run)
        self.tails.pop(old, None)
        if len(gone) < len(blocks):
            self.tails[old] = run
        for prefix in gone:
            self.blocks[prefix].cached = False
            self.blocks[prefix].run = run

    @staticmethod
    def like(one: Block, other: Block) -> bool:
        return (one.last, one.kind, one.uses) == (other.last, other.kind, other.uses)

    def victim(self) -> int:
        leaves = {run: self.blocks[self.of_run(run)[0]] for run in self.leaf_since}
        lru = min(leaves, key=lambda run: leaves[run].last)
        if not self.index:
            return lru
        ends = []
        for kind in sorted({block.kind for block in leaves.values()}):
            runs = [run for run in leaves if leaves[run].kind == kind]
            ends.append((0, kind, min(runs, key=lambda run: leaves[run].last)))
            ends.append((1, kind, max(runs, key=self.leaf_since.__getitem__)))
        _, _, best = min(sorted(ends), key=lambda end: self.value(leaves[end[2]]))
        return best if self.value(leaves[best]) < 0.7 * self.value(leaves[lru]) else lru

    def value(self, block: Block) -> float:
        return self.index[block.kind][age_bin(self.time - block.last)]

    def forget(self) -> None:
        num_cached = len({self.blocks[prefix].run for prefix in self.cached()})
        most = max(self.remembered, 4 * num_cached)
        surplus = len(self.evicted) + num_cached - most
        for _ in range(min(surplus, len(self.evicted)) if surplus > most // 64 else 0):
            run = self.evicted.pop(0)
            self.count_ages(run)
            for prefix in self.of_run(run):
                del self.blocks[prefix]

    # Learning

    def count_ages(self, run: int) -> None:
        """The blocks of a run lived to their age; what was counted at the last lesson is not counted again."""
        blocks = self.of_run(run)
        block = self.blocks[blocks[0]]
        passed = self.passed.setdefault(block.kind, [0.0] * 34)
        self.used.setdefault(block.kind, [0.0] * 34)
        for start, sign in ((self.time - block.last, 1), (max(0, self.lesson - block.last), -1)):
            for b in range(34):
                passed[b] += sign * len(blocks) * min(max(0.0, start - EDGES[b]), EDGES[b + 1] - EDGES[b])

    def count_use(self, run: int) -> None:
        self.count_ages(run)
        blocks = self.of_run(run)
        block = self.blocks[blocks[0]]
        self.used[block.kind][age_bin(self.time - block.last)] += len(blocks)
        self.num_used_blocks += len(blocks)
        self.num_used_runs += round(block.density * len(blocks)) or 1

    def learn(self) -> None:
        if self.time < self.next_lesson:
            return
        for run in {block.run for block in self.blocks.values()}:
            self.count_ages(run)
        elapsed, self.lesson = self.time - self.lesson, self.time
        self.next_lesson = self.time + max(32, min(256, self.time // 8))
        if not self.num_used_runs:
            return
        prior = 8 * self.num_used_blocks / self.num_used_runs
        kinds = [(uses, size) for uses in range(7) for size in range(6)]
        nothing = [0.0] * 34
        used = {kind: self.used.get(kind, nothing) for kind in kinds}
        passed = {kind: self.passed.get(kind, nothing) for kind in kinds}
        all_used, all_passed = sums(used.values()), sums(passed.values())
        level = sum(all_used) / sum(all_passed)
        base = []
        for num, time in zip(all_used, all_passed, strict=True):
            base.append((num + prior) / (time + prior / level))
            level = (base[-1] + level) / 2
        for uses in range(7):
            group = [kind for kind in kinds if kind[0] == uses]
            parent = fit(sums(used[kind] for kind in group), sums(passed[kind] for kind in group), base, prior)
            for kind in group:
                self.index[kind] = gittins(fit(used[kind], passed[kind], parent, prior))
        kept = 0.5 ** (elapsed / 2000)
        for table in (self.used, self.passed):
            for row in table.values():
                row[:] = [value * kept for value in row]
        self.num_used_blocks *= kept
        self.num_used_runs *= kept


def use_bucket(uses: int) -> int:
    return [1, 2, 3, 4, 8, 16, 32].index(max(low for low in (1, 2, 3, 4, 8, 16, 32) if low <= uses))


def age_bin(age: int) -> int:
    return max(b for b in range(34) if EDGES[b] <= age)


def sums(rows) -> list[float]:  # type: ignore[no-untyped-def]
    return [sum(column) for column in zip(*rows, strict=True)]


def fit(used: list[float], passed: list[float], parent: list[float], prior: float) -> list[float]:
    expected = sum(time * hazard for time, hazard in zip(passed, parent, strict=True))
    level = (sum(used) + prior) / (expected + prior)
    return [
        (num + prior / 2) / (time + prior / (2 * level * hazard))
        for num, time, hazard in zip(used, passed, parent, strict=True)
    ]


def gittins(hazards: list[float]) -> list[float]:
    """By its definition: over all bins up to which a block might be kept, the best chance of a use per request."""
    best = []
    for start in range(34):
        left, cost, ratios = 1.0, 0.0, []
        for b in range(start, 34):
            unused = (1 + hazards[b] * (EDGES[b + 1] - EDGES[b]) / 64) ** -64  # near e^-x
            cost += left * (1 - unused) / hazards[b]
            left *= unused
            ratios.append((1 - left) / cost)
        best.append(max(ratios))
    return best
