"""What the sanitizer reports, and what it must not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fake_accelerator import FakeEvent, FakeStream, current_stream
from hypothesis import given
from hypothesis import strategies as st
from mutations import Unrecorded

from anabranch.streams import StreamPair, launch, watch
from anabranch.streams.accelerator import AcceleratorStream
from anabranch.streams.accesses import overlap, region
from anabranch.streams.cpu import inline_streams
from anabranch.streams.direct import sanitize_direct
from anabranch.streams.findings import Fault, StreamFaults
from anabranch.streams.sanitizer import Sanitizer, sanitize

Program = Callable[[StreamPair], None]


def faults(program: Program) -> list[Fault]:
    pair = inline_streams()
    with sanitize(pair) as sanitizer:
        program(pair)
    return [finding.fault for finding in sanitizer.findings]


def forked(streams: StreamPair) -> None:
    streams.side.wait_event(streams.main.record_event("fork"))


def test_both_halves_of_a_packed_buffer_may_be_written_at_once() -> None:
    def program(streams: StreamPair) -> None:
        packed = torch.zeros(4, 3, 10)
        forked(streams)
        streams.side.run(lambda: packed[..., 8:].fill_(1.0))
        streams.main.run(lambda: packed[..., :8].fill_(2.0))

    assert faults(program) == []


def test_interleaved_columns_that_share_one_are_a_race() -> None:
    def program(streams: StreamPair) -> None:
        packed = torch.zeros(4, 3, 10)
        forked(streams)
        streams.side.run(lambda: packed[..., 7:].fill_(1.0))
        streams.main.run(lambda: packed[..., :8].fill_(2.0))

    assert faults(program) == [Fault.WORKSPACE_RACE]


def test_two_readers_are_no_race() -> None:
    def program(streams: StreamPair) -> None:
        shared = torch.ones(4)
        forked(streams)
        streams.side.run(lambda: shared.sum())  # type: ignore[arg-type, return-value]
        streams.main.run(lambda: shared.sum())  # type: ignore[arg-type, return-value]

    assert faults(program) == []


def test_synchronizing_orders_what_the_caller_does_next() -> None:
    def program(streams: StreamPair) -> None:
        shared = torch.zeros(4)
        forked(streams)
        streams.side.run(lambda: shared.fill_(1.0))
        streams.side.synchronize()
        streams.main.run(lambda: shared.add_(1.0))

    assert faults(program) == []


def test_the_order_of_calls_orders_nothing() -> None:
    def program(streams: StreamPair) -> None:
        shared = torch.zeros(4)
        streams.main.run(lambda: shared.fill_(1.0))
        streams.side.run(lambda: shared.add_(1.0))

    assert faults(program) == [Fault.DATA_RACE]


def test_an_event_that_was_never_recorded() -> None:
    def program(streams: StreamPair) -> None:
        streams.side.wait_event(Unrecorded("never"))

    assert faults(program) == [Fault.UNRECORDED_EVENT]


def test_an_operation_that_waits_for_its_own_stream() -> None:
    def program(streams: StreamPair) -> None:
        streams.side.run(lambda: streams.side.synchronize())

    assert faults(program) == [Fault.DEADLOCK]


def test_an_operation_that_waits_for_a_stream_that_waits_for_it() -> None:
    def program(streams: StreamPair) -> None:
        def wait_for_main() -> None:
            streams.main.wait_event(streams.side.record_event("behind"))
            streams.main.synchronize()

        streams.side.run(wait_for_main)

    assert faults(program) == [Fault.DEADLOCK]


def test_memory_released_while_another_stream_reads_it() -> None:
    def program(streams: StreamPair, protect: bool) -> list[torch.Tensor]:
        source, sink = torch.ones(16), torch.zeros(16)
        forked(streams)
        streams.side.run(lambda source=source: sink.copy_(source))  # type: ignore[misc]
        if protect:
            streams.side.record_stream(source)
        del source
        return [torch.ones(16)]

    assert faults(lambda streams: program(streams, False)) == [Fault.USE_AFTER_RELEASE]
    assert faults(lambda streams: program(streams, True)) == []


def test_memory_released_after_the_join_needs_no_protection() -> None:
    def program(streams: StreamPair) -> None:
        source, sink = torch.ones(16), torch.zeros(16)
        forked(streams)
        streams.side.run(lambda source=source: sink.copy_(source))  # type: ignore[misc]
        streams.main.wait_event(streams.side.record_event("copied"))
        del source
        torch.ones(16)

    assert faults(program) == []


def test_kernels_outside_pytorch_declare_their_accesses() -> None:
    def program(streams: StreamPair) -> None:
        shared = torch.zeros(4)
        forked(streams)
        streams.side.run(lambda: launch("fill", lambda: None, writes=(shared[:2],)))
        streams.main.run(lambda: launch("read", lambda: None, reads=(shared[2:],)))
        streams.main.run(lambda: launch("read", lambda: None, reads=(shared[1:],)))

    assert faults(program) == [Fault.EARLY_READ]


def test_a_report_names_operations_streams_tensor_lines_and_discipline() -> None:
    class Step:
        def __init__(self) -> None:
            self.result = torch.zeros(2, 3)

        def compute(self) -> None:
            self.result.fill_(1.0)

        def use(self) -> None:
            self.result.sum()

    step = Step()
    pair = inline_streams()
    with sanitize(pair) as sanitizer:
        forked(pair)
        pair.side.run(step.compute)
        pair.main.run(step.use)
    with pytest.raises(StreamFaults) as raised:
        sanitizer.check()
    (finding,) = sanitizer.findings
    assert (finding.first.operation, finding.second.operation) == ("compute", "use")
    assert (finding.first.stream, finding.second.stream) == ("side", "main")
    assert (finding.first.operator, finding.second.operator) == ("fill_", "sum")
    assert (finding.tensor, finding.shape) == ("result", (2, 3))
    assert finding.fault.discipline == "join"
    assert finding.first.line.number < finding.second.line.number
    for part in ("compute", "use", "side", "main", "result [2, 3]", "test_sanitizer.py", "join"):
        assert part in str(raised.value)


def test_one_onlooker_at_a_time() -> None:
    with sanitize() as sanitizer, pytest.raises(RuntimeError, match="already"), watch(sanitizer):
        pass


views = st.tuples(
    st.integers(0, 6), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=3)
)


@given(views, views)
def test_overlap_is_exact(
    a: tuple[int, list[tuple[int, int]]], b: tuple[int, list[tuple[int, int]]]
) -> None:
    base = torch.zeros(64)
    touched = []
    tensors = []
    for offset, dims in (a, b):
        shape, stride = [size for size, _ in dims], [step for _, step in dims]
        view = base.as_strided(shape, stride, offset)
        tensors.append(view)
        touched.append(set(torch.arange(64).as_strided(shape, stride, offset).flatten().tolist()))
    assert overlap(region(tensors[0]), region(tensors[1])) == bool(touched[0] & touched[1])


# PyTorch's own streams, by stand-ins.


def test_streams_of_an_accelerator_through_the_same_interface() -> None:
    pair = StreamPair(
        AcceleratorStream(FakeStream(), "main"),  # type: ignore[arg-type]
        AcceleratorStream(FakeStream(), "side"),  # type: ignore[arg-type]
    )
    with sanitize(pair) as sanitizer:
        shared = torch.zeros(4)
        forked(pair)
        pair.side.run(lambda: shared.fill_(1.0))
        joined = pair.side.record_event("done")
        pair.main.run(lambda: shared.add_(1.0))
        pair.main.wait_event(joined)
        pair.side.synchronize()
    assert [finding.fault for finding in sanitizer.findings] == [Fault.EARLY_READ]


def direct(program: Callable[[FakeStream], None]) -> Sanitizer:
    with sanitize_direct(FakeStream, FakeEvent, current_stream) as sanitizer:
        program(FakeStream())
    return sanitizer


def test_direct_use_of_streams() -> None:
    def program(side: FakeStream, join: bool) -> None:
        shared = torch.zeros(4)
        side.wait_stream(current_stream())
        with side:
            shared.fill_(1.0)
        if join:
            current_stream().wait_stream(side)
        shared.sum()

    missing = direct(lambda side: program(side, False))
    assert [finding.fault for finding in missing.findings] == [Fault.EARLY_READ]
    assert direct(lambda side: program(side, True)).findings == []


def test_direct_waits_in_a_circle() -> None:
    def program(side: FakeStream) -> None:
        first, second = FakeEvent(), FakeEvent()
        side.wait_event(first)
        current_stream().wait_event(second)
        current_stream().record_event(first)
        side.record_event(second)

    found = [finding.fault for finding in direct(program).findings]
    assert found == [Fault.UNRECORDED_EVENT, Fault.UNRECORDED_EVENT, Fault.DEADLOCK]


def test_direct_synchronization() -> None:
    def program(side: FakeStream, by_event: bool) -> None:
        shared = torch.zeros(4)
        side.wait_stream(current_stream())
        with side:
            shared.fill_(1.0)
        if by_event:
            side.record_event().synchronize()
        else:
            side.synchronize()
        shared.sum()

    assert direct(lambda side: program(side, True)).findings == []
    assert direct(lambda side: program(side, False)).findings == []


pytest_plugins = ["pytester"]

PLUGIN_TEST = """
import torch
from anabranch.streams import streams_for
{header}

def run(join):
    main, side = streams_for("cpu")
    shared = torch.zeros(4)
    side.wait_event(main.record_event("fork"))
    side.run(lambda: shared.fill_(1.0))
    if join:
        main.wait_event(side.record_event("done"))
    shared.sum()

def test_joined(stream_sanitizer):
    run(True)

def test_not_joined(stream_sanitizer):
    run(False)
"""


def test_the_pytest_fixture(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(PLUGIN_TEST.format(header=""))
    installed = pytester.runpytest_inprocess("--trace-config").stdout.str()
    plugin = () if "anabranch.streams.pytest_plugin" in installed else PLUGIN
    result = pytester.runpytest_inprocess(*plugin)
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*result read before a join*"])


PLUGIN = ("-p", "anabranch.streams.pytest_plugin")
