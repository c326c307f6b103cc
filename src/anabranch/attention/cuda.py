"""Partial attention on CUDA: the Triton kernels of `anabranch.triton_kernels.attention`.

HISTORY of shapes that FlashMLA or FlashInfer takes goes to that, where it is installed.

Floor of one decode step: `(L + R) * itemsize` bytes and `2 * heads * (2 L + R)` FLOPs a key,
whichever takes longer; `docs/cuda.md` has the figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from anabranch.attention import peer, peers
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
    (_, heads, rank), rope, dtype = q_nope.shape, q_pe.shape[2], q_nope.dtype
    here = chip(q_nope.device).capability
    shape = peer.Shape.of(here, heads, (rank, rope), dtype, cache, batch)
    other, pages = peers.serving(shape), peer.joined_pages(cache)
    if other is not None and pages is not None and batch.block_table.shape[1]:
        peer.history(other, shape, q_nope, q_pe, pages, batch, scale, out, lse, workspace)
        return
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

    That depends on the chip and on L, and on no number of heads, tokens or sequences. A peer that
    serves the step may want more.
    """
    here = chip(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    own = scratch_bytes(here, dims.kv_lora_rank)
    if cache is None or batch is None:
        return own
    widths = dims.kv_lora_rank, dims.qk_rope_head_dim
    dtype = cache.latent.dtype  # a peer takes no other
    shape = peer.Shape.of(here.capability, num_heads, widths, dtype, cache, batch)
    other = peers.serving(shape)
    return own if other is None else max(own, other.workspace_bytes(shape))


def paged_keys(cache: LatentCache, batch: DecodeBatch) -> Keys:
    latent, rope = cache.latent, cache.rope
    entries = [divmod(pages.stride(0), pages.stride(1)) for pages in (latent, rope)]
    even = entries[0] == entries[1] and entries[0][1] == 0
    return Keys(
        latent, rope, batch.seq_lens, cache.scale,
        {
            "PAGED": True, "BLOCK_SIZE": cache.block_size,
            "table": batch.block_table, "table_row": batch.block_table.stride(0),
            "latent_block": latent.stride(0), "LATENT_ENTRY": latent.stride(1),
            "rope_block": rope.stride(0), "ROPE_ENTRY": rope.stride(1),
            "BLOCK_ENTRIES": entries[0][0] if even else 0,
        },
    )  # fmt: skip


def step_keys(kv_c: torch.Tensor, k_pe: torch.Tensor, batch: DecodeBatch) -> Keys:
    kv_c, k_pe = dense_rows(kv_c), dense_rows(k_pe)
    return Keys(
        kv_c, k_pe, batch.query_lens, 1.0,
        {
            "PAGED": False, "BLOCK_SIZE": 1, "table": batch.block_table, "table_row": 0,
            "latent_block": 0, "LATENT_ENTRY": kv_c.stride(0),
            "rope_block": 0, "ROPE_ENTRY": k_pe.stride(0),
            "BLOCK_ENTRIES": 0,
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
    tile = tile_for(rows, rank, q_nope.dtype, keys, chip)
    programs = chip.processors * (8 // tile.warps)  # eight warps have all registers of one
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
            "ASYNC_DOT": chip.capability >= (9, 0) and tile.rows == MOST_ROWS,
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


def tile_for(rows: int, rank: int, dtype: torch.dtype, keys: Keys, chip: Chip) -> Tile:
    """The tile for sequences with `rows` query rows each.

    The fastest shapes that keep every value in registers, which `tests/triton_kernels` holds them
    to: keys that are gathered from several pages, and FP8, need some registers themselves.
    """
    most = max(16, MOST_ACCUMULATOR // next_power_of_2(rank))
    height = min(max(16, next_power_of_2(rows)), MOST_ROWS, most)
    size = keys.layout["BLOCK_SIZE"]
    fp8 = keys.latent.dtype == torch.float8_e4m3fn
    if dtype == torch.float32:
        return Tile(16, 16, 8, 1)
    if height == 16:
        # Bound by bandwidth: two programs on a multiprocessor where registers allow it.
        if fp8:
            return Tile(16, 32, 8, 5)
        if size % 32 and keys.layout["PAGED"] and chip.capability >= (9, 0):
            return Tile(16, 64, 8, 3)
        return Tile(16, 32, 4, 3)
    if height == MOST_ROWS:
        # Wide products where one page holds 64 keys.
        if size % 64 == 0 and chip.capability >= (9, 0):
            return Tile(height, 64, 8, 2)
        if chip.capability >= (9, 0):
            return Tile(height, 32, 8, 3)
        if not fp8 and (size % 32 == 0 or not keys.layout["PAGED"]):
            return Tile(height, 32, 8, 2)
    return Tile(min(height, 32), 32, 8, 3)


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
