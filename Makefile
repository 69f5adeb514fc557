# Two commands do everything on a machine that has a Python of 3.11 to 3.13: `make demo` and
# `make test`. Each makes its own part of .venv the first time and is quick afterwards.
# PYTHON=... chooses the Python, VENV=... another place, JOBS=... the number of processes.

VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2
export PYTHON
# RERUN=1, as CI sets it: what fails is run once more, alone (scripts/run_tier.py).
PYTEST = $(BIN)/python $(if $(RERUN),scripts/run_tier.py,-m pytest) -n $(JOBS) --dist worksteal -q

.PHONY: demo test test-quick test-long test-exhaustive test-stress test-versions lint format bench docs clean

demo: $(VENV)/.demo
	$(BIN)/python examples/mnist_demo.py --run-dir runs/demo-$$(date +%Y%m%d-%H%M%S)
	@echo "(the command tailrace is in $(BIN))"

test: $(VENV)/.dev
	$(PYTEST) -m "not exhaustive and not long and not stress"

test-quick: $(VENV)/.dev
	$(PYTEST) -m quick

test-long: $(VENV)/.dev
	$(PYTEST) -m "long and not exhaustive and not stress"

test-exhaustive: $(VENV)/.dev
	$(PYTEST) -m exhaustive

# Racing tests, 200 times each, by more processes than there are cores.
test-stress: $(VENV)/.dev
	TAILRACE_TEST_REPEAT=$${TIMES:-200} $(PYTEST) -n $$((3 * $(JOBS))) -m stress

# OPTIONS="--quick --rooms data,feeds"
test-versions:
	python=$${PYTHON:-$$(scripts/find_python.sh)} && $$python scripts/test_versions.py $(OPTIONS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.feeds

# The site, in build/site; needs no network. Warnings are errors.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/site
	@echo "Open build/site/index.html"

$(BIN)/python:
	python=$${PYTHON:-$$(scripts/find_python.sh)} && $$python -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[demo]'
	touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[dev]'
	touch $@

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[docs]'
	touch $@

$(VENV)/.bench: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[bench]'
	touch $@

clean:
	rm -rf $(VENV) .venvs .cache build dist .pytest_cache .ruff_cache
