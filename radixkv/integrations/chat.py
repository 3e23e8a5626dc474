"""A chat that keeps token ids from turn to turn, so that its prefix stays cached. Knows templates, not blocks.

A chat kept as text is rendered and tokenised anew each turn, and then the prefix breaks: a reply tokenises to other ids
than were sampled, a template strips the thinking out of old turns, trims a reply or moves the system prompt. Here a
turn's prompt is the ids of everything before, the reply as it was sampled, and the ids of what is new; so no reply is
ever tokenised, and rendering a turn costs the new message only.
"""

import copy
import math
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import torch

from radixkv.integrations.hf import RadixCache, Session

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Message = dict[str, Any]

_DEFAULT_MAX_NEW_TOKENS = 256
_GREETING: Message = {"role": "user", "content": "hello"}
_REPLY = "radixkv-stands-for-a-reply"  # whatever the template does to a reply, it does to this; none has blanks to trim


class Streamer(Protocol):
    """What `generate` streams to: a `transformers.TextStreamer`, say."""

    def put(self, value: torch.Tensor, /) -> None:
        """First the prompt, (1, tokens), then each token, (1,), on the CPU."""

    def end(self) -> None:
        """No token follows."""


class Clock:
    """A streamer that notes when each step of `generate` brings its tokens, and passes them on."""

    def __init__(self, streamer: "Streamer | None" = None) -> None:
        self.times: list[float] = []  # of `time.perf_counter`
        self._streamer = streamer
        self._num_puts = 0

    def put(self, value: torch.Tensor) -> None:
        if self._num_puts:  # the first is the prompt
            self.times.append(perf_counter())
        self._num_puts += 1
        if self._streamer is not None:
            self._streamer.put(value)

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a chat: what was said, what of it was cached, and where the time went. Times are wall seconds.

    `ttft + (num_generated_tokens - 1) * itl == total`: from the call of `send` to the last token.
    """

    messages: tuple[Message, ...]  # what was sent
    text: str  # the reply, without special tokens
    prompt_tokens: tuple[int, ...] = field(repr=False)  # the whole chat until the reply
    tokens: tuple[int, ...] = field(repr=False)  # the reply as sampled, with the token that ended it
    num_cached_tokens: int
    num_prefill_tokens: int
    prepare_seconds: float  # template and tokeniser
    lookup_seconds: float  # match, and read the cached KV
    prefill_seconds: float  # until the first token is there
    inter_token_seconds: tuple[float, ...]  # between each step and the next, a token a step
    commit_seconds: float  # after the last token, so in no other figure

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_tokens)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.tokens)

    @property
    def ttft(self) -> float:
        """Time to first token: prepare, lookup and prefill."""
        return self.prepare_seconds + self.lookup_seconds + self.prefill_seconds

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        return sum(self.inter_token_seconds)

    @property
    def itl(self) -> float:
        """Inter-token latency, the mean; as all of its kind 0.0 if there is one token only."""
        return self.decode_seconds / (len(self.tokens) - 1) if len(self.tokens) > 1 else 0.0

    @property
    def itl_median(self) -> float:
        return median(self.inter_token_seconds) if self.inter_token_seconds else 0.0

    @property
    def itl_p99(self) -> float:
        """The latency that 99 % of the tokens keep within (nearest rank)."""
        ordered = sorted(self.inter_token_seconds)
        return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0

    @property
    def total(self) -> float:
        """From the call of `send` to the last token."""
        return self.ttft + self.decode_seconds

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.num_prefill_tokens / self.prefill_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """1 / `itl`; 0.0 if there is one token only."""
        return 1 / self.itl if self.itl else 0.0

    def __str__(self) -> str:
        return (
            f"prompt {self.num_prompt_tokens} tokens: {self.num_cached_tokens} cached, {self.num_prefill_tokens} "
            f"prefilled; {self.num_generated_tokens} generated; TTFT {self.ttft:.3f} s, "
            f"ITL median {1000 * self.itl_median:.1f} ms, P99 {1000 * self.itl_p99:.1f} ms, "
            f"{self.decode_tokens_per_second:.1f} tokens/s; {self.total:.3f} s in all"
        )


class RadixChat:
    """A chat with a Transformers model in which each turn prefills only what is new.

    Its invariant: the prompt of a turn begins with the prompt and the reply of the turn before, id by id; only a last
    id that ends a reply as the template would not, and has no KV yet, gives way. A turn that fails or is interrupted
    leaves the chat as before it. Not thread-safe: one turn at a time. Chats on one cache may run in threads of their
    own.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        cache: RadixCache | None,
        *,
        system: str | None = None,
        namespace: Hashable = None,
        template_kwargs: Mapping[str, Any] | None = None,
        **generate_kwargs: Any,
    ) -> None:
        """A chat without turns. With `cache=None` every turn prefills everything, to compare.

        `template_kwargs` go to the chat template (`enable_thinking`, `tools`), `generate_kwargs` to every
        `model.generate` unless `send` has others (default: `max_new_tokens=256`).

        Raises: ValueError for a tokenizer without a template, or a template that such a chat cannot follow; what the
        template itself raises, where it knows no system prompt, say.
        """
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template: set tokenizer.chat_template first")
        self._model: Any = model  # their annotations do not say what they take and return
        self._tokenizer: Any = tokenizer
        self._cache = cache
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._namespace = namespace
        self._template_kwargs = dict(template_kwargs or {})
        self._generate_kwargs = _checked(generate_kwargs)
        self._turns: tuple[Turn, ...] = ()
        self._first_ids([_GREETING])
        self._next_ids([_GREETING])

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids of the whole chat, as the model saw and sampled them."""
        return self._turns[-1].prompt_tokens + self._turns[-1].tokens if self._turns else ()

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self._turns

    @property
    def messages(self) -> list[Message]:
        """The chat as text, for display: the system prompt, what was sent, the replies."""
        messages = [*self._system]
        for turn in self._turns:
            messages += [*turn.messages, {"role": "assistant", "content": turn.text}]
        return messages

    def send(
        self,
        message: str | Sequence[Message],
        *,
        streamer: "Streamer | None" = None,
        **generate_kwargs: Any,
    ) -> Turn:
        """Say something, and return the reply with its usage.

        `message` is what the user says, or messages in the tokenizer's own form (results of tools, few-shot examples
        before the first turn). `streamer` is one of transformers' (`TextStreamer`, `TextIteratorStreamer`): it gets the
        prompt, then each token as it is sampled, and is ended whatever happens, so that nobody waits on it for ever.
        `generate_kwargs` go to `model.generate`: penalties, `stop_strings`, `max_new_tokens`, sampling.

        Raises: TypeError or ValueError for what is no message; ValueError for a chat that has outgrown the model's
        context; whatever template, cache and `generate` raise. The chat is then as before.
        """
        began = perf_counter()
        try:
            return self._send(began, message, Clock(streamer), {**self._generate_kwargs, **_checked(generate_kwargs)})
        except BaseException:
            if streamer is not None:
                with suppress(Exception):  # what went wrong first is what matters
                    streamer.end()
            raise

    def reset(self) -> None:
        """Forget all turns; the system prompt stays. What is cached stays cached."""
        self._turns = ()

    def fork(self) -> "RadixChat":
        """A second chat with the same past, to try another turn on it; the past is shared in the cache. O(1)."""
        return copy.copy(self)

    def _send(
        self, began: float, message: str | Sequence[Message], clock: Clock, generate_kwargs: dict[str, Any]
    ) -> Turn:
        messages = _messages(message)
        prompt = self._next_ids(messages) if self._turns else self._first_ids(messages)
        context = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        if context is not None and len(prompt) >= context:
            raise ValueError(f"the chat is {len(prompt)} tokens with this turn, the model's context {context}")
        if not self._has_length(generate_kwargs):
            generate_kwargs["max_new_tokens"] = _DEFAULT_MAX_NEW_TOKENS
        if generate_kwargs.get("stop_strings") is not None:
            generate_kwargs.setdefault("tokenizer", self._tokenizer)
        input_ids = torch.tensor([prompt], device=self._model.device)  # (1, prompt)
        attention_mask = torch.ones_like(input_ids)
        prepared = perf_counter()
        with self._session(input_ids, attention_mask, generate_kwargs) as session:
            found = perf_counter()
            output = self._model.generate(
                input_ids,
                attention_mask=attention_mask,
                streamer=clock,
                **({} if session is None else session.kwargs),
                **generate_kwargs,
            )
            done = perf_counter()
        committed = perf_counter()
        output = getattr(output, "sequences", output)  # (1, prompt + reply)
        tokens = tuple(output[0, len(prompt) :].tolist())
        times = clock.times
        turn = Turn(
            messages=messages,
            text=self._tokenizer.decode(tokens, skip_special_tokens=True),
            prompt_tokens=tuple(prompt),
            tokens=tokens,
            num_cached_tokens=0 if session is None else session.num_cached_tokens,
            num_prefill_tokens=len(prompt) if session is None else session.num_prefill_tokens,
            prepare_seconds=prepared - began,
            lookup_seconds=found - prepared,
            prefill_seconds=times[0] - found,
            inter_token_seconds=tuple(after - before for before, after in pairwise(times)),
            commit_seconds=committed - done,
        )
        self._turns = (*self._turns, turn)
        return turn

    def _session(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, generate_kwargs: dict[str, Any]
    ) -> "Session | nullcontext[None]":
        if self._cache is None:
            return nullcontext()
        bypass = self._cache._why_not(generate_kwargs)  # assisted decoding, say: without the cache, not wrong
        return Session(self._cache, input_ids, attention_mask, self._namespace, bypass)

    def _has_length(self, generate_kwargs: Mapping[str, Any]) -> bool:
        """Whether anything but transformers' own default, 20 tokens with the prompt, says how long a reply may be."""
        config = self._model.generation_config
        return any(name in generate_kwargs for name in ("max_new_tokens", "max_length", "generation_config")) or (
            config is not None and config.max_new_tokens is not None
        )

    def _first_ids(self, messages: Sequence[Message]) -> list[int]:
        return self._encode(self._render([*self._system, *messages]))

    def _next_ids(self, messages: Sequence[Message]) -> list[int]:
        """The ids so far, and those of what follows: the end of the last reply, the messages, the next one's beginning.

        What the template puts after a reply does not depend on the reply nor on what came before. So it is taken from
        a chat of one turn, whose reply is a word that is easily found again.
        """
        past = [_GREETING, {"role": "assistant", "content": _REPLY}]
        _, found, rest = self._render([*past, *messages]).partition(_REPLY)
        if not found:
            raise ValueError("the chat template leaves replies out, so a turn cannot follow one")
        kept, ids = list(self.tokens), self._encode(rest)
        if kept and kept[-1] in self._ends():
            # The reply has ended itself. Templates end it with the same id, some with blanks before it.
            end = ids.index(kept[-1]) if kept[-1] in ids else len(ids)
            if end < len(ids) and not self._tokenizer.decode(ids[:end]).strip():
                del ids[: end + 1]
            else:
                kept.pop()
        return kept + ids

    def _ends(self) -> set[int]:
        """The ids that end a reply."""
        config = self._model.generation_config
        ends = config.eos_token_id if config is not None else None
        ends = ends if isinstance(ends, list) else [ends]
        return {end for end in (*ends, self._tokenizer.eos_token_id) if end is not None}

    def _render(self, messages: Sequence[Message]) -> str:
        text: str = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **self._template_kwargs
        )
        return text

    def _encode(self, text: str) -> list[int]:
        """Special tokens come from the template, so none is added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _messages(message: object) -> tuple[Message, ...]:
    if isinstance(message, str):
        return ({"role": "user", "content": message},)
    if not isinstance(message, Sequence) or not all(isinstance(each, dict) for each in message):
        raise TypeError(f"message must be a string or a list of dicts, got {message!r}")
    if not message:
        raise ValueError("message must be a string or at least 1 dict, got an empty list")
    return tuple(dict(each) for each in message)


def _checked(generate_kwargs: dict[str, Any]) -> dict[str, Any]:
    for name in ("num_beams", "num_return_sequences"):
        if generate_kwargs.get(name) not in (None, 1):
            raise ValueError(f"{name} must be 1, a chat has one reply a turn, got {generate_kwargs[name]}")
    return generate_kwargs
