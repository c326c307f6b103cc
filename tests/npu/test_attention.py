"""Both partials through the NPU provider against float64, within the documented limits."""

from __future__ import annotations

import pytest
import torch
from contract import V2
from hypothesis import given, settings
from on_npu import on_npu

from anabranch.attention import npu
from partials import check_shards_and_current
from problem import Problem, layouts_and_problems

WIDE = (512, 64, 128)  # L, R, V of the models that the operator is for


@settings(max_examples=60)
@given(case=layouts_and_problems())
def test_the_shapes_of_the_cpu_tests(case: tuple[int, int, Problem]) -> None:
    """None of these widths is the operator's: plain PyTorch serves them, by the same interface."""
    with on_npu() as seen:
        check_shards_and_current(*case, npu)
    assert seen.calls == []


@settings(max_examples=80)
@given(
    case=layouts_and_problems(
        sizes=[WIDE], block_sizes=[16, 128], heads=[1, 2, 4],
        dtypes=[torch.bfloat16, torch.float16], worlds=[1, 2, 4, 8],
    )
)  # fmt: skip
@pytest.mark.parametrize("cann", ["8.5.0", "9.1.0"])
def test_shards_and_current_merge_to_the_whole_sequence(
    cann: str, case: tuple[int, int, Problem]
) -> None:
    with on_npu(cann) as seen:
        check_shards_and_current(*case, npu)
    assert f"{V2}.out" in seen.names
