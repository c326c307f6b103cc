"""Waits for events that are recorded later, and the circles that such waits can make."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from anabranch.streams.findings import Site


@dataclass(eq=False)
class _Wait:
    """A wait that came before its event was recorded."""

    site: Site
    behind: set[_Wait] = field(default_factory=set)  # must end before this one can


class EarlyWaits:
    """Finds streams that wait for each other.

    A device that blocks on an event not yet recorded (CPU streams do, CUDA's memory waits
    do) never gets past a wait for an event that is recorded behind that very wait.
    """

    def __init__(self) -> None:
        self._passed: dict[Hashable, set[_Wait]] = {}  # waits that a stream's next task is behind
        self._at_event: WeakKeyDictionary[object, set[_Wait]] = WeakKeyDictionary()
        self._open: WeakKeyDictionary[object, list[_Wait]] = WeakKeyDictionary()

    def wait_early(self, stream: Hashable, event: object, site: Site) -> None:
        """`stream` waits for `event`, which was not recorded yet."""
        wait = _Wait(site)
        self._open.setdefault(event, []).append(wait)
        self._passed.setdefault(stream, set()).add(wait)

    def wait(self, stream: Hashable, event: object) -> None:
        """`stream` waits for `event`, which was recorded."""
        self._passed.setdefault(stream, set()).update(self._at_event.get(event, ()))

    def record(self, stream: Hashable, event: object) -> tuple[Site, Site] | None:
        """`event` is recorded on `stream`. Returns two waits of a circle that this closes."""
        before = set(self._passed.get(stream, ()))
        self._at_event[event] = before
        for wait in self._open.pop(event, []):
            wait.behind |= before
            for other in before:
                if wait is other or _reaches(other, wait, set()):
                    return other.site, wait.site
        return None


def _reaches(start: _Wait, goal: _Wait, seen: set[_Wait]) -> bool:
    if start in seen:
        return False
    seen.add(start)
    return goal in start.behind or any(_reaches(next_, goal, seen) for next_ in start.behind)
