"""The Triton kernels without a GPU: in Triton's interpreter, on CPU tensors.

Needs the package `triton`; without it nothing here is collected. `make test-triton` runs these.

Two things of the interpreter are replaced here, because it computes them differently from any
device: it truncates to BF16 where devices round to nearest, and its products take the bits of
BF16 values for integers. Both then agree with PyTorch's own conversions. Two more are there in
Triton 3.9 and not in 3.6: the truth of `tl.condition`, without which a loop has no end, and the
number in an array of one, which NumPy 2.4 does not convert by itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
INSTALLED = find_spec("triton") is not None
if not INSTALLED:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def exact_interpreter() -> Iterator[None]:
    """The interpreter with the conversions and products of a device."""
    import triton.language as tl
    from triton.runtime import interpreter

    torch.set_num_threads(1)
    dtypes = {
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
    }

    def values(data: np.ndarray, dtype: Any) -> torch.Tensor:
        flat = torch.from_numpy(np.ascontiguousarray(data).reshape(-1).view(np.uint8).copy())
        return flat.view(dtypes[dtype]).view(data.shape)

    def convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        converted = values(data, source).to(dtypes[target]).contiguous()
        unsigned = np.dtype(f"uint{target.primitive_bitwidth}")
        return converted.view(-1).view(torch.uint8).numpy().view(unsigned).reshape(data.shape)

    def dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        product = values(a.data, a.dtype.scalar).float() @ values(b.data, b.dtype.scalar).float()
        return interpreter.TensorHandle(product.numpy() + d.data, d.dtype.scalar)

    patch_tensor = interpreter._patch_lang_tensor

    def as_in_3_9(tensor: Any, *scopes: Any) -> None:  # Triton-Ascend's 3.2 has none
        patch_tensor(tensor, *scopes)
        for scope in scopes:
            scope.set_attr(tl.condition, "__bool__", lambda self: bool(self.condition))
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with (
        mock.patch.object(interpreter, "_patch_lang_tensor", as_in_3_9),
        mock.patch.object(interpreter, "_convert_float", convert),
        mock.patch.object(interpreter.InterpreterBuilder, "create_dot", dot),
    ):
        yield
