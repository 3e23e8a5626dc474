"""The Python in README and docs runs, and prints what stands under it."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n*^```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
NAMES = "design", "engine", "events", "integrations", "lab", "metrics", "policies", "router"
PAGES = ["README.md", *(f"docs/{name}.md" for name in NAMES)]


@pytest.mark.parametrize("page", PAGES)
def test_examples_run_and_print_what_they_show(page: str) -> None:
    """A page's blocks run one after the other in one namespace; a `text` block right below is what one prints."""
    blocks = BLOCK.findall((ROOT / page).read_text())
    assert blocks, f"{page} has no example"
    names: dict[str, object] = {"__name__": "__main__"}
    for code, shown in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec", dont_inherit=True), names)
        assert printed.getvalue() == shown
