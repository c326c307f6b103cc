"""FlashMLA and FlashInfer in PyTorch: their signatures, their refusals, their results.

Each `Refused` is what a library demands, or what it would silently get wrong. What it leaves
undefined is poison here: rows without keys come back as the library marks them, or worse, and a
workspace is overwritten. FlashMLA is that of commit 9241ae3 (April 2026), and of c2067be (April
2025), whose plan was made by a call of its own; FlashInfer is 0.7.4.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from interpreted import on_triton

from anabranch.attention import cuda, flashinfer, flashmla

HOPPER, BLACKWELL = (9, 0), (10, 0)
STATISTICS_SLOTS = 256  # csrc/trtllm_fmha_kernel_launcher.cu: round_up(max_q_len, 256)


class Refused(RuntimeError):
    """What the library would refuse, or silently get wrong."""


def demand(met: object, what: str) -> None:
    if not met:
        raise Refused(what)


@dataclass
class Calls:
    """Shapes of the queries that each library was called with."""

    flashmla: list[torch.Size] = field(default_factory=list)
    flashinfer: list[torch.Size] = field(default_factory=list)


def attend(
    query: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, lens: list[int], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[T, heads, 512]` FP32 and its natural LSE; a row without keys has 0 and -inf."""
    out = torch.zeros(*query.shape[:2], 512)
    lse = torch.full(query.shape[:2], -torch.inf)
    for row, length in enumerate(lens):
        used = table[row, : -(-length // pages.shape[1])].long()
        demand(bool((used >= 0).all() and (used < len(pages)).all()), "block ids in the cache")
        if length:
            keys = pages[used].flatten(0, 1)[:length].float()
            scores = query[row].float() @ keys.T * scale
            out[row] = scores.softmax(-1) @ keys[:, :512]
            lse[row] = scores.logsumexp(-1)
    return out, lse


def flashmla_results(
    q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor, lens: torch.Tensor,
    head_dim_v: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`csrc/api/dense_decode.h`: what it checks, and what its tests say of the results."""
    demand(cuda.chip(q.device).capability == HOPPER, "Dense decode MLA is only supported on SM90a")
    demand(q.dtype in (torch.bfloat16, torch.float16), "BF16 or FP16")
    demand(k_cache.dtype == q.dtype, "query and key must have the same dtype")
    demand(lens.dtype == torch.int32, "seqlens_k must have dtype int32")
    demand(block_table.dtype == torch.int32, "block_table must have dtype torch.int32")
    demand(q.stride(-1) == 1, "q must have contiguous last dimension")
    demand(k_cache.stride(-1) == 1, "kcache must have contiguous last dimension")
    demand(lens.is_contiguous(), "seqlens_k contiguous")
    demand(block_table.stride(-1) == 1, "block_table must have contiguous last dimension")
    batch, per_sequence, _, width = q.shape
    # The kernel behind asserts 576 where the interface still lets 512 through.
    demand(width == 576 and head_dim_v == 512, "576 and 512")
    demand(k_cache.shape[1] == 64, "Currently page_block_size must be 64")
    demand(k_cache.shape[2:] == (1, 576), "kcache has one head of 576")
    demand(batch > 0, "batch size must be positive")
    demand(lens.shape == (batch,) and block_table.shape[0] == batch, "one row a sequence")
    # Tensor maps of the loads (CUDA driver API, cuTensorMapEncodeTiled): 16 bytes.
    for tensor in (q, k_cache):
        demand(tensor.data_ptr() % 16 == 0, "aligned addresses")
        demand(all(step * 2 % 16 == 0 for step in tensor.stride()[:-1]), "aligned strides")
    # smem_size of get_decoding_sched_meta.cu.
    demand(4 * (5 * batch + 1) <= 227 * 1024, "a plan in shared memory")
    demand(per_sequence == 1, "only the form of one token is played here")
    # Entry 0 of every row is loaded, whatever its length; out of bounds of the tensor map is 0.
    out, lse = attend(q[:, 0], k_cache[:, :, 0], block_table, lens.tolist(), scale)
    nothing = lse.isnan() | (lse == -torch.inf)
    lse = torch.where(nothing, torch.inf, lse)  # cur_L == 0.0f || cur_L != cur_L
    return out.to(q.dtype)[:, None], lse[:, :, None]


class FlashMLASchedMeta:
    """Of one plan: made in the first call, and good for that one's lengths alone."""

    lens: list[int] | None = None


def flashmla_module(calls: Calls, *, planned: bool) -> ModuleType:
    """`flash_mla`; `planned`: the version of April 2025."""
    module = ModuleType("flash_mla")

    def metadata_before(
        cache_seqlens: torch.Tensor, num_heads_per_head_k: int, num_heads_k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        demand(cache_seqlens.dtype == torch.int32 and cache_seqlens.is_contiguous(), "seqlens_k")
        heads = torch.tensor([num_heads_per_head_k, num_heads_k])
        return heads, cache_seqlens.clone()

    def decode_before(
        q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor,
        cache_seqlens: torch.Tensor, head_dim_v: int, tile_scheduler_metadata: torch.Tensor,
        num_splits: torch.Tensor, softmax_scale: float | None = None, causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        demand(tile_scheduler_metadata.tolist() == [q.shape[1] * q.shape[2], 1], "the plan's heads")
        demand(torch.equal(num_splits, cache_seqlens), "the plan's lengths")
        demand(not causal and softmax_scale is not None, "no mask and our scale")
        calls.flashmla.append(q.shape)
        return flashmla_results(
            q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale or 0
        )

    def metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
        return FlashMLASchedMeta(), None

    def decode(
        q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor | None,
        cache_seqlens: torch.Tensor | None, head_dim_v: int,
        tile_scheduler_metadata: FlashMLASchedMeta, num_splits: None = None,
        softmax_scale: float | None = None, causal: bool = False, is_fp8_kvcache: bool = False,
        indices: torch.Tensor | None = None, attn_sink: torch.Tensor | None = None,
        extra_k_cache: torch.Tensor | None = None,
        extra_indices_in_kvcache: torch.Tensor | None = None,
        topk_length: torch.Tensor | None = None, extra_topk_length: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        demand(isinstance(tile_scheduler_metadata, FlashMLASchedMeta), "tile_scheduler_metadata")
        demand(num_splits is None, "num_splits must be None")
        demand(not is_fp8_kvcache and indices is None, "the dense kernel without FP8")
        demand(not causal and softmax_scale is not None, "no mask and our scale")
        assert block_table is not None
        assert cache_seqlens is not None
        lens = cache_seqlens.tolist()
        demand(tile_scheduler_metadata.lens in (None, lens), "a plan of other lengths")
        tile_scheduler_metadata.lens = lens
        calls.flashmla.append(q.shape)
        return flashmla_results(
            q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale or 0
        )

    module.get_mla_metadata = metadata_before if planned else metadata  # type: ignore[attr-defined]
    module.flash_mla_with_kvcache = decode_before if planned else decode  # type: ignore[attr-defined]
    return module


def flashinfer_decode(calls: Calls) -> Any:
    """`trtllm_batch_decode_with_kv_cache_mla`; a test holds its signature to the wheel's."""

    def trtllm_batch_decode_with_kv_cache_mla(
        query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim,
        block_tables, seq_lens, max_seq_len, sparse_mla_top_k=0, out=None, bmm1_scale=1.0,
        bmm2_scale=1.0, sinks=None, skip_softmax_threshold_scale_factor=None, enable_pdl=None,
        backend="auto", is_var_seq=True, uses_shared_paged_kv_idx=True, lse=None,
        return_lse=False, cute_dsl_impl="auto", kv_scale_format="auto", cum_seq_lens_q=None,
        max_q_len=None, multi_ctas_kv_counter_buffer=None, sparse_mla_top_k_lens=None,
        enable_dcp=False, cp_world=1, cp_rank=0, causal_seqlens_kv_global=None,
        use_fp16_softmax=None, return_lse_base=None,
    ):  # fmt: skip
        demand(backend == "trtllm-gen", "auto may tune, and pick an LSE of another base")
        demand(cuda.chip(query.device).capability in (BLACKWELL, (10, 3)), "SM100 or SM103")
        demand(query.dim() == 4 and query.shape[1] == 1, "[T, 1, heads, 576]; more is causal")
        tokens, _, heads, width = query.shape
        # _trtllm_gen_mla_incompatibility_reason, _validate_plan_arguments_before_metadata
        demand(not 64 < heads < 128, "does not support 64 < num_heads_q < 128")
        demand(heads <= 64 or heads == 128, "fits in tiles of 64 or two of them")
        demand(kv_cache.shape[-2] in (32, 64), "requires block_size in (32, 64)")
        demand(query.dtype == kv_cache.dtype == torch.bfloat16, "matching bfloat16")
        demand((kv_lora_rank, qk_rope_head_dim) == (512, 64), "Unsupported MLA dimensions")
        demand(width == kv_cache.shape[-1] == 576, "Expected head dim 576")
        demand(block_tables.dtype == seq_lens.dtype == torch.int32, "int32")
        demand(block_tables.shape[0] == tokens == seq_lens.shape[0], "batch size")
        demand(all(t.is_contiguous() for t in (query, kv_cache, block_tables, seq_lens)), "dense")
        demand(max_seq_len >= int(seq_lens.max()), "max_seq_len")
        demand(out.shape == (tokens, 1, heads, 512) and out.dtype == torch.bfloat16, "out")
        demand(return_lse and lse.shape == (tokens, heads) and lse.dtype == torch.float32, "lse")
        demand(bmm2_scale == 1.0 and isinstance(bmm1_scale, float), "scales on the host")
        slots = 8 * heads * tokens * STATISTICS_SLOTS + 2**20  # and then partial results
        partials = 148 * 64 * (512 * 4 + 8)
        demand(workspace_buffer.numel() >= slots + partials, "workspace")
        # The kernels are not open: nothing is known to keep them from a padding entry.
        demand(
            bool(((block_tables >= 0) & (block_tables < len(kv_cache))).all()),
            "any entry is a page",
        )
        workspace_buffer.fill_(255)
        calls.flashinfer.append(query.shape)
        result, natural = attend(query[:, 0], kv_cache, block_tables, seq_lens.tolist(), bmm1_scale)
        empty = seq_lens == 0  # issue 2883
        result[empty], natural[empty] = torch.nan, torch.nan
        out.copy_(result[:, None])
        lse.copy_(natural * torch.tensor(2.0).log().reciprocal())
        return out, lse

    return trtllm_batch_decode_with_kv_cache_mla


@contextmanager
def loaded(modules: dict[str, ModuleType]) -> Iterator[None]:
    """These are imported. Nothing else that is imported meanwhile is forgotten afterwards."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


@contextmanager
def peers_on(capability: tuple[int, int], *, planned: bool = False) -> Iterator[Calls]:
    """Both libraries are installed, on a chip of `capability`, and CPU tensors are on it."""
    calls = Calls()
    library, operations = ModuleType("flashinfer"), ModuleType("flashinfer.mla")
    operations.trtllm_batch_decode_with_kv_cache_mla = flashinfer_decode(calls)  # type: ignore[attr-defined]
    modules = {
        "flash_mla": flashmla_module(calls, planned=planned),
        "flashinfer": library,
        "flashinfer.mla": operations,
    }
    for name, module in modules.items():
        module.__spec__ = mock.Mock(name=name)  # what find_spec wants of a module that is loaded
    chip = cuda.Chip(capability, 4)
    with ExitStack() as stack:
        stack.enter_context(loaded(modules))
        for peer in (flashmla, flashinfer):
            peer.missing.cache_clear()
            stack.callback(peer.missing.cache_clear)
        stack.enter_context(on_triton())
        stack.enter_context(mock.patch.object(cuda, "chip", return_value=chip))
        yield calls
