"""The order "reuse" on real traces, beside the simulation that it was first described with."""

import importlib.util
from array import array
from pathlib import Path
from typing import Any

import pytest

from radixkv.replay import replay
from radixkv.trace import IdRequest, IdTrace, read_trace

SHARED = Path(__file__).parents[2] / "shared"
REFERENCE = SHARED / "reference" / "reuse_policy.py"
MAX_BELOW = 0.003  # of all blocks


@pytest.mark.parametrize("policy", ["reuse", "arc", "lru"])
def test_no_more_is_kept_beside_the_cache_than_it_has_room_for(policy: str) -> None:
    runs = [array("i", [100 * i, 100 * i + 7]) for i in range(20)] * 2
    trace = IdTrace("runs", [IdRequest(0.0, 7, 0, path) for path in runs], block_size=1, num_blocks=2000)
    assert replay(trace, 140, policy, bypass=True).hit_blocks == 140
    assert replay(trace, 4, policy, bypass=True).hit_blocks <= 8


@pytest.fixture(scope="module")
def reference() -> Any:
    if not REFERENCE.exists():
        pytest.skip(f"no {REFERENCE}")
    spec = importlib.util.spec_from_file_location("reuse_reference", REFERENCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize(
    ("name", "capacity"),
    [
        ("mooncake_conversation", 5000),
        ("mooncake_synthetic", 3000),
        ("coding_agents_merged60.blk64", 4000),
    ],
)
def test_it_hits_what_the_reference_does(reference: Any, name: str, capacity: int, bypass: bool) -> None:
    file = SHARED / "traces" / f"{name}.jsonl.gz"
    cache = reference.ReuseCache(capacity, bypass=bypass)
    for path in reference.load(file):
        cache.access(path)
    row = replay(read_trace(file), capacity, "reuse", bypass=bypass)
    assert row.access_blocks == cache.total
    assert row.block_hit_rate > cache.hits / cache.total - MAX_BELOW
