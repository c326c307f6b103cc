"""Captured steps: the same bits as eager ones, on memory that never moves."""

from __future__ import annotations

import gc
import resource
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch import CapturedStep, DCPDecoder, LatentCache, MLADims, Schedule, ShardLayout
from anabranch.step import StepInputs
from problem import FORMS, Problem, dims, kernels
from ranks import Ranks, rank_group

MOST = 12


def inputs_of(problem: Problem, rank: int, size: int) -> tuple[DCPDecoder, StepInputs]:
    heads = problem.dims.num_heads // size
    own = slice(rank * heads, (rank + 1) * heads)
    layout = ShardLayout(size, rank, 1)
    cache, batch = problem.shard(layout)
    columns = problem.dims.kv_lora_rank
    queries, current = problem.queries[:, own], problem.current_keys
    decoder = DCPDecoder(replace(problem.dims, num_heads=heads), rank_group(), layout)
    return decoder, StepInputs(
        queries[..., :columns], queries[..., columns:],
        current[:, :columns], current[:, columns:],
        cache, batch, problem.w_uv[own],
    )  # fmt: skip


def into(cache: LatentCache, other: LatentCache) -> LatentCache:
    """Copy `other`, which has no more blocks, into the memory of `cache`."""
    cache.latent[: other.num_blocks] = other.latent
    cache.rope[: other.num_blocks] = other.rope
    return cache


def replay_on_rank(problems: list[Problem], schedule: Schedule, form: str) -> list[bool]:
    """Replay every problem on one captured step; is each replay equal to an eager step?"""
    with kernels(form):
        return replays(problems, schedule)


def replays(problems: list[Problem], schedule: Schedule) -> list[bool]:
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = problems[0].dims
    local = MLADims(
        sizes.num_heads // size, sizes.kv_lora_rank, sizes.qk_rope_head_dim,
        sizes.qk_nope_head_dim, sizes.v_head_dim, sizes.scale,
    )  # fmt: skip
    decoder = DCPDecoder(local, rank_group(), ShardLayout(size, rank, 1), schedule)
    captured = decoder.capture(MOST)
    shared = LatentCache(64, problems[0].block_size, sizes, problems[0].dtype)
    w_uv = inputs_of(problems[0], rank, size)[1].w_uv.contiguous()
    equal = []
    for problem in sorted(problems, key=lambda p: -max(p.past)):  # the widest table comes first
        _, given = inputs_of(problem, rank, size)
        w_uv.copy_(given.w_uv)
        eager = decoder.step(**vars(given))
        expected_cache = given.cache.latent
        _, fresh = inputs_of(problem, rank, size)
        fresh = replace(fresh, cache=into(shared, fresh.cache), w_uv=w_uv)
        replayed = captured.step(**vars(fresh))
        kept = shared.latent[: expected_cache.shape[0]]
        same_cache = torch.equal(kept.nan_to_num(7), expected_cache.nan_to_num(7))
        equal.append(torch.equal(replayed, eager) and same_cache)
    return equal


@st.composite
def runs(draw: st.DrawFn) -> list[Problem]:
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    problems = []
    for seed in range(4):
        past = draw(st.lists(st.integers(0, 120), min_size=1, max_size=4))
        new = [draw(st.integers(1, 2)) for _ in past]
        padding = draw(st.integers(0, 3))
        problems.append(Problem(past, new, dims(4), dtype, 16, padding, seed))
    return problems


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("schedule", list(Schedule))
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.sampled_from([1, 2]), problems=runs())
def test_a_replay_equals_a_fresh_eager_step_bit_for_bit(
    ranks: type[Ranks], schedule: Schedule, form: str, size: int, problems: list[Problem]
) -> None:
    for equal in ranks(size).run(replay_on_rank, problems, schedule, form):
        assert equal == [True] * len(problems)


def captured_step() -> tuple[CapturedStep, StepInputs]:
    problem = Problem([40, 3], [2, 1], dims(2))
    cache, batch = problem.shard(ShardLayout())
    queries, current = problem.queries, problem.current_keys
    inputs = StepInputs(
        queries[..., :32], queries[..., 32:], current[:, :32], current[:, 32:],
        cache, batch, problem.w_uv,
    )  # fmt: skip
    captured = DCPDecoder(problem.dims).capture(3)
    captured.step(**vars(inputs))
    return captured, inputs


