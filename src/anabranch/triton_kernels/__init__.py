"""Triton kernels: attention, pack, merge and the cache write. Needs the package `triton`.

A host function describes a launch as `Launch`; running it is a step of its own, so that the same
description can be compiled ahead of time, for a device that is not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from anabranch import streams

MOST_PROGRAMS_ON_NPU = 65535  # Triton-Ascend gives each a block of the device


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid, arguments by name, those it writes, warps and pipeline stages."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    writes: tuple[str, ...]
    warps: int = 4
    stages: int = 3

    def run(self) -> None:
        """Queue it on the current stream. An empty grid runs nothing."""
        if not all(self.grid):
            return
        tensors = {k: v for k, v in self.arguments.items() if isinstance(v, torch.Tensor)}
        options = {"num_warps": self.warps, "num_stages": self.stages}
        streams.launch(
            self.kernel.__name__,
            lambda: self.kernel[self.grid](**self.arguments, **options),
            reads=[tensor for name, tensor in tensors.items() if name not in self.writes],
            writes=[tensors[name] for name in self.writes],
        )


def serve(device: torch.device, programs: int = 1) -> bool:
    """Whether these kernels run on `device`, as many as `programs` of them in one launch.

    On an NPU pack, merge and the cache write do, where `triton` is Triton-Ascend.
    """
    if device.type == "npu":
        return programs <= MOST_PROGRAMS_ON_NPU and _installed("triton.backends.ascend")
    return device.type == "cuda" and _installed("triton")


@cache
def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that the module would be in
        return False


def dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, copied unless its last axis is dense."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def next_power_of_2(size: int) -> int:
    """The least power of two that is at least `size` and 1."""
    return 1 << max(size - 1, 0).bit_length()
