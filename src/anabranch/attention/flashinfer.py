"""FlashInfer's MLA decode by TensorRT-LLM kernels, on Blackwell.

Of what FlashInfer 0.7 has, `trtllm_batch_decode_with_kv_cache_mla` returns an LSE without a plan
by the host. `BatchMLAPagedAttentionWrapper`, its way on Hopper, copies the lengths to the host in
`plan`, which a graph cannot follow and an eager step would wait for in every layer. The backend is
named so that no tuning may pick another, whose LSE has another base: this one's is 2. A row
without keys would come back as NaN (FlashInfer issue 2883).
"""

from __future__ import annotations

import inspect
import math
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from anabranch.attention.peer import RANK, ROPE, Peer, Shape

# Others are padded by FlashInfer to these, or refused.
HEADS = (8, 16, 32, 64, 128)
# The LSE is made from two FP32 numbers a row; their buffer has room for 256 tokens a sequence.
STATISTICS = 2 * 4 * 256
GUARD = 2**20  # behind them
# Partial results: two numbers and 512 values of each row of one tile a multiprocessor.
PARTIALS = 64 * 2**20
MOST_TOKENS = 1024  # with 128 heads that is 321 MiB of workspace
NOPE_HEAD_DIM = 128  # wanted, and not used for a latent cache


@cache
def missing() -> str | None:
    """Why it cannot be used here, or None."""
    if find_spec("flashinfer") is None:
        return "flashinfer: not installed"
    try:
        parameters = inspect.signature(_decode()).parameters
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"flashinfer: cannot be imported: {error}"
    # Before that, counters lay in the workspace, which had to be zero.
    if not {"return_lse", "multi_ctas_kv_counter_buffer"} <= set(parameters):
        return "flashinfer: 0.7 or later is needed for an LSE and counters of its own"
    return None


def _decode() -> Any:
    return import_module("flashinfer.mla").trtllm_batch_decode_with_kv_cache_mla


def _attend(
    query: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    _decode()(
        query[:, None], pages, workspace, NOPE_HEAD_DIM, RANK, ROPE, table, lengths,
        table.shape[1] * pages.shape[1], out=out[:, None], bmm1_scale=scale, bmm2_scale=1.0,
        backend="trtllm-gen", lse=lse, return_lse=True,
    )  # fmt: skip
    return out, lse


def workspace_bytes(shape: Shape) -> int:
    return shape.heads * shape.tokens * STATISTICS + GUARD + PARTIALS


PEER = Peer(
    name="flashinfer",
    capabilities=((10, 0), (10, 3)),
    dtypes=(torch.bfloat16,),
    block_sizes=(32, 64),
    heads=HEADS.__contains__,
    most_tokens=MOST_TOKENS,
    lse_unit=math.log(2),
    missing=missing,
    workspace_bytes=workspace_bytes,
    attend=_attend,
)
