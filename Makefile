# The two commands of the README, and what they need.
PYTHON ?= python3
BIN = .venv/bin

.PHONY: demo test lint bench clean

.venv/base: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -e .
	touch $@

.venv/test: .venv/base
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[test]"
	touch $@

demo: .venv/base
	$(BIN)/radixkv replay --synthetic

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: .venv/test lint
	$(BIN)/python -m pytest

bench: .venv/base
	$(BIN)/python bench/manager.py

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
