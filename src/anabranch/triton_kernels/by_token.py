"""A step of several tokens a sequence as sequences of one token, for kernels that want those.

`spread` gives each token the length and the blocks of its sequence, `settle` brings a kernel's
results into the form of this project. Both find the sequence of a token from the lengths on the
device, so a captured launch stays right when they change.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anabranch.cache import DecodeBatch
from anabranch.triton_kernels import Launch, dense_rows, next_power_of_2
from anabranch.triton_kernels.attention import _lengths, _pick

COLUMNS = 1024  # blocks that one program copies
ROW_TILE = 8  # heads that one program settles


@triton.jit
def _sequence(query_lens, key_lens, token, batch, BATCH: tl.constexpr):
    """The sequence of a token and its keys; a padding row is of none, with 0."""
    index, queries, keys = _lengths(query_lens, key_lens, batch, BATCH)
    b = tl.sum((tl.cumsum(queries, 0) <= token).to(tl.int32), 0)
    return b, _pick(keys, index, b)


@triton.jit
def spread(
    query_lens, key_lens, table, tables, lengths,
    table_row, blocks, batch,
    BLOCK_SIZE: tl.constexpr, BATCH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid `(T, ceil(blocks / COLUMNS))`. Without keys: one, of block 0. No padding is read."""
    token = tl.program_id(0)
    b, count = _sequence(query_lens, key_lens, token, batch, BATCH)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    used = column < tl.cdiv(count, BLOCK_SIZE)
    ids = tl.load(table + b.to(tl.int64) * table_row + column, mask=used, other=0)
    tl.store(tables + token.to(tl.int64) * blocks + column, ids, mask=column < blocks)
    if tl.program_id(1) == 0:
        tl.store(lengths + token, tl.maximum(count, 1))


@triton.jit
def settle(
    given, logs, query_lens, key_lens, out, lse,
    batch, heads, unit,
    RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, ROWS: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """Grid `(T, ceil(heads / ROWS))`. `given` and `logs` may be `out` and `lse`.

    Rows without keys: output 0, LSE -inf. An LSE of +inf, with keys, is of a sum that is no
    number, and becomes NaN.
    """
    token = tl.program_id(0)
    _, count = _sequence(query_lens, key_lens, token, batch, BATCH)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, RANK_BLOCK)
    row = token.to(tl.int64) * heads + head
    cells = row[:, None] * RANK + column
    kept = (head < heads)[:, None] & (column < RANK)
    values = tl.load(given + cells, mask=kept, other=0.0)
    tl.store(out + cells, tl.where(count > 0, values, 0.0), mask=kept)
    natural = tl.load(logs + row, mask=head < heads, other=0.0) * unit
    natural = tl.where(natural == float("inf"), float("nan"), natural)
    tl.store(lse + row, tl.where(count > 0, natural, float("-inf")), mask=head < heads)


def spread_launch(
    batch: DecodeBatch, block_size: int, tables: torch.Tensor, lengths: torch.Tensor
) -> Launch:
    """To `tables` `[T, max_blocks]` and `lengths` `[T]` int32, both contiguous."""
    table, sequences = dense_rows(batch.block_table), batch.seq_lens.shape[0]
    tokens, blocks = tables.shape
    columns = min(COLUMNS, next_power_of_2(blocks))
    return Launch(
        spread,
        (tokens, max(1, -(-blocks // columns))),
        {
            "query_lens": batch.query_lens, "key_lens": batch.seq_lens, "table": table,
            "tables": tables, "lengths": lengths, "table_row": table.stride(0), "blocks": blocks,
            "batch": sequences, "BLOCK_SIZE": block_size, "BATCH": next_power_of_2(sequences),
            "COLUMNS": columns,
        },
        ("tables", "lengths"),
    )  # fmt: skip


def settle_launch(
    given: torch.Tensor,
    logs: torch.Tensor,
    batch: DecodeBatch,
    unit: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> Launch:
    """`given` `[T, heads, L]` and `logs` `[T, heads]`, times `unit`, to `out` and `lse`.

    All are contiguous.
    """
    tokens, heads, rank = out.shape
    sequences = batch.seq_lens.shape[0]
    return Launch(
        settle,
        (tokens, -(-heads // ROW_TILE)),
        {
            "given": given, "logs": logs, "query_lens": batch.query_lens,
            "key_lens": batch.seq_lens, "out": out, "lse": lse, "batch": sequences,
            "heads": heads, "unit": unit, "RANK": rank, "RANK_BLOCK": next_power_of_2(rank),
            "ROWS": ROW_TILE, "BATCH": next_power_of_2(sequences),
        },
        ("out", "lse"),
    )  # fmt: skip
