# Everything runs in the project's own virtual environment, made on first use.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test test-fast check format docs serve notebooks benchmarks bench package clean

demo: $(VENV)/demo.stamp
	$(BIN)/python -m benchmarks.camera.demo

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
	KBR_TEST_PRECISION=32 $(BIN)/python -m pytest -n 2 --dist worksteal

# For work in progress: float64 only, one case of each test that is not slow.
test-fast: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --fast

check: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m benchmarks report check

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, in build/site. A link or a name that does not resolve is an error.
docs: $(VENV)/docs.stamp
	$(BIN)/python docs/tutorials/_stored.py check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

serve: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# Executes the notebooks whose code has changed, and keeps them in docs/tutorials/.
notebooks: $(VENV)/docs.stamp
	$(BIN)/python docs/tutorials/_stored.py

# Days, and gigabytes of peers.
benchmarks: $(VENV)/dev.stamp
	$(BIN)/python -m pip install --quiet --editable '.[benchmarks]'
	$(BIN)/python -m benchmarks

# Two minutes: what became slower beside NumPy and SciPy.
bench: $(VENV)/dev.stamp
	$(BIN)/python -m benchmarks.suite

# A wheel and an sdist, each installed into an environment of its own; how the README renders.
package:
	rm -rf build/package && mkdir -p build/package
	$(PYTHON) -m venv build/package/tools
	build/package/tools/bin/python -m pip install --quiet 'build>=1.2,<2' 'twine>=6,<8'
	build/package/tools/bin/python -m build --outdir build/package/dist
	build/package/tools/bin/python -m twine check --strict build/package/dist/*
	set -e; for file in build/package/dist/*; do \
		$(PYTHON) -m venv --clear build/package/clean; \
		build/package/clean/bin/python -m pip install --quiet $$file; \
		(cd build/package && clean/bin/python -c "import kbr_jax as kbr; print(kbr.__version__, kbr.Gaussian(1.0)(0.0, 1.0))"); \
	done

$(VENV)/demo.stamp: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	touch $@

# Byte code of all packages would take 15 s; what is imported makes its own.
$(VENV)/docs.stamp: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[docs]'
	touch $@ $(VENV)/demo.stamp

$(VENV)/dev.stamp: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[dev]'
	touch $@ $(VENV)/demo.stamp

clean:
	rm -rf $(VENV)
