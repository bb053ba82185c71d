# Two commands: `make demo` and `make test`. Each makes the environment it needs, once, and passes ARGS on.
#
#   make demo [ARGS="--layers 8 --json demo.json"]
#   make test [ARGS="-k hyper"]
#   make lint     ruff, mypy
#   make check    every kernel compiled for every target; its resources as committed
#   make resources    commits to what the kernels use now: profiling/resources.json
#   make env      the environment alone
#   make clean    removes .venv, build and caches
#   make help     this text
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
REPORTS := build/resources.json

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

# What a target that runs the project waits for.
READY := $(or $(ENV),packages)

# Both print nothing where an interpreter will do, else why not; any Python must be able to read them.
define CAN_MAKE_ENVIRONMENT
import sys
if not (3, 10) <= sys.version_info[:2] < (3, 15):
    print("is Python %d.%d" % sys.version_info[:2])
else:
    try:
        import ensurepip, venv
    except ImportError as error:
        print("has no module %s" % error.name)
endef
define CAN_RUN
import sys
if not (3, 10) <= sys.version_info[:2] < (3, 15):
    print("is Python %d.%d, needed is 3.10 to 3.14" % sys.version_info[:2])
else:
    from importlib.util import find_spec
    print(", ".join("has no " + name for name in ("torch", "numpy") if not find_spec(name)))
endef
export CAN_MAKE_ENVIRONMENT CAN_RUN

# why INTERPRETER PROGRAM, in a recipe
WHY := why() { command -v "$$1" >/dev/null 2>&1 || { echo "not found"; return; }; \
  "$$1" -c "$$2" 2>/dev/null || echo "does not run"; }

# An environment that is there keeps its interpreter, whatever PYTHON says.
ifneq ($(and $(ENV),$(PYTHON),$(wildcard $(PY))),)
BASE := import os, sys; print(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
HAS := $(shell $(PY) -c '$(BASE)' 2>/dev/null)
ifneq ($(HAS),$(shell $(PYTHON) -c '$(BASE)' 2>/dev/null))
$(warning PYTHON=$(PYTHON) is not used: $(VENV) is there, made with $(HAS). Remove it first, or name another VENV)
endif
endif

.DEFAULT_GOAL := help
.PHONY: demo test lint check resources env clean help packages
.DELETE_ON_ERROR:

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

demo: $(READY)
	$(PY) -m profiling.demo $(ARGS)

# pytest comes last, so that its closing line is the last one printed. Without a GPU the tests share the cores; with one they
# take turns on it.
test: $(READY) lint check
	@echo "== pytest"
	@workers=""; if [ -z "$(GPU)" ] && $(PY) -c 'import xdist' 2>/dev/null; then \
	  workers="-n auto --maxprocesses 4 --dist worksteal"; export OMP_NUM_THREADS=1; fi; \
	$(PY) -m pytest $$workers $(ARGS)

lint: $(ENV)
	@echo "== ruff, mypy"
	@run() { if [ -z "$(ENV)" ] && ! $(PY) -m "$$1" --version >/dev/null 2>&1; \
	  then echo "$$1: not installed for $(PY), skipped"; else $(PY) -m "$$@"; fi; }; \
	run ruff check . && run ruff format --check . && run mypy

check: $(READY)
	@echo "== every kernel for $(TARGETS)"
	@$(PY) -m bindings.precompile --targets $(TARGETS) --out $(PRECOMPILED) --sample --check --json $(REPORTS)
	@$(PY) -m profiling.resources $(REPORTS)

resources: $(READY)
	@$(PY) -m bindings.precompile --targets $(TARGETS) --out $(PRECOMPILED) --sample --json $(REPORTS)
	@$(PY) -m profiling.resources $(REPORTS) --update

env: $(ENV)

# For VENV=: nothing is installed, so what is missing is said.
packages:
	@$(WHY); reason=$$(why $(PY) "$$CAN_RUN"); [ -z "$$reason" ] || { \
	  echo "$(PY): $$reason. VENV= installs nothing: name an interpreter that has the packages, make VENV= PYTHON=..., or" \
	    "leave VENV= out" >&2; \
	  exit 1; }

ifneq ($(ENV),)
# The stamp is newer than what it was made from; a later change of either file installs again into the same environment.
$(ENV): pyproject.toml constraints.txt
	@set -eu; \
	if ! $(PY) -m pip --version >/dev/null 2>&1; then \
	  $(WHY); base=; refused=; \
	  for one in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python3.10); do \
	    reason=$$(why $$one "$$CAN_MAKE_ENVIRONMENT"); \
	    if [ -z "$$reason" ]; then base=$$one; break; fi; \
	    refused="$$refused, $$one: $$reason"; \
	  done; \
	  [ -n "$$base" ] || { \
	    echo "refused: $${refused#, }. Needed: Python 3.10 to 3.14 with venv; name one: make PYTHON=..." >&2; exit 1; }; \
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
