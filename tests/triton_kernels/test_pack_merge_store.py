"""Pack, merge and the cache write in the interpreter, against their PyTorch forms."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import on_triton

from anabranch import LatentCache, merge_partials, pack_partials, unpack_partials
from anabranch.triton_kernels import exchange
from problem import SIZES, TOLERANCE, dims, kernels, poison, relative_error

DTYPES = st.sampled_from(list(TOLERANCE))
LSE_BITS = [0x7FC00001, -0x3FFFFF, -0x80000000, 1, 0x7F800000, -0x800000, 0x3F800001]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@given(
    st.integers(1, 8), st.integers(0, 5), st.integers(1, 3), st.sampled_from([1, 8, 33]), DTYPES,
    st.sampled_from([1, exchange.ROW_TILE]),
)  # fmt: skip
def test_packing_keeps_every_bit(
    world_size: int, tokens: int, heads: int, width: int, dtype: torch.dtype, row_tile: int
) -> None:
    random = torch.Generator().manual_seed(tokens)
    out = torch.randn(tokens, world_size * heads, width, generator=random).to(dtype)
    pattern = torch.tensor(LSE_BITS, dtype=torch.int32).repeat(tokens * heads * world_size)
    lse = pattern[: tokens * heads * world_size].view(torch.float32).view(out.shape[:2])
    with kernels("pytorch"):
        expected = pack_partials(out, lse, world_size)
    with on_triton(), mock.patch.object(exchange, "row_tile", return_value=row_tile):
        packed = pack_partials(out, lse, world_size)
    assert torch.equal(bits(packed), bits(expected))


@st.composite
def partials(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a merge reads: packed as received or plain, some marked empty with poison under them."""
    shards, tokens, heads = (
        draw(st.integers(1, 8)),
        draw(st.integers(0, 4)),
        draw(st.integers(1, 3)),
    )
    width, dtype = draw(st.sampled_from([1, 5, 32])), draw(DTYPES)
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    outs = torch.randn(shards + 1, tokens, heads, width, generator=random).to(dtype)
    lses = torch.randn(shards + 1, tokens, heads, generator=random) * 10
    marks = torch.tensor([0.0, 0.0, 0.0, -torch.inf, torch.inf, torch.nan])
    marks = marks[torch.randint(0, 6, lses.shape, generator=random)]
    lses = torch.where(marks == 0, lses, marks)
    outs[marks != 0] = torch.nan
    if draw(st.booleans()):
        received = [pack_partials(out, lse, 1)[0] for out, lse in zip(outs, lses, strict=True)]
        received_outs, received_lses = unpack_partials(torch.stack(received))
    else:
        received_outs, received_lses = outs, lses
    return received_outs[:-1], received_lses[:-1], outs[-1], lses[-1]


@settings(max_examples=150)
@given(partials(), st.booleans())
def test_merge_agrees_with_float64(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], with_local: bool
) -> None:
    received, lses, *local = parts
    with on_triton():
        out, lse = merge_partials(received, lses, *(local if with_local else ()))
    assert out.dtype == received.dtype
    every = torch.cat([received, local[0][None]]) if with_local else received
    logs = (torch.cat([lses, local[1][None]]) if with_local else lses).double()
    logs = torch.where(logs.isfinite(), logs, -torch.inf)
    empty = (logs == -torch.inf).all(0)
    expected_lse = logs.logsumexp(0)
    weights = torch.exp(logs - torch.where(empty, 0, expected_lse))
    payload = torch.where((weights > 0)[..., None], every.double(), 0)
    expected = (weights[..., None] * payload).sum(0)
    assert relative_error(out, expected) < TOLERANCE[out.dtype]
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)
    assert out[empty].eq(0).all()
    assert lse[empty].eq(-torch.inf).all()


def test_a_weight_that_underflows_selects_its_payload_away() -> None:
    outs = torch.stack([torch.ones(1, 1, 4), torch.full((1, 1, 4), torch.nan)])
    with on_triton():
        out, lse = merge_partials(outs, torch.tensor([[[500.0]], [[-500.0]]]))
    assert out.eq(1).all()
    assert lse.item() == 500


def test_converted_partials_merge_to_the_same_bits() -> None:
    """`comm_stream` receives FP32 copies of what the other schedules receive."""
    outs, lses = torch.randn(3, 4, 2, 32).bfloat16(), torch.randn(3, 4, 2)
    results = []
    with on_triton():
        for received in (outs, outs.float()):
            out = torch.empty(4, 2, 32, dtype=torch.bfloat16), torch.empty(4, 2)
            merge_partials(received, lses, outs[0], lses[0], out=out)
            results.append(out)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@settings(max_examples=60)
@given(st.sampled_from(SIZES), DTYPES, st.booleans(), st.sampled_from([1, 16]), st.integers(0, 6))
def test_the_cache_write_agrees_with_pytorch(
    sizes: tuple[int, int, int], dtype: torch.dtype, fp8: bool, block_size: int, tokens: int
) -> None:
    rank, rope, _ = sizes
    stored, scale = (torch.float8_e4m3fn, 0.01) if fp8 else (dtype, 1.0)
    random = torch.Generator().manual_seed(tokens)
    rows = (torch.randn(tokens, rank + rope, generator=random) * 3).to(dtype)
    rows[:1, :1] = torch.nan
    slots = torch.randperm(3 * 16, generator=random)[:tokens]
    slots[1::2] = -1
    caches = []
    for form in ("triton", "pytorch"):
        cache = LatentCache(48 // block_size, block_size, dims(1, rank, rope), stored, scale=scale)
        poison(cache.latent, cache.rope)
        with on_triton() if form == "triton" else kernels("pytorch"):
            cache.write(rows[:, :rank], rows[:, rank:], slots)
        caches.append(cache)
    for pages in ("latent", "rope"):
        ours, theirs = (getattr(cache, pages).contiguous() for cache in caches)
        assert torch.equal(ours.float().nan_to_num(7), theirs.float().nan_to_num(7))


@pytest.mark.parametrize("strides", ["one token", "one head", "transposed", "sliced rows"])
def test_merge_of_rows_that_are_not_evenly_spaced(strides: str) -> None:
    whole, lses = torch.randn(3, 6, 4, 8), torch.randn(3, 6, 4)
    outs = {
        "one token": (whole[:, 1:2], lses[:, 1:2]),
        "one head": (whole[:, :, 1:2], lses[:, :, 1:2]),
        "transposed": (whole.transpose(1, 2), lses.transpose(1, 2)),
        "sliced rows": (whole[..., 1:7:2], lses),
    }[strides]
    with on_triton():
        out, lse = merge_partials(*outs)
    weights = outs[1].softmax(0).unsqueeze(-1)
    torch.testing.assert_close(out, (weights * outs[0]).sum(0))
    torch.testing.assert_close(lse, outs[1].logsumexp(0))
