"""Recorded operations: native calls are repeated, everything else runs as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from anabranch import DCPDecoder, Schedule, ShardLayout
from anabranch.streams import collective, launch, repeated, streams_for
from problem import Problem, dims
from ranks import Ranks

CPU = torch.device("cpu")


def on_main(operation: Callable[[], None]) -> None:
    streams_for(CPU).main.run(operation)


def on_side(operation: Callable[[], None]) -> None:
    side = streams_for(CPU).side
    side.run(operation)
    side.synchronize()


STREAMS = pytest.mark.parametrize("run", [on_main, on_side])


@STREAMS
def test_a_native_operation_repeats_its_calls_and_not_what_is_around_them(
    run: Callable[[Callable[[], None]], None],
) -> None:
    seen: list[str] = []
    memory = torch.zeros(4, 2)

    def operation() -> None:
        view = memory[1:].transpose(0, 1)
        seen.append("around")
        for name in ("first", "second"):
            launch(name, lambda name=name: seen.append(name), writes=(view,))

    again = repeated(CPU, operation)
    assert again.__name__ == "operation"
    for _ in range(3):
        run(again)
    assert seen == ["around", *["first", "second"] * 3]


@STREAMS
def test_an_operation_that_also_runs_operators_runs_as_it_is(
    run: Callable[[Callable[[], None]], None],
) -> None:
    seen: list[int] = []
    source, target = torch.zeros(1), torch.zeros(1)

    def operation() -> None:
        target.copy_(source)
        launch("kernel", lambda: seen.append(int(target)))

    again = repeated(CPU, operation)
    for value in range(3):
        source.fill_(value)
        run(again)
    assert seen == [0, 1, 2]


def collectives_of_a_repeated_operation() -> tuple[list[str], list[float]]:
    """What ran, and what each of three runs summed over the ranks."""
    seen: list[str] = []
    sums: list[float] = []
    value, total = torch.ones(1), torch.zeros(1)

    def sum_over_ranks() -> None:
        total.copy_(value)
        dist.all_reduce(total)

    def operation() -> None:
        seen.append("around")
        collective(sum_over_ranks)

    again = repeated(CPU, operation)
    for factor in range(3):
        value.fill_(factor)
        on_side(again)
        sums.append(total.item())
    return seen, sums


def test_collectives_are_repeated(ranks: type[Ranks]) -> None:
    for result in ranks(2).run(collectives_of_a_repeated_operation):
        assert result == (["around"], [0, 2, 4])


def test_an_error_of_a_repeated_call_is_raised_each_time_and_names_the_same() -> None:
    problem = Problem([40], [1], dims(2), block_size=16)
    cache, batch = problem.shard(ShardLayout())
    queries, current = problem.queries, problem.current_keys
    rows = queries[..., :32], queries[..., 32:], current[:, :32], current[:, 32:]
    captured = DCPDecoder(problem.dims, schedule=Schedule.SERIAL).capture(1)
    right = captured.step(*rows, cache, batch, problem.w_uv).clone()
    table, slots = batch.block_table.clone(), batch.slot_mapping.clone()
    for _ in range(2):
        batch.block_table[0, 1] = cache.num_blocks
        with pytest.raises(ValueError, match=r"batch.block_table\[0\] must name blocks in"):
            captured.step(*rows, cache, batch, problem.w_uv)
        batch.block_table.copy_(table)
        batch.slot_mapping.fill_(cache.num_blocks * cache.block_size)
        with pytest.raises(ValueError, match="slot_mapping must be below"):
            captured.step(*rows, cache, batch, problem.w_uv)
        batch.slot_mapping.copy_(slots)
        assert torch.equal(captured.step(*rows, cache, batch, problem.w_uv), right)


def test_a_captured_step_keeps_the_results_of_every_schedule_apart() -> None:
    """`merge` reads another buffer under `comm_stream` than under the others."""
    problem = Problem([40, 7], [1, 2], dims(2), block_size=16)
    cache, batch = problem.shard(ShardLayout())
    queries, current = problem.queries, problem.current_keys
    rows = queries[..., :32], queries[..., 32:], current[:, :32], current[:, 32:]
    decoder = DCPDecoder(problem.dims)
    captured = decoder.capture(3)
    right = decoder.step(*rows, cache, batch, problem.w_uv)
    for schedule in [*Schedule, *reversed(Schedule)]:
        decoder.schedule = schedule
        assert torch.equal(captured.step(*rows, cache, batch, problem.w_uv), right)
        flipped = tuple(-row for row in rows)
        expected = decoder.step(*flipped, cache, batch, problem.w_uv)
        assert torch.equal(captured.step(*flipped, cache, batch, problem.w_uv), expected)


def test_a_projected_captured_step_follows_its_inputs() -> None:
    """`project_first` copies the LSE with an operator, so those operations are not repeated."""
    problem = Problem([40, 7], [1, 2], dims(2), block_size=16)
    cache, batch = problem.shard(ShardLayout())
    queries, current = problem.queries, problem.current_keys
    rows = queries[..., :32], queries[..., 32:], current[:, :32], current[:, 32:]
    decoder = DCPDecoder(problem.dims, project_first=True)
    captured = decoder.capture(3)
    for factor in (1, -1, 0.5):
        scaled = tuple(factor * row for row in rows)
        expected = decoder.step(*scaled, cache, batch, problem.w_uv)
        assert torch.equal(captured.step(*scaled, cache, batch, problem.w_uv), expected)
