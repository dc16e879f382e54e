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

# What only a GPU can show, in the environment of PYTHON (torch >= 2.11, transformers >= 5.17, pytest;
# neither wandb nor datasets), without a download. Results, small and to be committed, go to
# outputs/reference/<the GPU's name>. The tests are named, since others import what may not be there.
GPU_TESTS := tests/test_train.py tests/test_triton.py tests/test_memory.py

gpu-check:
	$(PYTHON) -m pytest -m gpu $(GPU_TESTS)
	$(PYTHON) -m precexp.bench gpu-check

clean:
	rm -rf $(VENV)

# constraints.txt pins torch: a looser requirement can pull several GB of CUDA packages.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@
