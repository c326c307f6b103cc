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


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid, arguments by name, warps and pipeline stages."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int = 4
    stages: int = 3

    def run(self) -> None:
        """Queue it on the current stream. An empty grid runs nothing."""
        if all(self.grid):
            options = {"num_warps": self.warps, "num_stages": self.stages}
            self.kernel[self.grid](**self.arguments, **options)


def serve(device: torch.device) -> bool:
    """Whether these kernels run on `device`."""
    return device.type == "cuda" and _installed()


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def next_power_of_2(size: int) -> int:
    """The least power of two that is at least `size` and 1."""
    return 1 << max(size - 1, 0).bit_length()
