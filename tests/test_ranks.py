"""The rank pools themselves: results, failures, time limits."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from ranks import RankFailure, Ranks, rank_group


def _sum(x: float) -> tuple[int, float, bool]:
    total = torch.tensor(x + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), rank_group() is None


def _raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("deliberate")
    dist.barrier()


def _die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def _stall_on_rank_0() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


@pytest.mark.parametrize("world_size", [1, 2])
def test_results_in_rank_order(ranks, world_size):
    for x in (1.0, 2.0):
        total = sum(x + rank for rank in range(world_size))
        expected = [(rank, total, world_size == 1) for rank in range(world_size)]
        assert ranks(world_size).run(_sum, x) == expected


def test_failures_name_the_rank_and_the_pool_recovers():
    pool = Ranks(2)
    try:
        with pytest.raises(RankFailure, match=r"(?s)rank 1 of 2.*ValueError: deliberate"):
            pool.run(_raise_on_rank_1)
        with pytest.raises(RankFailure, match="rank 1 of 2:\nthe process ended with exit code 3"):
            pool.run(_die_on_rank_1)
        pool.run(_sum, 0.0)  # starting the ranks may take longer than the limit below
        with pytest.raises(RankFailure, match="no answer after 1 s from rank 0 of 2"):
            pool.run(_stall_on_rank_0, timeout=1)
        assert [total for _, total, _ in pool.run(_sum, 0.0)] == [1.0, 1.0]
    finally:
        pool.close()
