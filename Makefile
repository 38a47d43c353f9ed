# make serve    set up on the first run, then serve CONFIG on 127.0.0.1:PORT until Ctrl-C
# make test     set up on the first run, then run all tests
# make check    lint, types, layers, test: what continuous integration runs

PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/laptop.yaml
PORT ?= 8000
# Index of torch wheels: the default index brings the CUDA build on Linux; a CPU index spares several GB. See README.
TORCH_INDEX ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-warn-script-location
PACKAGES := specrelay deployments cluster router models kvstate benchmarks tests

.DEFAULT_GOAL := help
.PHONY: help serve test check lint types layers format clean

help:
	@sed -n 's/^# make /make /p' Makefile

serve: $(VENV)/.installed
	@$(BIN)/python -m specrelay serve $(CONFIG) --port $(PORT)

test: $(VENV)/.installed-test
	@$(BIN)/python -m pytest -q

check: lint types layers test

lint: $(VENV)/.installed-test
	@$(BIN)/ruff check --quiet $(PACKAGES)
	@$(BIN)/ruff format --check --quiet $(PACKAGES) || { echo "Run: make format"; exit 1; }

types: $(VENV)/.installed-test
	@$(BIN)/mypy

layers: $(VENV)/.installed-test
	@$(BIN)/lint-imports --no-logo

format: $(VENV)/.installed-test
	@$(BIN)/ruff check --fix --quiet $(PACKAGES)
	@$(BIN)/ruff format --quiet $(PACKAGES)

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "SpecRelay needs Python 3.11 or newer: set PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) \
	  || { rm -rf $(VENV); echo "python3 -m venv failed: install the venv package of your system (Debian: python3-venv)" >&2; exit 2; }

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing dependencies into $(VENV) (once; a few minutes)"
	@$(if $(TORCH_INDEX),$(PIP) --index-url $(TORCH_INDEX) torch==2.13.0)
	@$(PIP) -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/.installed
	@echo "Installing test dependencies into $(VENV) (once)"
	@$(PIP) -e '.[test]'
	@touch $@
