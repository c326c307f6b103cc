"""The exchange of HISTORY partials: packing, and one all-to-all in the native dtype.

Every rank holds partials of all N*H heads over its own shard, and needs those of its own H
heads over all shards. The FP32 LSE of a row travels bit for bit in trailing columns of its
output (one FP32 column, or two of a 16-bit dtype), so that one message per peer carries both
and nothing is converted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from anabranch import native, triton_kernels
from anabranch.streams import collective, launch

# The older name, of PyTorch before 2.13, is deprecated there.
_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class ExchangeError(RuntimeError):
    """A collective failed or stalled; the message names this rank and the operation."""


def lse_columns(dtype: torch.dtype) -> int:
    """Columns of `dtype` that carry one FP32 LSE: 1 for FP32, 2 for BF16 and FP16."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"partials must be float32, bfloat16 or float16, got {dtype}")
    return 4 // dtype.itemsize


def pack_partials(
    out: torch.Tensor,
    lse: torch.Tensor,
    world_size: int,
    *,
    packed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Lay partials out for the all-to-all, rank by rank.

    `out` `[T, N*H, L]` and `lse` `[T, N*H]` FP32, heads in rank order, give `packed`
    `[N, T, H, L + c]` in the dtype of `out`; columns `L:` are the bits of the LSE.
    Raises ValueError when the heads do not divide by `world_size`, or for a dtype off the list.
    """
    tokens, heads, width = out.shape
    if heads % world_size:
        raise ValueError(f"out must have heads divisible by world_size {world_size}, got {heads}")
    if lse.dtype != torch.float32 or lse.shape != (tokens, heads):
        raise ValueError(
            f"lse must be float32 {[tokens, heads]}, got {lse.dtype} {list(lse.shape)}"
        )
    columns = lse_columns(out.dtype)
    own = heads // world_size
    if packed is None:
        packed = out.new_empty(world_size, tokens, own, width + columns)
    if triton_kernels.serve(out.device, tokens * heads):
        from anabranch.triton_kernels import exchange as kernels

        if kernels.can_pack(out, lse, packed):
            kernels.pack_launch(out, lse, packed, kernels.row_tile(out.device)).run()
            return packed
    library = native.library() if out.device.type == "cpu" else None
    if library is not None and out.is_contiguous() and lse.is_contiguous():
        arguments = (
            out.data_ptr(), lse.data_ptr(), packed.data_ptr(), world_size, tokens, own,
            width * out.itemsize,
        )  # fmt: skip
        launch(
            "anabranch_pack",
            lambda: library.kernels.anabranch_pack(*arguments),
            reads=(out, lse),
            writes=(packed,),
        )
        return packed
    packed[..., :width] = out.view(tokens, world_size, own, width).transpose(0, 1)
    bits = lse.contiguous().view(tokens, heads, 1).view(out.dtype)
    packed[..., width:] = bits.view(tokens, world_size, own, columns).transpose(0, 1)
    return packed


def unpack_partials(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse: `packed` `[N, T, H, L + c]` to `outs` `[N, T, H, L]`, `lses` `[N, T, H]` FP32.

    `outs` is a view. `lses` is one too where its bits are aligned to 4 bytes (L even, or FP32).
    """
    columns = lse_columns(packed.dtype)
    width = packed.shape[-1] - columns
    bits = packed[..., width:]
    if columns == 2 and (width % 2 or packed.storage_offset() % 2):
        bits = bits.clone(memory_format=torch.contiguous_format)
    return packed[..., :width], bits.view(torch.float32).squeeze(-1)


def exchange_partials(
    out: torch.Tensor,
    lse: torch.Tensor,
    group: dist.ProcessGroup | None,
    *,
    buffers: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Send every rank the partials of its heads; receive those of ours. Merge deferred.

    `out` `[T, N*H, L]`, `lse` `[T, N*H]` FP32 give `outs` `[N, T, H, L]` (entry n: over rank n's
    shard) and `lses` `[N, T, H]`. `buffers` are the send and receive buffer of
    `pack_partials`' shape. Every rank of `group` must call this, with the same T, even when its
    shard is empty. `group` None means a single rank: nothing is copied. Raises ExchangeError.
    """
    if group is None:
        return out.unsqueeze(0), lse.unsqueeze(0)
    send, receive = buffers or (None, None)
    send = pack_partials(out, lse, group.size(), packed=send)
    receive = torch.empty_like(send) if receive is None else receive
    _run("exchange of history partials", group, partial(dist.all_to_all_single, receive, send))
    return unpack_partials(receive)


def gather_heads(
    local: torch.Tensor,
    group: dist.ProcessGroup | None,
    *,
    buffers: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """All-gather along the heads, in rank order: `[T, H, W]` to `[T, N*H, W]`.

    `buffers` are `[N, T, H, W]`, which receives, and `[T, N*H, W]`, the result; with T = 1 they
    may be the same memory, and nothing is moved. `group` None means a single rank: nothing is
    copied. Raises ExchangeError.
    """
    if group is None:
        return local
    tokens, heads, width = local.shape
    if buffers is None:
        receive = local.new_empty(group.size(), tokens, heads, width)
        result = local.new_empty(tokens, group.size() * heads, width)
    else:
        receive, result = buffers
    gather = partial(_all_gather, receive.flatten(0, 1), local.contiguous())
    _run("all-gather of heads", group, gather)
    if result.data_ptr() != receive.data_ptr():
        result.view(tokens, group.size(), heads, width).copy_(receive.transpose(0, 1))
    return result


def _run(name: str, group: dist.ProcessGroup, operation: Callable[..., object]) -> None:
    """Run a collective over `group`; a failure names it and this rank."""

    def run() -> None:
        try:
            operation(group=group)
        except RuntimeError as error:  # what every backend raises for a lost or stalled peer
            raise ExchangeError(
                f"rank {group.rank()} of {group.size()}: {name} failed: {error}"
            ) from error

    collective(run)
