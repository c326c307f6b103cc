"""PyTorch's stream and event classes in miniature, for code that needs an accelerator's.

A fake stream runs nothing: operators run at once, as a host launches them.
"""

from __future__ import annotations

from types import TracebackType

_current: list[FakeStream] = []


class FakeEvent:
    def record(self, stream: FakeStream) -> None:
        self.stream = stream

    def wait(self, stream: FakeStream) -> None:
        pass

    def synchronize(self) -> None:
        pass


class FakeStream:
    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = FakeEvent() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        event.wait(self)

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> FakeStream:
        _current.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _current.pop()


_default = FakeStream()


def current_stream() -> FakeStream:
    return _current[-1] if _current else _default
