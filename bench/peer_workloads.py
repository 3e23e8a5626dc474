"""The workloads of bench/peers.py: what is asked of every manager. Seeded; written to disk once a run."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from card import TRACES
from peer_stream import Piece, write_stream

SEED = 0
VOCABULARY = 150_000
TRACE = TRACES / "mooncake_conversation.jsonl.gz"
TRACE_BLOCK = 512  # tokens an id of the trace stands for


def random_tokens(num: int, salt: int) -> np.ndarray:
    """`num` seeded tokens, int32."""
    return np.random.default_rng((SEED, salt)).integers(0, VOCABULARY, num, np.int32)


def conversation(folder: Path, num_requests: int) -> Path:
    """The first requests of the Mooncake conversation trace; an id of its hashed blocks stands for 512 tokens."""
    requests: list[tuple[list[Piece], Piece]] = []
    places: dict[int, int] = {}  # id -> where its tokens begin
    size = 0
    with gzip.open(TRACE, "rt") as file:
        for _, line in zip(range(num_requests), file, strict=False):
            record = json.loads(line)
            left, prompt = record["input_length"], []
            for block in record["hash_ids"]:
                if block not in places:
                    places[block] = size
                    size += TRACE_BLOCK
                prompt.append((places[block], places[block] + min(left, TRACE_BLOCK)))
                left -= TRACE_BLOCK
            requests.append((prompt, (size, size + record["output_length"])))
            size += record["output_length"]
    return write_stream(folder, random_tokens(size, 1), requests)


def leaves(folder: Path, num_requests: int, num_systems: int) -> Path:
    """512-token prompts that share 256 with one of `num_systems` system prompts, each in turn; no output."""
    size = 256
    own = num_systems * size

    def requests() -> Iterator[tuple[list[Piece], Piece]]:
        for number in range(num_requests):
            system = number * 7919 % num_systems * size
            start = own + number * size
            yield [(system, system + size), (start, start + size)], (0, 0)

    return write_stream(folder, random_tokens(own + num_requests * size, 2), requests())


def chats(folder: Path, num_sessions: int, num_turns: int) -> Path:
    """Sessions that take turns at random; one turn in ten goes back to an earlier one of its session (a branch).

    A session begins with one of 100 system prompts of 512 tokens; a turn adds 20 to 200 tokens of the user's, and its
    output has 50 to 300.
    """
    rng = np.random.default_rng((SEED, 3))
    order = rng.permutation(np.repeat(np.arange(num_sessions), num_turns))
    asked = rng.integers(20, 201, (num_sessions, num_turns))
    said = rng.integers(50, 301, (num_sessions, num_turns))
    branches = rng.random((num_sessions, num_turns)) < 0.1
    ends = 100 * 512 + np.cumsum((asked + said).ravel()).reshape(num_sessions, num_turns)
    histories: list[list[list[Piece]]] = [[[(512 * (n % 100), 512 * (n % 100) + 512)]] for n in range(num_sessions)]

    def requests() -> Iterator[tuple[list[Piece], Piece]]:
        for session in order:
            known = histories[session]  # the context after each turn
            turn = len(known) - 1
            context = known[rng.integers(0, turn + 1)] if branches[session, turn] else known[-1]
            end = int(ends[session, turn])
            middle = end - int(said[session, turn])
            start = middle - int(asked[session, turn])
            yield _joined(context, (start, middle)), (middle, end)
            known.append(_joined(context, (start, end)))

    return write_stream(folder, random_tokens(int(ends[-1, -1]), 4), requests())


def session(folder: Path, num_turns: int, num_tokens: int) -> Path:
    """One session: each turn adds `num_tokens`, half of them the user's, half of them output."""
    half = num_tokens // 2
    turns = [
        ([(0, turn * num_tokens + half)], (turn * num_tokens + half, (turn + 1) * num_tokens))
        for turn in range(num_turns)
    ]
    return write_stream(folder, random_tokens(num_turns * num_tokens, 5), turns)


def decoding(folder: Path, num_requests: int, num_steps: int) -> Path:
    """Requests of about 1,000 tokens that share nothing, each with an output of one token a step."""
    pieces: list[tuple[list[Piece], Piece]] = []
    size = 0
    for number in range(num_requests):
        middle = size + 1000 + number % 16  # so that not all fill a block in the same step
        pieces.append(([(size, middle)], (middle, middle + num_steps)))
        size = middle + num_steps
    return write_stream(folder, random_tokens(size, 6), pieces)


def waiting(folder: Path, num_waiting: int, num_tokens: int, num_documents: int = 10) -> Path:
    """Documents, to be cached first, then the prompts that wait: three quarters a document, one quarter their own."""
    shared, own = num_tokens * 3 // 4, num_tokens // 4
    start = num_documents * shared
    documents = [(number * shared, (number + 1) * shared) for number in range(num_documents)]
    owns = [(start + number * own, start + (number + 1) * own) for number in range(num_waiting)]
    prompts = [[document] for document in documents]
    prompts += [[documents[number % num_documents], piece] for number, piece in enumerate(owns)]
    tokens = random_tokens(start + num_waiting * own, 7)
    return write_stream(folder, tokens, [(prompt, (0, 0)) for prompt in prompts])


def _joined(context: list[Piece], piece: Piece) -> list[Piece]:
    """`context` and `piece`, as one piece where they touch."""
    if context[-1][1] == piece[0]:
        return [*context[:-1], (context[-1][0], piece[1])]
    return [*context, piece]
