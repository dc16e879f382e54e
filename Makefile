# On a fresh machine with Python >= 3.11, git and make: `make demo`, `make test`, `make lint`.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test lint gpu-check clean

demo: $(VENV)/.ready
	$(BIN)/python -m precexp experiment=quickstart

test: $(VENV)/.ready
	$(BIN)/python -m pytest

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# What only a GPU can show, in the environment of PYTHON (torch >= 2.11, transformers >= 5.17).
gpu-check:
	$(PYTHON) -m pytest -m gpu
	$(PYTHON) -m precexp.bench optimizer --device cuda --shapes opt-1.3b --output outputs/bench_optimizer_gpu.csv
	$(PYTHON) -m precexp.bench memory --device cuda --output outputs/bench_memory_gpu.json

clean:
	rm -rf $(VENV)

# constraints.txt pins torch: a looser requirement can pull several GB of CUDA packages.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@
