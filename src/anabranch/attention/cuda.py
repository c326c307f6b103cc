"""Partial attention on CUDA: the Triton kernels of `anabranch.triton_kernels.attention`.

Floor of one decode step: `(L + R) * itemsize` bytes and `2 * heads * (2 L + R)` FLOPs a key,
whichever takes longer; `docs/cuda.md` has the figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from anabranch.cache import DecodeBatch, LatentCache
from anabranch.geometry import MLADims
from anabranch.triton_kernels import Launch, attention, dense_rows, next_power_of_2

MOST_ROWS = 64
MOST_ACCUMULATOR = MOST_ROWS * 512  # FP32 values that fit in the registers of 256 threads
REDUCE_TILE = 8192  # FP32 values of one tile of the second stage


@dataclass(frozen=True)
class Tile:
    """Shape of the first stage: query rows and keys of a tile, warps, stages of the pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Chip:
    """What the choice of tiles depends on: `(major, minor)` capability, and multiprocessors."""

    capability: tuple[int, int]
    processors: int

    @property
    def has_fp8(self) -> bool:
        return self.capability >= (8, 9)


@cache
def chip(device: torch.device) -> Chip:
    """The chip of `device`; for a CPU, where Triton's interpreter runs, a small one."""
    if device.type != "cuda":
        return Chip((9, 0), 4)
    properties = torch.cuda.get_device_properties(device)
    return Chip((properties.major, properties.minor), properties.multi_processor_count)


@dataclass(frozen=True)
class Keys:
    """The keys of one part: `[..., L]` and `[..., R]`, how many each sequence has, where they are.

    `layout` is the part of the kernel's arguments that differs between HISTORY and CURRENT.
    """

    latent: torch.Tensor
    rope: torch.Tensor
    lengths: torch.Tensor
    scale: float
    layout: dict[str, Any]


def history(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cache: LatentCache,
    batch: DecodeBatch,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor | None,
) -> None:
    """HISTORY. Block ids are read on the device: one outside the cache is not detected."""
    _run(q_nope, q_pe, paged_keys(cache, batch), batch, scale, out, lse, workspace)


def current(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    batch: DecodeBatch,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor | None,
) -> None:
    """CURRENT."""
    _run(q_nope, q_pe, step_keys(kv_c, k_pe, batch), batch, scale, out, lse, workspace)


