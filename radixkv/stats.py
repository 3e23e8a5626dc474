"""Counters, and what became of one lookup. Knows nothing of the tree."""

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """What a cache has done since it was made. Counters only grow; a snapshot does not change any more.

    A lookup counts once, when its allocation succeeds, however often it was tried. A resumed request (preempted and
    allocated again) finds its own blocks, which would flatter the hit rate, so it is counted apart.
    """

    lookups: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    resumed_lookups: int = 0
    resumed_prompt_tokens: int = 0
    resumed_hit_tokens: int = 0
    evicted_blocks: int = 0
    duplicates_freed: int = 0
    failed_allocations: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens of all lookups that were cached, in [0, 1]; resumed requests are left out."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


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
    num_lost_tokens: int = 0  # whole-block tokens that would have matched as well, but for the reason
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
            return head + (
                f"diverged at token {self.position} from a cached prompt, "
                f"which has {self.cached_token} where this one has {self.prompt_token}"
            )
        return head + f"nothing is cached from token {self.position} on"
