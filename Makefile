# Two commands do everything on a machine that has only Python 3.11: `make demo` and `make test`.
# Each makes its own part of .venv the first time and is quick afterwards.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2

.PHONY: demo test test-exhaustive lint format bench docs clean

demo: $(VENV)/.demo
	$(BIN)/python examples/mnist_demo.py

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) -q -m "not exhaustive"

test-exhaustive: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) -q -m exhaustive

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.feeds

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[demo]'
	touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[dev]'
	touch $@

$(VENV)/.bench: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[bench]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
