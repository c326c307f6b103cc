# Needs Python 3.11 or later with pip, nothing else: everything is installed into .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/installed

TRITON := .venv-triton/bin
TRITON_ASCEND := .venv-triton-ascend/bin
NPU := .venv-npu/bin
VLLM := .venv-vllm/bin
ENVIRONMENTS := $(INSTALLED) .venv-triton/installed .venv-triton-ascend/installed \
	.venv-npu/installed .venv-vllm/installed

# Modules are compiled when they are first imported: pip would compile all there are.
INSTALL := -m pip install --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-triton test-npu test-triton-ascend test-vllm environments clean

demo: $(INSTALLED)
	$(BIN)/anabranch generate --model embedded --dcp 2 --prompt-file examples/ledger.txt
	$(BIN)/anabranch evaluate --model embedded --dcp 1,2 --problems 10

# Two tests run at a time, on threads that sleep where they wait for each other.
test test-triton test-npu test-triton-ascend test-vllm: export OMP_WAIT_POLICY := PASSIVE

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist loadfile

# The Triton kernels without a GPU: interpreted, and compiled for GPUs that are not there.
test-triton: .venv-triton/installed
	$(TRITON)/pytest -n 2 --dist worksteal tests/triton_kernels

# The NPU provider without an NPU: on the real torch_npu, whose import wants a compiler and the
# stubs of CANN's libraries made here; and on the real Triton-Ascend.
test-npu: .venv-npu/installed
	LD_LIBRARY_PATH=$(CURDIR)/.venv-npu/cann-stubs TORCH_DEVICE_BACKEND_AUTOLOAD=0 \
		$(NPU)/pytest tests/npu

test-triton-ascend: .venv-triton-ascend/installed
	$(TRITON_ASCEND)/pytest tests/triton_kernels/test_pack_merge_store.py \
		tests/triton_kernels/test_ascend.py

# Each takes one core and waits for the network: `make -j environments`.
environments: $(ENVIRONMENTS)

# Constraints pin what is tested; the stamp is renewed when a requirement changes.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python $(INSTALL) -c constraints.txt -e '.[dev]'
	touch $@

.venv-triton/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-triton
	$(TRITON)/python $(INSTALL) -c constraints.txt torch numpy triton \
		hypothesis pytest pytest-xdist
	# To be read, not run: without a GPU it cannot be imported.
	$(TRITON)/python $(INSTALL) --no-deps flashinfer-python==0.7.4
	$(TRITON)/python $(INSTALL) --no-deps -e .
	touch $@

# Installing torch_npu changes a plain `import torch`; Triton-Ascend takes the name `triton`.
.venv-npu/installed: pyproject.toml constraints.txt tests/npu/cann_stubs.py
	$(PYTHON) -m venv .venv-npu
	$(NPU)/python $(INSTALL) -c constraints.txt torch torch_npu==2.13.0 numpy \
		hypothesis pytest rich typer
	$(NPU)/python $(INSTALL) --no-deps -e .
	$(NPU)/python tests/npu/cann_stubs.py .venv-npu/cann-stubs
	touch $@

.venv-triton-ascend/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-triton-ascend
	$(TRITON_ASCEND)/python $(INSTALL) -c constraints.txt torch numpy \
		triton-ascend==3.2.0 pybind11 hypothesis pytest
	$(TRITON_ASCEND)/python $(INSTALL) --no-deps -e .
	touch $@

# vLLM's requirements contradict those of the rest (it wants an older Transformers), so it has
# an environment of its own, where the package is installed without its dependencies.
test-vllm: .venv-vllm/installed
	$(VLLM)/pytest tests/vllm

.venv-vllm/installed: pyproject.toml constraints.txt tests/vllm/install.py
	$(PYTHON) -m venv .venv-vllm
	$(VLLM)/python $(INSTALL) torch==2.13.0 packaging
	$(VLLM)/python tests/vllm/install.py 0.32.0 0.30.0rc2
	$(VLLM)/python $(INSTALL) pytest hypothesis
	$(VLLM)/python $(INSTALL) --no-deps -e .
	touch $@

clean:
	rm -rf .venv .venv-triton .venv-triton-ascend .venv-npu .venv-vllm
