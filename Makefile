# make train and make test need Python 3.10 to 3.13 and nothing else: the first run sets up .venv.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# One thread a rank: several ranks share the cores.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup train test lint fuzz bench pictures clean
.DEFAULT_GOAL := help

help:  ## Show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

setup: $(READY)  ## Make .venv with pipemega and its tools
$(READY): setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints.txt "setuptools>=64" wheel
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

train: $(READY)  ## Train a small GPT on real text, on 4 ranks (tensor 2 x pipeline 2)
	$(BIN)/torchrun --standalone --nproc_per_node=4 pretrain_gpt.py --config configs/quickstart.json

test: lint  ## Lint, types, tests
	$(BIN)/python -m pytest

lint: $(READY)  ## Lint and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fuzz: $(READY)  ## Damaged configs, plans and data, at random, for some minutes (needs atheris)
	FUZZ=20 $(BIN)/python -m pytest -q tests/paper/test_config_fuzz.py tests/paper/test_plan_fuzz.py tests/unit/test_data_fuzz.py tests/unit/test_checkpoint_fuzz.py
	$(BIN)/python -m pip install --quiet "atheris>=2.3"
	$(BIN)/python -m tests.fuzz.token_files -max_total_time=60

bench: $(READY)  ## Measure against the peers (minutes; results in benchmarks/*/README.md)
	$(BIN)/python -m benchmarks.pipeline_cpu.run

pictures: $(READY)  ## Draw the pictures of README and docs anew
	$(BIN)/python -m docs.pictures

clean:  ## Remove what was built
	rm -rf $(VENV) build *.egg-info runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
