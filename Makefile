# mpsagent: everything a developer needs. Three targets matter: `make demo`, `make test` and `make test-all`.
# On a fresh Debian 12 or 13, as root, they install what they need: Debian packages first, then a virtual environment
# whose packages are pinned with hashes.

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS   += --no-print-directory

PYTHON  ?= python3
VENV    := .venv
PY      := $(VENV)/bin/python
STAMP   := $(VENV)/.up-to-date
# Tests mostly wait: two of them leave a quarter of two cores idle.
WORKERS ?= 3
# A test that hangs is ended after this many seconds.
TEST_TIMEOUT ?= 300
PYTEST_ARGS  ?=

.PHONY: help venv system-packages lint style types test-packages run-tests format schema openapi modules golden docs test test-all demo bench disorder hostile world conformance test-gpu test-gpu-system lock wheel deb rpm release clean fuzz

help:
	@echo 'make demo             half a minute of agent and gate at work on a simulated MPS'
	@echo 'make test             lint, types and the tests for after each change: about 5 minutes on two cores'
	@echo 'make test-all         all other tests that need no GPU: booted systems, NVIDIA'"'"'s daemons, Slurm, scenes'
	@echo 'make bench            the figures in docs/, measured here'
	@echo 'make disorder         six users at their worst on the simulator: does every client get exactly its policy?'
	@echo '                      (SHARING=turns|together|apart: turns, one-server, per-user of the policy; SERVER=own|shared, SEED=7,'
	@echo '                      CLIENTS=1000, DISORDER_SECONDS=60, BUSY=2)'
	@echo 'make fuzz             what others may send, made up for FUZZ_SECONDS each: handshake, link, orders, logs, policies, files'
	@echo 'make world            gate and agent in a simulated world, from random seeds (WORLD_SECONDS=60, SEED=48 plays one again)'
	@echo 'make hostile          a hostile day on the simulator, in each way of sharing: held or broke, and what honest users lost'
	@echo 'make conformance      what the simulator reproduces of real MPS, scenario by scenario'
	@echo 'make docs             README and docs/ as pages for a browser, in build/docs'
	@echo 'make test-gpu         the promises, on a real GPU with real MPS (root)'
	@echo 'make test-gpu-system  the same under a systemd booted for it (root)'
	@echo 'make release          wheel, .deb and .rpm, built twice and the same to the byte; their checksums'
	@echo 'make venv | lint | format | schema | modules | golden | lock | wheel | deb | rpm | clean'

venv: $(STAMP)

# System packages are an order-only step that is quick when nothing is missing.
$(STAMP): requirements-dev.lock pyproject.toml packaging/system-packages.sh | system-packages
	@echo '== virtual environment in $(VENV)'
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip --quiet --disable-pip-version-check install --require-hashes -r requirements-dev.lock
	@# compat: a plain path. The other way is a module that every start of Python loads, 26 ms, and the tests start thousands.
	@$(PY) -m pip --quiet --disable-pip-version-check install --no-deps --no-build-isolation \
		--config-settings editable_mode=compat --editable .
	@touch $@

system-packages:
	@packaging/system-packages.sh $(PYTHON)

lint: style types

style: $(STAMP)
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check --quiet .

types: $(STAMP)
	@$(VENV)/bin/mypy mpsagent mpsagent_*

format: $(STAMP)
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

# policies/policy.schema.json, for editors, from the policy's sections; a test says when it is out of date.
schema: $(STAMP)
	@$(PY) packaging/write_policy_schema.py

# What GET /openapi.json answers, from the shapes; a test says when it is out of date.
openapi: $(STAMP)
	@$(PY) packaging/write_openapi.py

# The list of modules in docs/develop/modules.md, from the modules' first sentences; a test says when it is out of date.
modules: $(STAMP)
	@$(PY) packaging/write_module_table.py

# The words of all surfaces: tests/golden and tests/net. Commit the changes with the reason.
golden: $(STAMP)
	@$(PY) -m tests.golden

# All links lead somewhere, or it fails; tests/test_docs_built.py does the same.
docs: $(STAMP)
	@$(PY) packaging/build_docs.py

