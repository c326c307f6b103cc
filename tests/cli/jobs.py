"""Jobs for the tests of `anabranch.launch`, and a program that runs one: `jobs.py NAME RANKS`.

It prints the result, or the error as the command line would: exit status 2 or 1.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from anabranch.launch import BadInput, Rank, RankFailure, is_first_rank, run


def total(rank: Rank) -> tuple[float, int, str]:
    values = torch.tensor([1.0 + rank.index])
    if rank.group is not None:
        dist.all_reduce(values, group=rank.group)
    rank.report(f"report of rank {rank.index}")
    return values.item(), torch.get_num_threads(), rank.share(f"shared by rank {rank.index}")


def processes(rank: Rank) -> None:
    """Report the process ids of all ranks, then wait to be ended."""
    ids: list[Any] = [None] * rank.world_size
    dist.all_gather_object(ids, os.getpid(), group=rank.group)
    rank.report(" ".join(map(str, ids)))
    time.sleep(120)


def begin(rank: Rank) -> bool:
    """Whether each rank began after all had connected; the last connects late (see `main`)."""
    began = time.monotonic()
    times: list[Any] = [None] * rank.world_size
    dist.all_gather_object(times, (began, connected), group=rank.group)
    return min(began for began, _ in times) >= max(connected for _, connected in times)


connected = 0.0
init_process_group = dist.init_process_group


def connect_late(*args: Any, **keywords: Any) -> None:
    global connected
    init_process_group(*args, **keywords)
    time.sleep(dist.get_rank())
    connected = time.monotonic()


def refuse(rank: Rank) -> None:
    raise BadInput("the number must be odd, got 2")


def fail_on_last(rank: Rank) -> None:
    """The others wait in a collective, which fails for them too, later."""
    if rank.index == rank.world_size - 1:
        raise KeyError("deliberate\nin two lines")
    if rank.group is not None:
        dist.barrier(group=rank.group)


def die_on_first(rank: Rank) -> None:
    if rank.index == 0:
        os.kill(os.getpid(), 9)
    dist.barrier(group=rank.group)


def exit_on_last(rank: Rank) -> None:
    if rank.index == rank.world_size - 1:
        os._exit(7)
    time.sleep(120)


def main() -> None:
    if sys.argv[1] == "begin":
        dist.init_process_group = connect_late
    try:
        result = run(
            int(sys.argv[2]), globals()[sys.argv[1]], report=lambda m: print(m, flush=True)
        )
    except (BadInput, RankFailure) as error:
        print(error, file=sys.stderr)
        sys.exit(2 if isinstance(error, BadInput) else 1)
    if is_first_rank():
        print(result)


if __name__ == "__main__":
    main()
