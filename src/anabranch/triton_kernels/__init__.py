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


def serve(device: torch.device) -> bool:
    """Whether these kernels run on `device`."""
    return device.type == "cuda" and _installed()


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, copied unless its last axis is dense."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def next_power_of_2(size: int) -> int:
    """The least power of two that is at least `size` and 1."""
    return 1 << max(size - 1, 0).bit_length()
