"""Random decode steps with a float64 answer, and the poison that must never reach it.

`Problem` draws everything a step needs, for all ranks of a group: whole sequences, queries of all
heads, weights. `shard` gives one rank's cache and batch, in which every unused slot is NaN, block
ids are shuffled and padding entries of the block table point far outside the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest import mock

import torch
from hypothesis import strategies as st

from anabranch import DecodeBatch, LatentCache, MLADims, ShardLayout, native

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
HUGE_BLOCK = 2**31 - 1


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of `expected`, in float64."""
    expected = expected.double()
    return float((result.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def poison(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.fill_(torch.nan)


@dataclass(frozen=True)
class Problem:
    """One step over sequences with `past` cached and `new` current tokens each."""

    past: list[int]
    new: list[int]
    dims: MLADims  # of all heads together
    dtype: torch.dtype = torch.float32
    block_size: int = 16
    padding_rows: int = 0
    seed: int = 0
    cache_dtype: torch.dtype | None = None  # that of the step, or FP8 with a scale
    cache_scale: float = 1.0
    keys: list[torch.Tensor] = field(init=False)
    queries: torch.Tensor = field(init=False)
    w_uv: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random).to(self.dtype)

        dims = self.dims
        keys = [normal(p + n, dims.latent_width) for p, n in zip(self.past, self.new, strict=True)]
        queries = normal(self.tokens, dims.num_heads, dims.latent_width)
        queries[sum(self.new) :] = torch.nan
        weights = normal(dims.num_heads, dims.kv_lora_rank, dims.v_head_dim)
        object.__setattr__(self, "keys", keys)
        object.__setattr__(self, "queries", queries)
        object.__setattr__(self, "w_uv", weights)

    @property
    def tokens(self) -> int:
        return sum(self.new) + self.padding_rows

    @property
    def current_keys(self) -> torch.Tensor:
        """`[T, L + R]`; padding rows hold NaN."""
        rows = [keys[past:] for keys, past in zip(self.keys, self.past, strict=True)]
        rest = torch.full((self.padding_rows, self.dims.latent_width), torch.nan, dtype=self.dtype)
        return torch.cat([*rows, rest])

    def answer(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Float64 attention of each row over its whole sequence: `[T, heads, L]` and its LSE."""
        rank = self.dims.kv_lora_rank
        out = torch.zeros(self.tokens, self.dims.num_heads, rank, dtype=torch.float64)
        lse = torch.full((self.tokens, self.dims.num_heads), -torch.inf, dtype=torch.float64)
        row = 0
        for keys, past, new in zip(self.keys, self.past, self.new, strict=True):
            for token in range(new):
                seen = keys[: past + token + 1].double()
                scores = self.queries[row].double() @ seen.T * self.dims.scale
                out[row] = scores.softmax(-1) @ seen[:, :rank]
                lse[row] = scores.logsumexp(-1)
                row += 1
        return out, lse

    def projected_answer(self) -> torch.Tensor:
        """`answer` through V-up: `[T, heads, V]` float64."""
        return torch.einsum("thl,hlv->thv", self.answer()[0], self.w_uv.double())

    def shard(self, layout: ShardLayout) -> tuple[LatentCache, DecodeBatch]:
        """This rank's cache, holding the past, and the batch of the step."""
        lengths = [p + n for p, n in zip(self.past, self.new, strict=True)]
        blocks = [layout.blocks_needed(length, self.block_size) for length in lengths]
        random = torch.Generator().manual_seed(self.seed)
        ids = iter((torch.randperm(sum(blocks), generator=random) + 1).tolist())
        tables = [[next(ids) for _ in range(count)] for count in blocks]
        cache = LatentCache(
            sum(blocks) + 2,
            self.block_size,
            self.dims,
            self.cache_dtype or self.dtype,
            scale=self.cache_scale,
        )
        poison(cache.latent, cache.rope)
        fill = layout.plan_batch([0] * len(lengths), self.past, tables, self.block_size)
        history = torch.cat([keys[:past] for keys, past in zip(self.keys, self.past, strict=True)])
        rank = self.dims.kv_lora_rank
        cache.write(history[:, :rank], history[:, rank:], fill.slot_mapping)
        batch = layout.plan_batch(self.past, self.new, tables, self.block_size)
        return cache, self._padded(batch, blocks)

    def _padded(self, batch: DecodeBatch, blocks: list[int]) -> DecodeBatch:
        table = torch.nn.functional.pad(batch.block_table, (0, 3), value=HUGE_BLOCK)
        for row, count in zip(table, blocks, strict=True):
            row[count:] = HUGE_BLOCK
        slots = torch.nn.functional.pad(batch.slot_mapping, (0, self.padding_rows), value=-1)
        return replace(batch, block_table=table, slot_mapping=slots)


@contextmanager
def kernels(form: str) -> Iterator[None]:
    """The compiled kernels ("native"), or the PyTorch forms that stand in for them ("pytorch")."""
    if form == "native":
        assert native.library() is not None, native.missing()
        yield
    else:
        with mock.patch.object(native, "library", return_value=None):
            yield


FORMS = ["native", "pytorch"]


def dims(heads: int, rank: int = 32, rope: int = 8, v: int = 16) -> MLADims:
    return MLADims(heads, rank, rope, 16, v, (16 + rope) ** -0.5)


SIZES = [(32, 8, 16), (33, 5, 7), (64, 0, 32)]  # (L, R, V): even, odd, and without rotary columns


@st.composite
def layouts_and_problems(
    draw: st.DrawFn,
    *,
    worlds: Sequence[int] = (1, 2, 3, 4, 8),
    block_sizes: Sequence[int] = (1, 16, 64),
    heads: Sequence[int] = (1, 2, 3),
    sizes: Sequence[tuple[int, int, int]] = tuple(SIZES),
    dtypes: Sequence[torch.dtype] = tuple(TOLERANCE),
) -> tuple[int, int, Problem]:
    """`(world_size, interleave, problem)` with lengths around every boundary there is."""
    world_size = draw(st.sampled_from(worlds))
    block_size = draw(st.sampled_from(block_sizes))
    interleave = draw(st.sampled_from([i for i in (1, 2, 16) if block_size % i == 0]))
    stripe = block_size * world_size
    edges = [0, 1, block_size - 1, block_size, block_size + 1, stripe - 1, stripe, stripe + 1]
    length = st.sampled_from(edges) | st.integers(0, 3 * stripe)
    past = draw(st.lists(length, min_size=1, max_size=4))
    most = draw(st.sampled_from([1, 4]))
    new = [draw(st.integers(1, most)) for _ in past]
    problem = Problem(
        past,
        new,
        dims(world_size * draw(st.sampled_from(heads)), *draw(st.sampled_from(sizes))),
        draw(st.sampled_from(dtypes)),
        block_size,
        draw(st.sampled_from([0, 1, 5])),
        draw(st.integers(0, 2**16)),
    )
    return world_size, interleave, problem
