"""Requests on disk, so that every manager gets the same tokens: arrays that numpy maps, nothing of any manager.

A prompt is a list of pieces of one long array of tokens; an output is one piece of it.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

Piece = tuple[int, int]  # [start, end) in the array of tokens


class Stream:
    """A stream of requests in a folder. `limit` leaves only the first requests."""

    def __init__(self, folder: str | Path, limit: int | None = None) -> None:
        folder = Path(folder)
        self.tokens = np.load(folder / "tokens.npy", mmap_mode="r")  # int32
        self.pieces = np.load(folder / "pieces.npy")  # int64 (num_pieces, 2)
        self.first = np.load(folder / "first.npy")  # int64: the pieces of request i are [first[i], first[i + 1])
        self.outputs = np.load(folder / "outputs.npy")  # int64 (num_requests, 2)
        self.num = len(self.outputs) if limit is None else min(limit, len(self.outputs))

    def prompt(self, number: int) -> np.ndarray:
        """The prompt's tokens, int32."""
        pieces = self.pieces[self.first[number] : self.first[number + 1]]
        return np.concatenate([self.tokens[start:end] for start, end in pieces])

    def output(self, number: int) -> np.ndarray:
        """The output's tokens, int32; may be empty."""
        start, end = self.outputs[number]
        return np.array(self.tokens[start:end])

    def num_prompt_tokens(self) -> np.ndarray:
        """Tokens of every prompt."""
        ends = np.concatenate([[0], np.cumsum(self.pieces[:, 1] - self.pieces[:, 0])])
        return np.array(ends[self.first[1:]] - ends[self.first[:-1]])[: self.num]


def write_stream(folder: Path, tokens: np.ndarray, requests: Iterable[tuple[list[Piece], Piece]]) -> Path:
    """Write `tokens` (int32) and the requests, each (pieces of the prompt, output), into a new folder."""
    folder.mkdir(parents=True)
    pieces: list[Piece] = []
    first, outputs = [0], []
    for prompt, output in requests:
        pieces += prompt
        first.append(len(pieces))
        outputs.append(output)
    np.save(folder / "tokens.npy", tokens)
    np.save(folder / "pieces.npy", np.array(pieces, np.int64).reshape(-1, 2))
    np.save(folder / "first.npy", np.array(first, np.int64))
    np.save(folder / "outputs.npy", np.array(outputs, np.int64).reshape(-1, 2))
    return folder
