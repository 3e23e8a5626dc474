"""The oldest transformers that is supported: a part of test_hf.py and test_engine.py, in an environment of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

OLDEST = "4.57.6"
FAMILIES = "llama or gemma3 or llama4 or gpt2 or deepseek"
CHOSEN = (
    f"((boundary or 0_3_and_40) and ({FAMILIES}) and not dynamic and not gemma3n) or refused or attach or pipeline "
    "or version or ones_own or logged_once or padding or sampling or encoder_decoder or other_tokens or rotary or bf16 "
    "or replies_are_those or changed_attention"
)


def test_the_oldest_transformers_gives_the_same_replies(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.cache is not None
    packages = Path(pytestconfig.cache.mkdir(f"transformers-{OLDEST}"))  # kept: the next run installs nothing
    whole = packages / "installed"
    if not whole.exists():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(packages)]
        try:
            subprocess.run([*install, f"transformers=={OLDEST}"], check=True, capture_output=True, timeout=300)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"transformers {OLDEST} cannot be installed here: {error}")
        whole.touch()
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(packages), str(root), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        str(root / "tests" / "test_hf.py"),
        str(root / "tests" / "test_engine.py"),
        "-k",
        CHOSEN,
    ]
    environment = os.environ | {"PYTHONPATH": path, "RADIXKV_TRANSFORMERS": OLDEST}
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
