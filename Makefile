# `make help` lists the targets. Tests and tools run in environments that tools/build_env.py keeps outside the checkout:
# one with vLLM, for everything but what needs SGLang, one with SGLang, and one for the documentation.

ENGINE ?= vllm-0.20.2
# Written like a requirement, too: make demo ENGINE=vllm==0.32.0, make demo-sglang ENGINE=sglang==0.5.17.
override ENGINE := $(subst ==,-,$(ENGINE))
SGLANG ?= $(if $(filter sglang-%,$(ENGINE)),$(ENGINE),sglang-0.5.17)
override SGLANG := $(subst ==,-,$(SGLANG))
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && echo $$p && exit; done; echo python3)
endif
PY := .venv/$(ENGINE)/bin/python
PYTEST := $(PY) -m pytest
SGLANG_PY := .venv/$(SGLANG)/bin/python
# Builds its environment, too, which is small: nothing with an engine waits for it.
DOCS_PY = $$($(PYTHON) tools/build_env.py docs)
# What runs on whichever engine is installed.
EITHER = tests/ordering tests/drift
SGLANG_TESTS = $(EITHER) tests/sglang
CORE_TESTS = $(wildcard tests/unit tests/ordering tests/drift tests/startup)
# Two files at a time, for tests that are one process each; those that start engines need all cores for themselves.
TWO_AT_A_TIME = -n 2 --dist loadfile
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help env env-sglang envs matrix demo demo-sglang examples examples-vllm examples-sglang docs changes release \
	test test-long test-core test-kernels test-vllm test-sglang startup mutants fuzz-dp pcp-matrix \
	feature-matrix lint typecheck

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)$$/\1|\2/p' Makefile | while IFS='|' read -r name text; do \
		printf '  make %-14s %s\n' "$$name" "$$text"; done
	@echo '  Every test target takes pytest arguments: make test-core ARGS="-k registry -x"'

env: ## build the environment (about 2 minutes the first time; later, nothing to do)
	@$(PYTHON) tools/build_env.py $(ENGINE) >/dev/null

env-sglang: ## build the environment with SGLang (about 2 minutes the first time)
	@$(PYTHON) tools/build_env.py $(SGLANG) >/dev/null

envs:
	@$(MAKE) --no-print-directory -j 2 env env-sglang

matrix: env ## every patch on every release: applies, upstreamed, moved or unsupported (about 10 minutes; ARGS=--read: 1)
	@$(PY) tools/matrix.py $(ARGS)

demo: env ## serve a hybrid and a dense model stock and with PCP=2, same traffic, compare every token
	@$(PY) tools/demo_pcp.py $(ARGS)

demo-sglang: env-sglang ## serve hybrids with SGLang stock and with the ATOM decoders, a rank idle at times, compare every token
	@$(SGLANG_PY) tools/demo_sglang.py $(ARGS)

examples: envs ## run every example of examples/ on this machine, and compare what it prints with what it says
	@$(MAKE) --no-print-directory -j 2 examples-vllm examples-sglang

examples-vllm: env
	@$(PY) tools/run_examples.py $(ARGS)

examples-sglang: env-sglang
	@$(SGLANG_PY) tools/run_examples.py $(ARGS)

docs: ## build the site into build/site, and fail on any warning
	@NO_MKDOCS_2_WARNING=1 $(DOCS_PY) -m mkdocs build --strict
	@echo 'docs: build/site/index.html'

changes: ## what changelog.d/ will put into CHANGELOG.md
	@$(DOCS_PY) -m towncrier build --draft --version Unreleased

release: ## move changelog.d/ into CHANGELOG.md: make release VERSION=0.2.0
	@$(DOCS_PY) -m towncrier build --yes --version $(or $(VERSION),$(error name the release: make release VERSION=0.2.0))

test: envs lint typecheck docs ## what CI runs, the cheap first: lint, types, docs, every test but the longest, examples
	$(PYTEST) tests --ignore tests/vllm --ignore tests/sglang -m "not long" $(TWO_AT_A_TIME) $(ARGS)
	$(SGLANG_PY) -m pytest $(EITHER) -m "not long" $(TWO_AT_A_TIME) $(ARGS)
	$(PYTEST) tests/vllm -m "not long" $(ARGS)
	$(SGLANG_PY) -m pytest tests/sglang -m "not long" $(ARGS)
	@$(MAKE) --no-print-directory examples ARGS=

test-long: envs ## the longest tests (about 25 minutes)
	$(PYTEST) tests -m long $(ARGS)
	$(SGLANG_PY) -m pytest $(SGLANG_TESTS) -m long $(ARGS)

test-core: env ## the patch engine, without an inference engine
	$(PYTEST) $(CORE_TESTS) $(ARGS)

test-kernels: env ## kernels against their references
	$(PYTEST) tests/kernels $(ARGS)

test-vllm: env ## on a real vLLM, CPU platform
	$(PYTEST) tests/vllm $(ARGS)

test-sglang: env-sglang ## on a real SGLang, CPU stand-in or GPU
	$(SGLANG_PY) -m pytest $(SGLANG_TESTS) $(ARGS)

startup: env ## what being installed, and being armed, costs an interpreter
	@$(PY) tools/startup.py $(ARGS)

mutants: env ## remove each guarded place in turn; a test must fail
	@$(PY) tools/mutants.py $(ARGS)

fuzz-dp: env-sglang ## drive RANKS real SGLang ranks through STEPS random steps; all must enter the same collectives
	@PYTHONPATH=tools $(SGLANG_PY) -m fuzz_dp --steps $(or $(STEPS),300) --ranks $(or $(RANKS),2) \
		--seed $(or $(SEED),0) $(ARGS)

feature-matrix: envs ## every feature with every family and every other feature, on both engines, on the CPU (ARGS=--new: what the record lacks)
	@$(PY) tools/feature_matrix.py $(ARGS)
	@$(SGLANG_PY) tools/feature_matrix.py $(ARGS)

pcp-matrix: env ## PCP=2 to 8 against PCP=1 over models, traffic and settings, on the CPU (about 20 minutes on 2 cores)
	@$(PY) tools/pcp_matrix.py $(ARGS)

lint: env ## ruff, and the workflow files against their schema
	@$(PY) -m ruff check .
	@$(DOCS_PY) -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

typecheck: env ## pyright
	@$(PY) -m pyright --pythonpath $(PY)
