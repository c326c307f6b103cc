"""Two kernels that vLLM has for accelerators only, for context parallelism on CPU.

Both go in through doors that vLLM and PyTorch leave open: vLLM's registry of substitutes for
its Triton kernels, and an operator that vLLM's CPU library declares nowhere.
"""

from __future__ import annotations

import torch
from vllm import _custom_ops as ops
from vllm.triton_utils import HAS_TRITON
from vllm.triton_utils.dispatcher import register_kernels

from anabranch.geometry import ShardLayout

SLOT_MAPPING = "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"
GATHER_NAMESPACE, GATHER = "_C_cache_ops", "cp_gather_cache"
GATHER_SCHEMA = (
    f"{GATHER}(Tensor src_cache, Tensor! dst, Tensor block_table, Tensor cu_seq_lens, "
    "SymInt batch_size, Tensor? seq_starts) -> ()"
)
_libraries: list[torch.library.Library] = []  # an operator lives as long as its library


def register_cpu_kernels() -> None:
    """Make both known in this process; again is harmless."""
    if not HAS_TRITON:  # with Triton for CPU, vLLM's own kernel runs
        register_kernels({SLOT_MAPPING: compute_slot_mapping})
    if not hasattr(getattr(torch.ops, GATHER_NAMESPACE), GATHER):
        library = torch.library.Library(GATHER_NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
        library.define(GATHER_SCHEMA)  # type: ignore[no-untyped-call]
        library.impl(GATHER, gather_context, "CPU")  # type: ignore[no-untyped-call]
        _libraries.append(library)


def compute_slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    slot_mapping: torch.Tensor,
    block_size: int,
    world_size: int = 1,
    rank: int = 0,
    interleave: int = 1,
    pad: int = -1,
    tile: int = 1024,
) -> None:
    """Cache slot of each token of a step in `slot_mapping`, `pad` for those of other ranks.

    The parameters are those of the Triton kernel, in its order. Rows beyond the step's tokens
    are padding too.
    """
    layout = ShardLayout(world_size, rank, interleave)
    query_lens = query_start_loc.diff()
    tokens = int(query_start_loc[-1])
    request = torch.repeat_interleave(torch.arange(len(query_lens)), query_lens)
    position = positions[:tokens]
    local = layout.local_index(position)
    block = block_table[request, local // block_size].long()
    slot = block * block_size + local % block_size
    slot_mapping[:tokens] = torch.where(layout.owner(position) == rank, slot, pad)
    slot_mapping[tokens:max_num_tokens] = pad


def gather_context(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    batch_size: int,
    seq_starts: torch.Tensor | None,
) -> None:
    """Copy each sequence's pages, from its start on, one after the other to `dst`."""
    starts = torch.zeros_like(cu_seq_lens[:-1]) if seq_starts is None else seq_starts
    ops.gather_mla_context_cache_cpu(
        src_cache=src_cache,
        dst=dst,
        block_table=block_table[:batch_size],
        starts=starts,
        cu_seq_lens=cu_seq_lens,
    )
