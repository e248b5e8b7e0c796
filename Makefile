# `make help` lists the targets. Tests and tools run in the environment that tools/build_env.py keeps outside the checkout.

ENGINE ?= vllm-0.20.2
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && echo $$p && exit; done; echo python3)
endif
PY := .venv/$(ENGINE)/bin/python
PYTEST := $(PY) -m pytest
CORE_TESTS = $(wildcard tests/unit tests/ordering tests/drift tests/startup)
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help env demo test test-core test-kernels test-vllm startup mutants pcp-matrix lint typecheck

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)$$/\1|\2/p' Makefile | while IFS='|' read -r name text; do \
		printf '  make %-14s %s\n' "$$name" "$$text"; done
	@echo '  Every test target takes pytest arguments: make test-core ARGS="-k registry -x"'

env: ## build the environment (about 2 minutes the first time; later, nothing to do)
	@$(PYTHON) tools/build_env.py $(ENGINE) >/dev/null

demo: env ## serve a hybrid and a dense model stock and with PCP=2, same traffic, compare every token
	@$(PY) tools/demo_pcp.py $(ARGS)

test: env lint typecheck ## lint, types and every test, the cheap ones first
	$(PYTEST) tests $(ARGS)

test-core: env ## the patch engine, without an inference engine
	$(PYTEST) $(CORE_TESTS) $(ARGS)

test-kernels: env ## kernels against their references
	$(PYTEST) tests/kernels $(ARGS)

test-vllm: env ## on a real vLLM, CPU platform
	$(PYTEST) tests/vllm $(ARGS)

startup: env ## what being installed, and being armed, costs an interpreter
	@$(PY) tools/startup.py $(ARGS)

mutants: env ## remove each guarded place in turn; a test must fail
	@$(PY) tools/mutants.py $(ARGS)

pcp-matrix: env ## PCP=2 to 8 against PCP=1 over models, traffic and settings, on the CPU (about 20 minutes on 2 cores)
	@$(PY) tools/pcp_matrix.py $(ARGS)

lint: env ## ruff
	@$(PY) -m ruff check .

typecheck: env ## pyright
	@$(PY) -m pyright --pythonpath $(PY)
