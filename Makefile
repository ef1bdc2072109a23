# Set-up and the main jobs. Everything lives in $(VENV); nothing else on the machine is touched.
#
#   make demo                  the whole graph on this machine, a real trace replayed against it, a report
#   make demo ENGINE=modelled  the same graph without engines (2 prefill, 4 decode workers)
#   make test                  the tests of a working day; `make lint` and `make types` are the other two checks
#   make test-fast             without engines and graphs
#   make test-all              all tests, also those that take minutes

PYTHON ?= python3
VENV   ?= .venv
ENGINE ?= sglang
OUT    ?= out

BIN := $(VENV)/bin
UV  := $(BIN)/uv
# The modelled engine needs no SGLang, so its set-up is the small one.
DEMO_EXTRA := $(if $(filter modelled,$(ENGINE)),base,sglang)

.PHONY: demo test test-fast test-all lint types format constraints clean

demo: $(VENV)/.installed-$(DEMO_EXTRA)
	$(BIN)/python -m ampd.cli.serve.demo --engine $(ENGINE) --out $(OUT)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not long"

test-fast: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not slow and not long"

test-all: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.installed-dev
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

constraints: $(UV)
	$(UV) pip compile pyproject.toml --all-extras --universal --python-version 3.11 --no-header --no-annotate \
		--upgrade --output-file constraints.txt

$(UV):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
		|| { echo "ampd needs Python 3.11, 3.12 or 3.13; choose one with: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

$(VENV)/.installed-base: pyproject.toml constraints.txt | $(UV)
	$(UV) pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-sglang: pyproject.toml constraints.txt | $(UV)
	@echo "installing SGLang and what it needs: about 11 GB, several minutes on most networks"
	$(UV) pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[sglang]'
	@touch $@ $(VENV)/.installed-base

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(UV)
	$(UV) pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[sglang,dev,aiconfigurator]'
	@touch $@ $(VENV)/.installed-sglang $(VENV)/.installed-base

clean:
	rm -rf $(OUT) build *.egg-info
