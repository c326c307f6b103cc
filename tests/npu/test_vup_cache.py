"""V-up on both sides of its guard, the cache of two buffers, and which provider serves."""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
from contract import BMM
from hypothesis import given, settings
from hypothesis import strategies as st
from on_npu import on_npu
from test_step import FIA

from anabranch import (
    AttentionKind,
    DecodeBatch,
    LatentCache,
    ShardLayout,
    merge_partials,
    partial_attention,
    v_up,
)
from anabranch.attention import _provider, npu, provider_for, reference
from anabranch.vup import v_up_transposed
from problem import TOLERANCE, Problem, dims, poison, relative_error


@settings(max_examples=60)
@given(
    st.sampled_from([0, 1, 3, 17]),
    st.sampled_from([(4, 128, 128), (16, 512, 128), (127, 512, 128), (128, 512, 128), (3, 33, 7)]),
    st.sampled_from(list(TOLERANCE)),
    st.sampled_from(["contiguous", "transposed weight", "sliced rows"]),
    st.booleans(),
)
def test_both_sides_of_the_guard_agree_with_float64(
    tokens: int, sizes: tuple[int, int, int], dtype: torch.dtype, layout: str, given_out: bool
) -> None:
    heads, rank, width = sizes
    random = torch.Generator().manual_seed(tokens + heads)
    x = torch.randn(tokens, heads, rank + 2, generator=random).to(dtype)
    x = x[..., 1:-1] if layout == "sliced rows" else x[..., 2:].contiguous()
    weight = torch.randn(heads, rank, width, generator=random).to(dtype)
    if layout == "transposed weight":
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    out = torch.full((tokens, heads * width), torch.nan, dtype=dtype) if given_out else None
    expected = torch.einsum("thl,hlv->thv", x.double(), weight.double()).flatten(1)
    with on_npu() as seen:
        result = v_up(x, weight, out=out)
        moved = v_up_transposed(x, weight)
    assert out is None or result is out
    for each in (result, moved):
        assert relative_error(each, expected) < TOLERANCE[dtype] or tokens == 0
    fits = heads * rank < 65536 and rank % 128 == 0 and tokens > 0
    assert seen.names == ([BMM] if fits and layout == "contiguous" else [])
    for _, call in seen.calls:
        assert (call["perm_x1"], call["perm_y"]) == ([1, 0, 2], [1, 0, 2])


@given(st.lists(st.integers(-1, 47), max_size=9))
def test_the_cache_has_two_buffers_and_skips_tokens_of_other_ranks(slots: list[int]) -> None:
    slots = [slot if slots.index(slot) == row else -1 for row, slot in enumerate(slots)]
    rows = torch.randn(len(slots), 40)
    mapping = torch.tensor(slots, dtype=torch.int64)
    caches = []
    for one_buffer in (True, False):
        if one_buffer:
            cache = LatentCache(3, 16, dims(1), torch.float32)
        else:
            with on_npu():
                cache = LatentCache(3, 16, dims(1), torch.float32)
        poison(cache.latent, cache.rope)
        with on_npu():
            cache.write(rows[:, :32], rows[:, 32:], mapping)
        caches.append(cache)
    for pages in ("latent", "rope"):
        views, apart = (getattr(cache, pages) for cache in caches)
        assert apart.is_contiguous()
        assert apart.shape == views.shape
        assert torch.equal(apart.nan_to_num(7), views.contiguous().nan_to_num(7))


def test_a_workspace_that_is_too_small_is_named() -> None:
    batch = ShardLayout().plan_batch([0], [1], [[0]], 16)
    half = torch.bfloat16
    given = [
        torch.zeros(*shape, dtype=half) for shape in ((1, 1, 512), (1, 1, 64), (1, 512), (1, 64))
    ]
    results = torch.empty(1, 1, 512, dtype=half), torch.empty(1, 1)
    with on_npu():
        for size in (8, npu._page_bytes(batch, half) + 8):
            small = torch.empty(size, dtype=torch.uint8)
            with pytest.raises(ValueError, match="workspace must hold"):
                npu.current(*given, batch, 1.0, *results, small)


def test_own_heads_are_served_where_all_heads_are_too_many() -> None:
    """256 heads of a group in plain PyTorch, 32 of this rank by the operator: one workspace."""
    problem = Problem([40, 9], [1, 1], dims(256, 512, 64, 128), torch.bfloat16)
    own = dims(32, 512, 64, 128)
    with on_npu() as seen:
        cache, batch = problem.shard(ShardLayout())
        queries, current = problem.queries, problem.current_keys
        size = npu.workspace_bytes(256, own, cache, batch)
        workspace = torch.empty(size, dtype=torch.uint8)
        history = partial_attention(
            queries[..., :512], queries[..., 512:], cache, batch, AttentionKind.HISTORY,
            problem.dims, workspace, provider=npu,
        )  # fmt: skip
        new = partial_attention(
            queries[:, :32, :512], queries[:, :32, 512:], (current[:, :512], current[:, 512:]),
            batch, AttentionKind.CURRENT, replace(own, scale=problem.dims.scale), workspace,
            provider=npu,
        )  # fmt: skip
    assert seen.names.count(FIA) == 1
    out, _ = merge_partials(history[0][None, :, :32], history[1][None, :, :32], *new)
    assert relative_error(out, problem.answer()[0][:, :32]) < TOLERANCE[torch.bfloat16]


def test_lengths_beyond_the_operators_do_not_stay() -> None:
    """A step that plain PyTorch serves for its lengths leaves a right size for the next."""
    sizes = dims(2, 512, 64, 128)
    with on_npu():
        cache = LatentCache(4, 128, sizes, torch.bfloat16)
        table = torch.zeros(1, 4, dtype=torch.int32)
        slots, ones = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
        needed = [
            npu.workspace_bytes(2, sizes, cache, DecodeBatch(ones * length, ones, table, slots))
            for length in (npu.MOST_KEYS + 1, 5, npu.MOST_KEYS + 1)
        ]
    assert needed[0] == needed[2] < needed[1]


def test_the_provider_of_npu_and_what_it_lacks() -> None:
    assert npu.missing() is None
    assert provider_for("npu") is npu
    with mock.patch.dict(sys.modules, {"torch_npu": None}):
        lacking = npu.missing()
    assert lacking is not None
    assert "torch_npu" in lacking
    with mock.patch.object(npu, "missing", return_value="torch_npu: not installed"):
        assert _provider.__wrapped__("npu") is reference  # past what it remembers
