"""Streams, events and lifetimes: the same three disciplines on every device.

A stream runs operations in the order they are given; an event orders two streams; `record_stream`
keeps memory alive until a stream has passed this point. An operation takes no arguments,
writes to buffers allocated beforehand and returns nothing, so that giving it to a stream need not
wait for it to run.

Two kinds of onlooker: an `Observer` sees what runs, when and on which thread (timelines); a
`Watcher` sees what is asked of the streams, in the order it is asked (`streams.sanitizer`,
`streams.adversarial`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from anabranch.streams.recorded import collective as collective
from anabranch.streams.recorded import record_call, recorded

DEVICES = ("cpu", "cuda", "npu")
"""The types of devices that have streams here."""

Operation = Callable[[], None]
T = TypeVar("T")


class StreamError(RuntimeError):
    """An operation on a stream failed; raised where the stream is joined, naming both."""


class Event(Protocol):
    """A point on a stream that other streams can wait for."""

    name: str


class Stream(ABC):
    """An ordered queue of operations on a device."""

    name: str
    handoff_flops: int = 0
    """Work that takes as long as giving an operation to this stream and joining it again."""

    def run(self, operation: Operation) -> None:
        """Queue an operation. Its name in traces and errors is its `__name__`."""
        self._run(operation if _watcher is None else _watcher.run(self, operation))

    def record_event(self, name: str) -> Event:
        """Mark this point of the stream."""
        event = self._record_event(name)
        if _watcher is not None:
            _watcher.record_event(self, event)
        return event

    def wait_event(self, event: Event) -> None:
        """Let nothing queued later on this stream run before `event` has been passed.

        Raises StreamError when an operation before the event failed.
        """
        if _watcher is None or _watcher.wait_event(self, event):
            self._wait_event(event)

    def record_stream(self, *tensors: torch.Tensor) -> None:
        """Keep the memory of `tensors` from reuse until this stream has passed this point."""
        if _watcher is not None:
            _watcher.record_stream(self, tensors)
        self._record_stream(tensors)

    def synchronize(self) -> None:
        """Block the caller until the stream is empty. Raises StreamError as `wait_event` does."""
        if _watcher is None or _watcher.synchronize(self):
            self._synchronize()

    @abstractmethod
    def _run(self, operation: Operation) -> None: ...

    @abstractmethod
    def _record_event(self, name: str) -> Event: ...

    @abstractmethod
    def _wait_event(self, event: Event) -> None: ...

    @abstractmethod
    def _record_stream(self, tensors: tuple[torch.Tensor, ...]) -> None: ...

    @abstractmethod
    def _synchronize(self) -> None: ...


class StreamPair(NamedTuple):
    """The two streams of a schedule."""

    main: Stream
    side: Stream


class Observer(Protocol):
    """Sees what streams do. `start` and `finish` are called on the thread that runs it."""

    def start(self, stream: str, kind: str, name: str) -> None: ...

    def finish(self, stream: str, kind: str, name: str) -> None: ...


class Watcher(Protocol):
    """Sees each call on a stream on the thread that makes it, before it takes effect."""

    def run(self, stream: Stream, operation: Operation) -> Operation:
        """Returns what the stream shall run in place of `operation`."""

    def record_event(self, stream: Stream, event: Event) -> None: ...

    def wait_event(self, stream: Stream, event: Event) -> bool:
        """False: do not wait, for it would never end."""

    def record_stream(self, stream: Stream, tensors: tuple[torch.Tensor, ...]) -> None: ...

    def synchronize(self, stream: Stream) -> bool:
        """False: do not wait, for it would never end."""

    def launch(
        self,
        name: str,
        kernel: Callable[[], T],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> T:
        """Runs `kernel` and returns what it returns."""


_observer: Observer | None = None
_watcher: Watcher | None = None
_provided: StreamPair | None = None


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Report every operation, event and wait of this process's streams to `observer`."""
    global _observer
    if _observer is not None:
        raise RuntimeError("streams are already being observed")
    _observer = observer
    try:
        yield
    finally:
        _observer = None


def observer() -> Observer | None:
    """The current observer, or None."""
    return _observer


@contextmanager
def watch(watcher: Watcher) -> Iterator[None]:
    """Show `watcher` every call on the streams of this process. Raises RuntimeError if nested."""
    global _watcher
    if _watcher is not None:
        raise RuntimeError("streams are already being watched")
    _watcher = watcher
    try:
        yield
    finally:
        _watcher = None


