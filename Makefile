# `make help` lists the targets. ARGS="..." is handed to pytest, the demo or the benchmark.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALL := $(PY) -m pip install --quiet --constraint constraints.txt
DEV := $(VENV)/.installed-dev
BENCH := $(VENV)/.installed-bench
DOCS := $(VENV)/.installed-docs
# Trainers, without what they need: tests/integration/frameworks runs those of their functions that run on a CPU.
FRAMEWORKS := .frameworks/.installed
# transformer-engine's Python, whose ep.py tests/integration/nccl_ep runs. In a folder of its own, where no framework finds it.
TRANSFORMER_ENGINE := .frameworks/te/.installed
# The older megatron-core that is tested, in an environment of its own.
MEGATRON_VERSION := 0.16.1
MEGATRON_VENV := .venv-megatron-0.16
MEGATRON_PY := $(MEGATRON_VENV)/bin/python
MEGATRON := $(MEGATRON_VENV)/.installed
# DeepSpeed, in an environment of its own too, because 0.19.8 fails with the transformers that constraints.txt pins.
DEEPSPEED_VENV := .venv-deepspeed
DEEPSPEED_PY := $(DEEPSPEED_VENV)/bin/python
DEEPSPEED_INSTALL := DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(DEEPSPEED_PY) -m pip install --quiet --constraint $(DEEPSPEED_VENV)/constraints.txt
DEEPSPEED := $(DEEPSPEED_VENV)/.installed
# Axolotl, with the transformers that it pins, and of its other requirements those that training on a CPU imports.
AXOLOTL_VENV := .venv-axolotl
AXOLOTL_PY := $(AXOLOTL_VENV)/bin/python
AXOLOTL_INSTALL := $(AXOLOTL_PY) -m pip install --quiet --no-warn-conflicts --constraint $(AXOLOTL_VENV)/constraints.txt
AXOLOTL := $(AXOLOTL_VENV)/.installed
# A CUDA build of torch, on stand-ins for NVIDIA's libraries: tests/simulated_cuda/README.md. Triton's version is that of constraints.txt.
SIMGPU_TORCH := 2.12.1
# Python of the machine for which make gpu-wheels fetches packages.
GPU_PYTHON := 3.12
SIMGPU_VENV := .venv-simgpu
SIMGPU_PY := $(SIMGPU_VENV)/bin/python
SIMGPU_INSTALL := $(SIMGPU_PY) -m pip install --quiet --no-warn-conflicts
SIMGPU := $(SIMGPU_VENV)/.installed
SIMGPU_LIBRARIES := $(SIMGPU_VENV)/.libraries

.DEFAULT_GOAL := help
.PHONY: help install demo notebook test slow kit mutations multihost faults soak simgpu gpu gpu-wheels matrix upstream constraints findings check format bench docs integration build release clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

CPU_TORCH := https://download.pytorch.org/whl/cpu

# torch comes first and alone: asked for by its pinned version, pip may take a build that lies on this machine.
$(DEV): pyproject.toml constraints.txt
	@echo "Fetching torch and what the tests need into $(VENV). On Linux, PyPI's torch brings 4.7 GB of CUDA."
	@echo "For the CPU build instead: PIP_EXTRA_INDEX_URL=$(CPU_TORCH) make $(MAKECMDGOALS)"
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

$(DEEPSPEED): Makefile pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DEEPSPEED_VENV)
	grep -v '^transformers==' constraints.txt > $(DEEPSPEED_VENV)/constraints.txt
	$(DEEPSPEED_INSTALL) torch
	$(DEEPSPEED_INSTALL) --editable . numpy peft pytest setuptools transformers==5.22.2 wheel
	# Without isolation: its setup.py imports torch.
	$(DEEPSPEED_INSTALL) --no-build-isolation deepspeed
	@touch $@

