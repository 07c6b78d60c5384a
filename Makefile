# Every target makes the virtual environment that it needs by itself; python3 and make are enough.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq install
# A strict editable install links each file, so it is repeated when files come or go.
# The warning that is silenced says that build/ must stay; only `make clean` removes it.
INSTALL := PYTHONWARNINGS=ignore $(PIP) -C editable_mode=strict
SOURCES := $(sort $(wildcard actors/*.py actors/*/*.py storage/*.py storage/*/*))

.PHONY: help run test check stress bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(VENV)/ready-to-run ## talk to the example bot (over state.db, or the file TURNKEEPER_DB names)
	@$(BIN)/python examples/bot.py

test: $(VENV)/ready-to-develop ## run the tests
	$(BIN)/python -m pytest

check: $(VENV)/ready-to-develop ## formatter, linter and strict types, on everything
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p turnkeeper.actors -p turnkeeper.storage
	$(BIN)/mypy tests examples

stress: $(VENV)/ready-to-develop ## many sessions in parallel, everything checked at the end (ARGS="--sessions 100")
	$(BIN)/python examples/stress.py $(ARGS)

bench: $(VENV)/ready-to-develop ## measure, print a table, write benchmarks.json (ARGS="appends load")
	$(BIN)/python tests/benchmarks/run.py $(ARGS)

clean: ## remove the virtual environment and what the tools left
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis turnkeeper.egg-info

$(VENV)/pip:
	$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip
	@touch $@

$(VENV)/sources: FORCE | $(VENV)/pip
	@echo "$(SOURCES)" | cmp -s - $@ || echo "$(SOURCES)" > $@

$(VENV)/ready-to-run: pyproject.toml $(VENV)/sources
	@$(INSTALL) -e ".[examples]"
	@touch $@

$(VENV)/ready-to-develop: pyproject.toml $(VENV)/sources
	@$(INSTALL) -e ".[examples]" --group dev
	@touch $@

FORCE:
