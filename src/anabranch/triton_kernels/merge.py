"""Merge by log-sum-exp: N received partials and the local pair, each read where it is, once.

A partial whose LSE is not finite has weight 0 and is not read. Floor: every payload and LSE
read once, one row and one LSE written.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from anabranch.triton_kernels import Launch, next_power_of_2


@triton.jit
def _finite(log):
    """`log`, or -inf in place of what marks a partial without keys: -inf, +inf and NaN."""
    return tl.where(tl.abs(log) < float("inf"), log, float("-inf"))


@triton.jit
def merge(
    outs, lses, local_out, local_lse, out, lse, rows,
    SHARDS: tl.constexpr, LOCAL: tl.constexpr, WIDTH: tl.constexpr,
    ROW: tl.constexpr, LSE_ROW: tl.constexpr, LOCAL_ROW: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid `(rows,)`. Row r of shard n is `outs + (n * rows + r) * ROW`, `lses` likewise."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    peak = -float("inf")
    for shard in tl.static_range(SHARDS):
        peak = tl.maximum(peak, _finite(tl.load(lses + (shard * rows + row) * LSE_ROW)))
    if LOCAL:
        peak = tl.maximum(peak, _finite(tl.load(local_lse + row)))
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = 0.0
    acc = tl.zeros([COLUMNS], tl.float32)
    for shard in tl.static_range(SHARDS):
        at = shard * rows + row
        weight = tl.exp(_finite(tl.load(lses + at * LSE_ROW)) - shift)
        width = tl.where(weight > 0, WIDTH, 0)  # a partial of no weight is not read
        payload = tl.load(outs + at * ROW + column, mask=column < width, other=0.0)
        acc += weight * payload.to(tl.float32)
        total += weight
    if LOCAL:
        weight = tl.exp(_finite(tl.load(local_lse + row)) - shift)
        width = tl.where(weight > 0, WIDTH, 0)
        payload = tl.load(local_out + row * LOCAL_ROW + column, mask=column < width, other=0.0)
        acc += weight * payload.to(tl.float32)
        total += weight
    acc = acc / tl.where(total == 0, 1.0, total)
    tl.store(out + row * WIDTH + column, acc, mask=column < WIDTH)
    tl.store(lse + row, tl.where(total == 0, float("-inf"), peak + tl.log(total)))


def merge_launch(
    outs: torch.Tensor,
    lses: torch.Tensor,
    local: tuple[torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> Launch:
    """`outs` `[N, T, H, D]`, `lses` `[N, T, H]`, local `[T, H, D]`, `[T, H]`; contiguous results.

    Rows that are not evenly spaced are copied first: those of the exchange are.
    """
    shards, tokens, heads, width = outs.shape
    (outs, row), (lses, lse_row) = _rows(outs, 3), _rows(lses, 3)
    local_out, local_lse = (outs[0], lses[0]) if local is None else local
    local_out, local_row = _rows(local_out, 2)
    return Launch(
        merge,
        (tokens * heads,),
        {
            "outs": outs, "lses": lses, "local_out": local_out,
            "local_lse": local_lse.contiguous(), "out": out, "lse": lse, "rows": tokens * heads,
            "SHARDS": shards, "LOCAL": local is not None, "WIDTH": width, "ROW": row,
            "LSE_ROW": lse_row, "LOCAL_ROW": local_row, "COLUMNS": next_power_of_2(width),
        },
        ("out", "lse"),
        warps=1 if width <= 512 else 4,
    )  # fmt: skip


def _rows(tensor: torch.Tensor, leading: int) -> tuple[torch.Tensor, int]:
    """`tensor` and the distance of its rows, which are all but its last axes after `leading`.

    Copied unless the rows are evenly spaced and dense.
    """
    axes = [axis for axis in range(leading) if tensor.shape[axis] != 1]
    row = tensor.stride(axes[-1]) if axes else math.prod(tensor.shape[leading:])
    expected, even = row, tensor.dim() == leading or tensor.stride(leading) == 1
    for axis in reversed(axes):
        even = even and tensor.stride(axis) == expected
        expected *= tensor.shape[axis]
    if even:
        return tensor, row
    return tensor.contiguous(), math.prod(tensor.shape[leading:])
