"""Partial attention on CPU: two matrix products and an online softmax per tile of keys.

All query rows (token, head) of one sequence share its keys, so one tile of gathered keys serves
them all: `scores = Q K^T`, a running maximum, `acc = acc * decay + P K[:, :L]` (the online
softmax of Milakov and Gimelshein, arXiv 1805.02867, as in FlashAttention). The loop is the
compiled one of `anabranch.native`, which cuts rows times keys into one equal share per thread;
`cpu_fallback` has the same loop in PyTorch, for machines without a compiler. Of few rows, the heads
of one rank, the products are the kernels' own, those of many rows the BLAS's.

Floor of one decode step: `2 * heads * (2 L + R)` FLOPs and `(L + R) * itemsize` bytes a key.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

# The name in `torch` may be another's: vLLM's workers put one there that does nothing.
from torch._C import set_num_threads

from anabranch import native
from anabranch.attention import cpu_fallback
from anabranch.cache import DecodeBatch, LatentCache
from anabranch.geometry import MLADims
from anabranch.streams import launch

KEY_TILE = 512  # keys per product
ROW_TILE = 512  # query rows per product, or all heads of a token if they are more


def history(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cache: LatentCache,
    batch: DecodeBatch,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor | None,
) -> None:
    library = native.library()
    if library is None:
        cpu_fallback.history(q_nope, q_pe, cache, batch, scale, out, lse, workspace)
        return
    table = batch.block_table

    def check(lost: int) -> None:
        if lost:
            b = lost - 1
            raise ValueError(
                f"batch.block_table[{b}] must name blocks in [0, {cache.num_blocks}) for all "
                f"{int(batch.seq_lens[b])} tokens, got {table[b].tolist()}"
            )

    _attend(
        library, q_nope, q_pe, cache.latent, cache.rope, batch, scale, out, lse, workspace,
        table=table.data_ptr(), table_row=table.stride(0), num_blocks=cache.num_blocks,
        block_size=cache.block_size, cache_scale=cache.scale,
        latent_block=cache.latent.stride(0), latent_entry=cache.latent.stride(1),
        rope_block=cache.rope.stride(0), rope_entry=cache.rope.stride(1), check=check,
    )  # fmt: skip


def current(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    batch: DecodeBatch,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor | None,
) -> None:
    library = native.library()
    if library is None:
        with _one_thread():
            cpu_fallback.current(q_nope, q_pe, kv_c, k_pe, batch, scale, out, lse, workspace)
        return
    _attend(
        library, q_nope, q_pe, kv_c, k_pe, batch, scale, out, lse, workspace,
        latent_entry=kv_c.stride(0), rope_entry=k_pe.stride(0), cache_scale=1.0,
    )  # fmt: skip


def workspace_bytes(
    num_heads: int,
    dims: MLADims,
    cache: LatentCache | None = None,
    batch: DecodeBatch | None = None,
) -> int:
    """Scratch that `history` and `current` need for up to `num_heads` heads, in bytes."""
    library = native.library()
    if library is None:
        return cpu_fallback.workspace_bytes(num_heads, dims)
    rows, threads = max(ROW_TILE, num_heads), torch.get_num_threads()
    return int(
        library.kernels.anabranch_workspace_bytes(
            rows, dims.kv_lora_rank, dims.latent_width, KEY_TILE, threads
        )
    )


def _attend(
    library: native.Library,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    batch: DecodeBatch,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor | None,
    check: Callable[[int], None] | None = None,
    **layout: float,
) -> None:
    """Run the kernel; `check` is given 1 + the sequence whose block table leads outside, or 0."""
    if q_nope.dtype == torch.float64:
        raise ValueError("q_nope must be float32, bfloat16 or float16, got torch.float64")
    tokens, heads, rank = q_nope.shape
    width, rows, threads = rank + q_pe.shape[2], max(ROW_TILE, heads), torch.get_num_threads()
    needed = library.kernels.anabranch_workspace_bytes(rows, rank, width, KEY_TILE, threads)
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.uint8)
    elif workspace.numel() < needed:
        raise ValueError(f"workspace must hold {needed} bytes, got {workspace.numel()}")
    q_nope, q_pe, latent, rope = map(_dense_rows, (q_nope, q_pe, latent, rope))
    bf16 = q_nope.dtype == latent.dtype == torch.bfloat16
    task = native.Attention(
        q_nope=q_nope.data_ptr(), q_pe=q_pe.data_ptr(),
        q_nope_token=q_nope.stride(0), q_nope_head=q_nope.stride(1),
        q_pe_token=q_pe.stride(0), q_pe_head=q_pe.stride(1),
        latent=latent.data_ptr(), rope=rope.data_ptr(),
        key_lens=batch.seq_lens.data_ptr(), query_lens=batch.query_lens.data_ptr(),
        out=out.data_ptr(), lse=lse.data_ptr(),
        batch=batch.seq_lens.shape[0], tokens=tokens, heads=heads, rank=rank,
        rope_width=q_pe.shape[2], row_tile=rows, key_tile=KEY_TILE, scale=scale,
        dtype=native.DTYPES[q_nope.dtype], cache_dtype=native.DTYPES[latent.dtype],
        workspace=workspace.data_ptr(), sgemm=library.sgemm,
        bf16gemm=library.bf16gemm if bf16 else 0, limit=library.limit, **layout,
    )  # fmt: skip

    def kernel() -> int:
        task.shares = min(threads, torch.get_num_threads())  # one where a side stream repeats it
        return int(library.kernels.anabranch_attention(ctypes.byref(task)))

    launch(
        "anabranch_attention",
        kernel,
        reads=(q_nope, q_pe, latent, rope, batch.block_table, batch.seq_lens, batch.query_lens),
        writes=(out, lse, workspace),
        check=check,
    )


def _dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run with one intra-op thread, as a side stream does.

    The bits of a BLAS product depend on the number of threads, and current attention must not
    depend on the stream that a schedule gives it to. The compiled loop sees to that itself.
    """
    threads = torch.get_num_threads()
    set_num_threads(1)
    try:
        yield
    finally:
        set_num_threads(threads)
