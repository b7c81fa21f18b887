# Everything a user or a contributor types. Each target makes what it needs.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(shell find src csrc -type f -not -name '*.pyc' -not -name '*.so')

.PHONY: serve test check exact bench dev clean

serve: $(VENV)/.installed ## Install, and serve the embedded demo model on http://127.0.0.1:8000
	$(BIN)/shardline serve

test: $(VENV)/.tested ## Install, and run the whole suite
	$(BIN)/python -m pytest

check: $(VENV)/.tested ## Lint, types, storeys
	$(PIP) install -c constraints.txt '.[check]'
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

exact: $(VENV)/.tested ## The full exactness matrix (long)
	$(BIN)/python -m pytest tests/exactness --full-matrix

bench: $(VENV)/.installed ## Throughput, latency and engine overhead on the demo model
	$(BIN)/shardline bench throughput
	$(BIN)/shardline bench latency

dev: $(VENV)/.tested ## Build the kernels into src/ for work without reinstalling (PYTHONPATH=src)
	$(PIP) install -c constraints.txt nanobind ninja
	cmake -S . -B build/dev -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE=$(abspath $(BIN))/python \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja
	cmake --build build/dev
	cmake --install build/dev --prefix src

clean:
	rm -rf build $(VENV)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python $(SOURCES)
	@command -v c++ >/dev/null || { echo "Shardline needs a C++ compiler: install g++ or clang++, or set CXX" >&2; exit 1; }
	$(PIP) install -c constraints.txt .
	touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(PIP) install -c constraints.txt '.[test]'
	touch $@