$(AXOLOTL): Makefile pyproject.toml constraints.txt
	$(PYTHON) -m venv $(AXOLOTL_VENV)
	grep -v -E '^(datasets|fsspec|packaging|transformers|typer|typing-extensions)==' constraints.txt > $(AXOLOTL_VENV)/constraints.txt
	$(AXOLOTL_INSTALL) torch
	$(AXOLOTL_INSTALL) --editable . pytest
	$(AXOLOTL_INSTALL) accelerate addict==2.4.0 art bitsandbytes==0.50.2 colorama datasets==5.0.1 einops evaluate==0.4.1 fastcore fire \
	    numba numpy optimum==1.16.2 peft pillow posthog==6.7.11 python-dotenv schedulefree==1.4.1 scipy tensorboard torchao \
	    transformers==5.20.1 triton trl==1.14.1 wandb zstandard
	# It asks for Python 3.12, and for much that only a GPU runs.
	$(AXOLOTL_INSTALL) --no-deps --ignore-requires-python axolotl==0.21.0 axolotl-contribs-lgpl==0.0.7 axolotl-contribs-mit==0.0.6
	@touch $@

# No nvidia wheels but the headers: the libraries are compiled here. PyPI has the CUDA build of torch; if the environment names
# an index of CPU builds, pip would take one of them.
$(SIMGPU): Makefile constraints.txt
	$(PYTHON) -m venv $(SIMGPU_VENV)
	PIP_EXTRA_INDEX_URL= $(SIMGPU_INSTALL) --no-deps torch==$(SIMGPU_TORCH) 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-crt==13.0.*'
	$(SIMGPU_INSTALL) --constraint constraints.txt filelock fsspec jinja2 networkx numpy pydantic pytest pytest-xdist setuptools \
	    sympy triton
	$(SIMGPU_INSTALL) --no-deps --ignore-requires-python --constraint constraints.txt megatron-core
	@touch $@

