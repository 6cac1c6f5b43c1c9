# A new user needs two commands: `make quickstart` and `make test`. Both set the environment up first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready-$(shell cksum pyproject.toml | cut -d' ' -f1)
SEED   ?= 1
GPU    := $(shell nvidia-smi -L 2>/dev/null | grep GPU)
BF16   := $(shell grep -m1 -o -w -e amx_bf16 -e avx512_bf16 /proc/cpuinfo 2>/dev/null)
WORKERS ?= $(if $(GPU),0,2)
# A GPU, and a CPU with instructions for bfloat16, multiply several times as fast in it; other CPUs not.
DTYPE  ?= $(if $(GPU)$(BF16),bfloat16,float32)
MERGE  := $(if $(filter float32,$(DTYPE)),true,false)
SUFFIX := $(if $(filter-out 1,$(SEED)),-seed-$(SEED))

# Several processes share the cores: an idle OpenMP thread must sleep, not spin (up to 8x in decoding).
export OMP_WAIT_POLICY := PASSIVE
export GOMP_SPINCOUNT := 0
# A run starts dozens of processes, and each would compile the package again where this is set.
export PYTHONDONTWRITEBYTECODE :=
export MLFLOW_DISABLE_TELEMETRY := true
export DO_NOT_TRACK := 1
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: setup quickstart real test test-fast test-jobs test-gpu test-clients chaos bench-fast lint clean

quickstart: setup  ## train a tiny agent from nothing; report in runs/quickstart/report.html
	$(BIN)/mempipe train jobs/configs/quickstart.yaml name=quickstart$(SUFFIX) seed=$(SEED) \
		$(if $(GPU),model.dtype=bfloat16) --resume-if-exists

real: setup  ## train a real language model on Wikipedia text: CORPUS=FILE for your own (docs/real_model.md)
	$(BIN)/mempipe train jobs/configs/smollm2_cloze_search.yaml name=smollm2_cloze$(SUFFIX) seed=$(SEED) \
		model.dtype=$(DTYPE) model.lora_merge=$(MERGE) $(if $(CORPUS),data.corpus=$(CORPUS)) --resume-if-exists

test: setup lint  ## test every promise and every real part on the devices of this machine
	$(BIN)/python -m pytest -n $(WORKERS) -m "not jobs"  # a test on a GPU needs it alone, so WORKERS is 0 there

test-fast: setup  ## run the tests without cluster, engine and training, seconds each
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not jobs" tests/unit tests/conformance

test-jobs: setup  ## run the long tests: real text, sweeps, a service under load, every agent, new examples; then `make chaos`
	$(BIN)/python -m pytest -m jobs
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not jobs" --hypothesis-profile=anew tests/unit tests/conformance
	$(MAKE) chaos

test-gpu: setup  ## run the GPU tests, smallest first: seconds, memory, MFU, canaries. MEMPIPE_REHEARSE=1: tiny, on CPUs
	$(BIN)/python -m pytest tests/gpu

test-clients: setup  ## call the service with other OpenAI clients, each the newest in its own environment (CLIENT=litellm: one)
	PYTHONPATH=.:tests/unit $(BIN)/python tests/clients/run.py $(CLIENT)

chaos: setup  ## kill every part of real runs, two tests at a time; HOURS=1 [SEED=7] [ONLY=23]: faults at random
ifdef HOURS
	PYTHONPATH=.:tests:tests/chaos $(BIN)/python tests/chaos/hour.py --hours $(HOURS) \
		$(if $(filter command line environment,$(origin SEED)),--seed $(SEED)) $(if $(ONLY),--only $(ONLY))
else
	$(BIN)/python -m pytest -s -n 2 --dist worksteal tests/chaos
endif

bench-fast: setup  ## measure every part beside its peer and the machine's limit, shortly (docs/performance.md)
	$(BIN)/python -m benchmarks.limits --fast

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/python tools/prose.py

setup: $(READY)

$(READY): pyproject.toml tools/setup.sh tools/models.txt
	PYTHON=$(PYTHON) VENV=$(VENV) bash tools/setup.sh
	touch $(READY)

clean:
	rm -rf $(VENV) .clients .pytest_cache .ruff_cache .hypothesis
