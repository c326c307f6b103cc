"""Every known stream bug is found, by name and by the damage it does; its repair is clean."""

from __future__ import annotations

import pytest
from known_bugs import KNOWN_BUGS, KnownBug

from anabranch.streams.adversarial import record
from anabranch.streams.cpu import inline_streams
from anabranch.streams.findings import Fault
from anabranch.streams.sanitizer import sanitize

each_bug = pytest.mark.parametrize("bug", KNOWN_BUGS, ids=str)


@each_bug
def test_the_fault_is_found(bug: KnownBug) -> None:
    with sanitize() as sanitizer:
        bug.program(inline_streams(), False)
    assert bug.fault in {finding.fault for finding in sanitizer.findings}, sanitizer.findings


@each_bug
def test_the_report_says_where(bug: KnownBug) -> None:
    with sanitize() as sanitizer:
        bug.program(inline_streams(), False)
    finding = next(one for one in sanitizer.findings if one.fault is bug.fault)
    for site in (finding.first, finding.second):
        assert site.line.file.endswith("known_bugs.py")
        assert site.operation
    assert finding.first.stream != finding.second.stream
    if bug.fault is not Fault.DEADLOCK:
        assert finding.shape is not None
        assert finding.tensor not in (None, "memory without a name")


@each_bug
def test_the_repair_is_clean(bug: KnownBug) -> None:
    with sanitize() as sanitizer:
        bug.program(inline_streams(), True)
    assert sanitizer.findings == []


@each_bug
def test_the_damage_is_shown(bug: KnownBug) -> None:
    if bug.fault is Fault.DEADLOCK:
        pytest.skip("a deadlock needs two ranks to show")
    assert record(lambda streams: bug.program(streams, False)).first_damage() is not None
    assert record(lambda streams: bug.program(streams, True)).first_damage() is None


def test_there_are_enough() -> None:
    assert len(KNOWN_BUGS) >= 8
