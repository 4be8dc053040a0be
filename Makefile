# `make demo` and `make test` need Python 3.11 or newer and nothing else: scripts/engine_venv.py builds a virtual
# environment with the real engine and a CPU build of torch (.cache/engine-venv, or $DSV4_GRAPHS_VENV), keeps it, and
# runs the commands in it.

.DEFAULT_GOAL := help

CANDIDATES := python3.11 python3.12 python3.13 python3
ifndef PYTHON
PYTHON := $(shell for p in $(CANDIDATES); do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)
endif

IN_VENV = $(PYTHON) scripts/engine_venv.py
# The slowest tests are named, as all of this has a limit on time.
PYTEST = pytest --color=auto --durations=10 --durations-min=2
# Arguments for the demo, and for both runs of the tests: make test PYTEST_ARGS="-k plan".
DEMO_ARGS ?=
PYTEST_ARGS ?=

.PHONY: help python venv demo lint format test test-0.5.23 test-0.5.22 clean distclean

help:
	@echo "make demo       run the plugin in the real engine on the CPU, with and without graphs, and compare"
	@echo "make test       lint, then the tests on sglang 0.5.23 and, beside them, the engine tests on 0.5.22"
	@echo "make lint       ruff and mypy alone          make format  let ruff rewrite what it can"
	@echo "make venv       only build the environment   make clean   remove caches and build leftovers"
	@echo "make distclean  clean, and remove the environment"

python:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer among: $(CANDIDATES)." >&2; \
		echo "       Install python3.11 (Debian, Ubuntu: with python3.11-venv), or: make PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: PYTHON=$(PYTHON) is not a Python 3.11 or newer." >&2; exit 1; }

venv: python
	@$(IN_VENV) --engine 0.5.22

demo: python
	@$(IN_VENV) sglang_dsv4_graphs demo $(DEMO_ARGS)

lint: python
	@echo "== ruff check"
	@$(IN_VENV) ruff check .
	@echo "== ruff format"
	@$(IN_VENV) ruff format --check .
	@echo "== mypy"
	@$(IN_VENV) mypy

format: python
	@$(IN_VENV) ruff check --fix .
	@$(IN_VENV) ruff format .

# --engine-version makes a run fail that meets another engine, or in which nothing was executed. Each has a cache of its
# own, as they run at the same time.
RUN_0.5.23 = $(IN_VENV) $(PYTEST) --engine-version 0.5.23 -o cache_dir=.cache/pytest-0.5.23 $(PYTEST_ARGS)
RUN_0.5.22 = $(IN_VENV) --engine 0.5.22 $(PYTEST) --engine-version 0.5.22 -o cache_dir=.cache/pytest-0.5.22 -m engine \
	$(PYTEST_ARGS)

# Lint first, as it takes seconds. Then both engine versions beside each other: a run keeps one core busy.
# By the environment, so that no quote in PYTEST_ARGS ends another.
test: export COMMAND_23 = $(RUN_0.5.23)
test: export COMMAND_22 = $(RUN_0.5.22)
test: venv
	@$(MAKE) --no-print-directory lint
	@$(PYTHON) scripts/side_by_side.py "tests, sglang 0.5.23" "$$COMMAND_23" \
		"engine tests, sglang 0.5.22" "$$COMMAND_22"
	@echo "== all passed: lint, sglang 0.5.23, sglang 0.5.22"

test-0.5.23: python
	@echo "== tests, sglang 0.5.23"
	@$(RUN_0.5.23)

test-0.5.22: python
	@echo "== engine tests, sglang 0.5.22"
	@$(RUN_0.5.22)

clean:
	rm -rf build dist .cache/mypy .cache/pytest .cache/pytest-* .cache/ruff
	find sglang_dsv4_graphs tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .cache
