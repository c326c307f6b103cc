"""Work cut into shares for threads: of any number, on any number of cores, the same answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from anabranch import AttentionKind, ShardLayout, merge_partials, partial_attention, v_up
from problem import TOLERANCE, Problem, dims, relative_error


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("heads", [16, 80])
def test_attention_of_any_number_of_threads(threads: int, heads: int) -> None:
    problem = Problem([9000, 3, 0, 4000], [2, 1, 1, 3], dims(heads), torch.bfloat16)
    cache, batch = problem.shard(ShardLayout())
    rank = problem.dims.kv_lora_rank
    queries = problem.queries[..., :rank], problem.queries[..., rank:]
    keys = problem.current_keys
    current = (keys[:, :rank], keys[:, rank:])
    history = [
        partial_attention(*queries, cache, batch, AttentionKind.HISTORY, problem.dims)
        for _ in range(3)
    ]
    for again in history[1:]:  # whichever thread ran which share
        assert all(map(torch.equal, history[0], again))
    local = partial_attention(*queries, current, batch, AttentionKind.CURRENT, problem.dims)
    out, _ = merge_partials(history[0][0][None], history[0][1][None], *local)
    assert relative_error(out, problem.answer()[0]) < TOLERANCE[torch.bfloat16]


def test_merge_and_v_up_give_the_bits_of_one_thread(threads: int) -> None:
    random = torch.Generator().manual_seed(0)
    outs = torch.randn(3, 40, 24, 64, generator=random)
    lses = torch.randn(3, 40, 24, generator=random)
    weights = torch.randn(24, 64, 96, generator=random)
    merged = merge_partials(outs, lses)
    projected = v_up(merged[0], weights)
    torch.set_num_threads(1)
    alone = merge_partials(outs, lses)
    assert all(map(torch.equal, merged, alone))
    assert torch.equal(projected, v_up(alone[0], weights))
