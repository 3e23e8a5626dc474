"""vLLM or SGLang as a worker that publishes KV events, for tests/test_router_engines.py, in its own environment.

    python bench/peer_events.py vllm|sglang NUM_BLOCKS BLOCK_SIZE PORT

Their own cache, their own events and their own publisher, at PORT, with a replay at PORT + 1; no tensors, no model. A
line of JSON in is a prompt; a line out is how many tokens of it were cached, and how many batches were published.
"""

import importlib
import json
import sys

import numpy as np

MAX_TOKENS = 1 << 12


def main(engine: str, num_blocks: int, block_size: int, port: int) -> None:
    peer = importlib.import_module(f"peer_{engine}")
    endpoints = f"tcp://*:{port}", f"tcp://*:{port + 1}"
    if engine == "vllm":
        from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

        manager = peer.Manager(num_blocks, block_size, MAX_TOKENS, 2)
        manager.manager.block_pool.enable_kv_cache_events = True
        take = manager.manager.take_events
    else:
        from sglang.srt.disaggregation.kv_events import KVEventBatch, ZmqEventPublisher

        class WithEvents(peer.Manager):
            def _tree(self, params: object) -> object:
                params.enable_kv_cache_events = True
                return super()._tree(params)

        manager = WithEvents(num_blocks, block_size, MAX_TOKENS, 2)
        take = manager.cache.take_events
    publisher = ZmqEventPublisher(0, *endpoints)
    num_published = 0
    print("ready", flush=True)
    for line in sys.stdin:
        tokens = manager.prepare(np.array(json.loads(line)), np.array([], np.int64))
        hit = manager.serve(tokens)
        events = take()
        if events:
            publisher.publish(KVEventBatch(ts=float(num_published), events=events))
            num_published += 1
        print(json.dumps({"hit": hit, "batches": num_published}), flush=True)
    publisher.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
