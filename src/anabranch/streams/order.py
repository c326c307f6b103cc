"""Happens-before among the tasks of several streams, by vector clocks.

Fed with the calls on streams in the order they are made, it knows which task must run before
which, whatever the device does in between. Only what a schedule says counts: the order of a
stream, events, and a caller that waits for a stream. That one call was made before another
orders nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from weakref import WeakKeyDictionary

import torch

Clock = dict[Hashable, int]  # how many tasks of each stream have run at the least

_SKIPPED = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


@dataclass(frozen=True)
class Line:
    """A line of source."""

    file: str
    number: int

    def __str__(self) -> str:
        path = Path(self.file)
        return f"{'/'.join(path.parts[-2:])}:{self.number}"


def user_frame(depth: int = 1) -> FrameType | None:
    """The innermost frame that is neither PyTorch's nor one of this package's."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and _skipped(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_line() -> Line:
    """Where `user_frame` stands now."""
    frame = user_frame(2)
    return Line("unknown", 0) if frame is None else Line(frame.f_code.co_filename, frame.f_lineno)


@cache
def _skipped(file: str) -> bool:
    return file.startswith(("<", *_SKIPPED)) or file.endswith(("contextlib.py", "functools.py"))


@dataclass(eq=False)
class Task:
    """One operation on one stream, or a stretch of the caller's own code between two calls.

    It is number `epoch` of its stream and runs after the first `clock[s]` tasks of every other
    stream s. `serial` numbers the tasks of all streams in the order they were given.
    """

    stream: Hashable
    epoch: int
    clock: Clock
    serial: int
    name: str
    line: Line

    def after(self, other: Task) -> bool:
        """Whether `other` has run before this task starts."""
        return other.epoch <= self.clock.get(other.stream, 0)


@dataclass
class Order:
    """Clocks of the streams, the events and the caller."""

    _streams: dict[Hashable, Clock] = field(default_factory=dict)
    _events: WeakKeyDictionary[object, Clock] = field(default_factory=WeakKeyDictionary)
    _caller: Clock = field(default_factory=dict)
    _serial: int = 0

    def clock(self, stream: Hashable) -> Clock:
        """What has run before a task that `stream` were given now."""
        clock = self._streams.setdefault(stream, {})
        _join(clock, self._caller)
        return clock

    def streams(self) -> list[Hashable]:
        """Every stream that was given something."""
        return list(self._streams)

    def task(self, stream: Hashable, name: str, line: Line) -> Task:
        """Give `stream` a task."""
        clock = self.clock(stream)
        before = dict(clock)
        epoch = clock[stream] = clock.get(stream, 0) + 1
        self._serial += 1
        return Task(stream, epoch, before, self._serial, name, line)

    def record(self, stream: Hashable, event: object) -> None:
        """Mark a point of `stream`; recording an event again moves it."""
        self._events[event] = dict(self.clock(stream))

    def wait(self, stream: Hashable, event: object) -> bool:
        """Order `stream` behind `event`. False when that was never recorded."""
        point = self._events.get(event)
        if point is None:
            return False
        _join(self.clock(stream), point)
        return True

    def caller_waits(self, stream: Hashable) -> None:
        """The caller has waited for `stream`: all it gives from now on comes after."""
        _join(self._caller, self.clock(stream))

    def caller_waits_event(self, event: object) -> bool:
        """The caller has waited for `event`. False when that was never recorded."""
        point = self._events.get(event)
        if point is None:
            return False
        _join(self._caller, point)
        return True


def _join(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count
