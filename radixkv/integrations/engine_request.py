"""A request of the engine: how its reply is drawn, what became of it, where its time went. Knows nothing of blocks."""

import math
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from radixkv.cache import Request
from radixkv.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from radixkv.integrations.engine import Engine


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a reply is drawn and when it ends. The default is greedy.

    The controls are transformers' own logits processors, in the order in which `model.generate` applies them.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0  # 0: always the likeliest token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    stop: str | Sequence[str] = ()  # the text ends before the first of these
    ignore_eos: bool = False
    seed: int = 0  # each request has a generator of its own: a reply does not depend on what runs beside it

    def __post_init__(self) -> None:
        if not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens!r}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if "" in stop:
            raise ValueError(f"a stop string must not be empty, got {stop!r}")
        object.__setattr__(self, "stop", stop)

    def processors(self) -> LogitsProcessorList:
        """What turns logits into scores. Raises: ValueError for values out of range."""
        chosen = LogitsProcessorList()
        if self.repetition_penalty != 1:
            chosen.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.no_repeat_ngram_size:
            chosen.append(NoRepeatNGramLogitsProcessor(self.no_repeat_ngram_size))
        if self.temperature:
            if self.temperature != 1:
                chosen.append(TemperatureLogitsWarper(float(self.temperature)))
            if self.top_k:
                chosen.append(TopKLogitsWarper(self.top_k))
            if self.top_p < 1:
                chosen.append(TopPLogitsWarper(self.top_p))
            if self.min_p:
                chosen.append(MinPLogitsWarper(self.min_p))
        return chosen


class Decoder(Protocol):
    """What the engine needs of a tokenizer to stream text and to find stop strings."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


class EngineRequest:
    """One prompt on its way through an engine: made by `Engine.submit`, changed by the engine only.

    Times are wall seconds, and add up: `ttft + (num_generated_tokens - 1) * itl == total`.
    """

    def __init__(
        self, engine: "Engine", serial: int, prompt: bytes, sampling: Sampling, *, namespace: Hashable
    ) -> None:
        self.sampling = sampling
        self.num_prompt_tokens = len(prompt) // TOKEN_BYTES
        self.num_cached_tokens = 0  # of the prompt, when it was first admitted
        self.num_preemptions = 0
        self.finish_reason: str | None = None  # "stop", "length", "cancelled" or "error"; None: not yet
        self.error: Exception | None = None
        self._engine = engine
        self._serial = serial
        self._ids = array("i", prompt)  # the prompt, then what was generated
        self._key = prompt  # what to allocate: grows when a preempted request comes back
        self._namespace = namespace
        self._hold: Request | None = None
        self._text = Text(engine.tokenizer, sampling.stop) if engine.tokenizer is not None else None
        self._processors = sampling.processors()
        self._generator: torch.Generator | None = None
        self._is_cancelled = False
        self._phase = "queueing"
        self._since = self._submitted = perf_counter()
        self._seconds = dict.fromkeys(_VERDICTS, 0.0)
        self._began: float | None = None
        self._times: list[float] = []

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def tokens(self) -> tuple[int, ...]:
        """What was generated so far, an end-of-sequence token and those of a stop string included."""
        return tuple(self._ids[self.num_prompt_tokens :])

    @property
    def num_generated_tokens(self) -> int:
        return len(self._ids) - self.num_prompt_tokens

    @property
    def text(self) -> str:
        """What was generated so far, cut before a stop string; what may yet be the beginning of one is left out.

        Raises: ValueError where the engine has no tokenizer.
        """
        if self._text is None:
            raise ValueError("the engine has no tokenizer, so a request has tokens but no text")
        return self._text.shown

    @property
    def queue_time(self) -> float:
        """From `submit` until the model first ran on it (until now, or the end, if it never did)."""
        end = self._began if self._began is not None else self._since if self.is_finished else perf_counter()
        return end - self._submitted

    @property
    def ttft(self) -> float:
        """Time to first token, from `submit` on; 0.0 if there is none."""
        return self._times[0] - self._submitted if self._times else 0.0

    @property
    def itl(self) -> float:
        """Inter-token latency, the mean; as all of its kind 0.0 if there is one token only."""
        return (self._times[-1] - self._times[0]) / (len(self._times) - 1) if len(self._times) > 1 else 0.0

    @property
    def inter_token_seconds(self) -> tuple[float, ...]:
        return tuple(after - before for before, after in pairwise(self._times))

    @property
    def itl_median(self) -> float:
        return median(self.inter_token_seconds) if len(self._times) > 1 else 0.0

    @property
    def itl_p99(self) -> float:
        """The latency that 99 % of the tokens keep within (nearest rank)."""
        ordered = sorted(self.inter_token_seconds)
        return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0

    @property
    def total(self) -> float:
        """From `submit` to the last token; 0.0 if there is none."""
        return self._times[-1] - self._submitted if self._times else 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """Where the time went: "queueing", "memory", "prefill" and "decode", until the request ended, or now."""
        seconds = dict(self._seconds)
        if not self.is_finished:
            seconds[self._phase] += perf_counter() - self._since
        return seconds

    @property
    def verdict(self) -> str:
        """What took most of the time, in words."""
        seconds = self.seconds
        phase = max(seconds, key=seconds.__getitem__)
        spent = sum(seconds.values())
        share = seconds[phase] / spent if spent else 0.0
        return f"{_VERDICTS[phase]}: {share:.0%} of {spent:.3f} s"

    def __str__(self) -> str:
        return (
            f"prompt {self.num_prompt_tokens} tokens: {self.num_cached_tokens} cached; "
            f"{self.num_generated_tokens} generated; queue {self.queue_time:.3f} s, TTFT {self.ttft:.3f} s, "
            f"ITL median {1000 * self.itl_median:.1f} ms, P99 {1000 * self.itl_p99:.1f} ms; {self.total:.3f} s in all; "
            f"{self.finish_reason or 'running'}; {self.verdict}"
        )

    @property
    def _held(self) -> Request:
        assert self._hold is not None, f"{self} is not running"
        return self._hold

    @property
    def _num_computed(self) -> int:
        """Tokens whose KV is in the store and that need not be computed again: all but the last at most."""
        return min(self._held.num_committed_tokens, len(self._ids) - 1)

    @property
    def _num_left(self) -> int:
        return len(self._ids) - self._num_computed

    @property
    def _is_decoding(self) -> bool:
        """Whether it is running, and its next token is one of the reply's."""
        return self._hold is not None and bool(self._times) and self._num_left == 1

    @property
    def _needs_draw(self) -> bool:
        return bool(self.sampling.temperature or self._processors)

    def _next(self, count: int) -> "array[int]":
        return self._ids[self._num_computed : self._num_computed + count]

    def _enter(self, phase: str) -> None:
        if phase != self._phase:
            now = perf_counter()
            self._seconds[self._phase] += now - self._since
            self._phase, self._since = phase, now

    def _finish(self, reason: str, error: Exception | None) -> None:
        if self._text is not None and error is None:  # which may be the tokenizer's
            self._text.finish()
        now = perf_counter()
        self._seconds[self._phase] += now - self._since
        self._since = now
        self.error = error
        self.finish_reason = reason  # last: who sees it takes the rest as final

    def _draw(self, logits: torch.Tensor) -> int:
        """The next token, from `logits` (1, vocabulary)."""
        ids: Any = torch.tensor(self._ids, dtype=torch.int64, device=logits.device)[None]
        scores = self._processors(ids, logits.float())
        if not self.sampling.temperature:
            return int(scores.argmax(-1))
        if self._generator is None:
            self._generator = torch.Generator(logits.device).manual_seed(self.sampling.seed)
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))

    def _accept(self, token: int, ends: set[int]) -> str | None:
        """Take a token; returns why it is the last, or None."""
        self._ids.append(token)
        self._times.append(perf_counter())
        if self._text is not None:
            self._text.push(token)
        if (token in ends and not self.sampling.ignore_eos) or (self._text is not None and self._text.is_stopped):
            return "stop"
        return "length" if self.num_generated_tokens == self.sampling.max_new_tokens else None


