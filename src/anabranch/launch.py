"""The ranks of a group: join those a launcher such as torchrun started, or start N processes here.

A job is a function `job(rank, *args)` that every rank calls; `run` gives the caller the first
rank's result. Jobs print nothing: what a person should see before the end goes through
`rank.report` to the process that called `run`, which owns the terminal.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from anabranch.streams import may_fork, take_device

if TYPE_CHECKING:
    from multiprocessing.context import ForkContext, SpawnContext

Report = Callable[[Any], None]

# After a rank has failed: how long the others get to tell of failures of their own, so that the
# first cause is named and not its consequence.
GRACE_SECONDS = 1.0
# After all ranks have delivered: how long they get to exit before they are killed.
EXIT_SECONDS = 10.0


class BadInput(ValueError):
    """Input a job refuses. Every rank refuses it alike; the message is for whoever gave it."""


class RankFailure(RuntimeError):
    """A rank raised an exception or died; the message, one line, names it."""


@dataclass(frozen=True)
class Rank:
    """What a job knows of where it runs; `group` is None for a rank on its own.

    `device` is the current device of its kind, and no other rank's.
    """

    index: int
    world_size: int
    group: dist.ProcessGroup | None
    report: Report
    device: torch.device

    def share(self, value: Any) -> Any:
        """The first rank's `value`, on every rank. All must call this."""
        values = [value]
        if self.group is not None:
            dist.broadcast_object_list(values, group_src=0, group=self.group, device=self.device)
        return values[0]


def joined_world_size() -> int | None:
    """How many ranks the launcher that started this process started; None without a launcher."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return None


def ranks_here(world_size: int) -> int:
    """How many of `world_size` ranks are processes of this machine."""
    return (
        int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) if joined_world_size() else world_size
    )


def is_first_rank() -> bool:
    """Whether this process speaks for all: the only one, or the first a launcher started."""
    return joined_world_size() is None or int(os.environ["RANK"]) == 0


def run(
    world_size: int,
    job: Callable[..., Any],
    *args: Any,
    report: Report = lambda _: None,
    device: str = "cpu",
) -> Any:
    """Call `job(rank, *args)` on `world_size` ranks; return what the first one returned.

    Started by a launcher, this process is one of the ranks, and None is returned on the others.
    Otherwise the ranks are new processes of this machine, `cores // world_size` threads each;
    this process must not have computed anything with PyTorch before.
    `report` is called here with all that the first rank's job passes to `rank.report`.
    `device` is a type of devices: each rank of a machine has one to itself, and the backend that
    PyTorch has for the type joins them.

    Raises BadInput as the job did, RankFailure when a rank failed. None outlives the call.
    """
    if joined_world_size() is not None:
        return _join(job, args, report, device)
    with tempfile.TemporaryDirectory(prefix="anabranch-") as folder:
        return _start(world_size, str(Path(folder) / "store"), job, args, report, device)


def _call(job: Callable[..., Any], rank: Rank, args: tuple[Any, ...]) -> Any:
    try:
        result = job(rank, *args)
        if rank.group is not None:
            # A rank that closes its connections early would fail those still receiving.
            dist.barrier(group=rank.group)
        return result
    except BadInput:
        raise
    except Exception as error:
        raise RankFailure(_describe(rank.index, rank.world_size, error)) from error


def _describe(index: int, world_size: int, error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())
    return (
        f"rank {index} of {world_size} failed: {type(error).__name__}: {message} "
        f"({Path(place.filename).name}:{place.lineno})"
    )


def _join(job: Callable[..., Any], args: tuple[Any, ...], report: Report, kind: str) -> Any:
    index, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = take_device(kind, int(os.environ.get("LOCAL_RANK", index)))
    heard = report if index == 0 else _unheard
    if world_size == 1:
        return _call(job, Rank(0, 1, None, heard, device), args)
    try:
        group = _meet(device)
    except Exception as error:
        raise RankFailure(_describe(index, world_size, error)) from error
    # After a failure the group is left as it is: closing it may wait for the peers.
    result = _call(job, Rank(index, world_size, group, heard, device), args)
    dist.destroy_process_group()
    return result if index == 0 else None


def _meet(device: torch.device, **where: Any) -> dist.ProcessGroup | None:
    """The group of all ranks, once each has connected to every other.

    `init_process_group` alone returns before: a job that refuses at once would end its rank while
    a peer is still connecting to it, and there gloo would print an error of its own.
    """
    dist.init_process_group(dist.get_default_backend_for_device(device), **where)
    dist.all_reduce(torch.zeros(1, device=device))
    return dist.group.WORLD


def _unheard(_: Any) -> None:
    """Where the reports of all ranks but the first go."""


def _start(
    world_size: int,
    store: str,
    job: Callable[..., Any],
    args: tuple[Any, ...],
    report: Report,
    kind: str,
) -> Any:
    # A fork shares what this process has imported, which takes longer than many a job. It would
    # lose threads of PyTorch's, so this process must compute nothing: a single rank is forked too.
    # The driver of an accelerator survives no fork, and looking for devices may have woken it.
    context: ForkContext | SpawnContext
    if sys.platform == "linux" and may_fork(kind):
        context = multiprocessing.get_context("fork")
    else:
        context = multiprocessing.get_context("spawn")
    ranks: list[tuple[BaseProcess, Connection]] = []
    with _terminated_as_exit():
        try:
            for index in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_serve, args=(index, world_size, store, sender, job, args, kind)
                )
                process.start()
                sender.close()
                ranks.append((process, receiver))
            result = _collect(ranks, report)
            for rank, _ in ranks:
                rank.join(EXIT_SECONDS)
            return result
        finally:
            for rank, _ in ranks:
                rank.kill()
            for rank, receiver in ranks:
                rank.join()
                receiver.close()


@contextmanager
def _terminated_as_exit() -> Iterator[None]:
    """Let SIGTERM unwind this process, so that its ranks and files go with it."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True)