def launch(
    name: str,
    kernel: Callable[[], T],
    *,
    reads: Sequence[torch.Tensor] = (),
    writes: Sequence[torch.Tensor] = (),
    check: Callable[[T], None] | None = None,
) -> T:
    """Run a kernel that PyTorch's dispatcher does not see, such as one called through ctypes.

    A watcher learns of its accesses only from `reads` and `writes` (views: a region of a buffer is
    enough). `kernel` must hold addresses and no tensors, as a device's queue does: it may be
    run again, and must not keep memory alive. Returns what `kernel` returns, which `check` has seen
    before: an error is for it to raise.
    """
    record_call(partial(launch, name, kernel, reads=reads, writes=writes, check=check))
    result = kernel() if _watcher is None else _watcher.launch(name, kernel, reads, writes)
    if check is not None:
        check(result)
    return result


@contextmanager
def provide(streams: StreamPair) -> Iterator[None]:
    """Make `streams_for` return `streams`, whatever the device."""
    global _provided
    before, _provided = _provided, streams
    try:
        yield
    finally:
        _provided = before


def streams_for(device: torch.device | str) -> StreamPair:
    """The caller's stream and the side stream of `device`, which all layers share.

    Raises ValueError for a device that has no streams here.
    """
    if _provided is not None:
        return _provided
    kind = torch.device(device).type
    if kind == "cpu":
        from anabranch.streams.cpu import cpu_streams

        return cpu_streams()
    if kind in ("cuda", "npu"):
        from anabranch.streams.accelerator import accelerator_streams

        return accelerator_streams(torch.device(device))
    raise ValueError(f"device must be {', '.join(DEVICES)}, got {device}")


def lacking(kind: str, count: int) -> str | None:
    """What this machine lacks for `count` processes with a device of `kind` each; None: nothing."""
    if kind == "cpu":
        return None
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != kind:
        return f"PyTorch {torch.__version__} finds no {kind} device on this machine"
    found = torch.accelerator.device_count()
    return None if found >= count else f"this machine has {found} for {count} ranks"


def take_device(kind: str, index: int) -> torch.device:
    """The device of `kind` with this index, made the current one; all processes share one CPU."""
    if kind == "cpu":
        return torch.device(kind)
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def may_fork(kind: str) -> bool:
    """Whether a process that has looked for devices of `kind` may fork: no driver survives it."""
    return kind == "cpu"


def repeated(device: torch.device | str, operation: Operation) -> Operation:
    """`operation`, which will run again and again on the same memory, at less cost where it can.

    On CPU see `streams.recorded`. On CUDA and NPU it is as given: `repeatable` takes all the work.
    """
    return recorded(operation) if torch.device(device).type == "cpu" else operation


def repeatable(device: torch.device | str, work: Callable[[], None]) -> Callable[[], None]:
    """`work` as something to call again and again: on CUDA and NPU a graph, elsewhere itself.

    `work` must touch only memory that stays where it is, read nothing back to the host, and give
    its operations to `streams_for(device)`. It may run before this returns. What it takes from the
    host anew each time goes through `updatable` and `host_fed`.
    """
    kind = torch.device(device).type
    if _provided is None and kind == "cuda":
        from anabranch.streams.graph import captured

        return captured(torch.device(device), work)
    if _provided is None and kind == "npu":
        from anabranch.streams.npu_graph import captured as captured_on_npu

        return captured_on_npu(torch.device(device), work)
    return work


class Capture(Protocol):
    """A graph in the making that can be told other lengths later."""

    def updatable(
        self, operator: Callable[..., object], arguments: Callable[[], dict[str, Any]]
    ) -> None: ...

    def host_fed(
        self, values: Callable[[], torch.Tensor], device: torch.device
    ) -> torch.Tensor: ...


_capture: Capture | None = None


@contextmanager
def capture_into(capture: Capture) -> Iterator[None]:
    """Give to `capture` what goes through `updatable` and `host_fed`."""
    global _capture
    _capture = capture
    try:
        yield
    finally:
        _capture = None


def capturing() -> bool:
    """Whether the work given now is captured by a graph whose host arguments can be updated."""
    return _capture is not None


def updatable(operator: Callable[..., object], arguments: Callable[[], dict[str, Any]]) -> None:
    """Launch `operator(**arguments())`; each replay of a graph asks for the arguments again.

    Only those that the host reads may differ then: the tensors must be the same.
    """
    if _capture is None:
        operator(**arguments())
    else:
        _capture.updatable(operator, arguments)


def host_fed(values: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """`values()`, made on the CPU, on `device`; each replay of a graph fills it in again."""
    if _capture is None:
        return values().to(device)
    return _capture.host_fed(values, device)
