# Everything a user or a contributor types. Each target makes what it needs.
VENV ?= .venv
RAY_VENV ?= $(HOME)/.cache/shardline-ray
PYTHON ?= python3
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
CLIENTS := build/clients-venv
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(shell find src csrc -type f -not -name '*.pyc' -not -name '*.so')

.PHONY: serve test check exact chaos fuzz ray clients claims bench dev clean compiler

serve: $(VENV)/.installed ## Install, and serve the embedded demo model on http://127.0.0.1:8000
	$(BIN)/shardline serve

test: $(VENV)/.tested ## Install, and run the whole suite
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: $(VENV)/.tested ## Lint, types, storeys
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

clients: $(VENV)/.tested $(CLIENTS)/.installed ## Real clients, in an environment of their own, against a real server
	SHARDLINE_PYTHON=$(abspath $(BIN))/python $(CLIENTS)/bin/python -m pytest -c tests/clients/pytest.ini --rootdir=. tests/clients

exact: $(VENV)/.tested ## The full exactness matrix: hours; ONLY="llama and bfloat16" takes a part of it
	$(BIN)/python -m pytest tests/exactness --full-matrix -k "$(ONLY)"

chaos: $(VENV)/.tested ## Every fault, FAULTS=1000 at random, PAIRS=120, on two hosts (root); disconnects; a soak: SEED=0 SOAK=600
	$(BIN)/python -m tests.faults.chaos --product --faults $(or $(FAULTS),1000) --seed $(or $(SEED),0)
	$(BIN)/python -m tests.faults.chaos --faults 20 --only kill --layout "-pp 2" --seed $(or $(SEED),0)
	$(BIN)/python -m tests.faults.chaos_pairs --pairs $(or $(PAIRS),120) --seed $(or $(SEED),0)
	SHARDLINE_DISCONNECTS=1000 $(BIN)/python -m pytest --timeout=0 tests/faults/test_disconnects.py
	$(BIN)/python -m tests.faults.soak --seconds $(or $(SOAK),600)

fuzz: $(VENV)/.tested ## Hostile requests and model folders: CASES=10000 SEED=0; random frames on every listener: FRAMES=1000000
	$(BIN)/python -m tests.hostile.run --cases $(or $(CASES),10000) --seed $(or $(SEED),0)
	$(BIN)/python -m tests.hostile.library --cases $$(( $(or $(CASES),10000) / 10 )) --seed $(or $(SEED),0)
	$(BIN)/python -m tests.faults.fuzz --frames $(or $(FRAMES),1000000)

ray: compiler ## Servers on real Ray clusters (needs root), in an environment of their own: RAY_VENV
	test -x $(RAY_VENV)/bin/python || $(PYTHON) -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/python -m pip --disable-pip-version-check -q install -c constraints.txt '.[test,ray]'
	$(RAY_VENV)/bin/python -m pytest --timeout=0 tests/faults/real_ray.py

claims: $(VENV)/.tested ## Write docs/claims.md and docs/planner-validation.md
	$(BIN)/python -m scripts.claims
	$(BIN)/python -m scripts.published page

bench: $(VENV)/.installed ## Throughput, latency and engine overhead on the demo model
	$(BIN)/shardline bench throughput
	$(BIN)/shardline bench latency

dev: $(VENV)/.tested ## Build the kernels into src/, for work without reinstalling (PYTHONPATH=src)
	$(PIP) install -c constraints.txt nanobind ninja
	cmake -S . -B build/dev -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DPython_EXECUTABLE=$(abspath $(BIN))/python
	cmake --build build/dev

# The list is complete, so pip need not resolve anything. No client needs torch.
$(CLIENTS)/.installed: tests/clients/requirements.txt
	rm -rf $(CLIENTS)
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check install --no-deps --progress-bar off -r $<
	touch $@

clean:
	rm -rf build $(VENV)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

compiler:
	@command -v $${CXX:-c++} >/dev/null || { echo "Shardline needs a C++ compiler: install g++ or clang++, or set CXX" >&2; exit 1; }

$(VENV)/.installed: $(VENV)/bin/python $(SOURCES) | compiler
	$(PIP) install -c constraints.txt .
	touch $@

$(VENV)/.tested: $(VENV)/bin/python $(SOURCES) | compiler
	$(PIP) install -c constraints.txt '.[test,check]'
	touch $(VENV)/.installed $@