class _Outcome:
    """The last message of a rank. `at` orders failures: the clock is the machine's."""

    result: Any = None
    refusal: str | None = None
    failure: str | None = None
    at: float = 0.0


def _collect(ranks: list[tuple[BaseProcess, Connection]], report: Report) -> Any:
    """Pass reports on until every rank has delivered; the first rank's result."""
    waiting = {receiver: index for index, (_, receiver) in enumerate(ranks)}
    outcomes: dict[int, _Outcome] = {}
    deadline: float | None = None
    while waiting:
        ready = wait(list(waiting), None if deadline is None else deadline - time.monotonic())
        if not ready:
            break
        for receiver in ready:
            assert isinstance(receiver, Connection)
            index = waiting[receiver]
            try:
                message = receiver.recv()
            except EOFError:
                message = _Outcome(failure=_describe_death(index, len(ranks), ranks[index][0]))
            if not isinstance(message, _Outcome):
                report(message)
                continue
            del waiting[receiver]
            outcomes[index] = message
            failed = message.refusal is not None or message.failure is not None
            if failed and deadline is None:
                deadline = time.monotonic() + GRACE_SECONDS
    refusals = [outcome.refusal for outcome in outcomes.values() if outcome.refusal is not None]
    if refusals:
        raise BadInput(refusals[0])
    # A rank that died had no time to say when: it is the cause, and comes first.
    failures = [(outcome.at, outcome.failure) for outcome in outcomes.values() if outcome.failure]
    if failures:
        raise RankFailure(min(failures)[1])
    return outcomes[0].result


def _describe_death(index: int, world_size: int, process: BaseProcess) -> str:
    process.join(GRACE_SECONDS)
    code = process.exitcode
    if code is not None and code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    else:
        how = f"exited with status {code}"
    return f"rank {index} of {world_size} {how}"


def _serve(
    index: int,
    world_size: int,
    store: str,
    sender: Connection,
    job: Callable[..., Any],
    args: tuple[Any, ...],
    kind: str,
) -> None:
    """The life of a rank process."""
    # Ctrl-C reaches the whole foreground group: the starter ends the ranks, each says nothing.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_starter, daemon=True).start()
    torch.set_num_threads(threads_per_rank(world_size))
    group = None
    try:
        device = take_device(kind, index)
        if world_size > 1:
            group = _meet(device, init_method=f"file://{store}", rank=index, world_size=world_size)
        report = sender.send if index == 0 else _unheard
        result = _call(job, Rank(index, world_size, group, report, device), args)
        outcome = _Outcome(result=result if index == 0 else None)
    except BadInput as error:
        outcome = _Outcome(refusal=str(error))
    except RankFailure as error:
        outcome = _Outcome(failure=str(error), at=time.monotonic())
    except Exception as error:
        failure = _describe(index, world_size, error)
        outcome = _Outcome(failure=failure, at=time.monotonic())
    sender.send(outcome)
    if group is not None and outcome.failure is None and outcome.refusal is None:
        dist.destroy_process_group()


def _end_with_starter() -> None:
    """End this rank when the process that started it is gone, even if that one was killed."""
    starter = multiprocessing.parent_process()
    assert starter is not None
    starter.join()
    os._exit(1)


def threads_per_rank(world_size: int) -> int:
    """Intra-op threads of each of `world_size` ranks on this machine: its share of the cores."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every platform
        cores = os.cpu_count() or 1
    return max(1, cores // world_size)
