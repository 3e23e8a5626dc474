"""A chat workload made from a seed, so that a replay runs anywhere. Knows nothing of caches or files.

Sessions of three kinds start at random: chats behind a few popular system prompts, agents behind long tool prompts, and
one-off prompts. A turn's prompt is the former prompt, its answer and a new message, after a time to think.
"""

import math
import random
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from radixkv.trace import DEFAULT_BLOCK_SIZE, TokenRequest, TokenTrace, count_blocks

NUM_REQUESTS = 2000


@dataclass(frozen=True, slots=True)
class _Kind:
    share: float  # of the sessions
    num_system_prompts: int  # of Zipf popularity: the second is used half as often as the first
    system_tokens: tuple[int, int]  # uniform, from and to
    turns: float  # mean, as are the rest
    message_tokens: int
    answer_tokens: int
    think_seconds: float


_CHAT = _Kind(0.5, 20, (100, 1500), turns=5, message_tokens=60, answer_tokens=250, think_seconds=40)
_AGENT = _Kind(0.1, 4, (2000, 6000), turns=8, message_tokens=300, answer_tokens=120, think_seconds=3)
_ONE_OFF = _Kind(0.4, 1, (0, 0), turns=1, message_tokens=1200, answer_tokens=300, think_seconds=0)
_KINDS = [_CHAT, _AGENT, _ONE_OFF]
_SECONDS_BETWEEN_SESSIONS = 2.0
_ANSWER_TOKENS_PER_SECOND = 50


def synthetic_trace(
    seed: int = 0, *, num_requests: int = NUM_REQUESTS, block_size: int = DEFAULT_BLOCK_SIZE
) -> TokenTrace:
    """The first `num_requests` requests of the workload of a seed, in order of time. About 50 us a request."""
    rng = random.Random(seed)
    system_prompts = {
        kind: [_tokens(rng, rng.randint(*kind.system_tokens)) for _ in range(kind.num_system_prompts)]
        for kind in _KINDS
    }
    requests: list[TokenRequest] = []
    # (time, number, kind, what the next prompt begins with, turns left after it); the number settles ties
    turns: list[tuple[float, int, _Kind, bytes, int]] = []
    arrival = 0.0
    num_sessions = 0
    while len(requests) < num_requests:
        if not turns or arrival <= turns[0][0]:
            kind = rng.choices(_KINDS, [kind.share for kind in _KINDS])[0]
            choices = system_prompts[kind]
            prefix = rng.choices(choices, [1 / rank for rank in range(1, len(choices) + 1)])[0]
            heappush(turns, (arrival, num_sessions, kind, prefix, round(rng.expovariate(1) * (kind.turns - 1))))
            arrival += rng.expovariate(1 / _SECONDS_BETWEEN_SESSIONS)
            num_sessions += 1
            continue
        now, number, kind, prefix, turns_left = heappop(turns)
        tokens = prefix + _tokens(rng, _length(rng, kind.message_tokens))
        answer = _tokens(rng, _length(rng, kind.answer_tokens))
        request = TokenRequest(now, tokens, answer)
        requests.append(request)
        if turns_left:
            pause = request.num_output_tokens / _ANSWER_TOKENS_PER_SECOND + rng.expovariate(1 / kind.think_seconds)
            heappush(turns, (now + pause, number, kind, tokens + answer, turns_left - 1))
    return TokenTrace("synthetic", requests, block_size=block_size, num_blocks=count_blocks(requests, block_size))


def _length(rng: random.Random, mean: float) -> int:
    """Log-normal, as lengths of messages are."""
    spread = 0.8
    return max(1, round(rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)))


def _tokens(rng: random.Random, num: int) -> bytes:
    """Packed tokens of a vocabulary of 2^16."""
    return np.frombuffer(rng.randbytes(2 * num), "<u2").astype("<i4").tobytes()
