"""Whole steps on the NPU provider: schedules, their calls in order, the sanitizer, real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import contract
import pytest
import torch
import torch.distributed as dist
from contract import BMM, V2
from hypothesis import given, settings
from hypothesis import strategies as st
from miniature import miniature
from on_npu import on_npu
from torch.utils._python_dispatch import TorchDispatchMode

from anabranch import DCPDecoder, Schedule, ShardLayout
from anabranch.schedules import RUN
from anabranch.step import DecodeStep
from anabranch.streams import StreamPair
from anabranch.streams.accesses import operator_name
from anabranch.streams.adversarial import Trace, record
from anabranch.streams.check import lone_group
from anabranch.streams.findings import Fault
from anabranch.streams.sanitizer import sanitize
from problem import TOLERANCE, Problem, dims, relative_error
from ranks import Ranks, rank_group

FIA = f"{V2}.out"
DTYPES = (torch.bfloat16, torch.float16)
each_schedule = pytest.mark.parametrize("schedule", Schedule, ids=lambda one: one.value)


def wide(past: list[int], new: list[int], heads: int = 2, **more: Any) -> Problem:
    return Problem(past, new, dims(heads, 512, 64, 128), **({"dtype": torch.bfloat16} | more))


def arguments(problem: Problem, layout: ShardLayout, own: slice) -> tuple[Any, ...]:
    cache, batch = problem.shard(layout)
    queries, current = problem.queries[:, own], problem.current_keys
    return (
        queries[..., :512], queries[..., 512:], current[:, :512], current[:, 512:],
        cache, batch, problem.w_uv[own].contiguous(),
    )  # fmt: skip


def steps(problem: Problem, group: Any, project_first: bool) -> dict[Schedule, torch.Tensor]:
    decoder = DCPDecoder(problem.dims, group, project_first=project_first)
    return {
        schedule: decoder.step(*arguments(problem, ShardLayout(), slice(None)), schedule=schedule)
        for schedule in Schedule
    }


@settings(max_examples=25)
@given(
    past=st.lists(st.integers(0, 150), min_size=1, max_size=3),
    most=st.sampled_from([1, 3]),
    heads=st.sampled_from([1, 2, 4, 128]),
    dtype=st.sampled_from(DTYPES),
    padding=st.sampled_from([0, 2]),
    data=st.data(),
)
def test_schedules_agree_and_are_right(
    past: list[int], most: int, heads: int, dtype: torch.dtype, padding: int, data: st.DataObject
) -> None:
    new = [data.draw(st.integers(1, most)) for _ in past]
    problem = wide(past, new, heads, dtype=dtype, padding_rows=padding)
    group = lone_group() if data.draw(st.booleans()) else None
    with on_npu(data.draw(st.sampled_from(["8.5.0", "9.1.0"]))) as seen:
        results = steps(problem, group, data.draw(st.booleans()))
    expected = problem.projected_answer().flatten(1)
    for result in results.values():
        assert relative_error(result, expected) < TOLERANCE[dtype]
        assert result[sum(new) :].eq(0).all()
    assert torch.equal(results[Schedule.SERIAL], results[Schedule.OVERLAP])
    assert FIA in seen.names
    assert (BMM in seen.names) == (heads < 128)  # 128 * 512 is the limit itself


def step_on_rank(problem: Problem) -> list[torch.Tensor]:
    import torch_npu  # noqa: F401  as conftest.py does in the process of the tests

    library = contract.install()
    rank, size = dist.get_rank(), dist.get_world_size()
    heads = problem.dims.num_heads // size
    own = slice(rank * heads, (rank + 1) * heads)
    layout = ShardLayout(size, rank, 1)
    with on_npu():
        decoder = DCPDecoder(replace(problem.dims, num_heads=heads), rank_group(), layout)
        results = [
            decoder.step(*arguments(problem, layout, own), schedule=schedule)
            for schedule in Schedule
        ]
    del library
    return results


def test_two_real_ranks(ranks: Callable[[int], Ranks]) -> None:
    problem = wide([150, 0, 33], [2, 1, 1], 4)
    expected = problem.projected_answer()
    for rank, results in enumerate(ranks(2).run(step_on_rank, problem)):
        own = expected[:, rank * 2 : rank * 2 + 2].flatten(1)
        for result in results:
            assert relative_error(result, own) < 1e-2


def figure_5() -> list[tuple[str, str]]:
    """The numbered arrows of the source's figure 5; gather and store are this design's own."""
    return [
        ("main", "history FIA"), ("main", "record"),  # 1, 2
        *[("side", "record_stream")] * 4,  # 3
        ("side", "wait"), ("side", "current FIA"), ("side", "record"),  # 4, 5, 6
        *[("main", "record_stream")] * 2,  # 7
        ("main", "alltoall_base_"), ("main", "wait"),  # 8, 9
        ("main", "merge"), ("main", "npu_transpose_batchmatmul"),  # 10, 11
    ]  # fmt: skip


def test_the_calls_of_overlap_are_those_of_the_sources_figure_5() -> None:
    problem = wide([150, 40], [1, 1], 4)
    merging = {"stack", "addcmul_"}  # the first operator of the merge, and its last products
    with on_npu() as seen, miniature() as device:
        decoder = DCPDecoder(problem.dims, lone_group())
        given = arguments(problem, ShardLayout(), slice(None))
        decoder.step(*given, schedule=Schedule.SERIAL)  # asks for workspaces, makes buffers
        del device.log[:], seen.calls[:]
        decoder.step(*given)
    kinds = iter(["history FIA", "current FIA"])
    wanted = {what for _, what in figure_5()}
    calls = []
    for stream, what in device.log:
        name = next(kinds) if what == V2 else "merge" if what in merging else what
        if (name in wanted and calls[-1:] != [(stream, "merge")]) or name != "merge":
            calls += [(stream, name)] if name in wanted else []
    assert calls == figure_5()
    history, current = (call for name, call in seen.calls if name == FIA)
    assert history["workspace"].data_ptr() == current["workspace"].data_ptr()
    assert history["actual_seq_kvlen"] == [150, 40]
    assert current["actual_seq_kvlen"] == [1, 1]
    assert history["block_table"] is not None
    assert history["sparse_mode"] == 0
    assert seen.names == [FIA, FIA, BMM]


def test_several_tokens_go_as_the_source_has_them_where_cann_takes_it() -> None:
    problem = wide([150, 40], [3, 3], 4)
    given = lambda: arguments(problem, ShardLayout(), slice(None))  # noqa: E731
    for cann in ("8.5.0", "9.1.0", "10.0"):
        with on_npu(cann) as seen:
            DCPDecoder(problem.dims).step(*given())
        history, current = (call for name, call in seen.calls if name == FIA)
        assert (current["sparse_mode"], current["input_layout"]) == (3, "TND")
        assert current["actual_seq_qlen"] == [3, 6]
        assert history["sparse_mode"] == 0
        assert history["atten_mask"] is None
        # Three tokens of 4 heads are 12 heads of one, which FIA does not take: a row each.
        if cann == "8.5.0":
            assert current["block_table"] is not None
            assert history["actual_seq_kvlen"] == [150] * 3 + [40] * 3
        else:
            assert current["block_table"] is None
            assert (history["input_layout"], history["actual_seq_qlen"]) == ("TND", [3, 6])
            assert history["actual_seq_kvlen"] == [150, 40]


def test_tokens_of_a_sequence_become_heads_of_history() -> None:
    problem = wide([150, 40], [4, 4], 2)
    with on_npu() as seen:
        DCPDecoder(problem.dims).step(*arguments(problem, ShardLayout(), slice(None)))
    history = next(call for name, call in seen.calls if name == FIA)
    assert history["query"].shape == (2, 8, 1, 512)
    assert history["actual_seq_kvlen"] == [150, 40]


def watched(schedule: Schedule, instead: Any = None) -> list[Any]:
    """Findings over steps whose inputs the caller lets go of."""
    with on_npu(), sanitize() as sanitizer:
        for group in (None, lone_group()):
            decoder = DCPDecoder(dims(2, 512, 64, 128), group, None, schedule)
            for past, new in (([150, 40], [1, 1]), ([0, 7], [3, 1]), ([20, 5], [2, 2])):
                given = arguments(wide(past, new), ShardLayout(), slice(None))
                with mock.patch.dict(RUN, {} if instead is None else {schedule: instead}):
                    decoder.step(*given)
                del given
    return sanitizer.findings


@each_schedule
def test_the_sanitizer_is_silent(schedule: Schedule) -> None:
    assert watched(schedule) == []


def overlap_without(missing: str, step: DecodeStep, streams: StreamPair) -> None:
    """`overlap` less one event: `history_ready`, for the workspace, or `current_done`, the join."""
    main, side = streams
    main.run(step.gather_queries)
    main.run(step.history_attention)
    history_ready = main.record_event("history_ready")
    side.record_stream(*step.current_inputs)
    if missing != "history_ready":
        side.wait_event(history_ready)
    side.run(step.current_attention)
    current_done = side.record_event("current_done")
    main.record_stream(*step.current_results)
    main.run(step.exchange_history)
    if missing != "current_done":
        main.wait_event(current_done)
    main.run(step.merge)
    main.run(step.project)
    main.run(step.store)


def test_the_sanitizer_sees_a_race_for_the_workspace_of_fia() -> None:
    found = watched(Schedule.OVERLAP, partial(overlap_without, "history_ready"))
    between = {
        (one.first.operation, one.first.operator, one.second.operation, one.second.operator)
        for one in found
        if one.fault is Fault.WORKSPACE_RACE
    }
    assert ("history_attention", V2, "current_attention", V2) in between


def traced(schedule: Schedule) -> Trace:
    """The recorded calls of a step, to be run again by address in other orders."""
    problem, group = wide([150, 40], [2, 2], 4), lone_group()

    def program(streams: StreamPair) -> Iterator[torch.Tensor]:
        decoder = DCPDecoder(problem.dims, group, None, schedule)
        yield decoder.step(*arguments(problem, ShardLayout(), slice(None)))

    return record(program)


@each_schedule
def test_every_legal_order_gives_the_same_bits(schedule: Schedule) -> None:
    with on_npu():
        trace = traced(schedule)
        assert trace.count_orders() == {"serial": 1, "comm_stream": 3}.get(schedule.value, 2)
        assert trace.first_damage() is None


def test_without_the_join_some_order_gives_other_numbers() -> None:
    broken = {Schedule.OVERLAP: partial(overlap_without, "current_done")}
    with on_npu(), mock.patch.dict(RUN, broken):
        assert traced(Schedule.OVERLAP).first_damage() is not None


class NoReadBack(TorchDispatchMode):
    """Fails at an operator that makes the host wait for the device."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        waits = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item", "masked_select")
        assert operator_name(function) not in waits, function
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("new", [[1, 1], [4, 4], [3, 3], [1, 2]])
def test_a_step_reads_nothing_back_to_the_host(new: list[int]) -> None:
    problem = wide([40, 0], new, 2)
    with on_npu():
        given = arguments(problem, ShardLayout(), slice(None))
        decoder = DCPDecoder(problem.dims, lone_group())
        with NoReadBack():
            out = decoder.step(*given, schedule=Schedule.SERIAL)
    assert relative_error(out, problem.projected_answer().flatten(1)) < 1e-2
