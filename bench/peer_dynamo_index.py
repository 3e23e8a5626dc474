"""Dynamo's RadixTree for bench/router.py and tests/test_router_peers.py; runs in Dynamo's own environment.

    python bench/peer_dynamo_index.py STEPS BLOCK_SIZE ANSWERS     steps are lines of JSON, see bench/router_steps.py

Writes what each match found as lines of JSON; prints one JSON object with the CPU time that each kind of step took, of
the process, and the bytes that it grew by.
"""

import json
import sys
import time
from itertools import count

from dynamo.llm import RadixTree, compute_block_hash_for_seq
from router_steps import Times, resident_bytes

clock = time.process_time_ns  # its own thread does the work


def main(path: str, block_size: int, answers: str) -> None:
    tree = RadixTree()
    ids = count(1)
    times = Times()
    before = resident_bytes()
    with open(path) as file, open(answers, "w") as found:
        for line in file:
            step = json.loads(line)
            if step["kind"] == "match":
                start = clock()
                hashes = compute_block_hash_for_seq(step["tokens"], block_size)
                hashed = clock()
                scores = tree.find_matches(hashes).scores
                times.add("match", clock() - start, 1)
                times.add("match without hashing", clock() - hashed, 1)
                answer = {str(worker): num * block_size for (worker, _), num in scores.items()}
                print(json.dumps(answer, sort_keys=True), file=found)
                continue
            hashing = 0
            if step["kind"] == "store":
                start = clock()
                local = compute_block_hash_for_seq(step["tokens"], block_size)
                hashing = clock() - start
                blocks = [
                    {"block_hash": number, "tokens_hash": tokens}
                    for number, tokens in zip(step["hashes"], local, strict=True)
                ]
                data: object = {"stored": {"parent_hash": step["parent"], "blocks": blocks}}
            elif step["kind"] == "remove":
                data = {"removed": {"block_hashes": step["hashes"]}}
            else:
                data = {"cleared": None}
            event = json.dumps({"event_id": next(ids), "data": data}).encode()
            start = clock()
            tree.apply_event(step["worker"], event)
            times.add(step["kind"], hashing + clock() - start, len(step.get("hashes", ())))
    print(json.dumps({"times": times.means(), "bytes": resident_bytes() - before}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
