PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := corp_cli scripts tests

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-lowest faults lint check docs hooks clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

# Threads that wait soon sleep, where libgomp would let them spin: other programs may need the cores.
demo: $(VENV)/.demo  ## set up, then prune the bundled vision transformer on the bundled images
	GOMP_SPINCOUNT=1000 $(BIN)/corp prune

test: $(VENV)/.dev  ## set up, then run all tests but the slow ones
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal -m "not slow"

test-slow: $(VENV)/.dev  ## run the slow tests: every model family, the wheel, the paper's accuracy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal -m slow

test-lowest: $(VENV)-lowest/.done  ## set up the lowest versions allowed, then run the tests of what comes from strangers
	OMP_NUM_THREADS=1 $(VENV)-lowest/bin/pytest -n auto -p no:cacheprovider tests/faults/test_untrusted*.py \
		tests/faults/test_oldest.py tests/faults/test_streams.py tests/models/test_state_dict.py

faults: $(VENV)/.dev  ## inject a thousand faults and fuzz twenty thousand inputs; ten minutes on two cores
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults

lint: $(VENV)/.dev  ## ruff (lint and format), mypy, and import-linter for the layers
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

check: lint test  ## lint and test

docs: $(VENV)/.dev  ## build the site of the documentation into site/, and check every link and anchor
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

hooks: $(VENV)/.dev  ## run what `make lint` runs before every commit, in place of any hook that was there
	$(BIN)/pre-commit install --overwrite

clean:  ## remove the environment and what tools left behind
	rm -rf $(VENV) $(VENV)-lowest build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

$(VENV)-lowest/.done: pyproject.toml
	$(PYTHON) -m venv $(VENV)-lowest
	sed -n '/^dependencies/,/^]/s/^ *"\([^>]*\)>=\([0-9.]*\).*/\1==\2/p' pyproject.toml > $(VENV)-lowest/lowest.txt
	$(VENV)-lowest/bin/python -m pip install --quiet --disable-pip-version-check -r $(VENV)-lowest/lowest.txt -e . \
		pytest pytest-timeout pytest-xdist hypothesis
	touch $@
