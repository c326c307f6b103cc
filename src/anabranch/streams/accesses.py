"""What memory an operator reads and writes, to the byte.

An access is the storage of a tensor and the region of it that the tensor covers. Regions of
interleaved views of one buffer (`[..., :L]` and `[..., L:]`) are told apart exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import Any

import numpy as np
import torch

# Above this many runs two interleaved views are taken to overlap without a look at each run.
MOST_RUNS = 1 << 16

# Writes that do not depend on what was there before.
_OVERWRITES = ("copy_", "fill_", "zero_", "uniform_", "normal_", "random_", "bernoulli_")


@dataclass(frozen=True)
class Region:
    """Bytes of a storage: runs of `run` bytes, repeated by each `(count, stride)` of `outer`."""

    start: int
    run: int
    outer: tuple[tuple[int, int], ...]

    @property
    def stop(self) -> int:
        return self.start + self.run + sum((count - 1) * stride for count, stride in self.outer)

    def starts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Where each run starts, in rising order."""
        starts = np.array([self.start])
        for count, stride in self.outer:
            starts = (starts[:, None] + np.arange(count) * stride).ravel()
        return np.sort(starts)


def region(tensor: torch.Tensor) -> Region:
    """The bytes of its storage that `tensor` covers."""
    return _region(
        tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.element_size()
    )


@lru_cache(maxsize=8192)
def _region(offset: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Region:
    run = itemsize if prod(shape) else 0
    outer: list[tuple[int, int]] = []
    dims = [(stride * itemsize, size) for size, stride in zip(shape, strides, strict=True)]
    for stride, size in sorted(dims):
        if size == 1 or stride == 0:
            continue
        if not outer and stride <= run:
            run += (size - 1) * stride
        elif outer and stride == outer[-1][0] * outer[-1][1]:
            outer[-1] = (outer[-1][0] * size, outer[-1][1])
        else:
            outer.append((size, stride))
    return Region(offset * itemsize, run, tuple(outer))


@lru_cache(maxsize=65536)
def overlap(a: Region, b: Region) -> bool:
    """Whether two regions of one storage share a byte (assumed beyond `MOST_RUNS` runs)."""
    if not a.run or not b.run or a.stop <= b.start or b.stop <= a.start:
        return False
    if not a.outer and not b.outer:
        return True
    if _runs(a) > MOST_RUNS or _runs(b) > MOST_RUNS:
        return True
    first, second = a.starts(), b.starts()
    # The last run of `a` that starts before each run of `b` ends.
    last = np.searchsorted(first, second + b.run, side="left") - 1
    reached = last >= 0
    return bool(np.any(first[last[reached]] + a.run > second[reached]))


def _runs(region: Region) -> int:
    return prod(count for count, _ in region.outer)


@dataclass(slots=True)
class Access:
    """One tensor that an operator touches."""

    tensor: torch.Tensor
    reads: bool
    writes: bool


@cache
def is_view(func: Any) -> bool:
    """Whether the operator only makes another view of its input."""
    returns = func._schema.returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


@cache
def returns_arguments(func: Any) -> bool:
    """Whether the operator returns nothing but the tensors that it wrote to."""
    return all(r.alias_info is not None and r.alias_info.is_write for r in func._schema.returns)


@cache
def allocates_only(func: Any) -> bool:
    """Whether the operator returns memory without writing to it."""
    return operator_name(func).startswith(("empty", "new_empty"))


@cache
def operator_name(func: Any) -> str:
    """`mm` of `aten::mm.out`."""
    return str(func._schema.name.split("::")[1])


@cache
def is_collective(func: Any) -> bool:
    """Whether the operator is one of `torch.distributed`."""
    return bool(func._schema.name.startswith("c10d::"))


def accesses(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Access]:
    """What `func(*args, **kwargs)` reads and writes of the memory it is given.

    What it allocates is not included.
    """
    touched = []
    for index, (name, reads, writes) in enumerate(_arguments(func)):
        value = args[index] if index < len(args) else kwargs.get(name)
        for tensor in tensors_in(value):
            touched.append(Access(tensor, reads, writes))
    return touched


@cache
def _arguments(func: Any) -> tuple[tuple[str, bool, bool], ...]:
    """Name of each argument, and whether its memory is read and written."""
    name = operator_name(func)
    if is_view(func) or name.startswith(("new_", "empty")) or name.endswith("_like"):
        return ()  # nothing but the shape of its input matters
    plan = []
    for argument in func._schema.arguments:
        if is_collective(func):
            reads, writes = _collective(name, argument.name)
        elif func._schema.name.startswith("npu::") and argument.name in ("out", "workspace"):
            reads, writes = False, True  # torch_npu's schemas do not say so
        else:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            reads = not writes or not (argument.kwarg_only or name in _OVERWRITES)
        plan.append((argument.name, reads, writes))
    return tuple(plan)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an argument or a result, which may be nested in lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def _collective(packet: str, argument: str) -> tuple[bool, bool]:
    """Schemas of collectives do not say what is written; the names of their arguments do."""
    if argument.startswith("output") or packet.startswith("recv"):
        return False, True
    if argument.startswith("input") or packet in ("send", "barrier"):
        return True, False
    return True, True


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor, None for one without (sparse, meta) or with an empty one."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    storage = tensor.untyped_storage()
    return storage if storage.nbytes() else None
