"""Our messages are those of vLLM to the byte, and vLLM's and SGLang's own readers read them.

Needs `make peers`, or RADIXKV_PEERS, the folder in which that was run.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from radixkv.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, encode

PEERS = Path(os.environ.get("RADIXKV_PEERS", Path(__file__).parents[1] / ".peers"))

READ = """
import json, sys, msgspec
from {module} import KVEventBatch
batch = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=KVEventBatch)
print(json.dumps(msgspec.to_builtins(batch)))
print(msgspec.msgpack.encode(batch).hex())
"""
MODULES = {"vllm": "vllm.distributed.kv_events", "sglang": "sglang.srt.disaggregation.kv_events"}


def read(engine: str, message: bytes) -> tuple[list[Any], bytes]:
    """What an engine's own reader makes of a message: ts, events and rank, and the message that it would write."""
    python = PEERS / engine / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {python}, see `make peers`")
    code = READ.format(module=MODULES[engine])
    done = subprocess.run([python, "-c", code, message.hex()], capture_output=True, text=True, check=True)
    events, written = done.stdout.splitlines()[-2:]
    return json.loads(events), bytes.fromhex(written)


def batch(salt: str | None) -> EventBatch:
    events = [
        AllBlocksCleared(),
        BlockStored([7, 2**64 - 1], 3, [1, 2, 3, 4], 2, medium="GPU"),
        BlockStored([8], None, [1, 2], 2, medium="GPU", cache_salt=salt),
        BlockRemoved([7], "GPU"),
    ]
    return EventBatch(1.5, [*events], 0)


@pytest.mark.parametrize("engine", MODULES)
def test_the_readers_of_engines_read_what_we_write(engine: str) -> None:
    (ts, (cleared, first, second, removed), rank), written = read(engine, encode(batch("tenant")))
    assert (ts, rank) == (1.5, 0)
    assert cleared["type"] == "AllBlocksCleared"
    assert (first["block_hashes"], first["parent_block_hash"], first["token_ids"]) == ([7, 2**64 - 1], 3, [1, 2, 3, 4])
    assert (second["parent_block_hash"], second["block_size"], second["medium"]) == (None, 2, "GPU")
    assert (removed["type"], removed["block_hashes"]) == ("BlockRemoved", [7])
    if engine == "vllm":
        assert written == encode(batch(None))  # it knows no salt, and writes the rest as we do
    else:
        assert second["cache_salt"] == "tenant"
