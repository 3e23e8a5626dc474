"""The index finds what Dynamo's does. Skipped without `make .peers/dynamo`; RADIXKV_PEERS names another folder."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import router
from router_steps import chats, random_steps

BENCH = Path(router.__file__).parent


@pytest.mark.skipif(not router.PEER.exists(), reason="Dynamo is not here")
@pytest.mark.parametrize("seed", range(3))
def test_the_index_finds_what_dynamo_finds(seed: int, tmp_path: Path) -> None:
    """Thousands of random stores, evictions, clears and matches of four workers, without a difference."""
    steps = list(random_steps(4_000, num_workers=4, block_size=2, seed=seed))
    (tmp_path / "steps").write_text("".join(json.dumps(step) + "\n" for step in steps))
    router.run(tmp_path / "steps", 2, tmp_path / "ours")
    script = [router.PEER, BENCH / "peer_dynamo_index.py", tmp_path / "steps", "2", tmp_path / "theirs"]
    subprocess.run(script, check=True, capture_output=True)
    ours, theirs = ((tmp_path / name).read_text().splitlines() for name in ("ours", "theirs"))
    assert len(ours) == sum(step["kind"] == "match" for step in steps) > 2_000
    assert sum(len(json.loads(line)) > 1 for line in ours) > 500  # several workers are found
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        assert our == their, f"match {number}"


def test_the_benchmark_runs_and_finds_what_was_stored(tmp_path: Path) -> None:
    shape = {"block_size": 16, "system": 64, "turn": 32, "turns": 2, "seed": 0}
    steps = list(chats(2, 4, **shape))
    (tmp_path / "steps").write_text("".join(json.dumps(step) + "\n" for step in steps))
    result = router.run(tmp_path / "steps", 16, tmp_path / "found")
    found = [json.loads(line) for line in (tmp_path / "found").read_text().splitlines()]
    assert found == [{"0": 64, "1": 64}] * 4 + [{"0": 96, "1": 64}, {"0": 64, "1": 96}] * 2
    assert result["times"].keys() == {"store", "remove", "match", "match packed", "decode"}
    assert all(time > 0 for time in result["times"].values())
