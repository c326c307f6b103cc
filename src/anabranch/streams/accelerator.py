"""Streams of an accelerator, CUDA or Ascend NPU, through PyTorch's device-independent classes."""

from __future__ import annotations

from functools import cache

import torch

from anabranch.streams import Event, Operation, Stream, StreamPair, observer


class AcceleratorEvent:
    """A `torch.Event` with a name."""

    def __init__(self, name: str, event: torch.Event) -> None:
        self.name, self.event = name, event


class AcceleratorStream(Stream):
    """A `torch.Stream`: equal to every other wrapper of the same device stream.

    Operations are launched on the caller's thread and run on the device later, so an error of
    the device surfaces at `synchronize`, as it does in PyTorch, and not as StreamError.
    """

    def __init__(self, stream: torch.Stream, name: str) -> None:
        self.stream, self.name = stream, name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AcceleratorStream) and self.stream == other.stream

    def __hash__(self) -> int:
        return hash(self.stream)

    def _run(self, operation: Operation) -> None:
        watcher = observer()
        if watcher is not None:
            watcher.start(self.name, "run", operation.__name__)
        try:
            with self.stream:
                operation()
        finally:
            if watcher is not None:
                watcher.finish(self.name, "run", operation.__name__)

    def _record_event(self, name: str) -> AcceleratorEvent:
        self._note("record", name)
        return AcceleratorEvent(name, self.stream.record_event())

    def _wait_event(self, event: Event) -> None:
        assert isinstance(event, AcceleratorEvent)
        self._note("wait", event.name)
        self.stream.wait_event(event.event)

    def _record_stream(self, tensors: tuple[torch.Tensor, ...]) -> None:
        for tensor in tensors:
            tensor.record_stream(self.stream)

    def _synchronize(self) -> None:
        self.stream.synchronize()

    def _note(self, kind: str, name: str) -> None:
        watcher = observer()
        if watcher is not None:
            watcher.start(self.name, kind, name)
            watcher.finish(self.name, kind, name)


@cache
def _side_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device=device)


def accelerator_streams(device: torch.device) -> StreamPair:
    """The current stream of `device`, and the one side stream that all layers share."""
    main = torch.accelerator.current_stream(device)
    return StreamPair(
        AcceleratorStream(main, "main"), AcceleratorStream(_side_stream(device), "side")
    )
