"""What bench/router.py and its peers share: the steps of an index's life, and how they are timed. Needs nothing.

A step is {"kind": "store", "worker", "hashes", "parent", "tokens"}, {"kind": "remove", "worker", "hashes"},
{"kind": "clear", "worker"} or {"kind": "match", "tokens"}. Ids are those of prefixes, the same on all workers: Dynamo's
tree takes that for granted.
"""

import random
from collections.abc import Iterator
from typing import Any

Step = dict[str, Any]
VOCABULARY = 150_000


class Times:
    """CPU time by kind of step, a block of what it stored or removed, or a match."""

    def __init__(self) -> None:
        self.nanoseconds: dict[str, int] = {}
        self.counts: dict[str, int] = {}

    def add(self, kind: str, nanoseconds: int, count: int) -> None:
        self.nanoseconds[kind] = self.nanoseconds.get(kind, 0) + nanoseconds
        self.counts[kind] = self.counts.get(kind, 0) + count

    def means(self) -> dict[str, float]:
        """Microseconds."""
        return {kind: self.nanoseconds[kind] / 1000 / max(1, count) for kind, count in self.counts.items()}


def resident_bytes() -> int:
    """What the process has in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def chats(
    num_workers: int, num_sessions: int, *, block_size: int, system: int, turn: int, turns: int, seed: int
) -> Iterator[Step]:
    """Sessions that grow by `turn` tokens, each on one worker, behind one system prompt of `system` tokens.

    Before each turn it is asked where it is cached. At the end half of the sessions are evicted, from their tails.
    """
    rng = random.Random(seed)

    def tokens(num: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(num)]

    def ids(num: int) -> list[int]:
        return [rng.getrandbits(64) for _ in range(num)]

    prompt, first = tokens(system), ids(system // block_size)
    for worker in range(num_workers):
        yield {"kind": "store", "worker": worker, "hashes": first, "parent": None, "tokens": prompt}
    sessions = [(number % num_workers, [*prompt], [*first]) for number in range(num_sessions)]
    for _ in range(turns):
        for worker, text, hashes in sessions:
            new = tokens(turn)
            text += new
            yield {"kind": "match", "tokens": text}
            fresh = ids(turn // block_size)
            yield {"kind": "store", "worker": worker, "hashes": fresh, "parent": hashes[-1], "tokens": new}
            hashes += fresh
    for worker, _, hashes in sessions[::2]:
        yield {"kind": "remove", "worker": worker, "hashes": hashes[: system // block_size - 1 : -1]}


def random_steps(num_steps: int, *, num_workers: int, block_size: int, seed: int) -> Iterator[Step]:
    """Small prompts of few tokens that share much: stored in pieces, evicted from their tails, cleared, asked for."""
    rng = random.Random(seed)
    ids: dict[tuple[int, ...], int] = {}
    held: list[dict[tuple[int, ...], int]] = [{} for _ in range(num_workers)]  # of a worker, path -> id

    def prompt() -> list[int]:
        return [rng.randrange(2) for _ in range(block_size * rng.randint(1, 8))]

    for _ in range(num_steps):
        worker = rng.randrange(num_workers)
        paths = held[worker]
        move = rng.random()
        text = prompt()
        if move < 0.4:
            ends = range(block_size, len(text) + 1, block_size)
            known = max((end for end in ends if tuple(text[:end]) in paths), default=0)
            new = [tuple(text[:end]) for end in ends if end > known]
            if not new:
                continue
            parent = paths.get(tuple(text[:known]))
            for path in new:
                paths[path] = ids.setdefault(path, rng.getrandbits(64))
            hashes = [paths[path] for path in new]
            yield {"kind": "store", "worker": worker, "hashes": hashes, "parent": parent, "tokens": text[known:]}
        elif move < 0.6:
            inner = {path[:-block_size] for path in paths}
            leaves = sorted(path for path in paths if path not in inner)
            if leaves:
                gone = []
                path = rng.choice(leaves)
                for _ in range(rng.randint(1, 4)):
                    gone.append(paths.pop(path))
                    if not path[:-block_size] or any(other[:-block_size] == path[:-block_size] for other in paths):
                        break
                    path = path[:-block_size]
                yield {"kind": "remove", "worker": worker, "hashes": gone}
        elif move < 0.61:
            paths.clear()
            yield {"kind": "clear", "worker": worker}
        yield {"kind": "match", "tokens": prompt()}
