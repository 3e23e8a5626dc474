"""Why the hit of a prompt ended where it did. Changes nothing; not for the hot path."""

from collections.abc import Hashable
from dataclasses import dataclass

from radixkv.tokens import TOKEN_BYTES, unpack_token
from radixkv.tree import Name, RadixTree, shown_name


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why the hit of a prompt ended where it did. `str()` says it in a sentence.

    `reason` is one of: "hit" (every token is cached), "shorter than a block" (all whole blocks are cached),
    "evicted" (the rest was cached, and evicted), "another namespace" (the rest is cached, but not in this one),
    "diverged" (a cached prompt goes on differently), "nothing cached".
    """

    reason: str
    num_tokens: int
    num_cached_tokens: int
    position: int  # the first token that is not as cached, or not cached
    num_lost_tokens: int = 0  # that would have matched as well, in whole blocks, but for the reason
    prompt_token: int | None = None  # diverged: what the prompt has at `position`
    cached_token: int | None = None  # diverged: what the cached prompt has there
    namespace: Hashable = None  # another namespace: which one

    def __str__(self) -> str:
        head = f"{self.num_cached_tokens} of {self.num_tokens} tokens cached: "
        if self.reason == "hit":
            return head + "the whole prompt"
        if self.reason == "shorter than a block":
            return head + f"the last {self.num_tokens - self.num_cached_tokens} tokens do not fill a block"
        if self.reason == "evicted":
            return head + f"the next {self.num_lost_tokens} were cached, but have been evicted"
        if self.reason == "another namespace":
            return head + f"the next {self.num_lost_tokens} are cached in namespace {self.namespace!r} only"
        if self.reason == "diverged":
            lost = f"; but for that, {self.num_lost_tokens} more would have matched" if self.num_lost_tokens else ""
            return head + (
                f"diverged at token {self.position} from a cached prompt, "
                f"which has {self.cached_token} where this one has {self.prompt_token}{lost}"
            )
        return head + f"nothing is cached from token {self.position} on"


def explain(tree: RadixTree, name: Name, key: bytes) -> Explanation:
    """Explain the hit of packed tokens in a namespace. O(tokens x namespaces + children where the hit ends)."""
    width = tree.width
    size = width // TOKEN_BYTES
    num_tokens = len(key) // TOKEN_BYTES
    whole = len(key) - len(key) % width
    path, num, part = tree.find(tree.root(name), key, 0, whole)
    hit, pos = num * size, num * width
    if hit == num_tokens and hit:
        return Explanation("hit", num_tokens, hit, hit)
    if pos == whole:
        return Explanation("shorter than a block", num_tokens, hit, hit)
    if not part and (lost := tree.num_evicted_behind(name, path, key, pos)):
        return Explanation("evicted", num_tokens, hit, hit, lost * size)
    hits = {other: tree.find(tree.root(other), key, 0, whole)[1] * size for other in tree.names()}
    best = max(hits, key=hits.__getitem__, default=None)
    if hits.get(best, 0) > hit:
        return Explanation("another namespace", num_tokens, hit, hit, hits[best] - hit, namespace=shown_name(best))

    import numpy as np  # here: importing radixkv stays fast

    block = np.frombuffer(key, "<i4", size, pos)
    closest = (-1, -1)  # equal tokens before the first difference, and in the whole block
    beside = (0, 0)
    for node, start in tree.continuations(path[-1] if path else tree.root(name), part):
        equal = np.frombuffer(tree.block_at(node, start), "<i4") == block
        rank = (int(equal.argmin()), int(equal.sum()))
        if rank > closest:
            closest, beside = rank, (node, start)
    if closest == (-1, -1):
        return Explanation("nothing cached", num_tokens, hit, hit)
    cached = np.frombuffer(tree.run_beside(*beside, key, pos), "<i4")
    num = min(len(cached), num_tokens - hit)
    # [same | differs | same | ...): the match would go on to the end of the second stretch that is the same
    edges = np.flatnonzero(np.diff(cached[:num] == np.frombuffer(key, "<i4", num, pos), prepend=True, append=False))
    lost = int(edges[2]) // size * size if len(edges) > 2 else 0
    if not (hit or closest[0] or lost):  # no cached prompt begins like this one
        return Explanation("nothing cached", num_tokens, hit, hit)
    position = hit + closest[0]
    return Explanation(
        "diverged",
        num_tokens,
        hit,
        position,
        lost,
        prompt_token=unpack_token(key, position),
        cached_token=int(cached[closest[0]]),
    )
