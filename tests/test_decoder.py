"""The whole step: three schedules on real ranks, against float64 and against each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings

from anabranch import DCPDecoder, MLADims, Schedule, ShardLayout, streams
from problem import TOLERANCE, Problem, dims, layouts_and_problems, relative_error
from ranks import Ranks, rank_group

ALL = list(Schedule)


def step_on_rank(
    problem: Problem, interleave: int, project_first: bool = False
) -> tuple[dict[Schedule, torch.Tensor], int]:
    """This rank's output under every schedule, and the tokens its cache holds afterwards."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layout = ShardLayout(size, rank, interleave)
    heads = problem.dims.num_heads // size
    own = slice(rank * heads, (rank + 1) * heads)
    sizes = problem.dims
    local = MLADims(
        heads, sizes.kv_lora_rank, sizes.qk_rope_head_dim, sizes.qk_nope_head_dim,
        sizes.v_head_dim, sizes.scale,
    )  # fmt: skip
    decoder = DCPDecoder(local, rank_group(), layout, project_first=project_first)
    columns = sizes.kv_lora_rank
    queries, current = problem.queries[:, own], problem.current_keys
    w_uv = problem.w_uv[own]
    if project_first:
        w_uv = decoder.gather_w_uv(w_uv)
        assert torch.equal(w_uv, problem.w_uv)
    results = {}
    for schedule in ALL:
        cache, batch = problem.shard(layout)
        results[schedule] = decoder.step(
            queries[..., :columns], queries[..., columns:],
            current[:, :columns], current[:, columns:],
            cache, batch, w_uv, schedule=schedule,
        )  # fmt: skip
    return results, int(cache.latent[..., 0].isfinite().sum())


def check(problem: Problem, interleave: int, pool: Ranks, project_first: bool = False) -> None:
    answers = pool.run(step_on_rank, problem, interleave, project_first)
    expected = problem.projected_answer()
    heads = problem.dims.num_heads // pool.world_size
    lengths = [past + new for past, new in zip(problem.past, problem.new, strict=True)]
    for rank, (results, held) in enumerate(answers):
        for schedule in ALL:
            assert torch.equal(results[schedule], results[Schedule.SERIAL]), schedule
        own = expected[:, rank * heads : (rank + 1) * heads].flatten(1)
        assert relative_error(results[Schedule.SERIAL], own) < TOLERANCE[problem.dtype]
        assert results[Schedule.SERIAL][sum(problem.new) :].eq(0).all()
        layout = ShardLayout(pool.world_size, rank, interleave)
        assert held == sum(layout.local_length(length) for length in lengths)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=layouts_and_problems())
def test_schedules_give_the_same_bits_and_the_right_answer(
    ranks: type[Ranks], case: tuple[int, int, Problem]
) -> None:
    world_size, interleave, problem = case
    check(problem, interleave, ranks(world_size))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=layouts_and_problems())
def test_project_first_agrees(ranks: type[Ranks], case: tuple[int, int, Problem]) -> None:
    world_size, interleave, problem = case
    check(problem, interleave, ranks(world_size), project_first=True)


