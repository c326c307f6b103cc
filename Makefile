# Needs Python 3.11 or later with pip, nothing else: everything is installed into .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/installed

TRITON := .venv-triton/bin

.PHONY: demo test test-triton clean

demo: $(INSTALLED)
	$(BIN)/anabranch generate --model embedded --dcp 2 --prompt-file examples/ledger.txt
	$(BIN)/anabranch evaluate --model embedded --dcp 1,2 --problems 10

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

# The Triton kernels without a GPU: interpreted, and compiled for GPUs that are not there.
test-triton: .venv-triton/installed
	$(TRITON)/pytest tests/triton_kernels

# Constraints pin what is tested; the stamp is renewed when a requirement changes.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

.venv-triton/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-triton
	$(TRITON)/python -m pip install --quiet -c constraints.txt torch numpy triton hypothesis pytest
	$(TRITON)/python -m pip install --quiet --no-deps -e .
	touch $@

clean:
	rm -rf .venv .venv-triton
