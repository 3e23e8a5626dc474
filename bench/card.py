"""What every benchmark prints first and last: the machine, the versions, the input; and one JSON object."""

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRACES = ROOT.parent / "shared" / "traces"  # real traces, where they are at hand


def card(title: str, **facts: object) -> dict[str, object]:
    """Print the card of a benchmark; returns it for the JSON object at the end."""

    def version(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return "absent"

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=ROOT, capture_output=True, text=True).stdout
    lines = {
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "versions": ", ".join(f"{name} {version(name)}" for name in ("radixkv", "numpy", "torch", "transformers")),
        "commit": (commit.strip() or "unknown") + (" with changes" if dirty else ""),
        **facts,
    }
    print(title, *(f"  {name}: {value}" for name, value in lines.items()), "", sep="\n")
    return {"benchmark": title, **lines}


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, P90, P99 and maximum."""
    ordered = sorted(values)
    at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.9, 0.99)]
    return {"mean": statistics.fmean(ordered), "median": at[0], "p90": at[1], "p99": at[2], "max": ordered[-1]}


def finish(result: Mapping[str, object]) -> None:
    """The last line: one JSON object with everything."""
    print()
    print(json.dumps(result))
    sys.stdout.flush()


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
