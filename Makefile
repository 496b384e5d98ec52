# Both main commands set up all they need: a virtual environment and the package with what it trains with.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

COMPAT ?= .venv-compat
FRAMEWORKS ?= .venv-frameworks

# The tests start hundreds of processes; each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-long test-doctor test-speed test-frameworks test-faults test-attacks test-busy record-doctor test-compat bench-gpu check format clean

demo: $(VENV)/.train
	$(BIN)/flatout demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 4 $(PYTEST_ARGS)

# Tests that take long and repeat in part what others show.
test-long: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 -m long $(PYTEST_ARGS)

# These measure, so they need a machine with nothing else to do: the doctor on every script live, and speed comparisons.
test-doctor: $(VENV)/.dev
	$(BIN)/python -m pytest -m live tests/doctor $(PYTEST_ARGS)

test-speed: $(VENV)/.dev
	$(BIN)/python -m pytest -m speed $(PYTEST_ARGS)

# The doctor on the loops of many frameworks. Their environment sees the packages of ours; litgpt pins some of them.
test-frameworks: $(FRAMEWORKS)/.made
	$(FRAMEWORKS)/bin/python -m pytest -m "frameworks or not frameworks" tests/frameworks $(PYTEST_ARGS)

$(FRAMEWORKS)/.made: $(VENV)/.dev
	$(PYTHON) -m venv $(FRAMEWORKS)
	echo "import site; site.addsitedir('$$(echo $(abspath $(VENV))/lib/python3*/site-packages)')" \
	  > $$(echo $(FRAMEWORKS)/lib/python3*/site-packages)/ours.pth
	$(FRAMEWORKS)/bin/python -m pip install --quiet papermill ipykernel uv jsonargparse docstring-parser typeshed-client
	$(FRAMEWORKS)/bin/python -m pip install --quiet --no-deps litgpt
	touch $@

# Every kill, every kind of damage, and the faults of several ranks; about two hours on two cores.
test-faults: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 -m faults tests/faults tests/recipes $(PYTEST_ARGS)

# Hostile files, options and requests, 2,000 of them; ATTACK_ARGS can say --seed N, --trials N or --one KIND/NUMBER.
test-attacks: $(VENV)/.dev
	$(BIN)/python -m tests.attack --folder $(or $(TMPDIR),/tmp)/flatout-attacks $(ATTACK_ARGS)

# `make test` three times while every core is busy with something else.
test-busy: $(VENV)/.dev
	$(BIN)/python tests/busy.py $(MAKE) test

# Records again what the agent sees of the doctor's scripts: tests/doctor/record.py.
record-doctor: $(VENV)/.dev
	PYTHONPATH=$(CURDIR) $(BIN)/python tests/doctor/record.py $(SCRIPTS)

# The doctor on an old torch, in an environment that knows nothing of flatout. COMPAT_PIP can name pip's index of
# builds without CUDA.
test-compat: $(VENV)/.dev $(COMPAT)/.made
	FLATOUT_COMPAT_PYTHON=$(abspath $(COMPAT))/bin/python $(BIN)/python -m pytest tests/doctor/test_doctor_compat.py

# One GPU; a peer is a script that prints one JSON line: see benchmarks/pretrain.py.
bench-gpu: $(VENV)/.train
	$(BIN)/python -m benchmarks.pretrain $(BENCH_ARGS)
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.growth
	$(BIN)/python -m benchmarks.micro_batch
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.profile_step --fp8
	$(BIN)/python -m benchmarks.doctor_gpu
	$(BIN)/python -m benchmarks.doctor_overhead --device cuda

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

$(COMPAT)/.made:
	$(PYTHON) -m venv $(COMPAT)
	$(COMPAT)/bin/python -m pip install --quiet $(COMPAT_PIP) 'torch==2.4.1' 'numpy<2'
	touch $@

clean:
	rm -rf $(VENV) $(COMPAT) $(FRAMEWORKS) dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
