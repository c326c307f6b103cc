"""The oracle: softmax attention written out, one sequence at a time, in FP32 or FP64.

Runs on any device. Accumulates in FP32, or in FP64 when the inputs are FP64.
"""

from __future__ import annotations

import torch

from anabranch.cache import DecodeBatch, LatentCache
from anabranch.geometry import MLADims


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
    first = 0
    for b, (length, queries) in enumerate(batch.host_lens()):
        rows = slice(first, first := first + queries)
        position = torch.arange(length, device=q_nope.device)
        block = batch.block_table[b].long()[position // cache.block_size]
        entry = position % cache.block_size
        _attend(
            q_nope[rows], q_pe[rows],
            cache.latent[block, entry], cache.rope[block, entry], cache.scale, scale,
            out[rows], lse[rows],
        )  # fmt: skip
    out[first:], lse[first:] = 0, -torch.inf


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
    first = 0
    for _, queries in batch.host_lens():
        for row in range(first, first + queries):
            one = slice(row, row + 1)
            seen = slice(first, row + 1)
            _attend(q_nope[one], q_pe[one], kv_c[seen], k_pe[seen], 1.0, scale, out[one], lse[one])
        first += queries
    out[first:], lse[first:] = 0, -torch.inf


def workspace_bytes(
    num_heads: int,
    dims: MLADims,
    cache: LatentCache | None = None,
    batch: DecodeBatch | None = None,
) -> int:
    return 0


def _attend(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    key_scale: float,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """`q` `[t, heads, .]` against keys `[n, .]`; with n = 0, output 0 and LSE -inf."""
    exact = torch.float64 if q_nope.dtype == torch.float64 else torch.float32
    latent, rope = latent.to(exact) * key_scale, rope.to(exact) * key_scale
    scores = torch.einsum("thl,nl->thn", q_nope.to(exact), latent)
    scores += torch.einsum("thr,nr->thn", q_pe.to(exact), rope)
    scores *= scale
    log_sum = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - log_sum.unsqueeze(-1))
    out.copy_(torch.einsum("thn,nl->thl", weights, latent))
    lse.copy_(log_sum)
