"""Both partials of a problem through a provider, and their merge against float64."""

from __future__ import annotations

import torch

from anabranch import AttentionKind, ShardLayout, merge_partials, partial_attention
from anabranch.attention import Provider
from problem import TOLERANCE, Problem, poison, relative_error


def attend(
    problem: Problem, layout: ShardLayout, provider: Provider
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """HISTORY of one rank and CURRENT, both through poisoned memory and one shared workspace."""
    cache, batch = problem.shard(layout)
    rank, heads = problem.dims.kv_lora_rank, problem.dims.num_heads
    q_nope, q_pe = problem.queries[..., :rank], problem.queries[..., rank:]
    current = problem.current_keys
    keys = {
        AttentionKind.HISTORY: cache,
        AttentionKind.CURRENT: (current[:, :rank], current[:, rank:]),
    }
    size = provider.workspace_bytes(heads, problem.dims, cache, batch)
    workspace = torch.full((size,), 255, dtype=torch.uint8)
    results = []
    for kind, kv in keys.items():
        out = q_nope.new_empty(q_nope.shape), torch.empty(problem.tokens, heads)
        poison(*out)
        partial_attention(
            q_nope, q_pe, kv, batch, kind, problem.dims, workspace, out=out, provider=provider
        )
        results.append(out)
    return results


def check_shards_and_current(
    world_size: int, interleave: int, problem: Problem, provider: Provider
) -> None:
    """They merge to the whole sequence; empty shards and padding rows are 0 and -inf."""
    history = []
    for rank in range(world_size):
        layout = ShardLayout(world_size, rank, interleave)
        shard, current = attend(problem, layout, provider)
        history.append(shard)
        row = 0
        for past, new in zip(problem.past, problem.new, strict=True):
            if layout.local_length(past) == 0:
                assert shard[0][row : row + new].eq(0).all()
                assert shard[1][row : row + new].eq(-torch.inf).all()
            row += new
        for out, lse in (shard, current):
            assert out[row:].eq(0).all()
            assert lse[row:].eq(-torch.inf).all()
    outs, lses = (torch.stack(parts) for parts in zip(*history, strict=True))
    out, lse = merge_partials(outs, lses, *current)
    expected, expected_lse = problem.answer()
    assert relative_error(out, expected) < TOLERANCE[problem.dtype]
    real = sum(problem.new)
    torch.testing.assert_close(lse[:real].double(), expected_lse[:real], rtol=1e-4, atol=1e-3)
