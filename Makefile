# `make help` lists the targets. Needs Python 3.11 or later; PYTHON=python3.12 make ... picks one.
PYTHON ?= python3
TORCH := torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help install train test test-all lint docs bench bench-peers clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' Makefile

install: $(VENV)/ready ## set up the environment, and nothing else
	@echo "Ready: $(BIN)/lapclip --help"

train: $(VENV)/ready ## train on the built-in images, in a few minutes
	@$(BIN)/lapclip train

test: $(VENV)/ready-to-test lint ## check the code and run all tests
	@$(BIN)/python -m pytest -n 2 --dist worksteal

# Each soak is one line: a short form of what the docs have the figures of.
test-all: test ## the same, then slow tests, soaks and the wheel in a fresh environment
	@$(BIN)/python -m pytest -m slow
	@$(BIN)/python benchmarks/chaos.py --faults 30
	@$(BIN)/python benchmarks/hostile_requests.py --requests 2000
	@$(BIN)/python benchmarks/hostile_files.py
	@$(BIN)/python benchmarks/fresh_install.py $(TORCH)

lint: $(VENV)/ready-to-test ## check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

docs: $(VENV)/ready ## write the generated pages of docs/
	@$(BIN)/python docs/generate.py

bench: benchmarks/.venv/ready ## time our training step against OpenCLIP's (6 minutes on two cores)
	@benchmarks/.venv/bin/python benchmarks/steps.py

bench-peers: benchmarks/.venv/ready ## set up the environment with the other trainers

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

benchmarks/.venv/ready: pyproject.toml
	@echo "Setting up benchmarks/.venv with OpenCLIP (once)"
	@$(PYTHON) -m venv benchmarks/.venv
	@benchmarks/.venv/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	@benchmarks/.venv/bin/python -m pip install --quiet --disable-pip-version-check \
	  $(TORCH) torchvision==0.28.0 'numpy<2.4' open_clip_torch==3.3.0 transformers 'scikit-learn<2' tqdm \
	  fastapi 'uvicorn[standard]' --editable .
	@# Without its dependencies: of those its metrics need torch, tqdm and scikit-learn alone.
	@benchmarks/.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps clip_benchmark==1.6.2
	@touch $@
