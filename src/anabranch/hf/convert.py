"""Replaces the MLA attention of a loaded Transformers model by `MLAAttention`.

Everything else of the model stays Transformers' own, and so do the norms and the rotary function
inside the attention.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from anabranch.cache import LatentCache
from anabranch.decoder import DCPDecoder
from anabranch.geometry import MLADims, ShardLayout
from anabranch.hf.architectures import Architecture, RotaryForm
from anabranch.hf.cache import CACHE_ARGUMENT, DCPCache, PositionEmbeddings, cos_sin
from anabranch.hf.checkpoint import CheckpointError
from anabranch.mla import MLAAttention, Rotary, head_columns, head_rows
from anabranch.schedules import Schedule

IMPLEMENTATION = "anabranch"
"""The `attn_implementation` of a converted model."""

PROBE_TOLERANCE = 1e-3
"""Relative, in FP32: far above rounding, far below any difference in the computation."""


def _refuse_attention(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    raise TypeError(f"{type(module).__name__} was not replaced by anabranch")


def _valid_columns(
    q_length: int, attention_mask: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor | None:
    """`[B, q_length]`, false in the padding; None: no padding. Never a mask over the keys."""
    return None if attention_mask is None else attention_mask[:, -q_length:]


# Under this name a model hands its layers the padding of the step instead of a causal mask that
# grows with the square of the context.
AttentionInterface.register(IMPLEMENTATION, _refuse_attention)
AttentionMaskInterface.register(IMPLEMENTATION, _valid_columns)


class ShardedAttention(nn.Module):
    """Stands in for one attention of the model: packs the valid tokens, attends, unpacks."""

    def __init__(
        self, attention: MLAAttention, layer_index: int, position_scale: PositionScale | None
    ) -> None:
        super().__init__()
        self.attention = attention
        self.layer_index = layer_index
        self.position_scale = position_scale

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: PositionEmbeddings = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """`[B, columns, hidden]` to the same; `attention_mask` is what `_valid_columns` gave."""
        cache = kwargs.get(CACHE_ARGUMENT)
        if not isinstance(cache, DCPCache):
            raise TypeError(
                f"cache must be an anabranch.hf.DCPCache, got {type(cache).__name__}: the history "
                "of a sharded model is nowhere else"
            )
        size, columns = hidden_states.shape[:2]
        step, latents = cache.step_for(self.layer_index, size, columns, attention_mask)
        cos, sin = step.angles(position_embeddings)
        scale = None
        if self.position_scale is not None:
            assert position_ids is not None
            scale = self.position_scale(step.pack(position_ids))
        output = self.attention(
            step.pack(hidden_states),
            cos,
            sin,
            latents,
            step.batch,
            query_scale=scale,
            schedule=Schedule.SERIAL if step.prefill else None,
        )
        return step.unpack(output), None


PositionScale = Callable[[torch.Tensor], torch.Tensor]
"""Positions `[T]` to the factor of each token's query, `[T]`."""


@dataclass(frozen=True)
class Converted:
    """What a model looks like after `convert`."""

    dims: MLADims
    layer_indices: tuple[int, ...]
    decoder: DCPDecoder


def convert(
    model: PreTrainedModel,
    architecture: Architecture,
    layout: ShardLayout,
    group: dist.ProcessGroup | None,
    schedule: Schedule,
    *,
    project_first: bool,
) -> Converted:
    """Replace every MLA attention of `model` in place by this rank's shard of it.

    Raises CheckpointError when an attention is not what the table of architectures says.
    """
    modules = [
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__ == architecture.attention
    ]
    if not modules:
        raise CheckpointError(
            f"{type(model).__name__} has no {architecture.attention}: this version of Transformers "
            "is not understood"
        )
    for name, module in modules:
        _check_weights(name, module, architecture)
    first = modules[0][1]
    try:
        difference = _probe(first, architecture, getattr(model.base_model, "rotary_emb", None))
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"{architecture.attention} cannot be compared with anabranch; this version of "
            f"Transformers is not understood: {error}"
        ) from error
    if not difference <= PROBE_TOLERANCE:
        raise CheckpointError(
            f"{architecture.attention} computes something else than anabranch, relative "
            f"difference {difference:.1e}; this version of Transformers is not understood"
        )

    dims = _dims(first, architecture, layout)
    decoder = DCPDecoder(dims, group, layout, schedule, model.device, project_first=project_first)
    for name, module in modules:
        if _dims(module, architecture, layout) != dims:
            raise CheckpointError(f"{name} has other dimensions than {modules[0][0]}")
        attention = _build(module, architecture, decoder)
        replacement = ShardedAttention(
            attention, module.layer_idx, _position_scale(module, architecture)
        )
        # One layer at a time: the whole weights of a layer are freed before the next is cut.
        model.set_submodule(name, replacement)
    model.set_attn_implementation(IMPLEMENTATION)
    return Converted(dims, tuple(module.layer_idx for _, module in modules), decoder)


def _dims(attention: Any, architecture: Architecture, layout: ShardLayout) -> MLADims:
    scale = attention.scaling
    if architecture.query_factor is not None:
        scale *= getattr(attention, architecture.query_factor)
    return MLADims(
        num_heads=attention.num_heads // layout.world_size,
        kv_lora_rank=attention.kv_lora_rank,
        qk_rope_head_dim=attention.qk_rope_head_dim,
        qk_nope_head_dim=attention.qk_nope_head_dim,
        v_head_dim=attention.v_head_dim,
        scale=scale,
    )


