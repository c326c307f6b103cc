"""Captured steps on graphs in miniature: replays follow lengths, tables and inputs."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any
from unittest import mock

import miniature
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_npu import on_npu
from test_step import FIA, arguments, each_schedule, wide

from anabranch import DCPDecoder, LatentCache, Schedule, ShardLayout
from anabranch.streams import npu_graph
from problem import Problem, dims, relative_error

MOST = 6
LENS = st.tuples(st.integers(0, 60), st.integers(1, 2))  # cached and new tokens of a sequence


class Captured:
    """A captured step and the memory that a capture fixes."""

    def __init__(self, sizes: Any, schedule: Schedule = Schedule.OVERLAP) -> None:
        self.decoder = DCPDecoder(sizes, schedule=schedule)
        self.step = self.decoder.capture(MOST)
        self.cache = LatentCache(64, 16, sizes, torch.bfloat16)
        self.w_uv = torch.empty(sizes.num_heads, 512, 128, dtype=torch.bfloat16)

    def __call__(self, problem: Problem) -> torch.Tensor:
        *inputs, cache, batch, w_uv = arguments(problem, ShardLayout(), slice(None))
        for pages in ("latent", "rope"):
            getattr(self.cache, pages)[: cache.num_blocks] = getattr(cache, pages)
        self.w_uv.copy_(w_uv)
        return self.step.step(*inputs, self.cache, batch, self.w_uv)


def right(problem: Problem, result: torch.Tensor) -> bool:
    return relative_error(result, problem.projected_answer().flatten(1)) < 1e-2


FORMS = {
    "one token each": [([90, 20], [1, 1]), ([3, 64], [1, 1]), ([0, 15], [1, 1])],
    "two tokens each": [([90, 20], [2, 2]), ([3, 64], [2, 2])],
    "three tokens each, a row apiece": [([90, 20], [3, 3]), ([0, 64], [3, 3])],
    "any number of tokens": [([90, 20], [2, 1]), ([3, 64], [1, 2]), ([0, 0], [1, 2])],
}


@each_schedule
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cann", ["8.5.0", "9.1.0"])
def test_replays_follow_new_lengths(schedule: Schedule, form: str, cann: str) -> None:
    with on_npu(cann) as seen, miniature.miniature() as device:
        problems = [
            wide(past, new, padding_rows=3 - sum(new) if form.startswith("any") else 0, seed=seed)
            for seed, (past, new) in enumerate(FORMS[form] * 2)
        ]
        captured = Captured(problems[0].dims, schedule)
        for problem in problems:
            assert right(problem, captured(problem))
            assert not device.running
        lengths = [call["actual_seq_kvlen"] for name, call in seen.calls if name == FIA]
        assert max(map(max, lengths[-2:])) == max(problems[-1].past + problems[-1].new)


@settings(max_examples=15)
@given(st.lists(st.lists(LENS, min_size=1, max_size=3), min_size=4, max_size=4))
def test_replays_of_several_sizes_share_their_memory(lens: list[list[tuple[int, int]]]) -> None:
    with on_npu(), miniature.miniature():
        problems = [
            wide([p for p, _ in one], [n for _, n in one], seed=seed)
            for seed, one in enumerate(lens)
        ]
        problems.sort(key=lambda problem: -max(problem.past))  # the widest table comes first
        captured, forms = Captured(problems[0].dims), {}
        for problem in problems:
            size, each = (problem.tokens, len(problem.new)), len(set(problem.new)) == 1
            if forms.setdefault(size, each) == each or not forms[size]:
                assert right(problem, captured(problem))


def test_without_updates_a_replay_has_the_old_lengths() -> None:
    """The control: what the task groups are for."""
    with (
        on_npu(), miniature.miniature(),
        mock.patch.object(npu_graph, "capture_into", return_value=nullcontext()),
    ):  # fmt: skip
        # As many blocks as before, so that the table still has them all.
        first, second = wide([81, 17], [1, 1]), wide([90, 30], [1, 1], seed=1)
        captured = Captured(first.dims)
        assert right(first, captured(first))
        assert not right(second, captured(second))


def test_lengths_of_another_form_are_refused_before_any_work() -> None:
    with on_npu() as seen, miniature.miniature() as device:
        captured = Captured(dims(2, 512, 64, 128))
        captured(wide([90, 20], [2, 2]))
        before = len(seen.calls), len(device.log)
        with pytest.raises(ValueError, match=r"query_lens must be 2 for every sequence, as captur"):
            captured(wide([90, 20], [3, 1]))
        assert not device.running
        assert len(seen.calls) == before[0]
        other = wide([5, 6], [2, 2], seed=4)
        assert right(other, captured(other))


def test_what_fia_does_not_take_is_not_captured() -> None:
    problem = Problem([20], [1], dims(2), torch.bfloat16)
    cache, batch = problem.shard(ShardLayout())
    current, queries = problem.current_keys, problem.queries
    with on_npu(), miniature.miniature():
        step = DCPDecoder(problem.dims).capture(2)
        with pytest.raises(ValueError, match="kv_lora_rank must be 512, got 32: only"):
            step.step(
                queries[..., :32], queries[..., 32:], current[:, :32], current[:, 32:], cache,
                batch, problem.w_uv,
            )  # fmt: skip


@pytest.mark.parametrize("name", miniature.NAMES)
def test_the_miniature_has_the_signatures_of_torch_npu(name: str) -> None:
    """Every parameter by name, for functions and for the methods of classes."""
    import torch_npu.npu as real

    ours, theirs = getattr(miniature, name), getattr(real, name)

    def parameters(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    if not inspect.isclass(ours):
        assert parameters(ours) == parameters(theirs)
        return
    for method, ours_of in vars(ours).items():
        if not callable(ours_of) or (method.startswith("_") and method != "__init__"):
            continue
        real_of = getattr(theirs, method)
        if method == "__init__" and "__new__" in vars(theirs):
            real_of = theirs.__new__
        assert set(parameters(ours_of)[1:]) <= set(parameters(real_of)[1:]), method
