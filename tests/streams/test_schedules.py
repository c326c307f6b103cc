"""No report on a shipped schedule, over random batches and in every legal order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import Decode, random_decode

from anabranch import Schedule
from anabranch.streams import observe, streams_for
from anabranch.streams.adversarial import Delays, record
from anabranch.streams.check import check_schedules, check_target, lone_group
from anabranch.streams.cpu import cpu_streams
from anabranch.streams.findings import Fault
from anabranch.streams.sanitizer import sanitize
from ranks import Ranks, rank_group

BATCHES = 1000
ONE_STEP = (((5, 2), (3, 1)),)
# Legal orders of one step: of its operations.
ORDERS = {
    Schedule.SERIAL: 1,
    Schedule.COMM_STREAM: 3,  # finding the memory that receives counts as an operation of main
    Schedule.OVERLAP: 2,
    Schedule.AUTO: 2,  # `overlap` here: the hand-off to these streams costs nothing
}

each_schedule = pytest.mark.parametrize("schedule", Schedule, ids=lambda one: one.value)


@each_schedule
def test_no_report_over_random_batches(schedule: Schedule) -> None:
    # The schedule that chooses runs one of the others.
    batches = BATCHES if schedule is not Schedule.AUTO else BATCHES // 10
    (checked,) = check_schedules(batches, schedules=[schedule])
    assert checked.findings == ()
    assert checked.runs == batches
    assert checked.operators > 10 * batches


@each_schedule
@pytest.mark.parametrize("project_first", [False, True])
def test_every_legal_order_of_a_step_gives_the_same_bits(
    schedule: Schedule, project_first: bool
) -> None:
    decode = Decode(ONE_STEP, lone_group(), project_first=project_first)
    trace = record(lambda streams: decode.run(schedule))
    orders = list(trace.orders())
    assert len(orders) == trace.count_orders() == ORDERS[schedule]
    assert trace.count_operator_orders() >= ORDERS[schedule]
    assert trace.first_damage() is None


@each_schedule
def test_random_orders_of_many_steps_with_reused_buffers(schedule: Schedule) -> None:
    lens = tuple(((3 + step, 1 + step % 2), (step, 1)) for step in range(6))
    trace = record(lambda streams: Decode(lens, lone_group()).run(schedule))
    for seed in range(10):
        assert trace.damage(trace.random_order(seed)) is None


def test_the_recorded_results_are_those_of_real_streams() -> None:
    decode = Decode(ONE_STEP, lone_group())
    trace = record(lambda streams: decode.run(Schedule.OVERLAP))
    for got, wanted in zip(trace.expected, decode.run(Schedule.OVERLAP), strict=True):
        torch.testing.assert_close(got, wanted)


def test_random_delays_on_real_threads_change_nothing() -> None:
    for seed in range(5):
        decode = random_decode(seed, None)
        wanted = list(decode.run(Schedule.SERIAL))
        with observe(Delays(seed)):
            got = list(decode.run(Schedule.OVERLAP))
        assert all(map(torch.equal, got, wanted))


def test_the_worker_stream_is_watched_too() -> None:
    """Real threads under the sanitizer: the accesses of the worker count for the side stream."""
    with sanitize(cpu_streams()) as sanitizer:
        list(Decode(ONE_STEP, lone_group()).run(Schedule.OVERLAP))
        pair = streams_for("cpu")
        shared = torch.zeros(4)
        pair.side.wait_event(pair.main.record_event("made"))
        pair.side.run(lambda: shared.fill_(1.0))
        pair.main.run(lambda: shared.add_(1.0))
        pair.side.synchronize()
    assert [finding.fault for finding in sanitizer.findings] == [Fault.EARLY_READ]


def _watched_step(schedule: Schedule) -> list[str]:
    group = rank_group()
    found = check_schedules(6, schedules=[schedule], group=group)
    return [str(finding) for checked in found for finding in checked.findings]


@each_schedule
def test_no_report_on_two_ranks(ranks: Callable[[int], Ranks], schedule: Schedule) -> None:
    assert ranks(2).run(_watched_step, schedule) == [[], []]


def faulty_step(streams: Any) -> None:
    """What `check_target` is pointed at by name."""
    result = torch.zeros(4)
    streams.side.run(lambda: result.fill_(1.0))
    result.sum()


def plain_step() -> None:
    torch.ones(4).sum()


def test_check_of_a_function() -> None:
    by_name = check_target(f"{__name__}:faulty_step")
    assert {finding.fault for finding in by_name.findings} >= {Fault.EARLY_READ}
    assert check_target(plain_step).findings == ()


@pytest.mark.parametrize("target", ["nowhere:step", "json:nothing", "json", "json:__name__"])
def test_a_target_that_cannot_be_called_is_named(target: str) -> None:
    with pytest.raises(ValueError, match=target.partition(":")[0]):
        check_target(target)
