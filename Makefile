# The same commands for people and CI. Every target sets up .venv when it is missing or pyproject.toml changed.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
RUN := $(PY) run.py --config-name qwen35_mimo
ARGS ?=

.PHONY: help setup demo test test-long bench-data bench-gpu lint clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## make .venv and install everything pinned in constraints.txt

$(STAMP): pyproject.toml setup.py constraints.txt tools/find_python.sh
	@set -e; python="$$(bash tools/find_python.sh)"; \
	if ! $(PY) -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then \
	  echo "making $(VENV) with $$python"; "$$python" -m venv --clear $(VENV); fi
	@echo "installing into $(VENV) (about 2 minutes the first time)"
	@$(PY) -m pip install --quiet --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP) ## train the small model on a CPU, from nothing to pictures; ARGS="key=value ..." overrides
	$(PY) -m tools.data.make_digits
	$(RUN) $(ARGS)

# Hundreds of processes start in the tests: they keep their bytecode, whatever the environment says.
TEST_ENV := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

test: $(STAMP) ## run the tests; ARGS="..." goes to pytest
	$(TEST_ENV) $(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

test-long: $(STAMP) ## run the tests that take minutes
	$(TEST_ENV) $(PY) -m pytest -m long $(ARGS)

bench-data: $(STAMP) ## reading and decoding against a plain DataLoader at 2, 4 and 8 ranks; ARGS="--ranks 8"
	$(PY) -m tools.bench.data $(ARGS)

RECIPE ?= 4b_h200x2
GPUS ?= 2
VARIANTS ?= unified homogeneous f2 f4 f8 text fsdp2:mb8+ac fsdp2:mb4+ac fsdp2:mb4
bench-gpu: ## layouts, and transformers with FSDP2, on the GPUs of this host; RECIPE, GPUS, VARIANTS, ARGS="--rounds 1"
	python3 -m torch.distributed.run --nproc_per_node $(GPUS) -m tools.bench.mimo --config-path examples/qwen35_mimo/conf \
	  --config-name $(RECIPE) --output outputs/bench-$(RECIPE) --variants $(VARIANTS) --timeline $(ARGS)

lint: $(STAMP) ## ruff and strict mypy
	$(PY) -m ruff check .
	$(PY) -m mypy

clean: ## remove .venv, caches and built data
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist *.egg-info
