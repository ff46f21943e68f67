# `make demo` and `make test` work on a fresh clone: each makes the virtual environment it needs first.
PYTHON ?= python3
# Any torch >= 2.11 works. The pinned version is the one the tests are run with.
TORCH ?= torch==2.13.0
DEVICE ?= cpu
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-lengthy lint bench clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -e ".[demo,test,lint]"
	touch $@

demo: $(VENV)/.installed  ## train a small GPT on the Python standard library, eager and compiled
	$(BIN)/python examples/train_gpt.py --device $(DEVICE)

test: $(VENV)/.installed  ## the whole test suite (about ten minutes on two cores)
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-lengthy: $(VENV)/.installed  ## what `make test` leaves out: whole models on the simulated GPU
	$(BIN)/python -m pytest -n 2 --dist worksteal -m lengthy

lint: $(VENV)/.installed  ## ruff and mypy
	$(BIN)/ruff check nova tests benchmarks examples
	$(BIN)/ruff format --check nova tests benchmarks examples
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info
