# Everything runs in a virtual environment: the active one, or .venv here, made on first use.
PYTHON ?= python3
VENV := $(or $(VIRTUAL_ENV),$(CURDIR)/.venv)
BIN := $(VENV)/bin
SOURCES := service replay planner engine_patch
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo lab test check lint types imports spelling generated unit e2e claims engine engine-env engine-try engine-versions fuzz bench generate clean

help: ## this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed-demo ## the whole fleet on this machine, a real trace, two policies, a verdict (ARGS="--engines 4")
	$(BIN)/cacheroute demo $(ARGS)

lab: $(VENV)/.installed-demo ## the same fleet left running, for trying by hand
	$(BIN)/cacheroute lab $(ARGS)

test: check claims engine e2e ## everything that CI runs: `make check`, the claims, the engine patch in real vLLMs, end to end on real Envoys

check: $(VENV)/.installed-dev lint types imports spelling generated unit ## lint, types, import contracts, generated code, unit and contract tests

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

imports: $(VENV)/.installed-dev
	$(BIN)/lint-imports --no-cache

spelling: $(VENV)/.installed-dev
	$(BIN)/codespell $(SOURCES) tests proto docs README.md ARCHITECTURE.md CHANGELOG.md Makefile

generated: $(VENV)/.installed-dev
	@rm -rf build/pb && mkdir -p build/pb
	@$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=build/pb --pyi_out=build/pb proto/*.proto
	@for f in build/pb/*; do cmp $$f service/pb/$$(basename $$f) || { echo "service/pb is stale: run 'make generate'"; exit 1; }; done
	@echo "service/pb is up to date"

unit: $(VENV)/.installed-dev
	$(BIN)/python -m tests.parallel_runs 3 tests/unit tests/contract -- $(ARGS)

e2e: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/e2e $(ARGS)

bench: $(VENV)/.installed-dev ## all benchmarks, min / median / max (minutes; results of record in docs/performance.md)
	@for f in tests/bench/bench_*.py; do echo "== $$f"; $(BIN)/python $$f || exit 1; done

claims: $(VENV)/.installed-dev ## figures that the docs state, as ranges over seeds (minutes)
	$(BIN)/python -m pytest tests/claims $(ARGS)

engine: $(VENV)/.installed-dev ## the engine patch inside real vLLMs: 0.32 all of it, 0.27 and 0.30 (ARGS="-k switch"; VERSIONS="0.32.0")
	$(BIN)/python -m tests.engine.environment $(if $(VERSIONS),--versions "$(VERSIONS)") test $(ARGS)

engine-env: $(VENV)/.installed-dev ## installs those vLLMs and no more (minutes and 4.5 GB, once, into ~/.cache/cacheroute/vllm)
	$(BIN)/python -m tests.engine.environment $(if $(VERSIONS),--versions "$(VERSIONS)") install

engine-try: $(VENV)/.installed-dev ## a real vLLM with a tiny random model and the patch on this machine's CPU, until Ctrl-C
	$(BIN)/python -m tests.engine.environment serve

engine-versions: $(VENV)/.installed-dev ## the engine patch on each vLLM from 0.27 to 0.32
	$(BIN)/python -m tests.engine.environment --versions all test $(ARGS)

fuzz: $(VENV)/.installed-dev ## a million mutated messages against the external processor (two minutes; ARGS="--messages 50000")
	$(BIN)/python -m tests.fuzz.fuzz_process $(ARGS)

generate: $(VENV)/.installed-dev ## service/pb from proto/
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=service/pb --pyi_out=service/pb proto/*.proto

clean: ## remove what was built, the virtual environment included
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  $(PYTHON) -m pip install -q --target build/virtualenv virtualenv && \
	  PYTHONPATH=build/virtualenv $(PYTHON) -m virtualenv -q $(VENV); }

$(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[$*]'
	@touch $@