_VERDICTS = {
    "queueing": "queueing for a place or behind other prefills",
    "memory": "waiting for memory",
    "prefill": "prefill-bound",
    "decode": "decode-bound",
}


class Text:
    """The text of a growing run of tokens, and how much of it is settled.

    Held back is what may yet change: half a character, and the beginning of a stop string.
    """

    def __init__(self, tokenizer: Decoder, stop: Sequence[str]) -> None:
        self.shown = ""
        self.is_stopped = False
        self._tokenizer = tokenizer
        self._stop = stop
        self._whole = ""
        self._tokens: list[int] = []
        self._start = self._read = 0  # the text of tokens[:_read] is in `_whole`; from _start on they are context

    def push(self, token: int) -> None:
        """O(tokens since the last whole character)."""
        self._tokens.append(token)
        before, after = self._decode(self._start, self._read), self._decode(self._start, len(self._tokens))
        if not after.endswith("\ufffd"):
            self._add(after[len(before) :])
            self._start, self._read = self._read, len(self._tokens)

    def finish(self) -> None:
        """Nothing follows: show what was held back."""
        if not self.is_stopped:
            before, after = self._decode(self._start, self._read), self._decode(self._start, len(self._tokens))
            self._add(after[len(before) :])
            self.shown = self._whole

    def _add(self, piece: str) -> None:
        longest = max(map(len, self._stop), default=0)
        begin = max(0, len(self._whole) - longest + 1)
        self._whole += piece
        found = [at for stop in self._stop if (at := self._whole.find(stop, begin)) >= 0]
        if found:
            self.is_stopped = True
            self.shown = self._whole = self._whole[: min(found)]
            return
        held = next((n for n in range(longest - 1, 0, -1) if self._whole.endswith(tuple(s[:n] for s in self._stop))), 0)
        self.shown = self._whole[: len(self._whole) - held]

    def _decode(self, start: int, end: int) -> str:
        # subtle: clean-up would change blanks that are shown already
        return self._tokenizer.decode(
            self._tokens[start:end], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
