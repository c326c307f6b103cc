"""What `anabranch check` runs: the sanitizer over the shipped schedules, or over a user's step.

check_schedules(batches=100)          every schedule, on random batches
check_target("my_module:my_step")     any callable that takes a StreamPair, or nothing
"""

from __future__ import annotations

import importlib
import inspect
import random
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from anabranch.cache import LatentCache
from anabranch.decoder import DCPDecoder
from anabranch.geometry import MLADims, ShardLayout
from anabranch.schedules import Schedule
from anabranch.streams.cpu import inline_streams
from anabranch.streams.findings import Finding
from anabranch.streams.sanitizer import sanitize

DIMS = MLADims(2, 8, 4, 8, 6, 0.3)
BLOCK_SIZE, BLOCKS = 4, 4  # of each sequence
LONGEST = timedelta(seconds=60)  # for a collective
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Checked:
    """What was found in one schedule or function, and how much was watched."""

    name: str
    findings: tuple[Finding, ...]
    runs: int
    operators: int


def check_schedules(
    batches: int = 100,
    seed: int = 0,
    schedules: Iterable[Schedule] = Schedule,
    group: dist.ProcessGroup | None = None,
) -> list[Checked]:
    """Run decode steps of `schedules` on random batches under the sanitizer.

    Batches differ in sequences, history, new tokens, dtype and the place of V-up, and share the
    buffers of a decoder two by two. Every second pair goes through `group`, by default a gloo
    group of this process alone, so that the packed exchange is seen; the rest without.
    """
    group = lone_group() if group is None else group
    checked = []
    for schedule in schedules:
        with sanitize() as sanitizer, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            for first in range(0, batches, 2):
                draw = random.Random(f"{seed}/{first}")
                through = group if first % 4 == 0 else None
                _two_steps(draw, schedule, through)
        name = schedule.value
        checked.append(Checked(name, tuple(sanitizer.findings), batches, sanitizer.operators))
    return checked


def check_target(target: str | Callable[..., Any], runs: int = 2) -> Checked:
    """Call a function `runs` times under the sanitizer: the second time buffers are reused.

    `target` is a callable or names one as `module:function`, found as Python finds modules, the
    current folder included. It is given a StreamPair if it takes an argument. Raises
    ValueError for a name that leads to no callable; what the function raises goes through.
    """
    function = _resolve(target) if isinstance(target, str) else target
    pair = inline_streams()
    takes_streams = bool(inspect.signature(function).parameters)
    with sanitize(pair) as sanitizer:
        for _ in range(runs):
            function(pair) if takes_streams else function()
    name = target if isinstance(target, str) else function.__qualname__
    return Checked(name, tuple(sanitizer.findings), runs, sanitizer.operators)


def lone_group() -> dist.ProcessGroup:
    """A gloo group of this process alone, apart from any that the process belongs to."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    group = dist.ProcessGroup(store, 0, 1)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, dist.ProcessGroupGloo(store, 0, 1, LONGEST))
    return group


def _two_steps(draw: random.Random, schedule: Schedule, group: dist.ProcessGroup | None) -> None:
    sequences, dtype = draw.randint(1, 3), draw.choice(DTYPES)
    size = 1 if group is None else group.size()
    layout = ShardLayout(size, 0 if group is None else group.rank())
    project_first = draw.random() < 0.25
    decoder = DCPDecoder(DIMS, group, layout, schedule, project_first=project_first)
    cache = LatentCache(sequences * BLOCKS, BLOCK_SIZE, DIMS, dtype)
    cache.latent.zero_()
    cache.rope.zero_()
    tables = [list(range(b * BLOCKS, (b + 1) * BLOCKS)) for b in range(sequences)]
    heads, rank, rope = DIMS.num_heads, DIMS.kv_lora_rank, DIMS.qk_rope_head_dim
    for _ in range(2):
        past = [draw.randint(0, 12) for _ in range(sequences)]
        new = [draw.choice((1, 1, 2, 3)) for _ in range(sequences)]
        batch = layout.plan_batch(past, new, tables, BLOCK_SIZE)
        tokens, w_heads = sum(new), size * heads if project_first else heads
        q_nope = torch.randn(tokens, heads, rank).to(dtype)
        q_pe = torch.randn(tokens, heads, rope).to(dtype)
        kv_c, k_pe = torch.randn(tokens, rank).to(dtype), torch.randn(tokens, rope).to(dtype)
        w_uv = torch.randn(w_heads, rank, DIMS.v_head_dim).to(dtype)
        decoder.step(q_nope, q_pe, kv_c, k_pe, cache, batch, w_uv)
        # Memory that a side stream might still read goes back to the allocator here.
        del q_nope, q_pe, kv_c, k_pe, w_uv


def _resolve(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    if not name:
        raise ValueError(f"target must be module:function, got {target}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{target} was not found: {error}") from error
    if not callable(function):
        raise ValueError(f"{target} must be callable, got {type(function).__name__}")
    return function  # type: ignore[no-any-return]
