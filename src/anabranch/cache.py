"""The paged latent cache of one rank, and the plan of one step over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from anabranch.geometry import MLADims, ShardLayout


class LatentCache:
    """Paged storage of this rank's latents for one layer.

    `latent` is `[num_blocks, block_size, L]` and `rope` `[num_blocks, block_size, R]`. On CPU
    and CUDA they are views of one buffer `[num_blocks, block_size, L + R]`; on NPU, whose
    attention operator reads them apart, they are two buffers. Slot `s` is entry
    `s % block_size` of block `s // block_size`. Unused slots may hold anything.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        dims: MLADims,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        rank, width = dims.kv_lora_rank, dims.latent_width
        if torch.device(device).type == "npu":
            latent = torch.empty(num_blocks, block_size, rank, dtype=dtype, device=device)
            rope = torch.empty(num_blocks, block_size, width - rank, dtype=dtype, device=device)
        else:
            buffer = torch.empty(num_blocks, block_size, width, dtype=dtype, device=device)
            latent, rope = buffer[..., :rank], buffer[..., rank:]
        self._bind(latent, rope)

    @classmethod
    def from_buffer(cls, buffer: torch.Tensor, kv_lora_rank: int) -> LatentCache:
        """Wrap an engine's own cache `[num_blocks, block_size, L + R]` without copying it."""
        if buffer.dim() != 3 or buffer.shape[2] < kv_lora_rank:
            raise ValueError(
                f"buffer must be [num_blocks, block_size, L + R] with L = {kv_lora_rank}, "
                f"got shape {list(buffer.shape)}"
            )
        cache = cls.__new__(cls)
        cache._bind(buffer[..., :kv_lora_rank], buffer[..., kv_lora_rank:])
        return cache

    def _bind(self, latent: torch.Tensor, rope: torch.Tensor) -> None:
        self.latent, self.rope = latent, rope
        self.num_blocks, self.block_size = latent.shape[0], latent.shape[1]

    def write(self, kv_c: torch.Tensor, k_pe: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store the tokens this rank owns: row t goes to slot `slot_mapping[t]`, -1 is skipped.

        `kv_c` is `[T, L]`, `k_pe` `[T, R]`, `slot_mapping` `[T]` int64.
        """
        own = (slot_mapping >= 0).nonzero().squeeze(1)
        slots = slot_mapping[own]
        block, entry = slots // self.block_size, slots % self.block_size
        self.latent.index_put_((block, entry), kv_c[own].to(self.latent.dtype))
        self.rope.index_put_((block, entry), k_pe[own].to(self.rope.dtype))


@dataclass(frozen=True)
class DecodeBatch:
    """One step over B sequences, as one rank sees it. Built by `ShardLayout.plan_batch`.

    - `seq_lens` `[B]` int32: HISTORY tokens of each sequence that this rank keeps (may be 0).
    - `query_lens` `[B]` int32: this step's tokens of each sequence, the same on every rank. The
      step's T rows are packed in sequence order; rows beyond their sum are padding.
    - `block_table` `[B, max_blocks]` int32: this rank's blocks. Entries beyond a sequence's
      length are padding: they may hold anything and are never followed.
    - `slot_mapping` `[T]` int64: cache slot of each token of the step, -1: another rank's.
    """

    seq_lens: torch.Tensor
    query_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor

    def __post_init__(self) -> None:
        size = self.seq_lens.shape[0]
        if self.seq_lens.dim() != 1 or self.query_lens.shape != (size,):
            raise ValueError(
                "seq_lens and query_lens must be [B], got "
                f"{list(self.seq_lens.shape)} and {list(self.query_lens.shape)}"
            )
        if self.block_table.dim() != 2 or self.block_table.shape[0] != size:
            raise ValueError(
                f"block_table must be [B, max_blocks] with B = {size}, "
                f"got {list(self.block_table.shape)}"
            )
        if self.slot_mapping.dim() != 1:
            raise ValueError(f"slot_mapping must be [T], got {list(self.slot_mapping.shape)}")

    @property
    def num_tokens(self) -> int:
        """T: rows of the step, padding included."""
        return self.slot_mapping.shape[0]

    @cached_property
    def host_lens(self) -> list[tuple[int, int]]:
        """`(history length, query length)` of each sequence as Python ints, read once."""
        return list(zip(self.seq_lens.tolist(), self.query_lens.tolist(), strict=True))


def plan_batch(
    layout: ShardLayout,
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    *,
    device: torch.device | str = "cpu",
) -> DecodeBatch:
    """Localise a step: global lengths in, this rank's lengths, block table and slots out.

    `seq_lens[b]` counts the tokens of sequence b before this step on all ranks together,
    `query_lens[b]` those of this step, whose positions follow. `block_tables[b]` lists the
    physical blocks of the sequence, the same on every rank: entry i holds each rank's local
    tokens `i * block_size ...`, so one entry covers `world_size * block_size` positions.

    Raises ValueError, naming the argument, for lists of different lengths, negative lengths, an
    interleave that does not divide the block, or a table too short for the step.
    """
    layout.check_block_size(block_size)
    if not len(seq_lens) == len(query_lens) == len(block_tables):
        raise ValueError(
            "seq_lens, query_lens and block_tables must have one entry per sequence, got "
            f"{len(seq_lens)}, {len(query_lens)} and {len(block_tables)}"
        )
    slots = [torch.empty(0, dtype=torch.int64)]
    table_width = max(map(len, block_tables), default=0)
    table = torch.zeros(len(seq_lens), table_width, dtype=torch.int32)
    for b, (past, new, blocks) in enumerate(zip(seq_lens, query_lens, block_tables, strict=True)):
        if past < 0 or new < 0:
            raise ValueError(
                f"seq_lens and query_lens must not be negative, got {past} and {new} at {b}"
            )
        if len(blocks) < layout.blocks_needed(past + new, block_size):
            raise ValueError(
                f"block_tables[{b}] must list {layout.blocks_needed(past + new, block_size)} "
                f"blocks for {past + new} tokens, got {len(blocks)}"
            )
        table[b, : len(blocks)] = torch.as_tensor(blocks, dtype=torch.int32)
        position = torch.arange(past, past + new)
        local = layout.local_index(position)
        block = table[b].long()[local // block_size]
        slot = block * block_size + local % block_size
        slots.append(torch.where(layout.owner(position) == layout.rank, slot, -1))
    local_lens = [layout.local_length(past) for past in seq_lens]
    return DecodeBatch(
        seq_lens=torch.tensor(local_lens, dtype=torch.int32, device=device),
        query_lens=torch.tensor(list(query_lens), dtype=torch.int32, device=device),
        block_table=table.to(device),
        slot_mapping=torch.cat(slots).to(device),
    )
