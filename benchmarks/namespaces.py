"""Two ranks in network namespaces of their own, joined by a pair of virtual interfaces.

On loopback an exchange costs next to nothing. A veth pair has counters, so the bytes on the wire
are counted rather than computed, and `tc ... tbf` gives it the rate of a real link. Needs root
and iproute2. Nothing but the two namespaces made here is touched, and both are removed
whatever happens. A namespace is private: the addresses in it exist nowhere else.

Run as a program this file is one rank, started by `NamespacePair.run`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from anabranch import launch

INTERFACE = "wire"
ADDRESSES = ("10.0.0.1", "10.0.0.2")
PORT = 29500
# Of the token bucket: a burst well below one exchange, or there would be nothing to shape.
BURST, QUEUE = 128 * 1024, 64 * 1024 * 1024


def missing() -> str:
    """Why namespaces cannot be made here; empty when they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    absent = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"{' and '.join(absent)} of iproute2 not found" if absent else ""


class NamespacePair:
    """Two namespaces and the link between them. Get one with `namespace_pair`."""

    def __init__(self) -> None:
        self.names = [f"anabranch-{os.getpid()}-{index}" for index in range(2)]

    def create(self) -> None:
        first, second = self.names
        for name in self.names:
            _call("ip", "netns", "add", name)
        _call(
            "ip", "-n", first, "link", "add", INTERFACE, "type", "veth",
            "peer", "name", INTERFACE, "netns", second,
        )  # fmt: skip
        for name, address in zip(self.names, ADDRESSES, strict=True):
            _call("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            _call("ip", "-n", name, "link", "set", "lo", "up")
            _call("ip", "-n", name, "link", "set", INTERFACE, "up")

    def shape(self, gigabits: float) -> None:
        """Limit both directions to a rate."""
        for name in self.names:
            _call(
                "tc", "-n", name, "qdisc", "replace", "dev", INTERFACE, "root", "tbf",
                "rate", f"{gigabits * 1000:g}mbit", "burst", str(BURST), "limit", str(QUEUE),
            )  # fmt: skip

    def remove(self) -> None:
        """Remove what `create` has made so far; the link goes with its ends."""
        for name in self.names:
            if Path("/run/netns", name).exists():
                _call("ip", "netns", "delete", name)

    def run(self, job: str, *arguments: Any) -> Any:
        """Call `module:function` as `job(rank, *arguments)` on both ranks; the first's result.

        Arguments and result travel as JSON. Raises RuntimeError when a rank fails.
        """
        with tempfile.TemporaryDirectory(prefix="anabranch-") as folder:
            result = Path(folder) / "result"
            call = json.dumps({"job": job, "arguments": arguments, "result": str(result)})
            ranks: list[subprocess.Popen[str]] = []
            try:
                for index in range(2):
                    ranks.append(self._start(index, call))
                _wait(ranks)
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()
            return json.loads(result.read_text())

    def _start(self, index: int, call: str) -> subprocess.Popen[str]:
        settings = {
            "RANK": str(index),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # the addresses have no names, which it warns of
        }
        # A session of its own: Ctrl-C reaches the starter alone, which ends the ranks.
        rank = subprocess.Popen(
            ["ip", "netns", "exec", self.names[index], sys.executable, __file__],
            env=os.environ | settings, stdin=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert rank.stdin is not None
        rank.stdin.write(call)
        rank.stdin.close()
        return rank


@contextmanager
def namespace_pair() -> Iterator[NamespacePair]:
    """A fresh pair, removed at the end, on errors, Ctrl-C and SIGTERM alike."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    pair = NamespacePair()
    try:
        pair.create()
        yield pair
    finally:
        pair.remove()
        signal.signal(signal.SIGTERM, before)


def sent_bytes() -> int:
    """Bytes this rank's end of the link has sent so far."""
    return int(Path("/sys/class/net", INTERFACE, "statistics/tx_bytes").read_text())


def _wait(ranks: list[subprocess.Popen[str]]) -> None:
    while None in (codes := [rank.poll() for rank in ranks]) or any(codes):
        for index, code in enumerate(codes):
            if code:
                raise RuntimeError(f"rank {index} exited with status {code}")
        time.sleep(0.05)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _serve() -> None:
    """The life of a rank: join the other, do the job, leave the first rank's result."""
    call = json.load(sys.stdin)
    module, _, function = call["job"].partition(":")
    result = launch.run(2, getattr(import_module(module), function), *call["arguments"])
    if launch.is_first_rank():
        Path(call["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    _serve()
