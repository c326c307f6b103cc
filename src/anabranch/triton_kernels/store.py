"""Cache write: this step's tokens to their slots, in one pass and without the host.

Rows of other ranks (slot -1) are skipped on the device, so that a graph may hold the launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anabranch.triton_kernels import Launch, next_power_of_2

FP8_MAX = tl.constexpr(448.0)


@triton.jit
def store(
    kv_c, k_pe, slots, latent, rope,
    kv_c_row, k_pe_row, latent_block, latent_entry, rope_block, rope_entry, cache_scale,
    BLOCK_SIZE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    RANK_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Grid `(T,)`. SCALED: the cache holds FP8 and a value is stored divided by `cache_scale`."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= 0:
        block, entry = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        column = tl.arange(0, RANK_BLOCK)
        values = tl.load(kv_c + row * kv_c_row + column, mask=column < RANK)
        if SCALED:
            values = _saturated(values, cache_scale)
        to = latent + block * latent_block + entry * latent_entry
        tl.store(to + column, values.to(latent.dtype.element_ty), mask=column < RANK)
        if ROPE > 0:
            column = tl.arange(0, ROPE_BLOCK)
            values = tl.load(k_pe + row * k_pe_row + column, mask=column < ROPE)
            if SCALED:
                values = _saturated(values, cache_scale)
            to = rope + block * rope_block + entry * rope_entry
            tl.store(to + column, values.to(rope.dtype.element_ty), mask=column < ROPE)


@triton.jit
def _saturated(values, cache_scale):
    """FP32 `values / cache_scale` within the range of FP8; NaN stays."""
    scaled = values.to(tl.float32) / cache_scale
    bounded = tl.minimum(tl.maximum(scaled, -FP8_MAX), FP8_MAX)
    return tl.where(scaled == scaled, bounded, scaled)
