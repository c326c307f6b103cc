"""The paged latent cache of one rank, and the plan of one step over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from anabranch import native, triton_kernels
from anabranch.geometry import MLADims, ShardLayout
from anabranch.streams import launch

CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


class LatentCache:
    """Paged storage of this rank's latents for one layer.

    `latent` is `[num_blocks, block_size, L]` and `rope` `[num_blocks, block_size, R]`. On CPU
    and CUDA they are views of one buffer `[num_blocks, block_size, L + R]`; on NPU, whose
    attention operator reads them apart, they are two buffers, with one block more than asked for,
    where tokens of other ranks go. Slot `s` is entry `s % block_size` of block
    `s // block_size`. Unused slots may hold anything.

    With `dtype` `torch.float8_e4m3fn` a stored value stands for itself times `scale`, one for
    the whole cache; what lies beyond 448 * scale saturates. Other dtypes have `scale` 1.
    """

    _slots_and_spare: tuple[torch.Tensor, torch.Tensor] | None = None  # flat, of two buffers

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        dims: MLADims,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        scale: float = 1.0,
    ) -> None:
        rank, width = dims.kv_lora_rank, dims.latent_width

        def memory(*shape: int) -> torch.Tensor:
            with torch.inference_mode(False):  # what that mode makes cannot be written outside it
                return torch.empty(*shape, dtype=dtype, device=device)

        if _is_npu(device):
            shape = num_blocks + 1, block_size
            latent, rope = memory(*shape, rank), memory(*shape, width - rank)
            self._bind(latent[:num_blocks], rope[:num_blocks], scale)
            self._slots_and_spare = latent.flatten(0, 1), rope.flatten(0, 1)
        else:
            buffer = memory(num_blocks, block_size, width)
            self._bind(buffer[..., :rank], buffer[..., rank:], scale)

    @classmethod
    def from_buffer(
        cls, buffer: torch.Tensor, kv_lora_rank: int, *, scale: float = 1.0
    ) -> LatentCache:
        """Wrap an engine's own cache `[num_blocks, block_size, L + R]` without copying it."""
        if buffer.dim() != 3 or buffer.shape[2] < kv_lora_rank:
            raise ValueError(
                f"buffer must be [num_blocks, block_size, L + R] with L = {kv_lora_rank}, "
                f"got shape {list(buffer.shape)}"
            )
        return cls.from_parts(buffer[..., :kv_lora_rank], buffer[..., kv_lora_rank:], scale=scale)

    @classmethod
    def from_parts(
        cls, latent: torch.Tensor, rope: torch.Tensor, *, scale: float = 1.0
    ) -> LatentCache:
        """Wrap an engine's own `latent` `[num_blocks, block_size, L]` and `rope` `[..., R]`."""
        cache = cls.__new__(cls)
        cache._bind(latent, rope, scale)
        return cache

    def _bind(self, latent: torch.Tensor, rope: torch.Tensor, scale: float) -> None:
        if latent.dtype not in CACHE_DTYPES:
            names = ", ".join(str(dtype) for dtype in CACHE_DTYPES)
            raise ValueError(f"dtype must be one of {names}, got {latent.dtype}")
        if not scale > 0 or (scale != 1 and latent.dtype != torch.float8_e4m3fn):
            raise ValueError(f"scale must be positive, and 1 unless FP8, got {scale}")
        self.latent, self.rope, self.scale = latent, rope, scale
        self.num_blocks, self.block_size = latent.shape[0], latent.shape[1]

    def write(self, kv_c: torch.Tensor, k_pe: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store the tokens this rank owns: row t goes to slot `slot_mapping[t]`, -1 is skipped.

        `kv_c` is `[T, L]`, `k_pe` `[T, R]`, `slot_mapping` `[T]` int64.
        Raises ValueError for a slot beyond the cache, except on CUDA and NPU, where nothing is
        read back.
        """
        if triton_kernels.serve(self.latent.device, slot_mapping.shape[0]):
            from anabranch.triton_kernels import store

            store.store_launch(kv_c, k_pe, slot_mapping, self.latent, self.rope, self.scale).run()
            return
        library = native.library() if self.latent.device.type == "cpu" else None
        rows = kv_c.dtype == k_pe.dtype == self.latent.dtype and kv_c.stride(1) == 1
        if library is not None and rows and (k_pe.shape[1] < 2 or k_pe.stride(1) == 1):
            self._write_rows(library, kv_c, k_pe, slot_mapping)
            return
        if self._slots_and_spare is not None:
            spare = self.num_blocks * self.block_size
            targets = torch.where(slot_mapping < 0, spare, slot_mapping)
            for slots, given in zip(self._slots_and_spare, (kv_c, k_pe), strict=True):
                slots.index_copy_(0, targets, self._stored(given))
            return
        own = (slot_mapping >= 0).nonzero().squeeze(1)
        slots = slot_mapping[own]
        block, entry = slots // self.block_size, slots % self.block_size
        self.latent[block, entry] = self._stored(kv_c[own])
        self.rope[block, entry] = self._stored(k_pe[own])

    @cached_property
    def _pages(self) -> tuple[int, ...]:
        """What the native store is told of the cache; strides in bytes."""
        return self.num_blocks, self.block_size, *(
            number
            for pages in (self.latent, self.rope)
            for number in (
                pages.data_ptr(), pages.stride(0) * pages.itemsize,
                pages.stride(1) * pages.itemsize, pages.shape[2] * pages.itemsize,
            )
        )  # fmt: skip

    def _write_rows(
        self,
        library: native.Library,
        kv_c: torch.Tensor,
        k_pe: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """One pass over the rows, allocating nothing."""
        size = self.latent.itemsize
        arguments = (
            kv_c.data_ptr(), kv_c.stride(0) * size, k_pe.data_ptr(), k_pe.stride(0) * size,
            slot_mapping.data_ptr(), slot_mapping.shape[0], *self._pages,
        )  # fmt: skip

        def check(lost: int) -> None:
            if lost:
                raise ValueError(
                    f"slot_mapping must be below {self.num_blocks * self.block_size}, "
                    f"got {int(slot_mapping[lost - 1])} at {lost - 1}"
                )

        launch(
            "anabranch_store",
            lambda: library.kernels.anabranch_store(*arguments),
            reads=(kv_c, k_pe, slot_mapping),
            writes=(self.latent, self.rope),
            check=check,
        )

    def _stored(self, values: torch.Tensor) -> torch.Tensor:
        if self.latent.dtype == torch.float8_e4m3fn:
            values = (values.float() / self.scale).clamp(-448, 448)
        return values.to(self.latent.dtype)


@dataclass(frozen=True)
class DecodeBatch:
    """One step over B sequences, as one rank sees it. Built by `ShardLayout.plan_batch`.

    - `seq_lens` `[B]` int32: HISTORY tokens of each sequence that this rank keeps (may be 0).
    - `query_lens` `[B]` int32: this step's tokens of each sequence, the same on every rank. The
      step's T rows are packed in sequence order; rows beyond their sum are padding.
    - `block_table` `[B, max_blocks]` int32: this rank's blocks. Entries beyond a sequence's
      length are padding: they may hold anything and are never followed.
    - `slot_mapping` `[T]` int64: cache slot of each token of the step, -1: another rank's.

    On NPU the lengths stay on the CPU, for its attention operator reads them there.
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

    def host_lens(self) -> list[tuple[int, int]]:
        """`(history length, query length)` of each sequence as Python ints.

        Read anew each time: a captured step changes the tensors in place.
        """
        return list(zip(self.seq_lens.tolist(), self.query_lens.tolist(), strict=True))


def joined(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """One view over two tensors that lie side by side along their last axis, or None."""
    width = left.shape[-1]
    beside = (
        left.stride() == right.stride()
        and left.stride(-1) == 1
        and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
        and right.storage_offset() - left.storage_offset() == width
    )
    if not beside:
        return None
    return left.as_strided((*left.shape[:-1], width + right.shape[-1]), left.stride())


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
    lengths_on = "cpu" if _is_npu(device) else device
    return DecodeBatch(
        seq_lens=torch.tensor(local_lens, dtype=torch.int32, device=lengths_on),
        query_lens=torch.tensor(list(query_lens), dtype=torch.int32, device=lengths_on),
        block_table=table.to(device),
        slot_mapping=torch.cat(slots).to(device),
    )


def _is_npu(device: torch.device | str) -> bool:
    return torch.device(device).type == "npu"
