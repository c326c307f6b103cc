"""V-up: the projection of merged latents to V, batch-major in and out.

`[T, H, L] x [H, L, V] -> [T, H*V]` is a product batched over heads, while both operands that
the layer sees are batched over tokens. A strided batched product reads and writes them where
they are; the classic form moves both in memory (transpose, product, transpose).
"""

from __future__ import annotations

from functools import cache

import torch


def v_up(x: torch.Tensor, w_uv: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Project `x` `[T, H, L]` with `w_uv` `[H, L, V]` to `[T, H*V]`, moving neither in memory.

    `w_uv` may have any strides. `out`, `[T, H*V]` contiguous, receives the result.
    Raises ValueError, naming the argument, when the shapes do not fit together.
    """
    _check(x, w_uv)
    tokens, heads, width = *x.shape[:2], w_uv.shape[2]
    if out is None:
        out = x.new_empty(tokens, heads * width)
    _product(x.transpose(0, 1), w_uv, out.view(tokens, heads, width).transpose(0, 1))
    return out


def v_up_transposed(
    x: torch.Tensor, w_uv: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The form before the change, which moves the operand and then the result. Same bits as `v_up`.

    Both passes over memory are made. The result is moved from a buffer that has the strides of
    `v_up`'s output, since a BLAS rounds by the stride it writes with.
    """
    _check(x, w_uv)
    tokens, heads, width = *x.shape[:2], w_uv.shape[2]
    if out is None:
        out = x.new_empty(tokens, heads * width)
    moved = x.transpose(0, 1).contiguous()
    product = torch.empty_like(out)
    _product(moved, w_uv, product.view(tokens, heads, width).transpose(0, 1))
    out.copy_(product)
    return out


def _check(x: torch.Tensor, w_uv: torch.Tensor) -> None:
    if x.dim() != 3 or w_uv.dim() != 3 or x.shape[1:] != w_uv.shape[:2]:
        raise ValueError(
            f"x and w_uv must be [T, H, L] and [H, L, V], "
            f"got {list(x.shape)} and {list(w_uv.shape)}"
        )


def _product(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    """`out[h] = x[h] @ w[h]`; all three may be strided.

    A CPU without units for the dtype multiplies it a hundred times slower than FP32, so there
    the product runs in FP32, one head at a time to bound the converted copy of the weight.
    """
    if x.device.type == "cpu" and not _cpu_multiplies(x.dtype):
        for x_head, w_head, out_head in zip(x, w, out, strict=True):
            out_head.copy_(x_head.float() @ w_head.float())
    else:
        torch.bmm(x, w, out=out)


@cache
def _cpu_multiplies(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True
