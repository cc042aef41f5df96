# `make run` and `make test` need Python 3.11 or later and a package index; everything else lands in .venv.
PYTHON ?= python3
CONFIG ?= config/demo.yaml
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RESULTS := results

# Local copies of the public graphs: MEGAGRAPH_MIRROR, or the folder ../shared/data where it exists.
MIRROR := $(abspath $(or $(MEGAGRAPH_MIRROR),$(wildcard ../shared/data)))
ifneq ($(MIRROR),)
export MEGAGRAPH_MIRROR := $(MIRROR)
endif

.PHONY: run test lint clean-venv

run: $(READY)
	$(BIN)/snakemake --configfile $(CONFIG)
	$(BIN)/snakemake --configfile $(CONFIG) --report $(RESULTS)/report.html
	@echo "Paper against measured: $(RESULTS)/report.md"
	@echo "Figures and tables:     $(RESULTS)/report.html"

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/snakemake --lint

clean-venv:
	rm -rf $(VENV)

# The package is installed without its dependencies: the lock has them all, and setuptools, too.
$(READY): envs/requirements.lock envs/requirements-dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "megagraph: error: PYTHON=$(PYTHON) is missing or older than 3.11: install Python 3.11 or later," \
	    "or name one: make PYTHON=python3.12 run" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "megagraph: error: $(PYTHON) cannot make a virtual environment: install its venv module" \
	    "(Debian: python3-venv)" >&2; exit 2; }
	$(BIN)/python -m pip install --quiet -r envs/requirements-dev.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $(READY)
