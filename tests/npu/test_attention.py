"""Both partials through the NPU provider against float64, within the documented limits."""

from __future__ import annotations

import pytest
import torch
from contract import V2
from hypothesis import given, settings
from on_npu import on_npu

from anabranch import AttentionKind, ShardLayout, merge_partials, partial_attention
from anabranch.attention import npu
from problem import TOLERANCE, Problem, layouts_and_problems, poison, relative_error

WIDE = (512, 64, 128)  # L, R, V of the models that the operator is for


def attend(problem: Problem, layout: ShardLayout) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """HISTORY of one rank and CURRENT, both through poisoned memory and one shared workspace."""
    cache, batch = problem.shard(layout)
    rank, heads = problem.dims.kv_lora_rank, problem.dims.num_heads
    q_nope, q_pe = problem.queries[..., :rank], problem.queries[..., rank:]
    current = problem.current_keys
    keys = {
        AttentionKind.HISTORY: cache,
        AttentionKind.CURRENT: (current[:, :rank], current[:, rank:]),
    }
    size = npu.workspace_bytes(heads, problem.dims, cache, batch)
    workspace = torch.full((size,), 255, dtype=torch.uint8)
    results = []
    for kind, kv in keys.items():
        out = q_nope.new_empty(q_nope.shape), torch.empty(problem.tokens, heads)
        poison(*out)
        partial_attention(
            q_nope, q_pe, kv, batch, kind, problem.dims, workspace, out=out, provider=npu
        )
        results.append(out)
    return results


def check(world_size: int, interleave: int, problem: Problem) -> None:
    history = []
    for rank in range(world_size):
        layout = ShardLayout(world_size, rank, interleave)
        shard, current = attend(problem, layout)
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


@settings(max_examples=60)
@given(case=layouts_and_problems())
def test_the_shapes_of_the_cpu_tests(case: tuple[int, int, Problem]) -> None:
    """None of these widths is the operator's: plain PyTorch serves them, by the same interface."""
    with on_npu() as seen:
        check(*case)
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
        check(*case)
    assert f"{V2}.out" in seen.names
