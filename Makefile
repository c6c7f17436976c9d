# `make help` lists the targets. ARGS="..." is handed to pytest, the demo or the benchmark.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALL := $(PY) -m pip install --quiet --constraint constraints.txt
DEV := $(VENV)/.installed-dev
BENCH := $(VENV)/.installed-bench
DOCS := $(VENV)/.installed-docs
# The older megatron-core that is tested, in an environment of its own.
MEGATRON_VERSION := 0.16.1
MEGATRON_VENV := .venv-megatron-0.16
MEGATRON_PY := $(MEGATRON_VENV)/bin/python
MEGATRON := $(MEGATRON_VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo notebook test multihost faults soak check format bench docs integration build clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# torch comes first and alone: asked for by its pinned version, pip may take a build that lies on this machine.
$(DEV): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) --editable '.[dev]'
	@touch $@

$(BENCH): $(DEV)
	$(INSTALL) --editable '.[bench]'
	# megatron-core asks for Python 3.12 in its metadata, and runs on 3.11 with what is installed by now.
	$(INSTALL) --no-deps --ignore-requires-python megatron-core
	@touch $@

$(MEGATRON): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(MEGATRON_VENV)
	$(MEGATRON_PY) -m pip install --quiet --constraint constraints.txt torch
	$(MEGATRON_PY) -m pip install --quiet --constraint constraints.txt --editable . numpy pytest
	# Not by the constraints, which pin the newer one; what it needs is there by now.
	$(MEGATRON_PY) -m pip install --quiet --no-deps megatron-core==$(MEGATRON_VERSION)
	@touch $@

$(DOCS): $(DEV)
	$(INSTALL) --editable '.[docs]'
	@touch $@

install: $(DEV) ## create .venv and install the package, with what tests and the demo need

demo: $(DEV) ## train a small MoE language model on 4 processes and on one; ARGS="--all" trains all backends
	$(PY) examples/train_packed_text.py $(ARGS)

notebook: $(DEV) ## run examples/tour.ipynb and store its outputs in it
	env -u MPLBACKEND $(PY) -c 'import nbclient, nbformat; path = "examples/tour.ipynb"; \
	    notebook = nbformat.read(path, as_version=4); nbclient.NotebookClient(notebook, record_timing=False).execute(); \
	    nbformat.write(notebook, path)'

test: $(DEV) ## the tests, except tests/integration and tests/multihost
	$(PY) -m pytest --numprocesses auto $(ARGS)

multihost: $(DEV) ## the tests on two hosts, which are network namespaces of this machine; they need root
	$(PY) -m pytest tests/multihost -o faulthandler_timeout=500 $(ARGS)

faults: $(DEV) ## break one of four processes in every phase, 25 minutes; a table of what the others raised
	$(PY) tests/reliability/faults.py --all --watchdog 5 --jobs 3 --table faults.md $(ARGS)
	$(PY) tests/reliability/faults.py --watchdog 5 --slow-steps 10000

soak: $(DEV) ## see that a process that runs for minutes does not grow; ARGS="--minutes 60"
	$(PY) tests/reliability/soak.py $(ARGS)

check: $(DEV) ## formatting, lint and types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

format: $(DEV) ## format, and mend what ruff can mend
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: $(BENCH) ## moe-dispatch bench, with torchtitan and transformers installed
	$(PY) -m moe_dispatch.cli bench $(ARGS)

integration: $(BENCH) $(MEGATRON) ## the tests that need megatron-core (two versions), torchtitan and transformers
	$(PY) -m pytest tests/integration $(ARGS)
	$(MEGATRON_PY) -m pytest tests/integration/megatron_core tests/integration/cases/test_case5_graph_safe_padding.py

docs: $(DOCS) ## build the site into site/, with warnings as errors
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

build: $(DEV) ## build the wheel and the sdist into dist/, and check their metadata
	$(INSTALL) build hatchling twine
	rm -rf dist
	$(PY) -m build --no-isolation
	$(PY) -m twine check --strict dist/*

clean: ## remove the environments and caches
	rm -rf $(VENV) $(MEGATRON_VENV) dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
