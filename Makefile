# On a fresh machine with Python >= 3.11, git and make: `make demo`, `make test`, `make lint`.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test lint gpu-check clean

demo: $(VENV)/.ready
	$(BIN)/python -m precexp experiment=quickstart

test: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# What only a GPU can show, in the environment of PYTHON (torch >= 2.11, transformers >= 5.17); its
# results are small and to be committed.
gpu-check: GPU_NAME = $(shell nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr 'A-Z ' 'a-z-')
gpu-check: GPU_RESULTS = outputs/reference/$(or $(GPU_NAME),$(error nvidia-smi names no GPU))
gpu-check:
	mkdir -p $(GPU_RESULTS)
	$(PYTHON) -m pytest -m gpu
	$(PYTHON) -m precexp.bench optimizer --device cuda --shapes opt-1.3b --output $(GPU_RESULTS)/optimizer.csv
	$(PYTHON) -m precexp.bench memory --device cuda --output $(GPU_RESULTS)/memory.json

clean:
	rm -rf $(VENV)

# constraints.txt pins torch: a looser requirement can pull several GB of CUDA packages.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@
