# Two commands: `make demo` and `make test`. Each makes the environment it needs, once, and passes ARGS on.
#
#   make demo [ARGS="--layers 8 --json demo.json"]
#   make test [ARGS="-k hyper"]
#   make lint | check | env | clean
#
# VENV=DIR    the environment (default .venv). `VENV=` (empty) makes none and installs nothing: PYTHON is used as it is, for
#             a host that has the packages and no package index.
# PYTHON=EXE  the interpreter to build the environment with, or to run with when VENV is empty.
# TORCH=REQ   what to install where the environment has no torch >= 2.9; one that is there is left alone. The index decides
#             the build: the default wheel for Linux is the CUDA one, and also runs on a CPU. Point PIP_EXTRA_INDEX_URL or
#             PIP_FIND_LINKS at CPU wheels for a smaller download.

VENV ?= .venv
TORCH ?= torch==2.13.0
TARGETS := sm_90a,sm_100a,sm_103a
PRECOMPILED := build/precompiled

# A driver is all that is asked for: no compiler, no toolkit.
GPU := $(wildcard /proc/driver/nvidia/version)$(shell command -v nvidia-smi 2>/dev/null)

ifeq ($(strip $(VENV)),)
PY := $(or $(PYTHON),python3)
ENV :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
ENV := $(VENV)/.installed
endif

.PHONY: demo test lint check env clean
.DELETE_ON_ERROR:

demo: $(ENV)
	$(PY) -m profiling.demo $(ARGS)

# pytest comes last, so that its closing line is the last one printed. Without a GPU the tests share the cores; with one they
# take turns on it.
test: lint check
	@echo "== pytest"
	@workers=""; if [ -z "$(GPU)" ] && $(PY) -c 'import xdist' 2>/dev/null; then \
	  workers="-n auto --maxprocesses 4 --dist worksteal"; export OMP_NUM_THREADS=1; fi; \
	$(PY) -m pytest $$workers $(ARGS)

lint: $(ENV)
	@echo "== ruff, mypy"
	@run() { if [ -z "$(ENV)" ] && ! $(PY) -m "$$1" --version >/dev/null 2>&1; \
	  then echo "$$1: not installed for $(PY), skipped"; else $(PY) -m "$$@"; fi; }; \
	run ruff check . && run ruff format --check . && run mypy

check: $(ENV)
	@echo "== every kernel for $(TARGETS)"
	@$(PY) -m bindings.precompile --targets $(TARGETS) --out $(PRECOMPILED) --sample --check

env: $(ENV)

ifneq ($(ENV),)
# The stamp is newer than what it was made from; a later change of either file installs again into the same environment.
$(ENV): pyproject.toml constraints.txt
	@set -eu; \
	if ! $(PY) -m pip --version >/dev/null 2>&1; then \
	  for base in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python3.10) none; do \
	    $$base -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 15))' 2>/dev/null && break; \
	  done; \
	  [ $$base != none ] || { echo "no Python 3.10 to 3.14 with venv found; name one: make PYTHON=..." >&2; exit 1; }; \
	  echo "== making $(VENV) with $$($$base --version)"; $$base -m venv $(VENV); \
	fi; \
	torch=$$($(PY) -c 'from importlib.metadata import version as v; \
	  n = tuple(map(int, v("torch").split("+")[0].split(".")[:2])); print("" if n >= (2, 9) else "$(TORCH)")' \
	  2>/dev/null || echo "$(TORCH)"); \
	echo "== installing into $(VENV): the project, its tests$${torch:+, $$torch}"; \
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt $$torch -e '.[cu13,test]'; \
	if [ -n "$(GPU)" ] && ! $(PY) -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then \
	  echo "== this host has an NVIDIA driver, but the torch in $(VENV) is a CPU build: GPU paths will not run" >&2; \
	fi; \
	touch $@
endif

# Only what these rules make; an environment named by VENV is its owner's.
clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.*' -prune -exec rm -rf {} +
