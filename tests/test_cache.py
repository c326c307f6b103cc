"""Batch planning, and what a rank ends up holding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from anabranch import DecodeBatch, LatentCache, ShardLayout
from problem import Problem, dims, layouts_and_problems


@given(layouts_and_problems())
def test_a_step_leaves_each_rank_with_the_tokens_it_owns(
    case: tuple[int, int, Problem],
) -> None:
    world_size, interleave, problem = case
    rank_columns = problem.dims.kv_lora_rank
    for rank in range(world_size):
        layout = ShardLayout(world_size, rank, interleave)
        cache, batch = problem.shard(layout)
        current = problem.current_keys
        cache.write(current[:, :rank_columns], current[:, rank_columns:], batch.slot_mapping)
        for b, keys in enumerate(problem.keys):
            own = [p for p in range(len(keys)) if layout.owner(p) == rank]
            flat = torch.cat((cache.latent, cache.rope), -1).flatten(0, 1)
            slots = [
                int(batch.block_table[b, i // cache.block_size]) * cache.block_size
                + i % cache.block_size
                for i in range(len(own))
            ]
            assert torch.equal(flat[slots], keys[own])
        held = cache.latent[..., 0].isfinite().sum().item()
        lengths = [len(keys) for keys in problem.keys]
        assert held == sum(layout.local_length(length) for length in lengths)
        blocks = sum(layout.blocks_needed(length, cache.block_size) for length in lengths)
        assert blocks * cache.block_size <= sum(
            length / world_size + cache.block_size for length in lengths
        )


def test_latent_and_rope_are_views_of_one_buffer() -> None:
    cache = LatentCache(3, 4, dims(2), torch.float32)
    assert cache.latent.shape == (3, 4, 32)
    assert cache.rope.shape == (3, 4, 8)
    assert cache.latent.untyped_storage().data_ptr() == cache.rope.untyped_storage().data_ptr()
    wrapped = LatentCache.from_buffer(torch.zeros(3, 4, 40), 32)
    wrapped.write(torch.ones(1, 32), torch.full((1, 8), 2.0), torch.tensor([5]))
    assert wrapped.latent[1, 1].eq(1).all()
    assert wrapped.rope[1, 1].eq(2).all()
    assert wrapped.latent.sum() == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], [1], [[0]]), "must have one entry per sequence, got 2, 1 and 1"),
        (([-1], [1], [[0]]), "must not be negative, got -1 and 1 at 0"),
        (([16], [1], [[0]]), r"block_tables\[0\] must list 2 blocks for 17 tokens, got 1"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(
    arguments: tuple[list[int], list[int], list[list[int]]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ShardLayout().plan_batch(*arguments, 16)


def test_malformed_batches_and_buffers_are_refused() -> None:
    ones = torch.ones(2, dtype=torch.int32)
    table = torch.zeros(2, 1, dtype=torch.int32)
    slots = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="seq_lens and query_lens must be"):
        DecodeBatch(ones, ones[:1], table, slots)
    with pytest.raises(ValueError, match="block_table must be"):
        DecodeBatch(ones, ones, table[:1], slots)
    with pytest.raises(ValueError, match="slot_mapping must be"):
        DecodeBatch(ones, ones, table, table)
    with pytest.raises(ValueError, match="buffer must be"):
        LatentCache.from_buffer(torch.zeros(3, 4, 8), 32)
