# make demo    the main job: plan and train a BERT encoder on eight virtual CPU devices
# make lint    style, types, and the examples of docstrings
# make test    that and all tests
# make test-newest, make test-aot    the core tests on the newest JAX; those that compile for TPUs and GPUs not here
# Each creates the environment it needs (.venv, ...), once. Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
NEWEST_VENV := .venv-newest
AOT_VENV := .venv-aot
EXTRAS := test
# What traces, lowers or runs programs: each primitive, train steps, and how people call it. The rest of the tests meets
# JAX in no other way. Strategies of single ops run over one mesh axis; tests/lower and tests/numerics run whole programs
# over several. Of a test with several cases the newest JAX runs every third.
NEWEST_TESTS := tests/aot tests/api tests/implement tests/kernels tests/lower tests/numerics tests/ops tests/test_trace.py

# A Python >= 3.12, which newer JAX releases ask for. Candidates are run, not just found: a pyenv shim may exist and fail.
NEWEST_PYTHON ?= $(shell for p in python3.13 python3.12 \
	$$(ls -dr $$HOME/.pyenv/versions/3.13.*/bin/python $$HOME/.pyenv/versions/3.12.*/bin/python 2>/dev/null); do \
	"$$p" -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo "$$p" && break; done)

.DEFAULT_GOAL := test
.DELETE_ON_ERROR:
.PHONY: demo test lint test-newest newest-python test-aot clean

demo: $(VENV)/.installed
	$(VENV)/bin/python -m experiments.examples.quickstart

test: lint
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal tests

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest --quiet --doctest-modules unity_jax

test-newest: $(NEWEST_VENV)/.installed
	$(NEWEST_VENV)/bin/python -m pytest -n 2 --dist worksteal -m "not slow" --one-axis --every 3 $(NEWEST_TESTS)

newest-python: # prints the interpreter that test-newest uses; fails where there is none
	@test -n "$(NEWEST_PYTHON)" && echo "$(NEWEST_PYTHON)"

test-aot: $(AOT_VENV)/.installed # what the other environments skip: what needs a compiler of an extra
	$(AOT_VENV)/bin/python -m pytest -n 2 --dist worksteal -m extra tests

clean:
	rm -rf $(VENV) $(NEWEST_VENV) $(AOT_VENV)

$(AOT_VENV)/.installed: EXTRAS := test,tpu-aot,gpu-aot

$(VENV)/.installed $(AOT_VENV)/.installed: pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'unity_jax needs Python 3.11 or newer: set PYTHON=/path/to/python3' >&2; exit 1; }
	$(call install,$(@D),$(PYTHON))

$(NEWEST_VENV)/.installed: pyproject.toml
	@test -n "$(NEWEST_PYTHON)" \
	  || { echo 'no Python 3.12 or newer found: set NEWEST_PYTHON=/path/to/python3' >&2; exit 1; }
	$(call install,$(@D),$(NEWEST_PYTHON))

# install(environment, interpreter): a virtual environment with this package, editable, its EXTRAS, and the newest
# versions pip finds.
define install
@echo "creating $(1) with $$("$(2)" -V) (about a minute)"
@"$(2)" -m venv --clear $(1)
@$(1)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
@$(1)/bin/python -c 'import flax, jax; print("installed jax", jax.__version__, "and flax", flax.__version__)'
@touch $@
endef
