"""Programs run as a user runs them, each a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import NamedTuple

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TIMEOUT = 300


class Ended(NamedTuple):
    """How a program ended."""

    status: int
    out: str
    err: str


def start(
    *arguments: str, environment: dict[str, str] | None = None, stderr: int = subprocess.PIPE
) -> subprocess.Popen[str]:
    """Python with these arguments, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
        # A shell that starts the tests in the background makes all below it deaf to Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        env=os.environ | (environment or {}),
    )


def finish(*arguments: str, text: str = "", environment: dict[str, str] | None = None) -> Ended:
    """Run Python to its end, `text` on its standard input."""
    process = start(*arguments, environment=environment)
    out, err = process.communicate(text, timeout=TIMEOUT)
    return Ended(process.returncode, out, err)


def anabranch(*arguments: str, text: str = "", environment: dict[str, str] | None = None) -> Ended:
    """The `anabranch` command."""
    return finish("-m", "anabranch", *arguments, text=text, environment=environment)


def torchrun(*arguments: str, text: str = "") -> Ended:
    """The `anabranch` command on the two ranks of a torchrun."""
    return finish(*TORCHRUN, "-m", "anabranch", *arguments, text=text)
