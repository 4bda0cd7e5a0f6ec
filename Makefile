# Everything runs in the project's own virtual environment, made on first use.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Threads on the CPU (docs/guide.md, "Limits and known problems"); not for benchmarks, whose peers keep all of theirs.
demo test notebooks: export PJRT_NPROC ?= $(shell cores=$$(nproc 2>/dev/null || echo 1); echo $$((cores > 16 ? cores : 16)))
demo test notebooks: export OPENBLAS_NUM_THREADS ?= 1

.PHONY: demo test check format notebooks benchmarks clean

demo: $(VENV)/demo.stamp
	$(BIN)/python -m benchmarks.camera_demo

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n 2
	KBR_TEST_PRECISION=32 $(BIN)/python -m pytest -n 2

check: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Run, with their pictures, in notebooks/executed/.
notebooks: $(VENV)/demo.stamp
	$(BIN)/python -m pip install --quiet --editable '.[notebooks]'
	mkdir -p notebooks/executed
	set -e; for file in notebooks/*.py; do \
		$(BIN)/python -m jupytext --to ipynb --execute $$file \
			--output notebooks/executed/$$(basename $$file .py).ipynb; \
	done

benchmarks: $(VENV)/dev.stamp
	$(BIN)/python -m pip install --quiet --editable '.[benchmarks]'
	$(BIN)/python -m benchmarks

$(VENV)/demo.stamp: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	touch $@

$(VENV)/dev.stamp: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/demo.stamp

clean:
	rm -rf $(VENV)
