"""The adapter that docs/integrations.md shows, under a scheduler of the style it is for, on a toy model."""

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from test_docs import BLOCK, ROOT

from radixkv import OutOfBlocksError

PAGE = "docs/integrations.md"
names: dict[str, Any] = {}
exec(compile(BLOCK.findall((ROOT / PAGE).read_text())[0][0], PAGE, "exec"), names)
BlockManager = names["BlockManager"]
VOCABULARY = 1000


@dataclass(eq=False)
class Sequence:
    token_ids: list[int]
    max_tokens: int
    seq_id: int = field(default_factory=count().__next__)
    block_table: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_scheduled_tokens: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


class Engine:
    """Prefill before decode, of a budget of tokens a step; a prompt beyond the budget comes in chunks, and alone."""

    def __init__(self, num_blocks: int, block_size: int, budget: int) -> None:
        self.manager = BlockManager(num_blocks, block_size)
        self.kv = [-1] * (num_blocks * block_size)
        self.budget = budget
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()
        self.finished: list[Sequence] = []
        self.hits = {"new": 0, "resumed": 0}
        self.num_preempted = self.num_chunks = 0

    def schedule(self) -> list[Sequence]:
        scheduled: list[Sequence] = []
        left = self.budget
        while self.waiting and left:
            seq = self.waiting[0]
            num_cached_blocks = 0
            if seq.block_table:
                num_tokens = len(seq) - seq.num_cached_tokens
            else:
                num_cached_blocks = self.manager.can_allocate(seq)
                if num_cached_blocks == -1:
                    break
                num_tokens = len(seq) - num_cached_blocks * self.manager.block_size
            if num_tokens > left and scheduled:
                break
            if not seq.block_table:
                self.manager.allocate(seq, num_cached_blocks)
                assert seq.num_cached_tokens == num_cached_blocks * self.manager.block_size < len(seq)
                self.hits["resumed" if seq.num_completion_tokens else "new"] += seq.num_cached_tokens
            seq.num_scheduled_tokens = min(num_tokens, left)
            left -= seq.num_scheduled_tokens
            scheduled.append(seq)
            if seq.num_cached_tokens + seq.num_scheduled_tokens < len(seq):
                self.num_chunks += 1
                break
            self.running.append(self.waiting.popleft())
        if scheduled:
            return scheduled
        while self.running:
            seq = self.running.popleft()
            while not self.manager.can_append(seq):
                self.preempt(self.running.pop() if self.running else seq)
                if not seq.block_table:
                    break
            else:
                self.manager.may_append(seq)
                seq.num_scheduled_tokens = 1
                scheduled.append(seq)
        self.running.extend(scheduled)
        return scheduled

    def preempt(self, seq: Sequence) -> None:
        self.num_preempted += 1
        self.manager.deallocate(seq)
        self.waiting.appendleft(seq)

    def step(self) -> None:
        scheduled = self.schedule()
        sampled = [self.forward(seq) for seq in scheduled]
        for seq, token in zip(scheduled, sampled, strict=True):
            self.manager.hash_blocks(seq)
            seq.num_cached_tokens += seq.num_scheduled_tokens
            if seq.num_cached_tokens < len(seq):
                continue
            seq.token_ids.append(token)
            if seq.num_completion_tokens == seq.max_tokens:
                self.manager.deallocate(seq)
                self.running.remove(seq)
                self.finished.append(seq)

    def forward(self, seq: Sequence) -> int:
        """The KV of a position is a number that depends on all tokens up to it, and the next token on that."""
        size = self.manager.block_size
        end = seq.num_cached_tokens + seq.num_scheduled_tokens
        assert len(seq.block_table) == -(-len(seq) // size)
        for position in range(seq.num_cached_tokens, end):
            before = position - 1
            state = self.kv[seq.block_table[before // size] * size + before % size] if position else 0
            slot = seq.block_table[position // size] * size + position % size
            self.kv[slot] = next_state(state, seq.token_ids[position])
        return self.kv[slot] % VOCABULARY

    def abort(self, seq: Sequence) -> None:
        self.manager.deallocate(seq)
        for queue in (self.waiting, self.running):
            if seq in queue:
                queue.remove(seq)


def next_state(state: int, token: int) -> int:
    return (state * 31 + token + 1) % 1_000_003


def alone(prompt: list[int], num_tokens: int) -> list[int]:
    tokens, state = list(prompt), 0
    for token in prompt:
        state = next_state(state, token)
    for _ in range(num_tokens):
        tokens.append(state % VOCABULARY)
        state = next_state(state, tokens[-1])
    return tokens


def prompts(rng: random.Random, num: int, longest: int) -> list[list[int]]:
    """Chats behind a few system prompts; some go on from what another one asked."""
    systems = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest // 2))] for _ in range(3)]
    made: list[list[int]] = []
    for _ in range(num):
        base = rng.choice(made) if made and rng.random() < 0.3 else rng.choice(systems)
        made.append([*base, *(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 8)))][:longest])
    return made


@pytest.mark.parametrize("seed", range(25))
def test_random_lives_get_right_answers_and_lose_no_block(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4, 8])
    num_blocks = rng.randint(48, 160) // size
    engine = Engine(num_blocks, size, budget=rng.choice([4, 16, 64]))
    longest = (num_blocks * size - 12) // 2
    arrivals = [Sequence(prompt, rng.randint(1, 12)) for prompt in prompts(rng, 60, longest)]
    asked = {seq.seq_id: list(seq.token_ids) for seq in arrivals}
    aborted = 0
    cache = engine.manager.cache
    while arrivals or engine.waiting or engine.running:
        for _ in range(rng.randint(0, 3)):
            if arrivals:
                engine.waiting.append(arrivals.pop())
        engine.step()
        alive = [*engine.waiting, *engine.running]
        if alive and rng.random() < 0.05:
            engine.abort(rng.choice(alive))
            aborted += 1
        cache.check()
    assert len(engine.finished) + aborted == len(asked)
    for seq in engine.finished:
        assert seq.token_ids == alone(asked[seq.seq_id], seq.max_tokens)
    assert (engine.manager.requests, engine.manager.lookups) == ({}, {})
    assert cache.num_free_blocks + cache.num_evictable_blocks == num_blocks
    assert (cache.stats.hit_tokens, cache.stats.resumed_hit_tokens) == (engine.hits["new"], engine.hits["resumed"])
    assert cache.stats.failed_allocations == 0  # it always asked before it took


def test_the_lives_meet_what_they_are_meant_to() -> None:
    """One of them, with more than a few of everything."""
    engine = Engine(num_blocks=24, block_size=4, budget=16)
    rng = random.Random(0)
    for prompt in prompts(rng, 60, 80):
        engine.waiting.append(Sequence(prompt, 10))
    while engine.waiting or engine.running:
        engine.step()
    assert min(engine.num_preempted, engine.num_chunks) > 5
    assert min(engine.hits.values()) > 100


def test_who_does_not_ask_first_is_refused_and_nothing_changes() -> None:
    manager = BlockManager(4, 4)
    first, second = Sequence([1] * 12, 1), Sequence([2] * 8, 1)
    manager.allocate(first)
    assert manager.can_allocate(second) == -1
    with pytest.raises(OutOfBlocksError):
        manager.allocate(second)
    assert second.block_table == []
    manager.deallocate(first)
    assert manager.can_allocate(second) == 0
    manager.allocate(second)
    manager.deallocate(second)
    manager.cache.check()
    assert manager.cache.num_free_blocks == 4


def test_two_prompts_of_one_batch_do_not_hit_what_is_not_written() -> None:
    manager = BlockManager(8, 4)
    pair = Sequence([1] * 9, 1), Sequence([1] * 9, 1)
    for seq in pair:
        assert manager.can_allocate(seq) == 0
        manager.allocate(seq)
        seq.num_scheduled_tokens = 9
    tables = [list(seq.block_table) for seq in pair]
    for seq in pair:
        manager.hash_blocks(seq)
    assert pair[0].block_table == tables[0]
    assert pair[1].block_table == tables[0][:2] + tables[1][2:]


def test_a_prompt_that_is_cached_whole_leaves_a_token_to_prefill() -> None:
    manager = BlockManager(8, 4)
    for expected in (0, 1):
        seq = Sequence([1] * 8, 1)
        assert manager.can_allocate(seq) == expected
        manager.allocate(seq)
        assert seq.num_cached_tokens == 4 * expected
        seq.num_scheduled_tokens = 8 - seq.num_cached_tokens
        manager.hash_blocks(seq)
        manager.deallocate(seq)


def test_a_token_fits_where_something_can_be_evicted() -> None:
    manager = BlockManager(2, 4)
    first, second = Sequence([1] * 4, 1), Sequence([2] * 4, 2)
    manager.allocate(first)
    first.num_scheduled_tokens = 4
    manager.hash_blocks(first)
    manager.deallocate(first)
    manager.allocate(second)
    second.token_ids.append(3)
    assert manager.can_append(second)
    manager.may_append(second)
    assert len(second.block_table) == 2
    second.token_ids += [3] * 3
    manager.may_append(second)
    second.token_ids.append(3)
    assert not manager.can_append(second)
