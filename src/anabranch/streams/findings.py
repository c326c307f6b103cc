"""What the sanitizer reports."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from anabranch.streams.order import Line


class Fault(enum.Enum):
    """The kinds of report, each with the discipline that is missing."""

    DATA_RACE = "race on data"
    WORKSPACE_RACE = "race on a reused workspace"
    EARLY_READ = "result read before a join"
    USE_AFTER_RELEASE = "memory recycled while in use"
    UNRECORDED_EVENT = "wait for an event that was never recorded"
    DEADLOCK = "deadlock between streams"

    @property
    def discipline(self) -> str:
        """`order` (an event), `lifetime` (`record_stream`) or `join` (a wait before the read)."""
        if self is Fault.EARLY_READ:
            return "join"
        return "lifetime" if self is Fault.USE_AFTER_RELEASE else "order"


@dataclass(frozen=True)
class Site:
    """An operation on a stream, and where: the line at fault and the line that gave the work.

    `operator` is what the operation was doing with the memory at that line.
    """

    operation: str
    stream: str
    line: Line
    given: Line | None = None
    operator: str | None = None

    def __str__(self) -> str:
        given = "" if self.given in (None, self.line) else f", given at {self.given}"
        operator = "" if self.operator is None else f"{self.operator} in "
        return f"{operator}`{self.operation}` on {self.stream} ({self.line}{given})"


@dataclass(frozen=True)
class Finding:
    """One fault: two operations that nothing keeps apart, and the memory they meet in.

    `first` was given to its stream before `second`. `tensor` and `shape` are None where no
    memory is involved.
    """

    fault: Fault
    first: Site
    second: Site
    tensor: str | None = None
    shape: tuple[int, ...] | None = None

    def __str__(self) -> str:
        where = "" if self.shape is None else f" of {self.tensor} {list(self.shape)}"
        return (
            f"{self.fault.value}{where}: {self.first} and {self.second}; "
            f"missing discipline: {self.fault.discipline}"
        )


class StreamFaults(AssertionError):
    """Raised by `Sanitizer.check`, listing every finding."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.findings = findings