$(SIMGPU_LIBRARIES): $(SIMGPU) $(wildcard tests/simulated_cuda/libraries/*)
	$(SIMGPU_PY) tests/simulated_cuda/libraries/build.py
	@touch $@

$(FRAMEWORKS): $(DEV)
	$(PY) -m pip install --quiet --no-deps --ignore-requires-python --upgrade --target .frameworks \
	    megatron-bridge==0.6.2 verl==0.9.1 areal==1.0.4 ms-swift==4.6.0 nemo-automodel==0.7.0
	@touch $@

$(TRANSFORMER_ENGINE): $(DEV)
	$(PY) -m pip install --quiet --no-deps --upgrade --target .frameworks/te transformer-engine==2.20.2
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

test: $(DEV) ## the tests, except slow ones, tests/integration and tests/multihost
	$(PY) -m pytest -m "not slow" --numprocesses auto $(ARGS)

slow: $(DEV) ## the slow tests: those that start programs, compile for long or repeat what quick tests show
	$(PY) -m pytest -m slow --numprocesses auto $(ARGS)

multihost: $(DEV) ## the tests on two hosts, which are network namespaces of this machine; they need root
	$(PY) -m pytest tests/multihost -o faulthandler_timeout=500 $(ARGS)

kit: $(DEV) ## the cases of the kit that make test leaves out, and every scenario with copies of experts
	$(PY) -m pytest tests/conformance/whole_kit.py tests/conformance/placed.py --numprocesses auto $(ARGS)

mutations: $(DEV) ## plant 300 random bugs in the core, one at a time, and count those that make test catches; ARGS="--seed 7 --list FILE"
	$(PY) -m tests.mutations --jobs 2 $(ARGS)

faults: $(DEV) ## break one of four processes in every phase, 25 minutes; a table of what the others raised
	$(PY) tests/reliability/faults.py --all --watchdog 5 --jobs 3 --table faults.md $(ARGS)
	$(PY) tests/reliability/faults.py --watchdog 5 --slow-steps 10000

soak: $(DEV) ## see that a process that runs for minutes does not grow; ARGS="--minutes 60"
	$(PY) tests/reliability/soak.py $(ARGS)

simgpu: $(SIMGPU_LIBRARIES) ## the kit, capture and the budgets of launches and bytes on CUDA and NCCL that are simulated on the CPU
	$(SIMGPU_PY) -m pytest -p tests.simulated_cuda.plugin --numprocesses auto tests/gpu/test_all_gpus.py tests/simulated_cuda \
	    tests/gpu/test_graphs.py tests/gpu/test_permutation.py $(ARGS)

gpu: ## what needs a GPU, in 45 minutes, without a network; OUT=DIR of the report, SOURCES=DIR of deep_ep to build
	$(PYTHON) -c 'import pydantic, pytest' 2>/dev/null || $(PYTHON) -m pip install --quiet --no-index --no-deps --target out/gpu/packages \
	    out/gpu/wheels/*.whl
	PYTHONPATH=out/gpu/packages $(PYTHON) -m tests.gpu.first_hour $(ARGS)

gpu-wheels: ## fetch what make gpu needs beside torch, for a machine without a network; GPU_PYTHON=3.12
	$(PYTHON) -m pip download --quiet --only-binary=:all: --python-version $(GPU_PYTHON) --implementation cp \
	    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --dest out/gpu/wheels pydantic pytest

matrix: ## a part of the tests with each tested version of Python and torch; ARGS="--only torch-2.15"
	$(PYTHON) tests/matrix/run.py $(ARGS)

upstream: $(DEV) ## the tests of each framework with its newest release, in a fresh environment; ARGS="--only transformers --nightly"
	$(PY) -m tests.matrix.upstream --python $(PYTHON) $(ARGS)

constraints: $(DEV) ## make constraints.txt; ARGS="--upgrade transformers" lets pip choose anew
	$(PY) -m tests.matrix.constraints $(ARGS)

findings: ## run the scripts of findings/ in turn, each in an environment of its own, an hour; they download packages
	for script in findings/*.sh; do echo "== $$script"; PYTHON=$(PYTHON) "$$script" || exit 1; done

check: $(DEV) ## formatting, lint, types, spelling and workflows
	$(VENV)/bin/hadolint Dockerfile
	$(VENV)/bin/typos
	$(VENV)/bin/zizmor --offline --quiet .github
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

format: $(DEV) ## format, and mend what ruff can mend
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: $(BENCH) ## moe-dispatch compare --peers, with torchtitan and transformers installed
	$(PY) -m moe_dispatch_tools compare --peers --mode eager $(ARGS)

integration: $(BENCH) $(MEGATRON) $(DEEPSPEED) $(AXOLOTL) $(FRAMEWORKS) $(TRANSFORMER_ENGINE) ## the tests that need megatron-core (two versions), torchtitan, transformers, DeepSpeed, Axolotl and trainers
	$(PY) -m pytest tests/integration --numprocesses auto --dist loadfile $(ARGS)
	$(MEGATRON_PY) -m pytest tests/integration/megatron_core tests/integration/cases/test_case5_graph_safe_padding.py
	$(DEEPSPEED_PY) -m pytest tests/integration/deepspeed
	$(AXOLOTL_PY) -m pytest tests/integration/axolotl

docs: $(DOCS) ## build the site into site/, with warnings as errors
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

build: $(DEV) ## build the wheel and the sdist into dist/, and check their metadata
	$(INSTALL) build hatchling twine
	rm -rf dist
	$(PY) -m build --no-isolation
	$(PY) -m twine check --strict dist/*

release: build ## check the archives in dist/, and use the wheel outside the checkout; ARGS="--only py3.11 --python PATH"
	$(PY) -m tests.release $(ARGS)

clean: ## remove the environments and caches
	rm -rf $(VENV) $(MEGATRON_VENV) $(DEEPSPEED_VENV) $(AXOLOTL_VENV) $(SIMGPU_VENV) .venv-matrix-* .venv-upstream .frameworks dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
