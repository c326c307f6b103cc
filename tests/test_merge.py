"""The LSE algebra: order, grouping, empty parts and poison."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anabranch import merge_partials
from problem import FORMS, TOLERANCE, kernels, relative_error

NOT_FINITE = [-torch.inf, torch.inf, torch.nan]
seeds = st.integers(0, 2**16)


def partials(
    shards: int, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    outs = torch.randn(shards, 3, 2, 5, generator=random).to(dtype)
    return outs, torch.randn(shards, 3, 2, generator=random) * 10


def oracle(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lses = lses.double()
    weights = lses.softmax(0).unsqueeze(-1)
    return (weights * outs.double()).sum(0), lses.logsumexp(0)


@given(st.integers(1, 9), seeds, st.sampled_from(list(TOLERANCE)))
def test_merge_agrees_with_float64(shards: int, seed: int, dtype: torch.dtype) -> None:
    outs, lses = partials(shards, seed, dtype)
    expected, expected_lse = oracle(outs, lses)
    for local in (False, True):
        if local and shards == 1:
            continue
        received, own = (outs[:-1], outs[-1]) if local else (outs, None)
        received_lse, own_lse = (lses[:-1], lses[-1]) if local else (lses, None)
        for form in FORMS:
            with kernels(form):
                out, lse = merge_partials(received, received_lse, own, own_lse)
            assert out.dtype == dtype
            assert relative_error(out, expected) < TOLERANCE[dtype]
            torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)


@given(st.integers(2, 8), seeds)
def test_merge_does_not_depend_on_grouping_or_order(shards: int, seed: int) -> None:
    outs, lses = partials(shards, seed)
    whole, whole_lse = merge_partials(outs, lses)
    order = torch.randperm(shards, generator=torch.Generator().manual_seed(seed))
    cut = 1 + seed % (shards - 1)
    head = merge_partials(outs[order[:cut]], lses[order[:cut]])
    grouped, grouped_lse = merge_partials(outs[order[cut:]], lses[order[cut:]], *head)
    torch.testing.assert_close(grouped, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grouped_lse, whole_lse, rtol=1e-6, atol=1e-5)


@given(st.integers(1, 8), seeds, st.data())
def test_parts_that_are_not_finite_weigh_nothing(
    shards: int, seed: int, data: st.DataObject
) -> None:
    outs, lses = partials(shards + 1, seed)
    marks = data.draw(st.lists(st.sampled_from([0.0, *NOT_FINITE]), min_size=3, max_size=3))
    lost = data.draw(st.integers(0, shards))
    expected = outs.double().clone(), lses.double().clone()
    for row, mark in enumerate(marks):
        if mark != 0.0:
            lses[lost, row], outs[lost, row] = mark, torch.nan
            expected[1][lost, row], expected[0][lost, row] = -torch.inf, 0
    expected_out, expected_lse = oracle(*expected)
    for form in FORMS:
        with kernels(form):
            out, lse = merge_partials(outs[:-1], lses[:-1], outs[-1], lses[-1])
        assert relative_error(out, expected_out) < 1e-5
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mark", NOT_FINITE)
@pytest.mark.parametrize("payload", [torch.nan, torch.inf, 1.0])
def test_where_everything_is_empty_the_output_is_zero(
    form: str, mark: float, payload: float
) -> None:
    outs, lses = torch.full((2, 3, 2, 5), payload), torch.full((2, 3, 2), mark)
    with kernels(form):
        out, lse = merge_partials(outs, lses, outs[0], lses[0])
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_that_underflows_is_zero_and_selects_its_payload_away(form: str) -> None:
    outs = torch.stack([torch.ones(1, 1, 4), torch.full((1, 1, 4), torch.nan)])
    with kernels(form):
        out, lse = merge_partials(outs, torch.tensor([[[500.0]], [[-500.0]]]))
    assert out.eq(1).all()
    assert lse.item() == 500


def test_bad_arguments_are_named() -> None:
    outs, lses = partials(2, 0)
    with pytest.raises(ValueError, match="local_output and local_lse must be given together"):
        merge_partials(outs, lses, outs[0])
    with pytest.raises(ValueError, match="outs and lses must be"):
        merge_partials(outs, lses[0])
    with pytest.raises(ValueError, match="local_output and local_lse must be"):
        merge_partials(outs, lses, outs[0, :1], lses[0])
