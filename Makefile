# Developer targets; `make` alone lists them.

TORCH ?= 2.13.0
PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?=
# Processes that share the tests between them; 0: pytest runs them itself, as its --pdb wants.
WORKERS ?= 2

VENV := .venv-$(TORCH)
READY := $(VENV)/.ready
PY := $(VENV)/bin/python
PYTEST = $(PY) -m pytest -n $(WORKERS) --dist worksteal
PIP := $(PY) -m pip install -qq --disable-pip-version-check --no-build-isolation
C_FILES = $(shell find csrc tests/c tests/device tests/gpu tests/soak benchmarks -name "*.[ch]" -o -name "*.cpp" -o -name "*.cu")
# A package of its own, found before the tree's since it lies where Python is started.
SANITIZED := build/sanitized
SANITIZED_TESTS := comm/test_comm device/test_device_nccl device/test_device_schedule optim/test_optim_local \
    optim/test_owner
# The program itself is not sanitized; the second one is where exceptions are caught.
PRELOADED = $(shell gcc -print-file-name=libasan.so) $(shell g++ -print-file-name=libstdc++.so)
PARITY := tests/fully_shard tests/behaviour tests/install/test_torch_names.py
QUICK := tests/quick.txt
# An environment of its own: no torch is needed to read docstrings.
DOCS_VENV := .venv-docs
DOCS_READY := $(DOCS_VENV)/.ready

# Where it is set, each process compiles what it imports anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help build demo check test test-parity test-hosts test-c coverage mutate soak bench chart docs sanitize lint \
    format wheels gpu-check clean

help:  ## list the targets
	@echo "make TARGET [TORCH=$(TORCH)] [PYTHON=$(PYTHON)]"
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-14s %s\n", $$1, $$2}'

$(READY): pyproject.toml requirements-dev.txt
	@echo "Making $(VENV): torch $(TORCH), a download of 0.2 to 3 GB"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) "torch==$(TORCH)" "setuptools>=77"
	@echo "Building fsdp_c; fetching what its tests and examples need meanwhile"
	@$(PIP) -r requirements-dev.txt & $(PY) setup.py -q build_ext --inplace; \
	    built=$$?; wait $$! && exit $$built
	@$(PIP) --no-deps -e .
	@touch $@

build: $(READY)  ## make the environment and build the extension in place
	@$(PY) setup.py -q build_ext --inplace

demo: build  ## train a small GPT on 2 ranks, beside torch; ARGS="--ranks 4 ..."
	@$(PY) examples/demo.py $(ARGS)

check: build lint  ## in two minutes: lint, C tests and tests that meet every module
	@$(PYTEST) @$(QUICK) $(PYTEST_ARGS)

test: build lint  ## lint, C tests and Python tests; PYTEST_ARGS="-k name"
	@$(PYTEST) $(PYTEST_ARGS)

test-parity: build  ## only the tests that compare with torch: its own fully_shard, its private names
	@$(PYTEST) $(PARITY) $(PYTEST_ARGS)

test-hosts: build  ## only the tests over several hosts, which are network and process spaces of this machine
	@$(PYTEST) tests/hosts $(PYTEST_ARGS)

test-c: $(READY)  ## only the programs that test the C core
	@$(PY) -m pytest tests/project/test_c.py $(PYTEST_ARGS)

coverage: build  ## what the tests of `check` never run, or ARGS="tests/..."; names modules that none meets
	@$(PY) tests/support/coverage_report.py -n $(WORKERS) --dist worksteal $(or $(ARGS),@$(QUICK))

mutate: $(READY)  ## small mistakes in the C core that its tests must notice, for hours; ARGS="csrc/engine --sample 50"
	@$(PY) -m tests.mutate $(ARGS)

soak: build  ## random programs, kills, failing calls, flipped bits, for minutes to hours; ARGS="--only kills --minutes 60"
	@$(PY) -m tests.soak $(ARGS)

bench: build  ## compare with torch's own fully_shard; ARGS="--quick"
	@$(PY) benchmarks/run.py $(ARGS)

chart:  ## draw README's chart again from the results that are kept; ARGS="--host NAME_YYYYMM"
	@$(PYTHON) docs/make_chart.py $(ARGS)

$(DOCS_READY): docs/requirements.txt
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install -qq --disable-pip-version-check -r docs/requirements.txt
	@touch $@

# Told to be quiet, mkdocs would not count warnings.
docs: $(DOCS_READY)  ## build the documentation as a site in build/docs; warnings are errors
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --config-file docs/site/mkdocs.yml

sanitize: $(READY)  ## C tests under address and undefined, then under thread; then the binding
	@FSDP_C_SANITIZE=address,undefined $(PY) -m pytest tests/project/test_c.py $(PYTEST_ARGS)
	@FSDP_C_SANITIZE=thread $(PY) -m pytest tests/project/test_c.py $(PYTEST_ARGS)
	@FSDP_C_SANITIZE=address FSDP_C_CUDA=0 $(PY) setup.py -q build --build-lib $(SANITIZED)
	@cd $(SANITIZED) && LD_PRELOAD="$(PRELOADED)" ASAN_OPTIONS=detect_leaks=0 \
	    $(CURDIR)/$(PY) -m pytest $(SANITIZED_TESTS:%=$(CURDIR)/tests/%.py) $(PYTEST_ARGS)

lint: $(READY)  ## check style and warnings; changes nothing
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/ruff format --quiet --check .
	@$(VENV)/bin/clang-format --dry-run -Werror $(C_FILES)

format: $(READY)  ## rewrite all files in the project's style
	@$(VENV)/bin/ruff check --quiet --fix .
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/clang-format -i $(C_FILES)

wheels:  ## a wheel in dist/ for each Python here and torch, each tried by training; ARGS="--torches 2.13.0"
	@$(PYTHON) tests/support/wheels.py $(ARGS)

gpu-check:  ## on a machine with a GPU: check and time all that runs there, with PYTHON's torch; ARGS="--only steps"
	@$(PYTHON) tests/gpu/gpu_check.py $(ARGS)

clean:  ## remove what was built; environments stay
	@rm -rf build dist *.egg-info fsdp_c/*.so .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
