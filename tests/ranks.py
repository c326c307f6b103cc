"""Pools of rank processes joined by gloo, shared by every test that needs real collectives.

A rank takes seconds to start and almost nothing to reuse, so one pool serves a whole test
session::

    def square(x):                       # module level: sent to the ranks by reference
        total = torch.tensor(float(x + dist.get_rank()))
        dist.all_reduce(total)
        return total.item()

    def test_square(ranks):              # the fixture of tests/conftest.py
        assert ranks(2).run(square, 3) == [7.0, 7.0]

Inside the function `torch.distributed` is initialised and PyTorch uses one thread. Use
`rank_group()` for the group to hand to the library: None in a world of one rank.
"""

from __future__ import annotations

import datetime
import multiprocessing
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Modules that take seconds to import: the ranks share one import of those the tests use.
HEAVY = ("torch", "torch.distributed", "anabranch.hf")

# After one rank has failed the others may wait for it in a collective: how long they get to
# report a failure of their own before the pool is ended.
GRACE_SECONDS = 2.0


class RankFailure(AssertionError):
    """One or several ranks raised, died or did not answer in time."""


def rank_group() -> dist.ProcessGroup | None:
    """The group of all ranks, or None in a world of one, as the library expects it."""
    return dist.group.WORLD if dist.get_world_size() > 1 else None


def _serve(rank: int, world_size: int, store: str, timeout: float, connection: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    while True:
        try:
            path, payload = connection.recv()
        except EOFError:
            return
        # The test module may live in a folder that was put on the path after this rank started.
        sys.path[:] = path
        try:
            function, args = pickle.loads(payload)
            answer = (True, pickle.dumps(function(*args)))
        except BaseException:
            answer = (False, traceback.format_exc().encode())
        connection.send(answer)


class Ranks:
    """`world_size` processes that run one function at a time, in lockstep.

    The processes start at the first `run`. After a failure they are ended, because a rank
    may still sit in a collective, and the next `run` starts fresh ones.
    """

    def __init__(self, world_size: int, timeout: float = 300.0) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self._ranks: list[tuple[Any, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def _start(self) -> None:
        # A fork server imports them once; every rank is then a cheap fork of it.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([name for name in HEAVY if name in sys.modules])
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        store = str(Path(self._folder.name) / "store")
        for rank in range(self.world_size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.world_size, store, self.timeout, there),
                daemon=True,
                name=f"rank-{rank}-of-{self.world_size}",
            )
            process.start()
            there.close()
            self._ranks.append((process, here))

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float | None = None
    ) -> list[Any]:
        """Call `function(*args)` on every rank; return the results in rank order.

        `function`, `args` and the results are pickled; tensors travel by value. Raises
        RankFailure with the tracebacks of the ranks that failed, or when a rank has not
        answered after `timeout` seconds (the pool's own by default).
        """
        payload = pickle.dumps((function, args))
        if not self._ranks:
            self._start()
        for _, connection in self._ranks:
            connection.send((list(sys.path), payload))

        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        results: list[Any] = [None] * self.world_size
        failures: dict[int, str] = {}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    succeeded, answer = connection.recv()
                except (EOFError, ConnectionError):
                    process = self._ranks[rank][0]
                    process.join(GRACE_SECONDS)
                    failures[rank] = f"the process ended with exit code {process.exitcode}"
                    succeeded = False
                else:
                    if succeeded:
                        results[rank] = pickle.loads(answer)
                    else:
                        failures[rank] = answer.decode()
                if not succeeded:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if not failures and waiting:
            silent = ", ".join(map(str, sorted(waiting.values())))
            self.close()
            raise RankFailure(
                f"no answer after {limit:g} s from rank {silent} of {self.world_size}"
            )
        if failures:
            self.close()
            raise RankFailure(
                "\n".join(
                    f"rank {rank} of {self.world_size}:\n{text}"
                    for rank, text in sorted(failures.items())
                )
            )
        return results

    def close(self) -> None:
        """End the processes. A later `run` starts fresh ones."""
        ranks, self._ranks = self._ranks, []
        for process, connection in ranks:
            connection.close()
            process.kill()
        for process, _ in ranks:
            process.join()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
