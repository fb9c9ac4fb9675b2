# `make train` and `make test` need only Python 3.10 to 3.13: the first run creates .venv.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Test processes, each with a pool of ranks. Three for two cores: tests also wait for processes.
WORKERS ?= 3
# One thread per rank: several ranks share the cores.
export OMP_NUM_THREADS ?= 1
# Tests start scripts: without .pyc files each of them would compile pipemega again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup train test versions faults fuzz gpu hf lint bench pictures docs clean
.DEFAULT_GOAL := help

help:  ## Show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

setup: $(READY)  ## Create .venv with pipemega and its development tools
$(READY): setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints.txt "setuptools>=64" wheel
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

train: $(READY)  ## Train a small GPT on real text, on 4 ranks (tensor 2 x pipeline 2)
	$(BIN)/torchrun --standalone --nproc_per_node=4 pretrain_gpt.py --config configs/quickstart.json

test: lint  ## Lint, types, tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# The oldest that setup.py allows, one that many clusters have, and the newest. Also with another
# Python: make versions TORCH="2.9.1@python3.10"
TORCH := 2.8.0 2.11.0 newest
versions:  ## Test with the oldest, an older and the newest torch (about 5 GB each)
	$(PYTHON) tests/versions.py $(TORCH) -n $(WORKERS) --dist worksteal

faults: $(READY)  ## Inject faults into runs (about 15 minutes); writes the table in docs/reliability.md
	$(BIN)/python -m pytest -m faults tests/faults --faults-table docs/reliability.md

# With PYTHON=... in that environment; QUICK=1 for at most 8 minutes; PART=tests for one part again.
IS_GIVEN := $(filter-out file,$(origin PYTHON))
gpu: $(if $(IS_GIVEN),,$(READY))  ## On a machine with GPUs: check it, run the benchmark and the GPU tests; writes gpu_report.md
	$(if $(IS_GIVEN),$(PYTHON),$(BIN)/python) -m benchmarks.gpu_report.run $(if $(QUICK),--minutes 8) $(if $(PART),--part $(PART))

# The oldest version that setup.py allows.
OLDEST_HF := transformers==5.9.0
hf: $(READY)  ## Compare all Hugging Face families, with the newest and the oldest transformers (about an hour)
	$(BIN)/python -m pytest -n $(WORKERS) -m "sweep or not sweep" tests/unit/hf tests/ranks/hf
	$(BIN)/python -m pip install --quiet --upgrade --target build/oldest_hf "$(OLDEST_HF)"
	PYTHONPATH=$(CURDIR)/build/oldest_hf $(BIN)/python -m pytest -n $(WORKERS) -m "sweep or not sweep" tests/unit/hf tests/ranks/hf

lint: $(READY)  ## Lint and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fuzz: $(READY)  ## Fuzz models, configs, plans, data and checkpoints, about 30 minutes (installs atheris)
	$(BIN)/python -m tests.fuzz.models --cases 500
	FUZZ=20 $(BIN)/python -m pytest -q tests/paper/config/test_config_fuzz.py tests/paper/plan/test_plan_fuzz.py tests/unit/data/test_data_fuzz.py tests/unit/checkpoint/test_checkpoint_fuzz.py
	$(BIN)/python -m pip install --quiet "atheris>=2.3"
	$(BIN)/python -m tests.fuzz.token_files -max_total_time=60

bench: $(READY)  ## Compare with other systems (minutes; results in benchmarks/*/README.md)
	$(BIN)/python -m benchmarks.pipeline_cpu.run

pictures: $(READY)  ## Draw the pictures in README and docs
	$(BIN)/python -m docs.pictures

docs: $(READY)  ## Generate the API reference: build/api/index.html
	$(BIN)/python -m docs.api

clean:  ## Remove .venv and all generated files
	rm -rf $(VENV) build *.egg-info runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
