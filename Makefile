# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Both need only Python 3.11 or newer (choose it with PYTHON=python3.12) and a package index.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all test-accelerators accelerators lint docs figures clean

# Train a small network on digits with six methods; table and plot in about a minute.
demo: $(VENV)/experiments.done
	$(BIN)/python -m experiments compare

# Format, types, doctests, the quick tests, a sample of the variants of long ones (docs/development/checks.md).
test: $(VENV)/dev.done lint
	$(BIN)/python -m pytest -n $(or $(WORKERS),2)

# The same with the tests marked slow and all variants: experiments of single papers, every row; compiled as users do.
test-all: $(VENV)/dev.done lint
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest -n $(or $(WORKERS),2) -m ""

# What the compilers of GPUs and TPUs make of every method, on a machine that has neither; an environment of its own.
test-accelerators:
	$(MAKE) VENV=$(VENV)-accelerators accelerators

accelerators: $(VENV)/accelerators.done
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n $(or $(WORKERS),2) --dist=loadgroup tests/accelerators

lint: $(VENV)/dev.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --level error

# The documentation, into docs/_build/html. Warnings are errors.
docs: $(VENV)/docs.done
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

# Tables and pictures of docs/results that take under an hour, made anew; DATA=FOLDER for those that need data.
figures: $(VENV)/experiments.done
	$(BIN)/python -m experiments figures --all $(if $(DATA),--data $(DATA))

$(VENV)/python.done:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "jaxcomp needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@touch $@

$(VENV)/%.done: $(VENV)/python.done pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[$*]'
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-accelerators runs build dist docs/_build docs/notebooks .pytest_cache .ruff_cache .hypothesis
