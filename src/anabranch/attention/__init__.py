"""Partial attention with LSE: one interface, one provider per kind of device.

A provider is a module with two functions, `history` and `current`, and `workspace_bytes`:
`reference` (plain PyTorch, the oracle of the others), `cpu`, `cuda`, which needs Triton, and `npu`,
which needs torch_npu.
"""

from __future__ import annotations

import enum
from functools import cache
from importlib.util import find_spec
from typing import Protocol

import torch

from anabranch.attention import cpu, reference
from anabranch.cache import DecodeBatch, LatentCache
from anabranch.geometry import MLADims

__all__ = ["AttentionKind", "Provider", "partial_attention", "provider_for"]


class AttentionKind(enum.Enum):
    """HISTORY: the sequence before this step, paged, sharded. CURRENT: this step's tokens."""

    HISTORY = "history"
    CURRENT = "current"


class Provider(Protocol):
    """What `partial_attention` asks of a device. Results go to `out` and `lse`."""

    def history(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: LatentCache,
        batch: DecodeBatch,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor,
        workspace: torch.Tensor | None,
    ) -> None: ...

    def current(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_c: torch.Tensor,
        k_pe: torch.Tensor,
        batch: DecodeBatch,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor,
        workspace: torch.Tensor | None,
    ) -> None: ...

    def workspace_bytes(
        self,
        num_heads: int,
        dims: MLADims,
        cache: LatentCache | None = None,
        batch: DecodeBatch | None = None,
    ) -> int:
        """Bytes of scratch for HISTORY with `num_heads` and CURRENT with those of `dims`.

        An NPU's operator needs more or less with the step's shapes, so it wants the step too.
        """


def provider_for(device: torch.device | str) -> Provider:
    """The provider that serves `device`; `reference` where there is no faster one."""
    # By name: before torch_npu is imported, which this does, PyTorch knows no "npu".
    return _provider(str(device).partition(":")[0])


@cache
def _provider(kind: str) -> Provider:
    if kind == "cpu":
        return cpu
    if kind == "cuda" and find_spec("triton") is not None:
        from anabranch.attention import cuda

        return cuda
    if kind == "npu":
        from anabranch.attention import npu

        return reference if npu.missing() else npu
    return reference


def partial_attention(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv: LatentCache | tuple[torch.Tensor, torch.Tensor],
    batch: DecodeBatch,
    kind: AttentionKind,
    dims: MLADims,
    workspace: torch.Tensor | None = None,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    provider: Provider | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over one part of the keys, with the LSE that a merge needs.

    - `q_nope` `[T, heads, L]` absorbed, `q_pe` `[T, heads, R]` rotated; any number of heads.
    - `kv`: for HISTORY a `LatentCache`; for CURRENT the pair `kv_c` `[T, L]`, `k_pe` `[T, R]`.
    - `workspace`: uint8 scratch of at least the provider's `workspace_bytes`; the content is
      lost. HISTORY and CURRENT may share one, in turn. Without one, scratch is allocated.
    - `out`: where to put the results; allocated without.

    Returns the output `[T, heads, L]` in the dtype of `q_nope` and the LSE `[T, heads]` FP32,
    natural log. HISTORY attends to the `seq_lens[b]` cached tokens, CURRENT to this step's
    tokens up to and including the row's own. A row with no keys (empty shard, padding row) has
    output 0 and LSE -inf.

    Raises ValueError, naming the argument, for shapes or dtypes that do not fit together.
    """
    tokens, heads = q_nope.shape[:2]
    _check_shape("q_nope", q_nope, (tokens, heads, dims.kv_lora_rank))
    _check_shape("q_pe", q_pe, (tokens, heads, dims.qk_rope_head_dim))
    _check_shape("batch.slot_mapping", batch.slot_mapping, (tokens,))
    if out is None:
        out = (
            torch.empty_like(q_nope, memory_format=torch.contiguous_format),
            torch.empty(tokens, heads, dtype=torch.float32, device=q_nope.device),
        )
    provider = provider or provider_for(q_nope.device)
    if kind is AttentionKind.HISTORY:
        if not isinstance(kv, LatentCache):
            raise ValueError(f"kv must be a LatentCache for HISTORY, got {type(kv).__name__}")
        provider.history(q_nope, q_pe, kv, batch, dims.scale, *out, workspace)
    else:
        if isinstance(kv, LatentCache):
            raise ValueError("kv must be the pair (kv_c, k_pe) for CURRENT, got a LatentCache")
        kv_c, k_pe = kv
        _check_shape("kv_c", kv_c, (tokens, dims.kv_lora_rank))
        _check_shape("k_pe", k_pe, (tokens, dims.qk_rope_head_dim))
        provider.current(q_nope, q_pe, kv_c, k_pe, batch, dims.scale, *out, workspace)
    return out


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