# Bytecode first: hundreds of agents and gates are started, and where none may be written (PYTHONDONTWRITEBYTECODE, other
# users) each start of an agent compiles for 0.6 s, measured.
# The types beside the tests, because mypy has use for one core only; and once more at the end, where a failure is looked for.
test: style test-packages
	@$(PY) tests/left_behind.py $(MAKE) --jobs 2 --keep-going types run-tests || { status=$$?; $(MAKE) types; exit $$status; }

# What `make test` leaves out; tests/conftest.py lists it.
test-all: test-packages
	@$(MAKE) run-tests WHICH=long

test-packages: $(STAMP)
	@packaging/system-packages.sh $(PYTHON) tests
	@$(PY) -m compileall -q mpsagent mpsagent_*

WHICH ?= not long
run-tests: $(STAMP)
	@$(PY) -m pytest -n $(WORKERS) --dist worksteal --timeout $(TEST_TIMEOUT) -m '$(WHICH)' \
		$(if $(TEST_TEMPORARY),--basetemp=$(TEST_TEMPORARY)) $(PYTEST_ARGS)

demo: $(STAMP)
	@$(PY) demo/demo.py

bench: $(STAMP)
	@$(PY) benchmarks/bench.py

# With bounds for a laptop: a minute, then it waits for the clients that remain. SHARING and SERVER have the words of the measured
# outputs: together is the policy's one-server, apart its per-user, own its server_scope user, shared its server_scope all.
SHARING ?= turns
SERVER  ?= own
CLIENTS ?= 400
SEED    ?=
BUSY    ?= 0
DISORDER_SECONDS ?= 60
GPUS    ?= 1
INSTANCES ?= one
disorder: $(STAMP)
	@$(PY) -m tests.disorder.run --sim --server $(SERVER) --sharing $(SHARING) --clients $(CLIENTS) --seconds $(DISORDER_SECONDS) \
		--busy $(BUSY) --gpus $(GPUS) --instances $(INSTANCES) $(if $(SEED),--seed $(SEED))

# A minute for each; `make test-all` has 8 s for each, more with FUZZ_SECONDS. WORDS: only these (`python -m tests.fuzz -h`).
FUZZ_SECONDS ?= $(if $(filter fuzz,$(MAKECMDGOALS)),60,8)
WORDS        ?=
export FUZZ_SECONDS
fuzz: $(STAMP)
	@$(PY) -m pytest -n $(WORKERS) --timeout 0 -m 'long or not long' tests/fuzz $(if $(WORDS),-k '$(WORDS)') $(PYTEST_ARGS)

# A failure prints the seed, the smallest plan that fails and its story (docs/develop/world.md).
WORLD_SECONDS ?= 60
world: $(STAMP)
	@$(PY) -m tests.world $(if $(KIND),--kind $(KIND)) $(if $(SEED),--seed $(SEED),--seconds $(WORLD_SECONDS))

# Some 50 minutes; ARGS='--only fault,ask --ways own' for less.
HOSTILE_SECONDS ?= 6000
hostile: $(STAMP)
	@$(PY) campaigns/hostile.py --sim --seconds $(HOSTILE_SECONDS) $(ARGS)

conformance: $(STAMP)
	@$(PY) tests/conformance/run.py

test-gpu: $(STAMP)
	@$(PY) campaigns/run.py

test-gpu-system: $(STAMP)
	@$(PY) campaigns/system.py

# One resolution for Python 3.11 and newer; the run-time lock constrains the development lock, so that both agree.
LOCK := uv pip compile --no-config --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	--default-index https://pypi.org/simple --custom-compile-command 'make lock' --upgrade
lock:
	@command -v uv >/dev/null || { echo 'make lock needs uv: pipx install uv' >&2; exit 1; }
	@$(LOCK) pyproject.toml -o requirements.lock
	@$(LOCK) pyproject.toml --extra dev --constraint requirements.lock packaging/build-requirements.in -o requirements-dev.lock

wheel: $(STAMP)
	@# From a copy, with modes as git has them and nothing left over from the last time.
	@. packaging/reproducible.sh; rm -rf build/source; mkdir -p build/source; \
		cp -r --no-preserve=mode mpsagent mpsagent_* pyproject.toml README.md LICENSE build/source; \
		$(PY) -m pip --quiet wheel --no-deps --no-build-isolation --wheel-dir $${DIST:-dist} build/source/
	@ls -1 $${DIST:-dist}/*.whl

deb:
	@packaging/debian/build.sh

rpm:
	@packaging/rpm/build.sh

release:
	@packaging/release.sh

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
