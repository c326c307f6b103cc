"""Both kinds of partial attention, every provider, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from anabranch import AttentionKind, ShardLayout, merge_partials, partial_attention
from anabranch.attention import Provider, cpu, provider_for, reference
from problem import TOLERANCE, Problem, dims, layouts_and_problems, poison, relative_error

PROVIDERS = pytest.mark.parametrize("provider", [reference, cpu], ids=["reference", "cpu"])


def attend(
    problem: Problem, layout: ShardLayout, provider: Provider
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """HISTORY of one rank and CURRENT, both through poisoned memory and one shared workspace."""
    cache, batch = problem.shard(layout)
    rank = problem.dims.kv_lora_rank
    q_nope, q_pe = problem.queries[..., :rank], problem.queries[..., rank:]
    current = problem.current_keys
    keys = {
        AttentionKind.HISTORY: cache,
        AttentionKind.CURRENT: (current[:, :rank], current[:, rank:]),
    }
    heads = problem.dims.num_heads
    workspace = torch.full((provider.workspace_bytes(heads, problem.dims),), 255, dtype=torch.uint8)
    results = []
    for kind, kv in keys.items():
        out = q_nope.new_empty(q_nope.shape), torch.empty(problem.tokens, heads)
        poison(*out)
        partial_attention(
            q_nope, q_pe, kv, batch, kind, problem.dims, workspace, out=out, provider=provider
        )
        results.append(out)
    return results


@PROVIDERS
@settings(max_examples=60)
@given(case=layouts_and_problems())
def test_shards_and_current_merge_to_the_whole_sequence(
    provider: Provider, case: tuple[int, int, Problem]
) -> None:
    world_size, interleave, problem = case
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


@PROVIDERS
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("world_size", [2, 8])
def test_sharding_is_no_less_exact_than_one_pass(
    provider: Provider, dtype: torch.dtype, world_size: int
) -> None:
    problem = Problem([3000, 777], [1, 3], dims(8, 64, 16), dtype)

    def error(size: int) -> float:
        parts = [attend(problem, ShardLayout(size, rank, 1), provider) for rank in range(size)]
        outs, lses = (torch.stack(x) for x in zip(*(history for history, _ in parts), strict=True))
        return relative_error(merge_partials(outs, lses, *parts[0][1])[0], problem.answer()[0])

    assert error(world_size) <= 1.5 * error(1)


def test_a_prefill_chunk_crosses_row_and_key_tiles() -> None:
    problem = Problem([2500], [700], dims(4), block_size=64)
    history, current = attend(problem, ShardLayout(), cpu)
    assert problem.tokens * 4 > 2 * cpu.ROW_TILE
    assert problem.past[0] > 2 * cpu.KEY_TILE
    out, _ = merge_partials(history[0][None], history[1][None], *current)
    assert relative_error(out, problem.answer()[0]) < 1e-5


@PROVIDERS
def test_scores_far_beyond_the_range_of_exp(provider: Provider) -> None:
    """LSE is a natural log and the maximum is subtracted: scores of hundreds are exact."""
    problem = Problem([300], [1], dims(2))
    problem.queries.mul_(200)
    history, current = attend(problem, ShardLayout(), provider)
    out, lse = merge_partials(history[0][None], history[1][None], *current)
    expected, expected_lse = problem.answer()
    assert expected_lse.max() > 500
    assert relative_error(out, expected) < 1e-4
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-3)


def test_bad_arguments_are_named() -> None:
    problem = Problem([5], [2], dims(2))
    cache, batch = problem.shard(ShardLayout())
    q_nope, q_pe = problem.queries[..., :32], problem.queries[..., 32:]
    pair = problem.current_keys[:, :32], problem.current_keys[:, 32:]
    history, current = AttentionKind.HISTORY, AttentionKind.CURRENT
    with pytest.raises(ValueError, match="kv must be a LatentCache for HISTORY, got tuple"):
        partial_attention(q_nope, q_pe, pair, batch, history, problem.dims)
    with pytest.raises(ValueError, match="kv must be the pair"):
        partial_attention(q_nope, q_pe, cache, batch, current, problem.dims)
    with pytest.raises(ValueError, match=r"q_pe must have shape \[2, 2, 8\], got \[2, 2, 7\]"):
        partial_attention(q_nope, q_pe[..., 1:], cache, batch, history, problem.dims)
    with pytest.raises(ValueError, match=r"batch.slot_mapping must have shape \[1\], got \[2\]"):
        partial_attention(q_nope[:1], q_pe[:1], cache, batch, history, problem.dims)
    short = (pair[0][:1], pair[1])
    with pytest.raises(ValueError, match=r"kv_c must have shape \[2, 32\], got \[1, 32\]"):
        partial_attention(q_nope, q_pe, short, batch, current, problem.dims)
    small = torch.empty(8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="workspace must hold"):
        partial_attention(q_nope, q_pe, cache, batch, history, problem.dims, small)


def test_the_cpu_provider_serves_the_cpu() -> None:
    assert provider_for("cpu") is cpu
    assert provider_for("meta") is reference


@pytest.mark.parametrize("provider", [reference, cpu])
def test_scratch_for_all_heads_serves_any_fewer(provider: Provider) -> None:
    sizes = [provider.workspace_bytes(heads, dims(1)) for heads in range(1, 3000, 7)]
    assert sizes == sorted(sizes)
