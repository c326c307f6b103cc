"""Cache write: this step's tokens to their slots, in one pass and without the host.

Rows of other ranks (slot -1) are skipped on the device, so that a graph may hold the launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anabranch.triton_kernels import Launch, dense_rows, next_power_of_2

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


def store_launch(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    slots: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    cache_scale: float,
) -> Launch:
    """`kv_c` `[T, L]`, `k_pe` `[T, R]` to the pages `latent`, `rope` `[num_blocks, block_size, .]`.

    Slots are not checked against the size of the cache.
    """
    tokens, rank = kv_c.shape
    width = k_pe.shape[1]
    kv_c, k_pe = dense_rows(kv_c), dense_rows(k_pe)
    return Launch(
        store,
        (tokens,),
        {
            "kv_c": kv_c, "k_pe": k_pe, "slots": slots, "latent": latent, "rope": rope,
            "kv_c_row": kv_c.stride(0), "k_pe_row": k_pe.stride(0),
            "latent_block": latent.stride(0), "latent_entry": latent.stride(1),
            "rope_block": rope.stride(0), "rope_entry": rope.stride(1),
            "cache_scale": cache_scale, "BLOCK_SIZE": latent.shape[1],
            "RANK": rank, "ROPE": width, "RANK_BLOCK": next_power_of_2(rank),
            "ROPE_BLOCK": next_power_of_2(width), "SCALED": latent.dtype == torch.float8_e4m3fn,
        },
        ("latent", "rope"),
        warps=1,
    )  # fmt: skip
