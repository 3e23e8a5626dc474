"""Dynamo's RadixTree for bench/peers.py: an index of block hashes only, without blocks, pins or eviction."""

import json
from itertools import count

import numpy as np
from dynamo.llm import RadixTree, compute_block_hash_for_seq

WORKER = 1
Tokens = tuple[list[int], list[int]]


class Manager:
    """See bench/peer_radixkv.py. Timed: hashing, `find_matches`, and `apply_event` of the blocks that are new.

    Not timed: the JSON of the event, which another process would send. Its own thread does the work, so the clock is
    the process's.
    """

    name = "Dynamo RadixTree"
    form = "list[int]"
    note = "an index only: no blocks, no pins, no eviction, so its hits are those of an unbounded cache"

    def __init__(self, num_blocks: int, block_size: int, max_tokens: int, max_running: int) -> None:
        self.tree = RadixTree()
        self.size = block_size
        self.events = count(1)
        self.stored: set[int] = set()

    def prepare(self, prompt: np.ndarray, output: np.ndarray) -> tuple[list[int], list[int], bytes]:
        everything = np.concatenate([prompt, output[:-1]]).tolist()  # the last token's KV is never written
        return prompt.tolist(), everything, self._stored(everything)

    def serve(self, tokens: tuple[list[int], list[int], bytes]) -> int:
        prompt, everything, event = tokens
        hashes = compute_block_hash_for_seq(everything, self.size)
        hit = self._find(hashes[: (len(prompt) - 1) // self.size])
        if event:
            self.tree.apply_event(WORKER, event)
        return hit

    def wait(self, tokens: tuple[list[int], list[int], bytes]) -> list[int]:
        return compute_block_hash_for_seq(tokens[0][:-1], self.size)

    def match(self, waiting: list[int]) -> int:
        return self._find(waiting)

    def _find(self, hashes: list[int]) -> int:
        return max(self.tree.find_matches(hashes).scores.values(), default=0) * self.size

    def _stored(self, tokens: list[int]) -> bytes:
        """The event that the blocks of `tokens` are stored, those that never were; empty where there are none."""
        known, parent = None, 0
        blocks = []
        for number in compute_block_hash_for_seq(tokens, self.size):
            parent = hash((parent, number)) & (2**64 - 1)
            if parent in self.stored:
                known = parent
            else:
                blocks.append({"block_hash": parent, "tokens_hash": number})
        self.stored.update(block["block_hash"] for block in blocks)
        data = {"stored": {"parent_hash": known, "blocks": blocks}}
        return json.dumps({"event_id": next(self.events), "data": data}).encode() if blocks else b""


MANAGERS = {"dynamo": Manager}
