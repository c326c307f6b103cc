"""Dimensions of MLA and the arithmetic of sharding a sequence over ranks.

Integers only: nothing here needs torch. `ShardLayout.owner` and `local_index` use nothing but
`//`, `%`, `*` and `+`, so they serve whole integer tensors as well as single positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

    from anabranch.cache import DecodeBatch

    Positions = TypeVar("Positions", int, torch.Tensor)


@dataclass(frozen=True)
class MLADims:
    """Dimensions of one MLA layer on one rank.

    `num_heads` counts the heads of this rank (H); with N ranks in the group the layer has N*H.
    `scale` multiplies the scores: `(qk_nope_head_dim + qk_rope_head_dim) ** -0.5`, times the
    square of YaRN's mscale where the checkpoint has one.
    """

    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    scale: float

    def __post_init__(self) -> None:
        for name in ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
            _require_at_least(name, getattr(self, name), 1)
        _require_at_least("qk_rope_head_dim", self.qk_rope_head_dim, 0)
        if not self.scale > 0:
            raise ValueError(f"scale must be positive, got {self.scale}")

    @property
    def latent_width(self) -> int:
        """Columns of one cached token: kv_lora_rank + qk_rope_head_dim (L + R)."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class ShardLayout:
    """Which rank of a DCP group keeps which token of a sequence.

    The token at position `p` belongs to rank `(p // interleave) % world_size`: runs of
    `interleave` tokens are dealt to the ranks in turn. On its rank it is token number
    `local_index(p)`, and a rank's tokens are contiguous from 0.
    """

    world_size: int = 1
    rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        _require_at_least("world_size", self.world_size, 1)
        _require_at_least("interleave", self.interleave, 1)
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be in [0, {self.world_size}), got {self.rank}")

    def owner(self, position: Positions) -> Positions:
        """Rank that keeps the token at `position` (an int, or an integer tensor of positions)."""
        return (position // self.interleave) % self.world_size

    def local_index(self, position: Positions) -> Positions:
        """Index of the token at `position` among its owner's tokens of that sequence."""
        stripe = self.interleave * self.world_size
        return position // stripe * self.interleave + position % self.interleave

    def local_length(self, length: int, rank: int | None = None) -> int:
        """How many of the first `length` tokens `rank` keeps (default: this layout's rank)."""
        rank = self.rank if rank is None else rank
        stripes, rest = divmod(length, self.interleave * self.world_size)
        return stripes * self.interleave + min(
            max(rest - rank * self.interleave, 0), self.interleave
        )

    def blocks_needed(self, length: int, block_size: int) -> int:
        """Blocks that hold a sequence of `length` tokens on its fullest rank, rank 0.

        Every rank uses the same number, so one block table serves the whole group.
        """
        return -(-self.local_length(length, rank=0) // block_size)

    def check_block_size(self, block_size: int) -> None:
        """Raise ValueError unless runs of `interleave` tokens never straddle a block."""
        _require_at_least("block_size", block_size, 1)
        if block_size % self.interleave:
            raise ValueError(
                f"interleave must divide block_size, got interleave {self.interleave} "
                f"with block_size {block_size}"
            )

    def plan_batch(
        self,
        seq_lens: Sequence[int],
        query_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        *,
        device: torch.device | str = "cpu",
    ) -> DecodeBatch:
        """Localise a step to this rank: see `anabranch.cache.plan_batch`, which this calls.

        The import is deferred so that the shard arithmetic itself stays free of torch.
        """
        from anabranch.cache import plan_batch

        return plan_batch(self, seq_lens, query_lens, block_tables, block_size, device=device)


def _require_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
