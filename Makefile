# Both main commands set up all they need: a virtual environment and the package with what it trains with.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test bench-gpu check format clean

demo: $(VENV)/.train
	$(BIN)/flatout demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(PYTEST_ARGS)

# One GPU; a peer is a script that prints one JSON line: see benchmarks/pretrain.py.
bench-gpu: $(VENV)/.train
	$(BIN)/python -m benchmarks.pretrain $(BENCH_ARGS)
	$(BIN)/python -m benchmarks.memory

check: $(VENV)/.dev
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff format src tests benchmarks
	$(BIN)/ruff check --fix src tests benchmarks

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.train: $(VENV)/.made pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[train]'
	touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[train,hf,tensorboard,wandb,dev]'
	touch $@

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
