# make help lists the targets. Variables, all optional:
#   PYTHON       interpreter that makes the virtual environment (3.10 or newer with venv and pip), default python3
#   TORCH_INDEX  package index for torch alone; https://download.pytorch.org/whl/cpu saves the CUDA libraries on Linux
#   PIP_ARGS     further arguments of every pip install
#   PYTEST_ARGS  further arguments of pytest
#   ARGS         further arguments of slime quickstart or tools/conformance/run.py

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | tr -s ' \t' '--')
SGLANG_VENV := .venv-sglang
SGLANG_FILES := $(wildcard tools/conformance/*.txt tools/conformance/sglang_cpu/* tools/conformance/sglang_cpu/sgl_kernel/*.py)
SGLANG_STAMP := $(SGLANG_VENV)/.installed-$(shell cat tools/conformance/requirements*.txt | cksum | tr -s ' \t' '--')

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-slow test-gpu conformance lint format docs size clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

install: $(STAMP)  ## make .venv and install the pinned versions (nothing happens when they are there)

quickstart: $(STAMP)  ## a whole GRPO run on this machine's CPU, in minutes
	$(BIN)/slime quickstart $(ARGS)

test: $(STAMP)  ## the tests that need no GPU, but for the slow ones
	$(BIN)/python -m pytest -q -m "not gpu and not slow" $(PYTEST_ARGS)

test-slow: $(STAMP)  ## the slow tests: kills, layouts of four ranks, more runs of train.py
	$(BIN)/python -m pytest -q -m "slow and not gpu" $(PYTEST_ARGS)

test-gpu: $(STAMP)  ## the tests that need one GPU, at most 8 minutes; they skip without one
	$(BIN)/python -m pytest -q -m gpu tests/gpu $(PYTEST_ARGS)

conformance: $(STAMP) $(SGLANG_STAMP)  ## the engine tests against a real SGLang on CPU (2 GB in .venv-sglang), and a GRPO job with it
	$(BIN)/python tools/conformance/run.py --sglang-python $(SGLANG_VENV)/bin/python $(ARGS)

lint: $(STAMP)  ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check_text.py

format: $(STAMP)  ## repair style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python tools/check_text.py --fix

docs: $(STAMP)  ## write the flag reference and the files shown in documents anew
	$(BIN)/python tools/gen_flag_docs.py
	$(BIN)/python tools/include_files.py

size: $(STAMP)  ## lines per package and the largest functions
	$(BIN)/python tools/size.py

clean:  ## remove the environment and caches; runs under outputs/ stay
	rm -rf $(VENV) $(SGLANG_VENV) build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "python 3.10 or newer is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1); set PYTHON=..." >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -c 'import pip, sys; sys.exit(int(pip.__version__.split(".")[0]) < 23)' || \
	  $(BIN)/python -m pip install $(PIP_ARGS) --upgrade "pip>=23"
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install $(PIP_ARGS) --index-url $(TORCH_INDEX) -c constraints.txt torch)
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e ".[dev]"
	@rm -f $(VENV)/.installed-*
	@touch $@

$(SGLANG_STAMP): $(SGLANG_FILES)
	@$(SGLANG_VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(SGLANG_VENV)
	$(if $(TORCH_INDEX),$(SGLANG_VENV)/bin/python -m pip install -q $(PIP_ARGS) --index-url $(TORCH_INDEX) torch==2.13.0)
	$(SGLANG_VENV)/bin/python -m pip install -q $(PIP_ARGS) -r tools/conformance/requirements.txt
	$(SGLANG_VENV)/bin/python -m pip install -q $(PIP_ARGS) --no-deps -r tools/conformance/requirements-nodeps.txt
	cp -r tools/conformance/sglang_cpu/. $$($(SGLANG_VENV)/bin/python -c 'import site; print(site.getsitepackages()[0])')/
	@rm -f $(SGLANG_VENV)/.installed-*
	@touch $@
