"""Shard arithmetic against its definition, token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anabranch import MLADims, ShardLayout

worlds = st.integers(1, 9)
interleaves = st.integers(1, 17)
lengths = st.integers(0, 500)


@given(worlds, interleaves, lengths)
def test_every_token_has_one_owner_and_local_indices_are_dense(
    world_size: int, interleave: int, length: int
) -> None:
    layout = ShardLayout(world_size, 0, interleave)
    kept: dict[int, list[int]] = {rank: [] for rank in range(world_size)}
    for position in range(length):
        assert layout.owner(position) == (position // interleave) % world_size
        kept[layout.owner(position)].append(layout.local_index(position))
    for rank, indices in kept.items():
        assert indices == list(range(len(indices)))
        assert layout.local_length(length, rank) == len(indices)
        assert ShardLayout(world_size, rank, interleave).local_length(length) == len(indices)


@given(worlds, interleaves, lengths)
def test_tensors_of_positions_agree_with_single_positions(
    world_size: int, interleave: int, length: int
) -> None:
    layout = ShardLayout(world_size, 0, interleave)
    positions = torch.arange(length)
    assert layout.owner(positions).tolist() == [layout.owner(p) for p in range(length)]
    assert layout.local_index(positions).tolist() == [layout.local_index(p) for p in range(length)]


@given(worlds, interleaves, lengths, st.integers(1, 64))
def test_no_rank_holds_more_than_its_share_plus_one_block(
    world_size: int, interleave: int, length: int, factor: int
) -> None:
    layout = ShardLayout(world_size, 0, interleave)
    block_size = interleave * factor
    needed = layout.blocks_needed(length, block_size)
    assert needed * block_size >= max(layout.local_length(length, r) for r in range(world_size))
    assert needed * block_size <= length / world_size + block_size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "world_size must be at least 1, got 0"),
        ({"interleave": 0}, "interleave must be at least 1, got 0"),
        ({"world_size": 2, "rank": 2}, r"rank must be in \[0, 2\), got 2"),
        ({"rank": -1}, r"rank must be in \[0, 1\), got -1"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardLayout(**arguments)


def test_an_interleave_that_straddles_blocks_is_refused() -> None:
    message = "interleave must divide block_size, got interleave 3 with block_size 16"
    with pytest.raises(ValueError, match=message):
        ShardLayout(2, 0, 3).plan_batch([1], [1], [[0]], 16)


@pytest.mark.parametrize(
    ("field", "value"), [("num_heads", 0), ("kv_lora_rank", -1), ("qk_rope_head_dim", -1)]
)
def test_dims_that_cannot_be_are_refused(field: str, value: int) -> None:
    sizes = {
        "num_heads": 1,
        "kv_lora_rank": 1,
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": 1,
        "v_head_dim": 1,
        field: value,
    }
    with pytest.raises(ValueError, match=f"{field} must be at least"):
        MLADims(**sizes, scale=1.0)
    with pytest.raises(ValueError, match="scale must be positive"):
        MLADims(1, 1, 1, 1, 1, scale=0.0)
