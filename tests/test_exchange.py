"""Packing, and the exchange among real ranks."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from anabranch import ExchangeError, exchange_partials, pack_partials, unpack_partials
from anabranch.exchange import gather_heads
from problem import TOLERANCE, kernels
from ranks import Ranks, rank_group

DTYPES = st.sampled_from(list(TOLERANCE))
# Bit patterns of the LSE that a conversion on the way would lose: NaN payloads, -0, subnormals.
LSE_BITS = [0x7FC00001, -0x3FFFFF, -0x80000000, 1, 0x7F800000, -0x800000, 0x3F800001]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32)


def partials(
    tokens: int, heads: int, width: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    out = torch.randn(tokens, heads, width, generator=random).to(dtype)
    pattern = torch.tensor(LSE_BITS, dtype=torch.int32).repeat(tokens * heads)
    return out, pattern[: tokens * heads].view(torch.float32).view(tokens, heads)


@given(st.integers(1, 8), st.integers(0, 5), st.integers(1, 3), st.sampled_from([1, 8, 33]), DTYPES)
def test_packing_keeps_every_bit(
    world_size: int, tokens: int, heads: int, width: int, dtype: torch.dtype
) -> None:
    out, lse = partials(tokens, world_size * heads, width, dtype, tokens)
    with kernels("pytorch"):
        plain = pack_partials(out, lse, world_size)
    with kernels("native"):
        packed = pack_partials(out, lse, world_size)
    assert torch.equal(packed.view(torch.uint8), plain.view(torch.uint8))
    columns = {4: 1, 2: 2}[dtype.itemsize]
    assert packed.shape == (world_size, tokens, heads, width + columns)
    assert packed.dtype == dtype
    outs, lses = unpack_partials(packed)
    assert outs.data_ptr() == packed.data_ptr() or tokens == 0
    for rank in range(world_size):
        own = slice(rank * heads, (rank + 1) * heads)
        assert torch.equal(outs[rank], out[:, own])
        assert torch.equal(bits(lses[rank]), bits(lse[:, own]))


def exchange_on_rank(
    tokens: int, heads: int, width: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = partials(tokens, heads * dist.get_world_size(), width, dtype, dist.get_rank())
    outs, lses = exchange_partials(out, lse, rank_group())
    return outs.contiguous(), lses.contiguous()


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("tokens", "width"), [(3, 8), (1, 33), (0, 8)])
def test_every_rank_receives_its_heads_of_every_shard(
    ranks: type[Ranks], world_size: int, dtype: torch.dtype, tokens: int, width: int
) -> None:
    received = ranks(world_size).run(exchange_on_rank, tokens, 2, width, dtype)
    for source in range(world_size):
        out, lse = partials(tokens, 2 * world_size, width, dtype, source)
        for rank, (outs, lses) in enumerate(received):
            own = slice(2 * rank, 2 * rank + 2)
            assert torch.equal(outs[source], out[:, own])
            assert torch.equal(bits(lses[source]), bits(lse[:, own]))


def gather_on_rank() -> torch.Tensor:
    return gather_heads(torch.full((3, 2, 4), float(dist.get_rank())), rank_group())


def test_heads_are_gathered_in_rank_order(ranks: type[Ranks]) -> None:
    for gathered in ranks(4).run(gather_on_rank):
        assert gathered.shape == (3, 8, 4)
        assert gathered[:, :, 0].tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]] * 3


def lose_a_peer() -> str:
    dist.barrier()  # the timeout is for the exchange: ranks just started may meet later
    group = dist.new_group(timeout=timedelta(seconds=2))
    if dist.get_rank() == 1:
        return "stayed away"
    try:
        exchange_partials(torch.zeros(1, 2, 4), torch.zeros(1, 2), group)
    except ExchangeError as error:
        return str(error)
    return "no error"


def test_a_stall_is_an_error_that_names_rank_and_operation() -> None:
    pool = Ranks(2)
    try:
        answer, other = pool.run(lose_a_peer)
    finally:
        pool.close()
    assert other == "stayed away"
    assert answer.startswith("rank 0 of 2: exchange of history partials failed:")


def test_bad_arguments_are_named() -> None:
    out, lse = torch.zeros(2, 6, 8), torch.zeros(2, 6)
    with pytest.raises(ValueError, match="heads divisible by world_size 4, got 6"):
        pack_partials(out, lse, 4)
    with pytest.raises(ValueError, match=r"lse must be float32 \[2, 6\]"):
        pack_partials(out, lse.bfloat16(), 2)
    with pytest.raises(ValueError, match="partials must be float32, bfloat16 or float16"):
        pack_partials(out.double(), lse, 2)
