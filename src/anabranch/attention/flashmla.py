"""FlashMLA's dense decode kernel, on Hopper.

It has no package on PyPI: it is built from its source, as `flash_mla`, or comes with vLLM. What
is taken from it here is in all its versions since the first, up to commit 9241ae3 of April 2026:
what `csrc/api/dense_decode.h` (before: `csrc/flash_api.cpp`) demands of shapes, and the two calls
of `flash_mla_interface.py`, whose arguments kept their places. The plan of a call is made on the
device from the lengths there, inside the call or just before it, so nothing waits for the host.
LSE is of natural logarithm; +inf marks a row whose sum is 0 or not a number.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from anabranch.attention.peer import Peer, Shape

# The plan keeps five numbers a sequence in the shared memory of one block, 227 KiB at most.
MOST_TOKENS = (227 * 1024 // 4 - 1) // 5
IN_VLLM = "vllm.v1.attention.ops.flashmla"


@cache
def missing() -> str | None:
    """Why it cannot be used here, or None."""
    if find_spec("flash_mla") is None and "vllm" not in sys.modules:
        return "flash_mla: not installed"
    try:
        module = _module()
    except (ImportError, OSError, RuntimeError) as error:  # its library, mostly
        return f"flash_mla: cannot be imported: {error}"
    # vLLM's module is there even where its library is not.
    supported, reason = getattr(module, "is_flashmla_dense_supported", lambda: (True, None))()
    return None if supported else f"flash_mla: {reason}"


def _module() -> Any:
    """Its own package, or vLLM's copy; vLLM is not imported for it, as that changes a process."""
    return import_module("flash_mla" if find_spec("flash_mla") is not None else IN_VLLM)


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
    module = _module()
    tokens, heads = lse.shape
    # Versions from January 2026 on plan inside the call and ignore these arguments.
    plan, splits = module.get_mla_metadata(lengths, heads, 1)
    given, logs = module.flash_mla_with_kvcache(
        query[:, None], pages[:, :, None], table, lengths, out.shape[2], plan, splits,
        softmax_scale=scale, causal=False,
    )  # fmt: skip
    return given.reshape(out.shape), logs.reshape(tokens, heads)


def _no_workspace(shape: Shape) -> int:
    return 0


PEER = Peer(
    name="flashmla",
    capabilities=((9, 0),),
    dtypes=(torch.bfloat16, torch.float16),
    block_sizes=(64,),
    heads=lambda heads: True,
    most_tokens=MOST_TOKENS,
    lse_unit=1.0,
    missing=missing,
    workspace_bytes=_no_workspace,
    attend=_attend,
)
