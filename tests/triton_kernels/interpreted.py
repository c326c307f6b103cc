"""Let CPU tensors be served by the Triton kernels, as CUDA tensors are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import anabranch.attention
import anabranch.step
from anabranch import triton_kernels
from anabranch.attention import cuda


@contextmanager
def on_triton(processors: int = 4) -> Iterator[None]:
    """Serve CPU tensors with Triton, as a chip with so many multiprocessors would."""
    chip = cuda.Chip((9, 0), processors)
    with ExitStack() as stack:
        for target, name, value in (
            (triton_kernels, "serve", lambda device, programs=1: True),
            (anabranch.attention, "provider_for", lambda device: cuda),
            (anabranch.step, "provider_for", lambda device: cuda),
            (cuda, "chip", lambda device: chip),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield
