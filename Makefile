# Needs Python 3.11 or later with pip, nothing else: everything is installed into .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: demo test clean

demo: $(INSTALLED)
	$(BIN)/anabranch generate --model embedded --dcp 2 --prompt-file examples/ledger.txt
	$(BIN)/anabranch evaluate --model embedded --dcp 1,2 --problems 10

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

# Constraints pin what is tested; the stamp is renewed when a requirement changes.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv
