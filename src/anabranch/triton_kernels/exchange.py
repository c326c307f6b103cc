"""Pack: partials and the bits of their LSE to the layout of the all-to-all, in one pass.

Everything moves as 32-bit words, so that no dtype is converted: a row of `out` is W words, its
LSE one more. Floor: every byte of the partials read once and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anabranch.triton_kernels import Launch, next_power_of_2

ROW_TILE = 4  # rows of one program


@triton.jit
def pack(
    out, lse, packed, rows, tokens, heads, own_heads,
    WORDS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid `(ceil(rows / ROWS),)`. `out` `[rows, WORDS]`; `packed` `[N, T, H, WORDS + 1]`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    exists = row < rows
    token, head = row // heads, row % heads
    rank, own = head // own_heads, head % own_heads
    source = row.to(tl.int64) * WORDS
    target = ((rank * tokens + token) * own_heads + own).to(tl.int64) * (WORDS + 1)
    mask = exists[:, None] & (column < WORDS)
    words = tl.load(out + source[:, None] + column, mask=mask)
    tl.store(packed + target[:, None] + column, words, mask=mask)
    tl.store(packed + target + WORDS, tl.load(lse + row, mask=exists), mask=exists)


def can_pack(out: torch.Tensor, lse: torch.Tensor, packed: torch.Tensor) -> bool:
    """Whether rows are dense and whole words, as those of real models are."""
    dense = out.is_contiguous() and lse.is_contiguous() and packed.is_contiguous()
    return dense and out.shape[-1] * out.itemsize % 4 == 0


def row_tile(device: torch.device) -> int:
    """Rows of one program. Triton-Ascend 3.2 lowers no tile whose rows lie anywhere: one there."""
    return 1 if device.type == "npu" else ROW_TILE


def pack_launch(
    out: torch.Tensor, lse: torch.Tensor, packed: torch.Tensor, row_tile: int = ROW_TILE
) -> Launch:
    """`out` `[T, N*H, L]`, `lse` `[T, N*H]` FP32 to `packed` `[N, T, H, L + c]`."""
    tokens, heads = lse.shape
    words = out.shape[-1] * out.itemsize // 4
    return Launch(
        pack,
        (-(-tokens * heads // row_tile),),
        {
            "out": out.view(torch.int32), "lse": lse.view(torch.int32),
            "packed": packed.view(torch.int32), "rows": tokens * heads, "tokens": tokens,
            "heads": heads, "own_heads": packed.shape[2], "WORDS": words,
            "COLUMNS": next_power_of_2(words), "ROWS": row_tile,
        },
        ("packed",),
    )  # fmt: skip