def workspace_bytes(
    num_heads: int,
    dims: MLADims,
    cache: LatentCache | None = None,
    batch: DecodeBatch | None = None,
) -> int:
    """Scratch of `history` and `current` in bytes: partials of one tile at either end of a share.

    It depends on the chip and on L, and on no number of heads, tokens or sequences.
    """
    here = chip(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return scratch_bytes(here, dims.kv_lora_rank)


def paged_keys(cache: LatentCache, batch: DecodeBatch) -> Keys:
    latent, rope = cache.latent, cache.rope
    return Keys(
        latent, rope, batch.seq_lens, cache.scale,
        {
            "PAGED": True, "BLOCK_SIZE": cache.block_size,
            "table": batch.block_table, "table_row": batch.block_table.stride(0),
            "latent_block": latent.stride(0), "latent_entry": latent.stride(1),
            "rope_block": rope.stride(0), "rope_entry": rope.stride(1),
        },
    )  # fmt: skip


def step_keys(kv_c: torch.Tensor, k_pe: torch.Tensor, batch: DecodeBatch) -> Keys:
    kv_c, k_pe = dense_rows(kv_c), dense_rows(k_pe)
    return Keys(
        kv_c, k_pe, batch.query_lens, 1.0,
        {
            "PAGED": False, "BLOCK_SIZE": 1, "table": batch.block_table, "table_row": 0,
            "latent_block": 0, "latent_entry": kv_c.stride(0),
            "rope_block": 0, "rope_entry": k_pe.stride(0),
        },
    )  # fmt: skip


def launches(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    keys: Keys,
    batch: DecodeBatch,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor,
    chip: Chip,
) -> tuple[Launch, Launch]:
    """The two stages for `chip`. `out` and `lse` are contiguous, `workspace` is large enough."""
    tokens, heads, rank = q_nope.shape
    rope, sequences = q_pe.shape[2], batch.seq_lens.shape[0]
    # Exact when all sequences have the same number of tokens; any value gives the right answer.
    rows = -(-tokens // max(sequences, 1)) * heads
    tile = tile_for(rows, rank, q_nope.dtype, chip)
    programs = _programs(chip, tile.rows)
    lanes = min(max(1, -(-rows // tile.rows)), programs)
    parts = programs // lanes
    partials = programs * 2 * tile.rows
    scratch = workspace[: partials * (rank + 1) * 4].view(torch.float32)
    latent, rope_keys = keys.latent, keys.rope
    if latent.dtype == torch.float8_e4m3fn and not chip.has_fp8:
        latent, rope_keys = latent.view(torch.uint8), rope_keys.view(torch.uint8)
    common = {
        "query_lens": batch.query_lens, "key_lens": keys.lengths, "out": out, "lse": lse,
        "partial_out": scratch[: partials * rank], "partial_lse": scratch[partials * rank :],
        "batch": sequences, "heads": heads, "RANK": rank, "ROWS": tile.rows, "KEYS": tile.keys,
        "BATCH": next_power_of_2(sequences),
    }  # fmt: skip
    attend = Launch(
        attention.attend,
        (lanes, parts),
        common | keys.layout | {
            "q_nope": q_nope, "q_pe": q_pe, "latent": latent, "rope": rope_keys,
            "q_nope_token": q_nope.stride(0), "q_nope_head": q_nope.stride(1),
            "q_pe_token": q_pe.stride(0), "q_pe_head": q_pe.stride(1),
            "scale": scale, "cache_scale": keys.scale, "ROPE": rope,
            "RANK_BLOCK": max(16, next_power_of_2(rank)),
            "ROPE_BLOCK": max(16, next_power_of_2(rope)),
            "PRECISION": "tf32x3" if q_nope.dtype == torch.float32 else "tf32",
        },
        ("out", "lse", "partial_out", "partial_lse"),
        tile.warps,
        tile.stages,
    )  # fmt: skip
    # Few rows: cut their columns too, so that there are programs enough to fill the chip.
    widest = 512 if tokens * heads >= 8 * chip.processors else 128
    columns = min(next_power_of_2(rank), widest)
    reduce = Launch(
        attention.reduce,
        (tokens * heads, -(-rank // columns)),
        common | {
            "lanes": lanes, "parts": parts, "COLUMNS": columns, "SPLITS": REDUCE_TILE // columns,
        },
        ("out", "lse"),
    )  # fmt: skip
    return attend, reduce


def tile_for(rows: int, rank: int, dtype: torch.dtype, chip: Chip) -> Tile:
    """The tile for sequences with `rows` query rows each."""
    most = max(16, MOST_ACCUMULATOR // next_power_of_2(rank))
    height = min(max(16, next_power_of_2(rows)), MOST_ROWS, most)
    if dtype == torch.float32:
        return Tile(min(height, 16), 16, 4, 2)
    if height == MOST_ROWS:
        # sm_80 has shared memory for 32 keys; later chips want 64, so that the products are wide.
        return Tile(height, 32 if chip.capability < (9, 0) else 64, 8, 2)
    # Five stages: the block table, then two tiles of keys on their way.
    return Tile(height, 32, 4 if height == 16 else 8, 5)


def _run(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    keys: Keys,
    batch: DecodeBatch,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor | None,
) -> None:
    here = chip(q_nope.device)
    needed = scratch_bytes(here, q_nope.shape[2])
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.uint8, device=q_nope.device)
    elif workspace.numel() < needed:
        raise ValueError(f"workspace must hold {needed} bytes, got {workspace.numel()}")
    q_nope, q_pe = dense_rows(q_nope), dense_rows(q_pe)
    for launch in launches(q_nope, q_pe, keys, batch, scale, out, lse, workspace, here):
        launch.run()


def scratch_bytes(chip: Chip, rank: int) -> int:
    return chip.processors * MOST_ROWS * 2 * (rank + 1) * 4


def _programs(chip: Chip, rows: int) -> int:
    """Programs of the first stage: small tiles share a multiprocessor."""
    return chip.processors * (1 if rows == MOST_ROWS else 2)
