"""V-up against einsum in float64, for every layout of its operands."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anabranch import v_up
from anabranch.vup import v_up_transposed, within_npu_limit, workspace_bytes
from problem import FORMS, TOLERANCE, kernels, relative_error


@given(
    st.sampled_from([0, 1, 2, 7, 64]),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([(32, 16), (33, 7), (64, 128)]),
    st.sampled_from(list(TOLERANCE)),
    st.sampled_from(["contiguous", "transposed weight", "sliced weight", "sliced rows"]),
)
def test_both_forms_agree_with_float64_and_with_each_other(
    tokens: int, heads: int, sizes: tuple[int, int], dtype: torch.dtype, layout: str
) -> None:
    rank, width = sizes
    random = torch.Generator().manual_seed(tokens + heads)
    x = torch.randn(tokens, heads, rank + 2, generator=random).to(dtype)
    x = x[..., 1:-1] if layout == "sliced rows" else x[..., 2:].contiguous()
    weight = torch.randn(heads, rank, width, generator=random).to(dtype)
    if layout == "transposed weight":
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced weight":
        weight = torch.cat((weight, weight), 2)[..., :width]
    expected = torch.einsum("thl,hlv->thv", x.double(), weight.double()).flatten(1)
    for form in FORMS:
        out = torch.full((tokens, heads * width), torch.nan, dtype=dtype)
        with kernels(form):
            assert v_up(x, weight, out=out) is out
            assert out.shape == expected.shape
            assert relative_error(out, expected) < TOLERANCE[dtype] or tokens == 0
            assert torch.equal(v_up(x, weight), out)
            assert torch.equal(v_up_transposed(x, weight), out)


def test_neither_operand_is_moved_in_memory() -> None:
    x, weight = torch.randn(64, 8, 32), torch.randn(8, 32, 16)
    out = torch.empty(64, 8 * 16)
    workspace = torch.empty(workspace_bytes(32, 16), dtype=torch.uint8)

    def allocated(form: object) -> int:
        with torch.profiler.profile(profile_memory=True) as profile:
            form(x, weight, out=out, workspace=workspace)  # type: ignore[operator]
        return sum(max(e.self_cpu_memory_usage, 0) for e in profile.events())

    assert allocated(v_up) == 0
    assert allocated(v_up_transposed) == x.nbytes + out.nbytes


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="x and w_uv must be"):
        v_up(torch.zeros(2, 3, 4), torch.zeros(3, 5, 6))
    small = torch.empty(8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="workspace must hold"):
        v_up(torch.zeros(2, 3, 4), torch.zeros(3, 4, 6), workspace=small)


def test_bits_do_not_depend_on_threads() -> None:
    x, weight = torch.randn(7, 8, 512), torch.randn(8, 512, 128)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(v_up(x, weight))
    torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("product", "fused"), [(0, False), (1, True), (65535, True), (65536, False)]
)
def test_the_guard_of_the_fused_product(product: int, fused: bool) -> None:
    assert within_npu_limit(product, 1) is fused
    assert within_npu_limit(1, product) is fused
