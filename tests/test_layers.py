"""Imports go down the layers only, and the core loads nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "radixkv"

# Each may import from the lines above its own; modules of one line do not import each other.
LAYERS = [
    {"errors", "tokens", "pool", "stats"},
    {"evicted", "hazards", "lazy_heap", "ring", "shadow"},
    {"ghosts", "learner"},
    {"memory", "waiting"},
    {"tree"},
    {"arc", "reuse"},
    {"policy", "explanation", "record"},
    {"cache"},
]
HEAVY = {"torch", "transformers", "hypothesis", "matplotlib", "prometheus_client", "zmq", "msgspec", "xxhash", "ray"}


def imports(module: str) -> set[str]:
    """Top-level and inner imports of a module, of radixkv without the package's name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return {name.removeprefix("radixkv.") for name in found}


def test_the_core_imports_down_its_layers_only() -> None:
    all_modules = {path.stem for path in PACKAGE.glob("*.py")}
    below: set[str] = set()
    for layer in LAYERS:
        for module in layer:
            ours = imports(module) & (all_modules | {"radixkv"})
            assert ours <= below, f"{module} imports {ours - below}, which is not below it"
        below |= layer


def test_importing_radixkv_loads_nothing_heavy() -> None:
    code = "import sys, radixkv; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not (HEAVY | {"numpy", "typer", "rich"}) & set(loaded)
