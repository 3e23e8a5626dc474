"""Counters. Knows nothing of the tree."""

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """What a cache has done since it was made. Counters only grow; a snapshot does not change any more.

    A lookup counts once, when its allocation succeeds, however often it was tried. A resumed request (preempted and
    allocated again) finds its own blocks, which would flatter the hit rate, so it is counted apart. Evicted
    blocks went for want of room or by a call of `evict`, counted each, so that neither ever falls for a reader in
    another thread; `forgotten_blocks` went by `reset` and `clear`.
    """

    lookups: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    resumed_lookups: int = 0
    resumed_prompt_tokens: int = 0
    resumed_hit_tokens: int = 0
    evicted_blocks: int = 0
    evicted_for_room: int = 0
    evicted_by_call: int = 0
    forgotten_blocks: int = 0
    duplicates_freed: int = 0
    failed_allocations: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens of all lookups that were cached, in [0, 1]; resumed requests are left out."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
