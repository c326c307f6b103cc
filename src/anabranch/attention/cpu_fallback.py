"""The loop of `anabranch.attention.cpu` in PyTorch, for a CPU without a C compiler.

Scratch is bounded by the two tile constants whatever the context. Products and sums run in
FP32; a 16-bit tile is converted once and serves every row of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from anabranch.cache import DecodeBatch, LatentCache
from anabranch.geometry import MLADims

KEY_TILE = 1024  # keys per product
ROW_TILE = 1024  # query rows per product: bounds the scratch of a prefill chunk

# Puts keys [start, stop) of one sequence into an FP32 tile [stop - start, L + R].
LoadKeys = Callable[[int, int, torch.Tensor], None]


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
    scratch = _Scratch(q_nope, q_pe, workspace)
    rank, size = q_nope.shape[2], cache.block_size
    first = 0
    for b, (length, queries) in enumerate(batch.host_lens()):
        table = batch.block_table[b]

        def load(start: int, stop: int, tile: torch.Tensor, table: torch.Tensor = table) -> None:
            head = start // size  # a tile may begin inside a block: gather whole blocks, then cut
            pages = table[head : -(-stop // size)].long()
            cut = slice(start - head * size, stop - head * size)
            tile[:, :rank] = cache.latent[pages].flatten(0, 1)[cut]
            tile[:, rank:] = cache.rope[pages].flatten(0, 1)[cut]
            tile *= cache.scale

        rows = slice(first, first := first + queries)
        _attend(scratch, q_nope, q_pe, rows, load, length, False, scale, out, lse)
    _empty(out[first:], lse[first:])


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
    scratch = _Scratch(q_nope, q_pe, workspace)
    rank = q_nope.shape[2]
    first = 0
    for _, queries in batch.host_lens():

        def load(start: int, stop: int, tile: torch.Tensor, first: int = first) -> None:
            tile[:, :rank] = kv_c[first + start : first + stop]
            tile[:, rank:] = k_pe[first + start : first + stop]

        rows = slice(first, first := first + queries)
        _attend(scratch, q_nope, q_pe, rows, load, queries, True, scale, out, lse)
    _empty(out[first:], lse[first:])


def workspace_bytes(
    num_heads: int,
    dims: MLADims,
    cache: LatentCache | None = None,
    batch: DecodeBatch | None = None,
) -> int:
    """Scratch that `history` and `current` need for `num_heads` heads, in bytes."""
    return 4 * sum(_Scratch.sizes(num_heads, dims.kv_lora_rank, dims.latent_width))


class _Scratch:
    """FP32 tiles of one call, laid out in the workspace, or in fresh memory without one."""

    def __init__(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, workspace: torch.Tensor | None
    ) -> None:
        heads, rank = q_nope.shape[1:]
        width = rank + q_pe.shape[2]
        sizes = self.sizes(heads, rank, width)
        if workspace is None:
            flat = torch.empty(sum(sizes), dtype=torch.float32)
        elif workspace.numel() < 4 * sum(sizes):
            raise ValueError(f"workspace must hold {4 * sum(sizes)} bytes, got {workspace.numel()}")
        else:
            flat = workspace[: 4 * sum(sizes)].view(torch.float32)
        queries, keys, self.scores, acc = torch.split(flat, list(sizes))
        self.tokens = _rows(heads) // heads
        self.queries = queries[: self.tokens * heads * width].view(self.tokens, heads, width)
        self.keys, self.acc = keys.view(KEY_TILE, width), acc.view(_rows(heads), rank)

    @staticmethod
    def sizes(heads: int, rank: int, width: int) -> tuple[int, int, int, int]:
        """Elements of the query rows, the key tile, the scores and the accumulator."""
        rows = _rows(heads)
        return rows * width, KEY_TILE * width, rows * KEY_TILE, rows * rank


def _rows(heads: int) -> int:
    """Rows of the tiles: never fewer for more heads, so scratch for all serves some as well."""
    return max(ROW_TILE, heads)


def _attend(
    scratch: _Scratch,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    rows: slice,
    load: LoadKeys,
    num_keys: int,
    causal: bool,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Token rows `rows` of one sequence against its `num_keys` keys, a tile at a time.

    With `causal`, row i of `rows` sees keys 0 to i.
    """
    if num_keys == 0:
        _empty(out[rows], lse[rows])
        return
    heads, rank = q_nope.shape[1:]
    for start in range(rows.start, rows.stop, scratch.tokens):
        part = slice(start, min(start + scratch.tokens, rows.stop))
        offset, count = part.start - rows.start, part.stop - part.start
        queries = scratch.queries[:count]
        queries[..., :rank], queries[..., rank:] = q_nope[part], q_pe[part]
        queries = queries.view(count * heads, -1).mul_(scale)  # in FP32, after the conversion
        acc = scratch.acc[: count * heads]
        peak = acc.new_full((count * heads, 1), -torch.inf)
        total = acc.new_zeros(count * heads, 1)
        seen = offset + count if causal else num_keys
        for key in range(0, seen, KEY_TILE):
            stop = min(key + KEY_TILE, seen)
            keys = scratch.keys[: stop - key]
            load(key, stop, keys)
            scores = scratch.scores[: count * heads * (stop - key)].view(-1, stop - key)
            torch.mm(queries, keys.T, out=scores)
            if causal and stop > offset + 1:
                future = torch.arange(key, stop) > torch.arange(offset, offset + count)[:, None]
                scores.view(count, heads, -1).masked_fill_(future[:, None], -torch.inf)
            # Key 0 is visible to every row, so from the first tile on the peak is finite.
            higher = torch.maximum(peak, scores.amax(1, keepdim=True))
            decay = torch.exp(peak - higher)
            scores.sub_(higher).exp_()
            total = total.mul_(decay).add_(scores.sum(1, keepdim=True))
            if key == 0:
                torch.mm(scores, keys[:, :rank], out=acc)
            else:
                acc.mul_(decay).addmm_(scores, keys[:, :rank])
            peak = higher
        torch.div(acc, total, out=acc)
        out[part] = acc.view(count, heads, rank)
        lse[part] = (peak + total.log()).view(count, heads)


def _empty(out: torch.Tensor, lse: torch.Tensor) -> None:
    """What rows without keys get: padding rows, and the rows of a sequence with no history."""
    out.zero_()
    lse.fill_(-torch.inf)