def test_what_must_be_fixed_is_refused_when_it_changes() -> None:
    captured, inputs = captured_step()
    call = dict(vars(inputs))
    wide = torch.nn.functional.pad(inputs.batch.block_table, (0, 1))
    other = LatentCache(9, 16, dims(2), torch.float32)
    half = {
        name: value.bfloat16() for name, value in call.items() if isinstance(value, torch.Tensor)
    }
    problem = Problem([1] * 4, [1] * 4, dims(2))
    _, longer_batch = problem.shard(ShardLayout())
    longer = {
        "q_nope": problem.queries[..., :32], "q_pe": problem.queries[..., 32:],
        "kv_c": problem.current_keys[:, :32], "k_pe": problem.current_keys[:, 32:],
        "batch": longer_batch,
    }  # fmt: skip
    changes: dict[str, dict[str, object]] = {
        "tokens must be at most 3, as captured, got 4": longer,
        "block_table columns must be at most 6, as captured, got 7": {
            "batch": replace(inputs.batch, block_table=wide)
        },
        "cache must be as captured": {"cache": other},
        "w_uv must be as captured": {"w_uv": inputs.w_uv.clone()},
        "dtype must be as captured": half,
        "q_nope must be": {"q_nope": inputs.q_nope[:, :1]},
    }
    for message, change in changes.items():
        with pytest.raises(ValueError, match=message):
            captured.step(**{**call, **change})  # type: ignore[arg-type]
    inputs.w_uv.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="w_uv must be as captured"):
        captured.step(**vars(inputs))
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        DCPDecoder(dims(2)).capture(0)


@pytest.mark.parametrize("form", FORMS)
def test_a_step_may_leave_inference_mode_and_enter_it_again(form: str) -> None:
    """What is allocated under that mode may not be written outside, and buffers are kept."""
    modes = [torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode]
    problem = Problem([40, 3], [2, 1], dims(2))
    cache, batch = problem.shard(ShardLayout())
    queries, current = problem.queries, problem.current_keys
    rows = queries[..., :32], queries[..., 32:], current[:, :32], current[:, 32:]
    with torch.inference_mode():
        shared = into(LatentCache(8, 16, problem.dims, problem.dtype), cache)
    with kernels(form):
        for schedule in Schedule:
            decoder = DCPDecoder(problem.dims, schedule=schedule)
            captured, results = decoder.capture(3), []
            for mode in modes:
                with mode():
                    results.append(decoder.step(*rows, shared, batch, problem.w_uv).clone())
                    results.append(captured.step(*rows, shared, batch, problem.w_uv).clone())
            assert all(torch.equal(result, results[0]) for result in results)


def test_a_captured_step_survives_the_larger_capture_of_another() -> None:
    captured, inputs = captured_step()
    before = captured.step(**vars(inputs)).clone()
    larger = Problem([500] * 8, [2] * 8, dims(2))
    cache, batch = larger.shard(ShardLayout())
    queries, current = larger.queries, larger.current_keys
    captured._decoder.capture(16).step(
        queries[..., :32], queries[..., 32:], current[:, :32], current[:, 32:],
        cache, batch, larger.w_uv,
    )  # fmt: skip
    assert torch.equal(captured.step(**vars(inputs)), before)


@pytest.mark.parametrize("schedule", [Schedule.SERIAL, Schedule.OVERLAP])
def test_steady_state_allocates_nothing(schedule: Schedule) -> None:
    captured, inputs = captured_step()
    captured._decoder.schedule = schedule
    call = vars(inputs)
    captured.step(**call)
    with torch.profiler.profile(profile_memory=True) as profile:
        for _ in range(20):
            captured.step(**call)
    assert sum(max(event.self_cpu_memory_usage, 0) for event in profile.events()) == 0


def test_resident_memory_is_flat_over_ten_thousand_replays() -> None:
    captured, inputs = captured_step()
    call = vars(inputs)
    for _ in range(500):
        captured.step(**call)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(10_000):
        captured.step(**call)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1024  # KiB
