"""The table of mutants in docs/sanitizer.md: computed, never written by hand.

python tests/streams/mutation_table.py      rewrites it in the document
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from mutations import Mutant, mutants
from programs import Decode

from anabranch import native
from anabranch.schedules import Schedule
from anabranch.streams.adversarial import Damage, record
from anabranch.streams.check import lone_group
from anabranch.streams.findings import Fault
from anabranch.streams.sanitizer import sanitize

DOCUMENT = Path(__file__).parents[2] / "docs" / "sanitizer.md"
BEGIN, END = "<!-- mutants -->", "<!-- end of mutants -->"


@dataclass(frozen=True)
class Verdict:
    """What the sanitizer said, and what the worst legal order did."""

    faults: tuple[Fault, ...]
    damage: Damage | None
    orders: int


def verdict(mutant: Mutant) -> Verdict:
    """Two steps, the second with several new tokens, on one set of buffers.

    Without the compiled kernels, so that an operation is many operators and can be interrupted.
    """
    decode = Decode((((2, 2),), ((3, 2),)), lone_group(), torch.bfloat16)
    with patch.object(native, "library", lambda: None):
        with sanitize() as sanitizer:
            list(decode.run(mutant.schedule, mutant.run))
        trace = record(lambda streams: decode.run(mutant.schedule, mutant.run))
    faults = {finding.fault for finding in sanitizer.findings}
    ordered = tuple(fault for fault in Fault if fault in faults)
    # Harmless mutants are mostly the same program: each is explored to the end only once.
    seen = trace.fingerprint()
    if seen not in _explored:
        _explored[seen] = trace.first_damage()
    return Verdict(ordered, _explored[seen], trace.count_orders())


_explored: dict[tuple[object, ...], Damage | None] = {}


REASONS = {
    "a": "The decoder owns the results, and the step holds the inputs until the join was given, so "
    "no memory is released before it.",
    "b": "The statement did not pass the work that its event orders: the edge is the same.",
}


def harmless_because(mutant: Mutant) -> str | None:
    """Key of the reason why a mutant does no damage; None for one that does."""
    if "record_stream" in mutant.statement:
        return "a"
    return "b" if mutant.after is not None and _keeps_the_edge(mutant) else None


# A statement may stand anywhere between these two without moving its edge.
_SPANS = {
    (Schedule.COMM_STREAM, "main.record_event('history_ready')"):
        ("main.run(step.history_attention)", "side.wait_event(history_ready)"),
    (Schedule.COMM_STREAM, "side.wait_event(history_ready)"):
        ("main.record_event('history_ready')", "side.run(step.exchange_history_converted)"),
    (Schedule.COMM_STREAM, "side.record_event('exchange_done')"):
        ("side.run(step.exchange_history_converted)", "main.wait_event(exchange_done)"),
    (Schedule.COMM_STREAM, "main.wait_event(exchange_done)"):
        ("side.record_event('exchange_done')", "main.run(step.merge)"),
    (Schedule.OVERLAP, "main.record_event('history_ready')"):
        ("main.run(step.history_attention)", "side.wait_event(history_ready)"),
    (Schedule.OVERLAP, "side.wait_event(history_ready)"):
        ("main.record_event('history_ready')", "side.run(step.current_attention)"),
    (Schedule.OVERLAP, "side.record_event('current_done')"):
        ("side.run(step.current_attention)", "main.wait_event(current_done)"),
    (Schedule.OVERLAP, "main.wait_event(current_done)"):
        ("side.record_event('current_done')", "main.run(step.merge)"),
}  # fmt: skip


def _keeps_the_edge(mutant: Mutant) -> bool:
    first, last = _SPANS[mutant.schedule, mutant.statement]
    order = list(mutant.order)
    return order.index(first) < order.index(mutant.statement) < order.index(last)


def table(verdicts: Mapping[str, Verdict]) -> str:
    """Removals one by one, displacements by what they move and what came of it."""
    rows = ["| schedule | statement | change | sanitizer | damage |", "|---|---|---|---|---|"]
    for schedule in Schedule:
        moved: Counter[tuple[str, str, str]] = Counter()
        for mutant in mutants(schedule):
            outcome = verdicts[str(mutant)]
            said = ", ".join(fault.value for fault in outcome.faults) or "no report"
            hurt = "wrong numbers" if outcome.damage else f"none ({harmless_because(mutant)})"
            if mutant.after is None:
                rows.append(
                    f"| {schedule.value} | `{mutant.statement}` | removed | {said} | {hurt} |"
                )
            else:
                moved[mutant.statement, said, hurt] += 1
        for (statement, said, hurt), count in moved.items():
            places = f"moved, {count} place{'s' if count > 1 else ''}"
            rows.append(f"| {schedule.value} | `{statement}` | {places} | {said} | {hurt} |")
    reasons = [f"({key}) {reason}" for key, reason in REASONS.items()]
    return "\n".join([*rows, "", *reasons])


def main() -> None:
    verdicts = {str(m): verdict(m) for schedule in Schedule for m in mutants(schedule)}
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table(verdicts)}\n{END}{after}")
    found = sum(bool(one.faults) for one in verdicts.values())
    print(f"{len(verdicts)} mutants, {found} unsafe and found")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
