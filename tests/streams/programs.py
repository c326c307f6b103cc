"""Programs for the sanitizer and the adversarial mode: decode steps of tiny layers."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from anabranch import DCPDecoder, DecodeBatch, LatentCache, MLADims, ShardLayout
from anabranch.schedules import RUN, Schedule
from anabranch.step import DecodeStep
from anabranch.streams import StreamPair

DIMS = MLADims(2, 8, 4, 8, 6, 0.3)
BLOCK_SIZE, BLOCKS = 4, 4  # per sequence

ScheduleFunction = Callable[[DecodeStep, StreamPair], None]


def lone_group() -> dist.ProcessGroup:
    """A real gloo group of one rank: the packed exchange with real collectives, in one process."""
    store = dist.HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(
        torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo(store, 0, 1)
    )
    return group


@dataclass(frozen=True)
class Decode:
    """Some decode steps on one set of buffers, with inputs that the caller lets go of.

    `lens` is one list of `(history, new tokens)` per step.
    """

    lens: tuple[tuple[tuple[int, int], ...], ...]
    group: dist.ProcessGroup | None
    dtype: torch.dtype = torch.float32
    project_first: bool = False
    seed: int = 0

    def run(
        self, schedule: Schedule, instead: ScheduleFunction | None = None
    ) -> Iterator[torch.Tensor]:
        """Yields the output of each step, then the cache; `instead` stands in for the schedule."""
        sequences = max(map(len, self.lens))
        cache = LatentCache(sequences * BLOCKS, BLOCK_SIZE, DIMS, self.dtype)
        draw = torch.Generator().manual_seed(self.seed)
        cache.latent.copy_(self._random(draw, *cache.latent.shape))
        cache.rope.copy_(self._random(draw, *cache.rope.shape))
        decoder = DCPDecoder(DIMS, self.group, None, schedule, project_first=self.project_first)
        with patch.dict(RUN, {} if instead is None else {schedule: instead}):
            outputs = [decoder.step(*self._inputs(draw, cache, lens)) for lens in self.lens]
        yield from outputs
        yield cache.latent

    def _inputs(
        self, draw: torch.Generator, cache: LatentCache, lens: tuple[tuple[int, int], ...]
    ) -> tuple[Any, ...]:
        tables = [list(range(b * BLOCKS, (b + 1) * BLOCKS)) for b in range(len(lens))]
        batch: DecodeBatch = ShardLayout().plan_batch(
            [past for past, _ in lens], [new for _, new in lens], tables, BLOCK_SIZE
        )
        tokens, heads = batch.num_tokens, DIMS.num_heads
        rank, rope = DIMS.kv_lora_rank, DIMS.qk_rope_head_dim
        return (
            self._random(draw, tokens, heads, rank),
            self._random(draw, tokens, heads, rope),
            self._random(draw, tokens, rank),
            self._random(draw, tokens, rope),
            cache,
            batch,
            self._random(draw, heads, rank, DIMS.v_head_dim),
        )

    def _random(self, draw: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(self.dtype)


def random_decode(seed: int, group: dist.ProcessGroup | None) -> Decode:
    """Two steps of one to three sequences, with one to three new tokens each."""
    draw = random.Random(seed)
    sequences = draw.randint(1, 3)
    lens = tuple(
        tuple((draw.randint(0, 12), draw.choice((1, 1, 2, 3))) for _ in range(sequences))
        for _ in range(2)
    )
    dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16))
    return Decode(lens, draw.choice((group, None)), dtype, draw.random() < 0.3, seed)


warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*", category=FutureWarning)

__all__ = ["DIMS", "Decode", "Schedule", "lone_group", "random_decode"]