class Recorder:
    """What the streams did, in the order it started and finished."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str, str, str]] = []

    def start(self, stream: str, kind: str, name: str) -> None:
        self.log.append(("start", stream, kind, name))

    def finish(self, stream: str, kind: str, name: str) -> None:
        self.log.append(("finish", stream, kind, name))

    def at(self, phase: str, kind: str, name: str) -> int:
        (index,) = [
            i for i, (p, _, k, n) in enumerate(self.log) if (p, k, n) == (phase, kind, name)
        ]
        return index

    def on(self, stream: str) -> list[str]:
        return [name for phase, s, _, name in self.log if (phase, s) == ("start", stream)]


def record(schedule: Schedule) -> Recorder:
    problem = Problem([40], [2], dims(2))
    cache, batch = problem.shard(ShardLayout())
    current = problem.current_keys
    recorder = Recorder()
    decoder = DCPDecoder(problem.dims, schedule=schedule)
    with streams.observe(recorder):
        decoder.step(
            problem.queries[..., :32], problem.queries[..., 32:],
            current[:, :32], current[:, 32:], cache, batch, problem.w_uv,
        )  # fmt: skip
    return recorder


def test_overlap_orders_its_streams_as_designed() -> None:
    run = record(Schedule.OVERLAP)
    assert run.on("main") == [
        "gather_queries", "history_attention", "history_ready", "exchange_history",
        "current_done", "merge", "project", "store",
    ]  # fmt: skip
    assert run.on("side") == ["history_ready", "current_attention", "current_done"]
    # Current attention after history's event, the merge after the join.
    assert run.at("finish", "run", "history_attention") < run.at("start", "record", "history_ready")
    assert run.at("start", "record", "history_ready") < run.at("start", "run", "current_attention")
    assert run.at("finish", "run", "current_attention") < run.at("start", "record", "current_done")
    assert run.at("start", "record", "current_done") < run.at("start", "wait", "current_done")
    assert run.at("start", "wait", "current_done") < run.at("start", "run", "merge")


def test_comm_stream_orders_its_streams_as_before_the_change() -> None:
    run = record(Schedule.COMM_STREAM)
    assert run.on("main") == [
        "gather_queries", "history_attention", "history_ready", "current_attention",
        "exchange_done", "merge", "project_transposed", "store",
    ]  # fmt: skip
    assert run.on("side") == ["history_ready", "exchange_history_converted", "exchange_done"]
    exchanged = run.at("finish", "run", "exchange_history_converted")
    assert exchanged < run.at("start", "run", "merge")


def test_serial_uses_one_stream() -> None:
    run = record(Schedule.SERIAL)
    assert run.on("side") == []
    assert len(run.on("main")) == 7


def ran_overlapped_on_rank(tokens: int) -> bool:
    """Whether `auto` uses the side stream for a step of `tokens` tokens of one sequence."""
    size, rank = dist.get_world_size(), dist.get_rank()
    problem = Problem([40], [tokens], dims(32 * size, 64, 8, 16))
    cache, batch = problem.shard(ShardLayout(size, rank))
    queries, current = problem.queries[:, :32], problem.current_keys
    recorder = Recorder()
    decoder = DCPDecoder(dims(32, 64, 8, 16), rank_group(), schedule=Schedule.AUTO)
    with streams.observe(recorder):
        decoder.step(
            queries[..., :64], queries[..., 64:], current[:, :64], current[:, 64:],
            cache, batch, problem.w_uv[:32],
        )  # fmt: skip
    return "current_attention" in recorder.on("side")


def test_auto_overlaps_only_what_outlasts_the_hand_off(
    ranks: type[Ranks],
) -> None:
    assert ranks(2).run(ran_overlapped_on_rank, 1) == [False, False]
    assert ranks(2).run(ran_overlapped_on_rank, 64) == [True, True]
    assert ranks(1).run(ran_overlapped_on_rank, 64) == [False]


@contextmanager
def decoder_inputs() -> Iterator[tuple[DCPDecoder, dict[str, object]]]:
    problem = Problem([40], [2], dims(2))
    cache, batch = problem.shard(ShardLayout())
    current = problem.current_keys
    yield (
        DCPDecoder(problem.dims),
        {
            "q_nope": problem.queries[..., :32],
            "q_pe": problem.queries[..., 32:],
            "kv_c": current[:, :32],
            "k_pe": current[:, 32:],
            "cache": cache,
            "batch": batch,
            "w_uv": problem.w_uv,
        },
    )


@pytest.mark.parametrize("name", ["q_nope", "q_pe", "kv_c", "k_pe", "w_uv"])
def test_a_step_names_the_input_that_does_not_fit(name: str) -> None:
    with decoder_inputs() as (decoder, inputs):
        given = inputs[name]
        assert isinstance(given, torch.Tensor)
        with pytest.raises(ValueError, match=f"{name} must be .*, got"):
            decoder.step(**{**inputs, name: given[..., :-1]})  # type: ignore[arg-type]
        if name != "q_nope":
            with pytest.raises(ValueError, match=f"{name} must have the dtype of q_nope"):
                decoder.step(**{**inputs, name: given.double()})  # type: ignore[arg-type]


def test_a_layout_that_contradicts_the_group_is_refused() -> None:
    message = "layout must have world_size 1 and rank 0 as the group has, got 2 and 1"
    with pytest.raises(ValueError, match=message):
        DCPDecoder(dims(2), None, ShardLayout(2, 1))
