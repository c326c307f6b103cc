"""One MLA layer under decode context parallelism: prolog, sharded attention, output projection.

Symbols as everywhere in the package: `T` tokens of the step, `H` heads of this rank, `N` ranks,
`L` kv_lora_rank, `R` qk_rope_head_dim, `P` qk_nope_head_dim, `V` v_head_dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from anabranch.cache import DecodeBatch, LatentCache
from anabranch.decoder import DCPDecoder
from anabranch.geometry import MLADims, ShardLayout
from anabranch.schedules import Schedule
from anabranch.vup import v_up

Rotary = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]
"""`(q_pe [T, H, R], k_pe [T, R], cos, sin)` to both of them rotated, same shapes."""


class MLAAttention(nn.Module):
    """Multi-head latent attention of one layer, the heads and the history sharded over ranks.

    Rank r computes heads `r * H ... (r + 1) * H - 1`. What it needs of the layer's weights:

    - `query`: module `[T, hidden] -> [T, H * (P + R)]`, each head's P nope columns first. With a
      low-rank query it is the chain of down projection, norm and this rank's up projection.
    - `kv_a`: module `[T, hidden] -> [T, L + R]`, replicated.
    - `kv_norm`: module `[T, L] -> [T, L]`, replicated.
    - `kv_b_weight` `[H * (P + V), L]`: rows of this rank's heads, per head P rows of W_UK, then
      V rows of W_UV. They are kept apart as `w_uk` `[H, P, L]` and `w_uv` `[H, L, V]`.
    - `output_weight` `[hidden, H * V]`: columns of this rank's heads.
    - `output_bias` `[hidden]`, replicated, added once, after the sum over the ranks.
    - `rotary`: see `Rotary`.
    - `head_gate`: module `[T, hidden] -> [T, H]`; its sigmoid scales each head's output.

    `head_rows` and `head_columns` cut whole weights for a rank. Constant factors on the query or
    the latent belong in `dims.scale` and in `kv_b_weight`: they cost nothing there.

    Several layers may share one `decoder`. With its `project_first` the weights are exchanged
    here once, so every rank must build its layers in the same order.

    Inference only: `forward` does not record gradients.
    """

    def __init__(
        self,
        decoder: DCPDecoder,
        *,
        query: nn.Module,
        kv_a: nn.Module,
        kv_norm: nn.Module,
        kv_b_weight: torch.Tensor,
        output_weight: torch.Tensor,
        rotary: Rotary,
        output_bias: torch.Tensor | None = None,
        head_gate: nn.Module | None = None,
    ) -> None:
        super().__init__()
        dims = decoder.dims
        rows = dims.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim)
        _require_shape("kv_b_weight", kv_b_weight, (rows, dims.kv_lora_rank))
        columns = dims.num_heads * dims.v_head_dim
        _require_shape("output_weight", output_weight, (output_weight.shape[0], columns))
        self.decoder = decoder
        self.query = query
        self.kv_a = kv_a
        self.kv_norm = kv_norm
        self.head_gate = head_gate
        self.rotary = rotary
        with torch.no_grad():
            up = kv_b_weight.view(dims.num_heads, -1, dims.kv_lora_rank)
            w_uk, w_uv = up[:, : dims.qk_nope_head_dim], up[:, dims.qk_nope_head_dim :]
            self.w_uk = nn.Parameter(w_uk.contiguous(), requires_grad=False)
            w_uv = w_uv.transpose(1, 2).contiguous()
            if decoder.project_first:
                w_uv = decoder.gather_w_uv(w_uv)
            self.w_uv = nn.Parameter(w_uv, requires_grad=False)
            self.output_weight = nn.Parameter(output_weight.contiguous(), requires_grad=False)
            self.output_bias = (
                None if output_bias is None else nn.Parameter(output_bias, requires_grad=False)
            )

    @property
    def dims(self) -> MLADims:
        """Dimensions of the layer on this rank."""
        return self.decoder.dims

    @torch.no_grad()
    def forward(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: LatentCache,
        batch: DecodeBatch,
        *,
        query_scale: torch.Tensor | None = None,
        schedule: Schedule | None = None,
    ) -> torch.Tensor:
        """Attend with this step's tokens and store those this rank owns in `cache`.

        `hidden` `[T, hidden]` holds the step's tokens packed in sequence order, the same on every
        rank; `cos` and `sin` are handed to `rotary` as they are. `query_scale` `[T]` multiplies
        the scores of each token. `schedule` overrides the decoder's for this call. Returns
        `[T, hidden]`, the same on every rank. Every rank of the group must take part.
        """
        dims = self.dims
        tokens = hidden.shape[0]
        query = self.query(hidden).view(tokens, dims.num_heads, -1)
        if query_scale is not None:
            query = query * query_scale.to(query.dtype).view(tokens, 1, 1)
        q_nope, q_pe = query.split([dims.qk_nope_head_dim, dims.qk_rope_head_dim], dim=-1)
        kv_c, k_pe = self.kv_a(hidden).split([dims.kv_lora_rank, dims.qk_rope_head_dim], dim=-1)
        kv_c = self.kv_norm(kv_c)
        q_pe, k_pe = self.rotary(q_pe, k_pe, cos, sin)

        # The absorption of W_UK has the form of V-up, with P and L for L and V.
        absorbed = v_up(q_nope, self.w_uk)

        heads = self.decoder.step(
            absorbed.view(tokens, dims.num_heads, -1),
            q_pe.contiguous(),
            kv_c.contiguous(),
            k_pe.contiguous(),
            cache,
            batch,
            self.w_uv,
            schedule=schedule,
        )
        if self.head_gate is not None:
            gate = torch.sigmoid(self.head_gate(hidden).float()).to(heads.dtype)
            heads = (heads.view(tokens, dims.num_heads, -1) * gate.unsqueeze(-1)).flatten(1)
        output = nn.functional.linear(heads, self.output_weight)
        if self.decoder.group is not None:
            dist.all_reduce(output, group=self.decoder.group)
        if self.output_bias is not None:
            output += self.output_bias
        return output


def head_rows(linear: nn.Linear, layout: ShardLayout) -> nn.Linear:
    """The output rows of this rank's heads of a projection that ends in heads, as a copy.

    Raises ValueError when the rows do not divide by the world size.
    """
    rows = _share("rows", linear.out_features, layout)
    part = nn.Linear(linear.in_features, rows, bias=linear.bias is not None, device="meta")
    begin = layout.rank * rows
    # Copies, so that the whole weight can be freed.
    part.weight = _frozen(linear.weight[begin : begin + rows])
    if linear.bias is not None:
        part.bias = _frozen(linear.bias[begin : begin + rows])
    return part


def head_columns(weight: torch.Tensor, layout: ShardLayout) -> torch.Tensor:
    """The input columns of this rank's heads of a weight `[out, N * in]`: `[out, in]`, a copy.

    Raises ValueError when the columns do not divide by the world size.
    """
    columns = _share("columns", weight.shape[1], layout)
    return weight.detach()[:, layout.rank * columns : (layout.rank + 1) * columns].clone()


def _share(what: str, count: int, layout: ShardLayout) -> int:
    share, rest = divmod(count, layout.world_size)
    if rest:
        raise ValueError(f"{count} {what} cannot be divided over {layout.world_size} ranks")
    return share


def _frozen(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().clone(), requires_grad=False)


def _require_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
