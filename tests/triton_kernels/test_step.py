"""Whole decode steps on the Triton kernels: every schedule, and captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreted import NoReadBack, on_triton

from anabranch import DCPDecoder, DecodeBatch, LatentCache, Schedule, ShardLayout
from anabranch.step import Buffers, StepInputs
from anabranch.vllm_plugin.batches import localise
from anabranch.vllm_plugin.decode import LatentDecoder
from problem import TOLERANCE, Problem, dims, relative_error


def arguments(problem: Problem) -> tuple[Any, ...]:
    cache, batch = problem.shard(ShardLayout())
    queries, current = problem.queries, problem.current_keys
    return (
        queries[..., :32], queries[..., 32:], current[:, :32], current[:, 32:],
        cache, batch, problem.w_uv,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "project_first"),
    [*((dtype, False) for dtype in TOLERANCE), (torch.bfloat16, True)],
)
def test_schedules_give_the_same_bits_and_the_right_answer(
    dtype: torch.dtype, project_first: bool
) -> None:
    problem = Problem([40, 0, 77], [2, 1, 3], dims(4), dtype, padding_rows=2)
    results = []
    with on_triton():
        decoder = DCPDecoder(problem.dims, project_first=project_first)
        for schedule in Schedule:
            given = arguments(problem)
            results.append(decoder.step(*given, schedule=schedule))
            written = given[4].latent[..., 0].isfinite().sum()
            assert written == 40 + 77 + 2 + 1 + 3
    assert relative_error(results[0], problem.projected_answer().flatten(1)) < TOLERANCE[dtype]
    for result in results[1:]:
        assert torch.equal(result, results[0])


def test_a_step_reads_nothing_back_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph needs: lengths, tables and slots stay on the device."""
    problem = Problem([40, 0], [2, 1], dims(4))
    given = arguments(problem)
    monkeypatch.setattr(DecodeBatch, "host_lens", lambda self: pytest.fail("read"))
    with on_triton():
        decoder = DCPDecoder(problem.dims)
        with NoReadBack():
            out = decoder.step(*given, schedule=Schedule.SERIAL)
    assert relative_error(out, problem.projected_answer().flatten(1)) < 1e-5


@pytest.mark.parametrize("new", [[1, 1, 1, 0], [2, 1, 3, 0]])
def test_a_step_in_an_engine_reads_nothing_back(
    monkeypatch: pytest.MonkeyPatch, new: list[int]
) -> None:
    """Localisation and step of the vLLM plugin on a device; the last sequence is padding."""
    problem = Problem([40, 0, 77, 0], new, dims(4), padding_rows=4 - sum(new) % 4)
    *inputs, cache, batch, w_uv = arguments(problem)
    cache.write(*inputs[2:], batch.slot_mapping)  # an engine has stored before
    totals = torch.tensor([past + n for past, n in zip(problem.past, new, strict=True)])
    starts = torch.tensor([0, *new]).cumsum(0)
    lengths = torch.zeros(2, 4, dtype=torch.int32)
    monkeypatch.setattr(DecodeBatch, "host_lens", lambda self: pytest.fail("read"))
    with on_triton():
        decoder = LatentDecoder(problem.dims, None, Schedule.AUTO, Buffers(torch.device("cpu")))
        with NoReadBack():
            localise(ShardLayout(), totals, starts, *lengths)
            slots = torch.full_like(batch.slot_mapping, -1)
            localised = DecodeBatch(*lengths, batch.block_table, slots)
            out = decoder.step(StepInputs(*inputs, cache, localised, w_uv))
    assert relative_error(out[: sum(new)], problem.answer()[0][: sum(new)]) < 1e-5
    assert not out[sum(new) :].any()


def test_a_replay_follows_new_lengths_and_tables() -> None:
    """The launch of a captured step is the same whatever the lengths: only contents change."""
    problems = [Problem([90, 0, 20], [1, 2, 1], dims(4), seed=seed) for seed in range(2)]
    problems += [Problem([3, 64, 47], [2, 1, 1], dims(4), seed=5)]
    with on_triton():
        decoder = DCPDecoder(problems[0].dims)
        captured = decoder.capture(4)
        shared = LatentCache(64, 16, problems[0].dims, torch.float32)
        weight = problems[0].w_uv.clone()
        for problem in problems:
            *inputs, cache, batch, w_uv = arguments(problem)
            shared.latent[: cache.num_blocks], shared.rope[: cache.num_blocks] = (
                cache.latent,
                cache.rope,
            )
            weight.copy_(w_uv)
            replayed = captured.step(*inputs, shared, batch, weight)
            expected = problem.projected_answer().flatten(1)
            assert relative_error(replayed, expected) < 1e-5
