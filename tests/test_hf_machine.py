"""Any order of sessions, evictions, exceptions and namespaces: every reply is the one without a cache."""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hf_models import VOCAB, make, padded  # noqa: E402

from radixkv.integrations.hf import RadixCache, Session  # noqa: E402

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

MODEL = make("llama", hidden_size=16, head_dim=4, num_hidden_layers=2)
FORWARD = MODEL.forward
SIZE = 4
NUM_BLOCKS = 9
PIECE = 6  # tokens; no multiple of a block, so that prompts part inside blocks too
Prompt = tuple[int, ...]

pieces = st.lists(st.integers(0, 2), min_size=1, max_size=4)
prompts = st.builds(
    lambda parts, tail: sum((tuple(range(7 * i + 1, 7 * i + 1 + PIECE)) for i in parts), ()) + tail,
    pieces,
    st.lists(st.integers(30, 33), max_size=3).map(tuple),
)
namespaces = st.sampled_from([None, "a", ("a",)])
lengths = st.integers(1, 9)


class Interrupted(Exception):
    """Stands for whatever ends a generation early."""


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Uncached replies are asked for again and again while Hypothesis shrinks."""
    known: dict[Any, Any] = {}

    def ask(*key: Any) -> Any:
        if key not in known:
            known[key] = function(*key)
        return known[key]

    return ask


def generate(rows: tuple[Prompt, ...], num_new: int, num_beams: int, **options: Any) -> Any:
    ids, mask = padded([torch.tensor(row) for row in rows])
    return MODEL.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=num_new, num_beams=num_beams, **options
    )


uncached = remembered(lambda rows, num_new, num_beams: generate(rows, num_new, num_beams))


class Sessions(RuleBasedStateMachine):
    """Sessions on a cache so small that it evicts all the time, some of them open at once, on one tiny random model."""

    opened = Bundle("opened")

    @initialize(policy=st.sampled_from(["lru", "lfu"]))
    def start(self, policy: str) -> None:
        self.cache = RadixCache(MODEL, num_blocks=NUM_BLOCKS, block_size=SIZE, policy=policy)

    @rule(target=opened, rows=st.lists(prompts, min_size=1, max_size=3).map(tuple), namespace=namespaces)
    def open(self, rows: tuple[Prompt, ...], namespace: Hashable) -> tuple[tuple[Prompt, ...], Session]:
        session = self.cache.session(*padded([torch.tensor(row) for row in rows]), namespace=namespace)
        session.__enter__()
        assert session.num_cached_tokens + session.num_prefill_tokens == sum(map(len, rows))
        assert all(0 <= n < len(row) for n, row in zip(session.num_cached_tokens_by_row, rows, strict=True))
        return rows, session

    @rule(opened=consumes(opened), num_new=lengths, num_beams=st.sampled_from([1, 1, 2]))
    def reply(self, opened: tuple[tuple[Prompt, ...], Session], num_new: int, num_beams: int) -> None:
        rows, session = opened
        out = generate(rows, num_new, num_beams, **session.kwargs)
        session.__exit__(None, None, None)
        assert torch.equal(out, uncached(rows, num_new, num_beams))

    @rule(opened=consumes(opened), after=st.integers(0, 4))
    def fail(self, opened: tuple[tuple[Prompt, ...], Session], after: int) -> None:
        rows, session = opened
        left = after

        @wraps(FORWARD)  # generate reads its signature
        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Interrupted
            return FORWARD(*args, **kwargs)

        before = self.cache.stats.committed_tokens
        MODEL.forward = forward
        try:
            with pytest.raises(Interrupted):
                generate(rows, 9, 1, **session.kwargs)
        finally:
            del MODEL.forward
        session.__exit__(Interrupted, Interrupted(), None)
        assert self.cache.stats.committed_tokens == before

    @rule(opened=consumes(opened))
    def drop(self, opened: tuple[tuple[Prompt, ...], Session]) -> None:
        """Never ended: there is nothing to release."""

    @rule(target=opened, opened=consumes(opened), num_new=lengths, more=prompts, namespace=namespaces)
    def next_turn(self, opened: Any, num_new: int, more: Prompt, namespace: Hashable) -> Any:
        """The reply becomes the beginning of the next prompt."""
        self.reply(opened, num_new, 1)
        turns = tuple((*[token for token in out if token], *more) for out in uncached(opened[0], num_new, 1).tolist())
        turns = tuple(turn for turn in turns if len(turn) < 60)
        return self.open(turns, namespace) if turns else multiple()

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        assert self.cache.num_cached_blocks == 0

    @rule(prompt=prompts, namespace=namespaces)
    def a_prompt_just_served_hits(self, prompt: Prompt, namespace: Hashable) -> None:
        for _ in range(2):
            with self.cache.session(torch.tensor([prompt]), namespace=namespace) as session:
                assert torch.equal(generate((prompt,), 1, 1, **session.kwargs), uncached((prompt,), 1, 1))
        assert session.num_cached_tokens == min((len(prompt) - 1) // SIZE, NUM_BLOCKS) * SIZE

    @invariant()
    def every_block_has_one_owner_and_none_is_held(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()
            assert "private=0, running=0" in repr(self.cache)


assert max(max(range(7 * i + 1, 7 * i + 1 + PIECE)) for i in range(3)) < VOCAB
TestSessions = Sessions.TestCase
# a step runs the model, and takes as long as hundreds of the core's
TestSessions.settings = settings(max_examples=settings().max_examples // 4, stateful_step_count=20)
