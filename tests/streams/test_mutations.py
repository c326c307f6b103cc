"""Every mutant of a schedule is found if it is unsafe, and does damage; the rest are listed.

Neither side is taken on trust: a mutant counts as unsafe when some legal order gives wrong
numbers, and the sanitizer, which runs one order only, must report exactly those.
`docs/sanitizer.md` carries the table; `python tests/streams/mutation_table.py` writes it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from mutation_table import DOCUMENT, Verdict, harmless_because, table, verdict
from mutations import Mutant, mutants

from anabranch.schedules import Schedule

ALL = [mutant for schedule in Schedule for mutant in mutants(schedule)]


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    return {str(mutant): verdict(mutant) for mutant in ALL}


def test_there_are_mutants_of_every_overlapping_schedule() -> None:
    assert {mutant.schedule for mutant in ALL} == {Schedule.COMM_STREAM, Schedule.OVERLAP}
    assert sum(mutant.after is None for mutant in ALL) == 12


@pytest.mark.parametrize("mutant", ALL, ids=str)
def test_reported_exactly_if_it_does_damage(mutant: Mutant, verdicts: dict[str, Verdict]) -> None:
    outcome = verdicts[str(mutant)]
    assert bool(outcome.faults) == (outcome.damage is not None)


@pytest.mark.parametrize("mutant", ALL, ids=str)
def test_harmless_ones_have_a_reason(mutant: Mutant, verdicts: dict[str, Verdict]) -> None:
    harmless = verdicts[str(mutant)].damage is None
    assert harmless == (harmless_because(mutant) is not None)


def test_the_documented_table_is_what_happens(verdicts: dict[str, Verdict]) -> None:
    assert table(verdicts) in Path(DOCUMENT).read_text()