def _build(attention: Any, architecture: Architecture, decoder: DCPDecoder) -> MLAAttention:
    layout = decoder.layout
    query = (
        head_rows(attention.q_proj, layout)
        if getattr(attention, "q_lora_rank", None) is None
        else nn.Sequential(
            attention.q_a_proj, attention.q_a_layernorm, head_rows(attention.q_b_proj, layout)
        )
    )
    kv_b_weight = head_rows(attention.kv_b_proj, layout).weight
    if architecture.latent_factor is not None:
        kv_b_weight = kv_b_weight * getattr(attention, architecture.latent_factor)
    gate = None if architecture.gate is None else getattr(attention, architecture.gate)
    return MLAAttention(
        decoder,
        query=query,
        kv_a=attention.kv_a_proj_with_mqa,
        kv_norm=attention.kv_a_layernorm,
        kv_b_weight=kv_b_weight,
        output_weight=head_columns(attention.o_proj.weight, layout),
        output_bias=attention.o_proj.bias,
        rotary=_rotary(attention, architecture.rotary),
        head_gate=None if gate is None else head_rows(gate, layout),
    )


def _rotary(attention: Any, form: RotaryForm) -> Rotary:
    modelling = sys.modules[type(attention).__module__]
    if form is RotaryForm.CONFIG:
        interleaved = attention.config.rope_interleave
        form = RotaryForm.INTERLEAVED if interleaved else RotaryForm.HALVES
    if form is RotaryForm.INTERLEAVED:
        return _real_rotary(modelling.apply_rotary_pos_emb_interleave)
    if form is RotaryForm.HALVES:
        return _real_rotary(modelling.apply_rotary_pos_emb)
    if form is RotaryForm.COMPLEX:
        return _complex_rotary(modelling.apply_rotary_emb)
    return _no_rotary


def _real_rotary(apply: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Rotary:
    def rotary(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = apply(q, k.unsqueeze(1), cos, sin, unsqueeze_dim=1)
        return q, k.squeeze(1)

    return rotary


def _complex_rotary(apply: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Rotary:
    def rotary(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # The function takes a batch of [heads, tokens] and nothing else.
        q, k = apply(q.transpose(0, 1)[None], k[None, None], torch.complex(cos, sin)[None])
        return q[0].transpose(0, 1), k[0, 0]

    return rotary


def _no_rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return q, k


def _position_scale(attention: Any, architecture: Architecture) -> PositionScale | None:
    if not architecture.position_scale:
        return None
    formula = sys.modules[type(attention).__module__].get_llama_4_attn_scale
    rope = attention.config.rope_parameters
    beta, limit = rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"]

    def scale(positions: torch.Tensor) -> torch.Tensor:
        return formula(positions[None], beta, limit).view(-1)  # type: ignore[no-any-return]

    return scale


def _check_weights(name: str, attention: nn.Module, architecture: Architecture) -> None:
    """Refuse an attention with weights that are missing, unknown or not plain linear ones."""
    required = {"kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight", "kv_b_proj.weight"}
    required.add("o_proj.weight")
    if getattr(attention, "q_lora_rank", None) is None:
        required.add("q_proj.weight")
    else:
        required |= {"q_a_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight"}
    if architecture.gate is not None:
        required.add(f"{architecture.gate}.weight")
    optional = {"q_proj.bias", "q_a_proj.bias", "q_b_proj.bias", "kv_a_proj_with_mqa.bias"}
    optional.add("o_proj.bias")
    found = set(attention.state_dict())
    if not required <= found <= required | optional:
        raise CheckpointError(
            f"{name} has weights that are not understood: missing {sorted(required - found)}, "
            f"unknown {sorted(found - required - optional)}"
        )
    for child_name, child in attention.named_children():
        if child_name.endswith("proj") and type(child) is not nn.Linear:
            raise CheckpointError(
                f"{name}.{child_name} is a {type(child).__name__}; only plain linear layers can be "
                "divided over ranks"
            )


@torch.no_grad()
def _probe(attention: Any, architecture: Architecture, rotary_module: nn.Module | None) -> float:
    """Relative difference of one attention and its replacement, over a few tokens in FP32.

    A version of Transformers may compute something that the table of architectures does not know.
    """
    original = copy.deepcopy(attention).float()
    device = original.o_proj.weight.device
    positions = torch.tensor([[0, 1, 2, 3, 5, 8, 4096, 9000]], device=device)
    tokens = positions.shape[1]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, tokens, original.hidden_size, generator=generator).to(device)
    embeddings = None
    if rotary_module is not None:
        # A copy: some rotary modules remember the longest position they have seen.
        embeddings = copy.deepcopy(rotary_module)(hidden, position_ids=positions)
    mask = torch.full((1, 1, tokens, tokens), torch.finfo(torch.float32).min, device=device)
    arguments: dict[str, Any] = {"position_ids": positions}
    if embeddings is not None:
        arguments["position_embeddings"] = embeddings
    expected = original(hidden, attention_mask=mask.triu(1), **arguments)[0][0]

    layout = ShardLayout()
    dims = _dims(original, architecture, layout)
    replacement = _build(original, architecture, DCPDecoder(dims, device=device))
    scale = _position_scale(original, architecture)
    block_size = tokens
    cos, sin = cos_sin(embeddings)
    output = replacement(
        hidden[0],
        cos.squeeze(0),
        sin.squeeze(0),
        LatentCache(1, block_size, dims, torch.float32, device),
        layout.plan_batch([0], [tokens], [[0]], block_size, device=device),
        query_scale=None if scale is None else scale(positions[0]),
        schedule=Schedule.SERIAL,
    )
    return float((output - expected).norm() / expected.norm())
