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
        tl.store(to + column, _stored(values, latent.dtype.element_ty), mask=column < RANK)
        if ROPE > 0:
            column = tl.arange(0, ROPE_BLOCK)
            values = tl.load(k_pe + row * k_pe_row + column, mask=column < ROPE)
            if SCALED:
                values = _saturated(values, cache_scale)
            to = rope + block * rope_block + entry * rope_entry
            tl.store(to + column, _stored(values, rope.dtype.element_ty), mask=column < ROPE)


@triton.jit
def _saturated(values, cache_scale):
    """FP32 `values / cache_scale` within the range of FP8; NaN stays."""
    scaled = values.to(tl.float32) / cache_scale
    bounded = tl.minimum(tl.maximum(scaled, -FP8_MAX), FP8_MAX)
    return tl.where(scaled == scaled, bounded, scaled)


@triton.jit
def _stored(values, dtype: tl.constexpr):
    """`values` in the dtype of the cache.

    Bytes are FP8 e4m3, of which a value within range is rounded here, to the nearest and ties to
    even: to three bits of the mantissa, or to multiples of 2^-9. 2^-8 times that is an FP16 that
    has the bits of the FP8 in its own.
    """
    if dtype == tl.uint8:
        size = tl.abs(values)
        bits = size.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        large = bits.to(tl.float32, bitcast=True)
        small = (size + 16384.0) - 16384.0
        number = tl.where(size < 0.015625, small, large) * 0.00390625
        code = number.to(tl.float16).to(tl.int16, bitcast=True) >> 7
        sign = (values.to(tl.int32, bitcast=True) >> 24) & 0x80
        return (tl.where(values == values, code, 0x7F) | sign).to(tl.uint8)
    else:
        return values.to(dtype)


def store_launch(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    slots: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    cache_scale: float,
    *,
    has_fp8: bool | None = None,
) -> Launch:
    """`kv_c` `[T, L]`, `k_pe` `[T, R]` to the pages `latent`, `rope` `[num_blocks, block_size, .]`.

    Slots are not checked against the size of the cache. `has_fp8`: whether the target's compiler
    has the type; None: ask the device.
    """
    fp8 = latent.dtype == torch.float8_e4m3fn
    if has_fp8 is None:
        on_gpu = latent.device.type == "cuda"
        has_fp8 = not on_gpu or torch.cuda.get_device_capability(latent.device) >= (8, 9)
    if fp8 and not has_fp8:
        latent, rope = latent.view(torch.uint8), rope.view(torch.uint8)
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
            "ROPE_BLOCK": next_power_of_2(width), "SCALED": fp8,
        },
        ("latent", "rope"),
        warps=1,
    )  # fmt: skip
