"""`anabranch check`: the stream sanitizer over the shipped schedules, or over a step of yours."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from anabranch.cli.options import JSONOption, option, whole
from anabranch.launch import BadInput
from anabranch.streams.check import Checked, check_schedules, check_target
from anabranch.streams.findings import Finding

FOUND = 1


def check(
    target: Annotated[
        str | None,
        typer.Argument(metavar="MODULE:FUNCTION", help="Default: the schedules of this package."),
    ] = None,
    batches: Annotated[
        int, option(whole(1), "N", "Random batches for each schedule of this package.")
    ] = 100,
    seed: Annotated[int, option(whole(0), "N", "Of the batches.")] = 0,
    as_json: JSONOption = False,
) -> None:
    """Look for races, early reads, recycled memory and deadlocks between streams.

    What a schedule guarantees is judged, not how a run went: see docs/sanitizer.md.
    A function is called twice, with a StreamPair if it takes an argument.
    The exit status is 1 if anything was found.

    Examples:
      anabranch check
      anabranch check my_module:my_step --json
    """
    if target is None:
        checked = check_schedules(batches, seed)
    else:
        try:
            checked = [check_target(target)]
        except ValueError as error:
            raise BadInput(str(error)) from error
    findings = [finding for each in checked for finding in each.findings]
    if as_json:
        print(json.dumps([_described(each) for each in checked], indent=2))
    else:
        _show(checked, findings)
    if findings:
        raise typer.Exit(FOUND)


def _show(checked: list[Checked], findings: list[Finding]) -> None:
    table = Table()
    table.add_column("checked")
    for name in ("runs", "operators", "findings"):
        table.add_column(name, justify="right")
    for each in checked:
        table.add_row(each.name, str(each.runs), str(each.operators), str(len(each.findings)))
    console = Console()
    console.print(table)
    for finding in findings:
        console.print(str(finding), markup=False, highlight=False, soft_wrap=True)


def _described(checked: Checked) -> dict[str, Any]:
    findings = [
        asdict(finding) | {"fault": finding.fault.value, "discipline": finding.fault.discipline}
        for finding in checked.findings
    ]
    return asdict(checked) | {"findings": findings}
