"""The NPU provider on the real torch_npu, without CANN and without an NPU: `make test-npu`.

Needs torch_npu, and stubs of CANN's libraries on the loader's path (`cann_stubs.py`). Without
torch_npu nothing here is collected.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

if find_spec("torch_npu") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def operators() -> Iterator[None]:
    """The operators of torch_npu, computed on CPU tensors within their documented limits."""
    import contract
    import torch_npu  # noqa: F401  registers the schemas and the Meta kernels

    torch.set_num_threads(1)
    library = contract.install()
    yield
    del library
