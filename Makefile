# make demo   fine-tune a tiny model on the CPU and ask it something
# make test   the tests except slow ones and those of benchmarks/; a few minutes
# make test-all   make test, then the rest of the test suite
# make fuzz   random combinations of settings on several ranks against training by hand; SEED=1000 CASES=30
# All install what they need into .venv first; nothing is installed outside of it.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
OUTPUT ?= outputs/demo
WORKERS ?= 2
SEED ?= 1000
CASES ?= 30

# Python writes what it has compiled, whatever the environment says: tests start hundreds of processes that import torch.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all fuzz lint format types docs docs-config docs-site clean

help:
	@sed -n 's/^# make /  make /p' Makefile
	@echo '  make lint   ruff, import layers, types'
	@echo '  make docs-config  write docs/config.md anew from the schema'
	@echo '  make docs   that, and the pages whose figures are plans; an hour or two'
	@echo '  make docs-site  build the documentation as a site in build/site; a warning is an error'
	@echo '  make clean  remove .venv and what runs left behind'

install: $(STAMP)

# torch comes first and by its exact version: asked for as a range, pip would take the newest build there is. What is
# imported is compiled then: to compile all files of all packages takes longer than the rest of the installation.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'error: $(PYTHON) is older than 3.11; try: make PYTHON=python3.12 install' >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: install
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo/run.sh $(OUTPUT)

# A file's tests stay in one process, which makes their fixtures once; in order, long files do not come last.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=40 -p tests.budget

# A file whose tests take over ten seconds of CPU fails: what is slow is marked so, or made faster.
test: install
	$(PYTEST) -m "not slow and not benchmark" --file-budget 10

test-all: test
	$(PYTEST) -m "slow or benchmark"

# For each seed from SEED on a combination; what is wrong is printed with the command that runs it.
fuzz: install
	$(BIN)/python -m tests.fuzz --seed $(SEED) --cases $(CASES)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs-config: install
	$(BIN)/python -m recipe_lib.config.describe > docs/config.md

# Pages whose figures are plans, by the commands that they name. A change of the planner that moves a figure shows in
# `make docs && git diff --exit-code docs`.
docs: docs-config
	$(BIN)/python -m benchmarks.small_cards --output docs/small_cards.md
	$(BIN)/python -m benchmarks.all_ranks --output docs/measurements/all_ranks.md
	$(BIN)/python -m benchmarks.planner_replications --output docs/measurements/planner.md
	$(BIN)/python -m benchmarks.planner_peers --output docs/measurements/planner_peers.md
	$(BIN)/python -m benchmarks.planned_times --output docs/measurements/planned_times.md
	$(BIN)/python -m benchmarks.longest --output docs/longest.json
	$(BIN)/python -m benchmarks.fit --output docs/fit.md

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $(DOCS_STAMP)

# Settings are in mkdocs.yml. Not with --quiet: it drops warnings, and with them that they are errors. Pages may fetch nothing from other hosts, neither scripts nor styles nor pictures.
docs-site: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@! grep -rlE '(src|<link[^>]* href)="https?:' --include='*.html' build/site

clean:
	rm -rf $(VENV) outputs build dist .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
