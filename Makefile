# Everything a developer or an operator types. GNU make and Python 3.11 or newer are all that it needs.
#
#   make demo        a server with a real model, one streamed answer, figures, and the end
#   make test        the CI tier
#   make test-all    that and the tests marked slow
#
# TORCH     the torch requirement, such as TORCH='torch==2.13.0'; remembered by the venv once given
# PIP_ARGS  extra arguments for installing torch alone, such as an --index-url that holds smaller builds
# PYTHON    the interpreter that makes the venv          VENV  where it lies
# WORKERS   test processes                               ARGS  extra arguments for pytest

VENV ?= .venv
WORKERS ?= 2
ARGS ?=
PIP_ARGS ?=

ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell for p in python3.11 python3 python; do \
    $$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
endif

STAMPS := $(VENV)/.make
ifeq ($(origin TORCH),undefined)
TORCH := $(or $(shell cat $(STAMPS)/torch 2>/dev/null),torch==2.13.0)
endif

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
WHEELS := plugins/api core backends/cpu backends/cuda plugins/mirage plugins/triton
MEMBERS := plugins/api core[gguf] backends/cpu backends/cuda plugins/mirage plugins/triton
# A waiting OpenMP thread that spins takes the core that another test needs.
TEST_ENV := OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

.PHONY: help venv runtime test test-all lint typecheck gates snapshot demo wheels clean always
.DELETE_ON_ERROR:

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# The venv itself, with a pip that knows dependency groups.
$(STAMPS)/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; name one: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade 'pip>=25.1'
	@mkdir -p $(STAMPS) && touch $@

# Holds the requirement; touched only when it changes.
$(STAMPS)/torch: always | $(STAMPS)/python
	@test "$$(cat $@ 2>/dev/null)" = '$(TORCH)' || echo '$(TORCH)' > $@

# Torch first, by its own requirement and index; then all members in one command, which leaves torch as it is.
$(STAMPS)/runtime: $(STAMPS)/torch $(WHEELS:%=%/pyproject.toml) backends/cpu/hatch_build.py $(wildcard backends/cpu/src/*)
	$(PIP) install --quiet $(PIP_ARGS) '$(TORCH)'
	$(PIP) install --quiet $(MEMBERS:%=-e './%')
	@touch $@

$(STAMPS)/demo: $(STAMPS)/runtime pyproject.toml
	$(PIP) install --quiet --group demo
	@touch $@

$(STAMPS)/dev: $(STAMPS)/demo pyproject.toml
	$(PIP) install --quiet --group dev
	@touch $@

venv: $(STAMPS)/dev
runtime: $(STAMPS)/runtime

demo: $(STAMPS)/demo
	$(BIN)/python ci/demo.py

test: $(STAMPS)/dev
	$(PYTEST) -m "not slow and not device" $(ARGS)

test-all: $(STAMPS)/dev
	$(PYTEST) -m "not device" $(ARGS)

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache

typecheck: $(STAMPS)/dev
	$(BIN)/mypy

gates: $(STAMPS)/dev
	$(BIN)/python ci/gates/size.py
	$(BIN)/python ci/gates/hardware_words.py
	$(BIN)/python ci/gates/imports.py
	$(BIN)/python ci/gates/words.py
	$(BIN)/python ci/gates/no_torch.py
	$(BIN)/python ci/gates/api_snapshot.py

# After a meant change of the contract; the decision page says why.
snapshot: $(STAMPS)/dev
	$(BIN)/python ci/gates/api_snapshot.py --update

wheels: $(STAMPS)/dev
	@mkdir -p dist
	set -e; for member in $(WHEELS); do $(BIN)/python -m build --quiet --wheel --no-isolation --outdir dist $$member; done
	@ls dist/*.whl

clean:
	rm -rf dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
