# Needs Python 3.11 or later with pip, nothing else: everything is installed into .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/installed

VLLM_BIN := .venv-vllm/bin
VLLM_INSTALLED := .venv-vllm/installed

.PHONY: demo test test-vllm clean

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

# vLLM's requirements contradict those of the rest (it wants an older Transformers), so it has
# an environment of its own, where the package is installed without its dependencies.
test-vllm: $(VLLM_INSTALLED)
	$(VLLM_BIN)/pytest tests/vllm

$(VLLM_INSTALLED): pyproject.toml constraints.txt tests/vllm/install.py
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python -m pip install --quiet torch==2.13.0 packaging
	$(VLLM_BIN)/python tests/vllm/install.py 0.32.0
	$(VLLM_BIN)/python -m pip install --quiet pytest hypothesis
	$(VLLM_BIN)/python -m pip install --quiet --no-deps -e .
	touch $@

clean:
	rm -rf .venv .venv-vllm
