"""`anabranch check`: run the stream sanitizer."""

from __future__ import annotations

from typing import Annotated

import typer

from anabranch.cli.options import JSONOption


def check(
    target: Annotated[
        str | None,
        typer.Argument(metavar="MODULE:FUNCTION", help="Default: all schedules of this package."),
    ] = None,
    as_json: JSONOption = False,
) -> None:
    """Prove that no order of the streams can go wrong."""
