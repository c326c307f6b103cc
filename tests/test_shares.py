"""Shares of a kernel's work: each is run once, by whoever is free."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch

from anabranch import AttentionKind, ShardLayout, native, partial_attention
from problem import Problem, dims


@pytest.mark.parametrize("shares", [1, 2, 7])
def test_each_share_is_run_once(shares: int) -> None:
    run: list[int] = []
    native.in_shares(run.append, shares)
    assert sorted(run) == list(range(shares))


def test_a_helper_that_never_comes_is_not_waited_for() -> None:
    """What a core kept busy by another process looks like from here."""
    release = threading.Event()
    with ThreadPoolExecutor(1) as busy:
        busy.submit(release.wait)
        try:
            run: dict[int, int] = {}
            with mock.patch.object(native, "_helpers", return_value=busy):
                native.in_shares(lambda share: run.update({share: threading.get_ident()}), 3)
        finally:
            release.set()
    assert run == dict.fromkeys(range(3), threading.get_ident())


def test_helpers_of_a_bound_thread_run_where_its_siblings_are_bound() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    found, bound, done = [], threading.Event(), threading.Event()

    def sibling() -> None:
        os.sched_setaffinity(0, cores[1:2])
        bound.set()
        done.wait()

    def main() -> None:
        os.sched_setaffinity(0, cores[:1])
        found.append(native._cores())

    others = threading.Thread(target=sibling)
    others.start()
    bound.wait()
    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
    done.set()
    others.join()
    assert found == [set(cores[:2])]


@pytest.mark.parametrize("heads", [16, 80])
def test_the_bits_depend_on_the_number_of_shares_alone(heads: int) -> None:
    """Whichever thread runs a share, in whatever order."""
    problem = Problem([9000, 3, 0, 4000], [2, 1, 1, 3], dims(heads), torch.bfloat16)
    cache, batch = problem.shard(ShardLayout())
    rank = problem.dims.kv_lora_rank
    queries = problem.queries[..., :rank], problem.queries[..., rank:]
    counts: list[int] = []

    def attend(order: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        def in_order(run: Callable[[int], object], shares: int) -> None:
            counts.append(shares)
            for share in order:
                run(share)

        with mock.patch.object(native, "in_shares", in_order):
            return partial_attention(*queries, cache, batch, AttentionKind.HISTORY, problem.dims)

    with mock.patch.object(torch, "get_num_threads", return_value=4):
        first, second, third = (
            attend(order) for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1])
        )
    assert counts == [4, 4, 4]
    for other in (second, third):
        assert all(map(torch.equal, first, other))
