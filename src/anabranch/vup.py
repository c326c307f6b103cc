"""V-up: the projection of merged latents to V, batch-major in and out.

`[T, H, L] x [H, L, V] -> [T, H*V]` is a product batched over heads, while both operands that
the layer sees are batched over tokens. A strided batched product reads and writes them where
they are; the classic form moves both in memory (transpose, product, transpose).
"""

from __future__ import annotations

import torch

from anabranch import native
from anabranch.streams import launch

SHARE_FLOPS = 10_000_000  # what is worth another thread
# Limits of npu_transpose_batchmatmul: the batch times K where it transposes, and the multiple
# that K and N must be of. Both are in torch_npu's own fusion pass for it.
NPU_MOST = 65536
NPU_ALIGNMENT = 128


def v_up(
    x: torch.Tensor,
    w_uv: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Project `x` `[T, H, L]` with `w_uv` `[H, L, V]` to `[T, H*V]`, moving neither in memory.

    `w_uv` may have any strides. `out`, `[T, H*V]` contiguous, receives the result. `workspace`
    is uint8 scratch of `workspace_bytes`, allocated without.
    Raises ValueError, naming the argument, when the shapes do not fit together.
    """
    _check(x, w_uv)
    tokens, heads, width = *x.shape[:2], w_uv.shape[2]
    if _kind(x.device) == "npu" and _can_fuse_on_npu(x, w_uv):
        fused = torch.ops.npu.npu_transpose_batchmatmul(
            x, w_uv, perm_x1=(1, 0, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
        ).flatten(1)
        return fused if out is None else out.copy_(fused)
    if out is None:
        out = x.new_empty(tokens, heads * width)
    _product(x.transpose(0, 1), w_uv, out.view(tokens, heads, width).transpose(0, 1), workspace)
    return out


def v_up_transposed(
    x: torch.Tensor,
    w_uv: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """The form before the change, which moves the operand and then the result. Same bits, except
    where an NPU's fused operator serves `v_up`: equal within rounding.
    """
    _check(x, w_uv)
    tokens, heads, width = *x.shape[:2], w_uv.shape[2]
    if out is None:
        out = x.new_empty(tokens, heads * width)
    moved = x.transpose(0, 1).contiguous()
    product = x.new_empty(heads, tokens, width)
    _product(moved, w_uv, product, workspace)
    out.view(tokens, heads, width).copy_(product.transpose(0, 1))
    return out


def within_npu_limit(num_heads: int, kv_lora_rank: int) -> bool:
    """Whether `npu_transpose_batchmatmul` takes a product batched over `num_heads`."""
    return 1 <= num_heads * kv_lora_rank < NPU_MOST


def _can_fuse_on_npu(x: torch.Tensor, w_uv: torch.Tensor) -> bool:
    heads, rank, width = w_uv.shape
    aligned = rank % NPU_ALIGNMENT == 0 and width % NPU_ALIGNMENT == 0
    dense = x.is_contiguous() and w_uv.is_contiguous()
    return within_npu_limit(heads, rank) and aligned and dense and x.shape[0] > 0


def _kind(device: torch.device) -> str:
    return device.type


def workspace_bytes(kv_lora_rank: int, v_head_dim: int, device: torch.device | str = "cpu") -> int:
    """Scratch of one `v_up` on `device`, in bytes, whatever the tokens and heads."""
    library = native.library() if torch.device(device).type == "cpu" else None
    if library is None:
        return 0
    threads = torch.get_num_threads()
    return int(library.kernels.anabranch_v_up_bytes(kv_lora_rank, v_head_dim, threads))


def _check(x: torch.Tensor, w_uv: torch.Tensor) -> None:
    if x.dim() != 3 or w_uv.dim() != 3 or x.shape[1:] != w_uv.shape[:2]:
        raise ValueError(
            f"x and w_uv must be [T, H, L] and [H, L, V], "
            f"got {list(x.shape)} and {list(w_uv.shape)}"
        )


def _product(
    x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None
) -> None:
    """`out[h] = x[h] @ w[h]`; all three may be strided."""
    if _kind(x.device) != "cpu":
        # cuBLAS takes any strides of rows and of the batch where columns are dense: no copies.
        torch.bmm(x, w, out=out)
        return
    library = native.library()
    dense = all(tensor.stride(2) == 1 for tensor in (x, w, out))
    if library is not None and dense and x.dtype in native.DTYPES:
        heads, tokens, rank = x.shape
        width, threads = w.shape[2], torch.get_num_threads()
        needed = workspace_bytes(rank, width)
        if workspace is None:
            workspace = torch.empty(needed, dtype=torch.uint8)
        elif workspace.numel() < needed:
            raise ValueError(f"workspace must hold {needed} bytes, got {workspace.numel()}")
        arguments = (
            x.data_ptr(), x.stride(1), x.stride(0), w.data_ptr(), w.stride(0), w.stride(1),
            out.data_ptr(), out.stride(1), out.stride(0), tokens, heads, rank, width,
            native.DTYPES[x.dtype], workspace.data_ptr(), library.sgemm, library.limit,
        )  # fmt: skip
        shares = min(threads, heads, 1 + 2 * x.numel() * width // SHARE_FLOPS)
        launch(
            "anabranch_v_up",
            lambda: native.in_shares(
                lambda share: library.kernels.anabranch_v_up(*arguments, share, shares), shares
            ),
            reads=(x, w),
            writes=(out, workspace),
        )
    else:  # one head at a time bounds the copies, and each product has the same strides
        exact = x.dtype if x.dtype == torch.float64 else torch.float32
        for x_head, w_head, out_head in zip(x, w, out, strict=True):
            out_head.copy_(x_head.to(exact).contiguous() @ w_head.to(exact))
