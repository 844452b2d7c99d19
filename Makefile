# `make help` lists the targets. Needs Python 3.11 or later; PYTHON=python3.12 make ... picks one.
PYTHON ?= python3
TORCH := torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help train test lint docs clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "make %-8s %s\n", $$1, $$2}' Makefile

train: $(VENV)/ready ## train on the built-in pictures, in a few minutes
	@$(BIN)/lapclip train

test: $(VENV)/ready-to-test lint ## check the code and run all tests
	@$(BIN)/python -m pytest -n 2

lint: $(VENV)/ready-to-test ## check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

docs: $(VENV)/ready ## write the generated pages of docs/
	@$(BIN)/python docs/generate.py

clean: ## remove the environment
	rm -rf $(VENV)

$(VENV)/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "lapclip needs Python 3.11 or later. Try: PYTHON=python3.12 make train, or uv (see README.md)"; exit 2; }
	@echo "Setting up $(VENV) (once)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/ready-to-test: $(VENV)/ready
	@echo "Installing the test tools (once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@
