"""`torch.npu`'s streams, events and graphs in miniature, with the signatures of the real ones.

A stream runs nothing: operators run at once, as the host launches them, and each is noted with the
stream that was current. A graph holds the operators that ran under its capture and runs them
again on the same memory. It stops where it waits for an external event that nobody has recorded,
and goes on when somebody does. An update of a task group replaces the arguments of a captured
launch and runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import anabranch.capture
import anabranch.decoder
from anabranch.streams import StreamPair, npu_graph
from anabranch.streams.accelerator import AcceleratorStream
from anabranch.streams.accesses import allocates_only, is_view, operator_name, tensors_in


@dataclass
class Device:
    """What was launched, by stream, in the order of the host."""

    log: list[tuple[str, str]] = field(default_factory=list)
    current: list[Stream] = field(default_factory=list)
    graph: NPUGraph | None = None
    group: list[_Kernel] | None = None
    updating: list[_Kernel] | None = None
    running: list[Iterator[None]] = field(default_factory=list)

    def note(self, what: str, stream: Stream | None = None) -> None:
        self.log.append(((stream or current_stream()).name, what))

    def go_on(self) -> None:
        """Run replays until each waits for an event, or ends."""
        self.running = [one for one in self.running if next(one, "ended") != "ended"]


_device = Device()


class Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.name = "side"

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        assert not _device.running, "a replay still waits for an event"

    def __enter__(self) -> Stream:
        _device.current.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _device.current.pop()


class Event:
    def record(self, stream: Stream | None = None) -> None:
        _device.note("record", stream)

    def wait(self, stream: Stream | None = None) -> None:
        _device.note("wait", stream)

    def synchronize(self) -> None:
        assert not _device.running, "a replay still waits for an event"


class ExternalEvent:
    recorded = False

    def record(self, stream: Stream | None = None) -> None:
        self.recorded = True
        _device.go_on()

    def wait(self, stream: Stream | None = None) -> None:
        assert _device.graph is not None
        _device.graph.work.append(lambda: self.recorded)

    def reset(self, stream: Stream | None = None) -> None:
        assert _device.graph is not None
        _device.graph.work.append(self._clear)

    def _clear(self) -> bool:
        self.recorded = False
        return True


@dataclass
class _Kernel:
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[torch.Tensor]

    def __call__(self) -> bool:
        given = list(tensors_in([*self.args, *self.kwargs.values()]))
        new = list(tensors_in(self.func(*self.args, **self.kwargs)))
        for kept, result in zip(self.results, new, strict=True):
            if all(kept is not tensor for tensor in given):
                kept.copy_(result)
        return True

    def replace(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        """Only what the host reads may change: the operator and its tensors stay."""
        assert func is self.func
        for (name, old), new in zip(self.kwargs.items(), kwargs.values(), strict=True):
            before, after = list(tensors_in(old)), list(tensors_in(new))
            assert [t.data_ptr() for t in before] == [t.data_ptr() for t in after], name
        self.kwargs = kwargs


class _Launches(TorchDispatchMode):
    """Operators go to the graph, the task group or the update that is open."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _device.updating is not None:
            (kernel,) = _device.updating
            kernel.replace(func, args, kwargs)
            return tuple(kernel.results)
        # A capture runs nothing, and the lengths it is given are not held.
        held = _device.group is not None
        result = tuple(kwargs["out"]) if held else func(*args, **kwargs)
        if _device.graph is not None and allocates_only(func):
            result.zero_()  # what is filled in before a replay may be an index
        if not is_view(func) and not allocates_only(func):
            _device.note(operator_name(func))
            kernel = _Kernel(func, args, kwargs, list(tensors_in(result)))
            if _device.graph is not None:
                _device.graph.work.append(kernel)
            if _device.group is not None:
                _device.group.append(kernel)
        return result


class NPUGraph:
    def __init__(self) -> None:
        self.work: list[Callable[[], bool]] = []

    def replay(self) -> None:
        _device.running.append(self._steps())
        _device.go_on()

    def _steps(self) -> Iterator[None]:
        for work in self.work:
            while not work():
                yield


class graph:
    def __init__(
        self,
        npu_graph: NPUGraph,
        pool: Any = None,
        stream: Stream | None = None,
        auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ) -> None:
        self.npu_graph, self.stream, self.open = npu_graph, stream, ExitStack()

    def __enter__(self) -> None:
        assert self.stream is not None
        self.open.enter_context(self.stream)
        _device.graph = self.npu_graph

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _device.graph = None
        self.open.close()


def stream(stream: Stream) -> Stream:
    return stream


_default = Stream()
_default.name = "main"


def current_stream(device: Any = None) -> Stream:
    """The stream in use. Captures and warm-up runs have streams of their own, called main."""
    return _device.current[-1] if _device.current else _default


def graph_task_group_begin(stream: Stream) -> None:
    _device.group = []


def graph_task_group_end(stream: Stream) -> list[_Kernel]:
    group, _device.group = _device.group, None
    assert group is not None
    assert len(group) == 1
    return group


def graph_task_update_begin(stream: Stream, handle: list[_Kernel]) -> None:
    _device.updating = handle


def graph_task_update_end(stream: Stream) -> None:
    _device.updating = None


NAMES = (
    "Stream", "Event", "ExternalEvent", "NPUGraph", "graph", "stream", "current_stream",
    "graph_task_group_begin", "graph_task_group_end", "graph_task_update_begin",
    "graph_task_update_end",
)  # fmt: skip


@contextmanager
def miniature() -> Iterator[Device]:
    """`torch.npu` is this module, and decoders on the CPU use its streams and graphs."""
    global _device
    _device = Device()
    side = Stream()

    def pair(device: Any) -> StreamPair:
        main = AcceleratorStream(current_stream(), "main")  # type: ignore[arg-type]
        return StreamPair(main, AcceleratorStream(side, "side"))  # type: ignore[arg-type]

    def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
        _device.note("record_stream", stream)

    with ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(mock.patch.object(torch.npu, name, globals()[name]))  # type: ignore[attr-defined]
        for target, name, value in (
            (anabranch.decoder, "streams_for", pair),
            (anabranch.capture, "repeatable", npu_graph.captured),
            (torch.Tensor, "record_stream", record_stream),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(_Launches())
        yield _device
