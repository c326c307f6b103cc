"""Streams, events and lifetimes: the same three disciplines on every device.

A stream runs operations in the order they are given; an event orders two streams; `record_stream`
keeps memory alive until a stream has passed this point. An operation takes no arguments,
writes to buffers allocated beforehand and returns nothing, so that giving it to a stream need not
wait for it to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

Operation = Callable[[], None]


class StreamError(RuntimeError):
    """An operation on a stream failed; raised where the stream is joined, naming both."""


class Event(Protocol):
    """A point on a stream that other streams can wait for."""

    name: str


class Stream(Protocol):
    """An ordered queue of operations on a device."""

    name: str

    def run(self, operation: Operation) -> None:
        """Queue an operation. Its name in traces and errors is its `__name__`."""

    def record_event(self, name: str) -> Event:
        """Mark this point of the stream."""

    def wait_event(self, event: Event) -> None:
        """Let nothing queued later on this stream run before `event` has been passed.

        Raises StreamError when an operation before the event failed.
        """

    def record_stream(self, *tensors: torch.Tensor) -> None:
        """Keep the memory of `tensors` from reuse until this stream has passed this point."""

    def synchronize(self) -> None:
        """Block the caller until the stream is empty. Raises StreamError as `wait_event` does."""


class StreamPair(NamedTuple):
    """The two streams of a schedule."""

    main: Stream
    side: Stream


class Observer(Protocol):
    """Sees what streams do. `start` and `finish` are called on the thread that runs it."""

    def start(self, stream: str, kind: str, name: str) -> None: ...

    def finish(self, stream: str, kind: str, name: str) -> None: ...


_observer: Observer | None = None


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


def streams_for(device: torch.device | str) -> StreamPair:
    """The caller's stream and the side stream of `device`, which all layers share."""
    kind = torch.device(device).type
    if kind != "cpu":
        raise ValueError(f"device must be cpu, got {device}")
    from anabranch.streams.cpu import cpu_streams

    return cpu_streams()
