"""Let CPU tensors be served by the Triton kernels, as CUDA tensors are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

import anabranch.attention
import anabranch.step
import anabranch.vllm_plugin.decode
from anabranch import triton_kernels
from anabranch.attention import cuda

READ_BACK = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"}


@contextmanager
def on_triton(processors: int = 4) -> Iterator[None]:
    """Serve CPU tensors with Triton, as a chip with so many multiprocessors would."""
    chip = cuda.Chip((9, 0), processors)
    with ExitStack() as stack:
        for target, name, value in (
            (triton_kernels, "serve", lambda device, programs=1: True),
            (anabranch.attention, "provider_for", lambda device: cuda),
            (anabranch.step, "provider_for", lambda device: cuda),
            (anabranch.vllm_plugin.decode, "provider_for", lambda device: cuda),
            (cuda, "chip", lambda device: chip),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield


class NoReadBack(TorchDispatchMode):
    """Fails at an operator that makes the host wait for the device: no graph could hold it."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert function._schema.name not in READ_BACK, function
        return function(*args, **(kwargs or {}))
