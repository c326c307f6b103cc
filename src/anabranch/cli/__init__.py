"""The `anabranch` command: one module for each subcommand.

What a command is given is checked here before any process starts and any weight is loaded, as far
as that goes. An error is one line on stderr: exit status 2 for bad input, 1 for a rank that failed.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import typer
import typer.main

from anabranch.cli.check import check
from anabranch.cli.evaluate import evaluate
from anabranch.cli.generate import generate
from anabranch.cli.info import info
from anabranch.launch import BadInput, RankFailure

INTERRUPTED = 130

app = typer.Typer(
    help="MLA decode context parallelism: the latent cache of a sequence sharded over N ranks, "
    "current attention overlapped with the exchange of history.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)
app.command()(generate)
app.command()(evaluate)
app.command()(info)
app.command()(check)


def main() -> NoReturn:
    """Run the command that `sys.argv` names, and exit."""
    command = typer.main.get_command(app)
    try:
        status = command(prog_name="anabranch", standalone_mode=False)
        sys.stdout.flush()
    except BadInput as error:
        _fail(str(error), 2)
    except typer.TyperException as error:
        _fail(error.format_message(), error.exit_code)
    except RankFailure as error:
        _fail(str(error), 1)
    except typer.Abort:  # what Typer makes of Ctrl-C
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    sys.exit(status)


def _fail(message: str, status: int) -> NoReturn:
    print("anabranch:", " ".join(message.split()), file=sys.stderr)
    sys.exit(status)
