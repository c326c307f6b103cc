"""MLAAttention against the definition of MLA, without Transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from anabranch import LatentCache, MLADims, ShardLayout
from anabranch.decoder import DCPDecoder
from anabranch.mla import MLAAttention, head_columns, head_rows
from ranks import rank_group

HIDDEN, HEADS, LATENT, ROPE, NOPE, VALUE = 20, 4, 16, 6, 10, 8
SCALE = 0.21
PAST, NEW = (13, 0, 30), (2, 3, 1)


def whole_weights() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def linear(rows: int, columns: int, bias: bool = False) -> nn.Linear:
        module = nn.Linear(columns, rows, bias=bias)
        for parameter in module.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / columns**0.5
        return module

    return {
        "query": linear(HEADS * (NOPE + ROPE), HIDDEN, bias=True),
        "kv_a": linear(LATENT + ROPE, HIDDEN, bias=True),
        "kv_norm": nn.RMSNorm(LATENT),
        "kv_b": linear(HEADS * (NOPE + VALUE), LATENT),
        "output": linear(HIDDEN, HEADS * VALUE, bias=True),
        "gate": linear(HEADS, HIDDEN),
    }


def rotary(q, k, cos, sin):
    """Not a rotation, but it depends on everything a rotation depends on."""
    return q * cos.unsqueeze(1) + sin.unsqueeze(1), k * cos + sin


def sequences() -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Hidden states, angles and query scales of every sequence, past and new tokens together."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    lengths = [past + new for past, new in zip(PAST, NEW, strict=True)]
    return (
        [draw(length, HIDDEN) for length in lengths],
        [draw(length, ROPE) for length in lengths],
        [1 + draw(length).abs() for length in lengths],
    )


@torch.no_grad()
def expected(gated: bool) -> torch.Tensor:
    """MLA by its definition: expanded keys and values of all heads, one sequence at a time."""
    weights = whole_weights()
    outputs = []
    for hidden, angle, scale, new in zip(*sequences(), NEW, strict=True):
        length = len(hidden)
        query = weights["query"](hidden).view(length, HEADS, -1) * scale.view(-1, 1, 1)
        latent, k_pe = weights["kv_a"](hidden).split([LATENT, ROPE], dim=-1)
        expanded = weights["kv_b"](weights["kv_norm"](latent)).view(length, HEADS, -1)
        q_pe, k_pe = rotary(query[..., NOPE:], k_pe, angle.cos(), angle.sin())
        query = torch.cat([query[..., :NOPE], q_pe], dim=-1)
        k_pe = k_pe.unsqueeze(1).expand(-1, HEADS, -1)
        key = torch.cat([expanded[..., :NOPE], k_pe], dim=-1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
        scores += torch.full((length, length), float("-inf")).triu(1)
        heads = torch.einsum("hqk,khd->qhd", scores.softmax(-1), expanded[..., NOPE:])
        if gated:
            heads = heads * torch.sigmoid(weights["gate"](hidden)).unsqueeze(-1)
        outputs.append(weights["output"](heads.flatten(1))[-new:])
    return torch.cat(outputs)


def attend(gated: bool, project_first: bool, chain: bool) -> torch.Tensor:
    """History in one step, then the new tokens: the output of the second step on this rank."""
    weights = whole_weights()
    layout = ShardLayout(dist.get_world_size(), dist.get_rank(), 2)
    dims = MLADims(HEADS // layout.world_size, LATENT, ROPE, NOPE, VALUE, SCALE)
    decoder = DCPDecoder(dims, rank_group(), layout, project_first=project_first)
    query: nn.Module = head_rows(weights["query"], layout)
    attention = MLAAttention(
        decoder,
        query=nn.Sequential(nn.Identity(), query) if chain else query,
        kv_a=weights["kv_a"],
        kv_norm=weights["kv_norm"],
        kv_b_weight=head_rows(weights["kv_b"], layout).weight,
        output_weight=head_columns(weights["output"].weight, layout),
        output_bias=weights["output"].bias,
        rotary=rotary,
        head_gate=head_rows(weights["gate"], layout) if gated else None,
    )
    tables = [[7, 1, 9, 12, 3], [2], [4, 5, 6, 8, 0, 10, 11, 13]]
    cache = LatentCache(14, 4, dims, torch.float32)
    output = torch.empty(0)
    for begin, count in ((None, PAST), (PAST, NEW)):
        firsts = [0] * len(PAST) if begin is None else list(begin)
        batch = layout.plan_batch(firsts, list(count), tables, 4)
        packed = [
            torch.cat(
                [
                    whole[first : first + n]
                    for whole, first, n in zip(part, firsts, count, strict=True)
                ]
            )
            for part in sequences()
        ]
        hidden, angle, scale = packed
        output = attention(hidden, angle.cos(), angle.sin(), cache, batch, query_scale=scale)
    return output


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("gated", "project_first", "chain"),
    [(False, False, False), (True, False, True), (True, True, False)],
)
def test_definition_of_mla(ranks, world_size, gated, project_first, chain):
    reference = expected(gated)
    for output in ranks(world_size).run(attend, gated, project_first, chain):
        assert ((output - reference).norm() / reference.norm()).item() < 1e-5


def test_cut_weights():
    linear = whole_weights()["query"]
    layouts = [ShardLayout(4, rank) for rank in range(4)]
    parts = [head_rows(linear, layout) for layout in layouts]
    assert torch.equal(torch.cat([part.weight for part in parts]), linear.weight)
    assert torch.equal(torch.cat([part.bias for part in parts]), linear.bias)
    columns = [head_columns(linear.weight, layout) for layout in layouts]
    assert torch.equal(torch.cat(columns, dim=1), linear.weight)
    # Copies: the whole weight can be freed.
    assert parts[0].weight.untyped_storage().nbytes() == linear.weight.nbytes // 4
    assert columns[0].untyped_storage().nbytes() == linear.weight.nbytes // 4


def test_weights_that_do_not_divide():
    linear = nn.Linear(10, 12)
    with pytest.raises(ValueError, match="12 rows cannot be divided over 5 ranks"):
        head_rows(linear, ShardLayout(5, 0))
    with pytest.raises(ValueError, match="10 columns cannot be divided over 4 ranks"):
        head_columns(linear.weight, ShardLayout(4, 0))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("kv_b_weight", (70, 16), r"kv_b_weight must be \[72, 16\], got \[70, 16\]"),
        ("output_weight", (20, 30), r"output_weight must be \[20, 32\], got \[20, 30\]"),
    ],
)
def test_weights_of_another_shape(name, shape, message):
    arguments: dict[str, Any] = {
        "query": nn.Identity(),
        "kv_a": nn.Identity(),
        "kv_norm": nn.Identity(),
        "kv_b_weight": torch.zeros(72, 16),
        "output_weight": torch.zeros(20, 32),
        "rotary": rotary,
        name: torch.zeros(shape),
    }
    decoder = DCPDecoder(MLADims(HEADS, LATENT, ROPE, NOPE, VALUE, SCALE))
    with pytest.raises(ValueError, match=message):
        MLAAttention(decoder, **arguments)
