"""The sanitizer for code that uses PyTorch's own streams and events, with no wrapper.

    with sanitize_direct(torch.cuda.Stream, torch.cuda.Event, torch.cuda.current_stream) as found:
        my_step()
    found.check()

and the same with the classes of `torch.npu`. Work counts for the stream that is current when it
is launched, so the operations of a report are lines of the caller's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from anabranch.streams.accelerator import AcceleratorEvent, AcceleratorStream
from anabranch.streams.sanitizer import Sanitizer


@contextmanager
def sanitize_direct(
    stream_type: type[Any], event_type: type[Any], current_stream: Callable[[], Any]
) -> Iterator[Sanitizer]:
    """Watch every operator of this thread, and every event of `event_type`, while it lasts.

    `Stream.record_event`, `wait_event` and `wait_stream` are built on the event's `record` and
    `wait` in PyTorch, so those are what is listened to.
    """
    names: dict[Any, str] = {}
    events: dict[int, AcceleratorEvent] = {}

    def named(stream: Any) -> AcceleratorStream:
        stream = current_stream() if stream is None else stream
        name = names.setdefault(stream, "main" if not names else f"stream {len(names)}")
        return AcceleratorStream(stream, name)

    def named_event(event: Any) -> AcceleratorEvent:
        known = events.get(id(event))
        if known is None or known.event is not event:
            known = events[id(event)] = AcceleratorEvent(f"event {len(events) + 1}", event)
        return known

    sanitizer = Sanitizer(lambda: named(None))
    record, wait = event_type.record, event_type.wait
    event_synchronize, synchronize = event_type.synchronize, stream_type.synchronize

    def record_and_tell(event: Any, stream: Any = None) -> Any:
        sanitizer.record_event(named(stream), named_event(event))
        return record(event, current_stream() if stream is None else stream)

    def wait_and_tell(event: Any, stream: Any = None) -> Any:
        sanitizer.wait_event(named(stream), named_event(event))
        return wait(event, current_stream() if stream is None else stream)

    def event_synchronize_and_tell(event: Any) -> Any:
        sanitizer.synchronize_event(named_event(event))
        return event_synchronize(event)

    def synchronize_and_tell(stream: Any) -> Any:
        sanitizer.synchronize(named(stream))
        return synchronize(stream)

    with ExitStack() as stack:
        for owner, name, listening in (
            (event_type, "record", record_and_tell),
            (event_type, "wait", wait_and_tell),
            (event_type, "synchronize", event_synchronize_and_tell),
            (stream_type, "synchronize", synchronize_and_tell),
        ):
            stack.enter_context(patch.object(owner, name, listening))
        stack.enter_context(sanitizer.watching())
        yield sanitizer
