"""What the backend does not serve, refused by name before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SPECULATION = ("ngram", "mtp")
SPECULATION_ON_CUDA = ("ngram",)
ATTENTION, CACHE_UPDATE = (
    "vllm::unified_mla_attention_with_output",
    "vllm::unified_mla_kv_cache_update",
)


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Raise ValueError that names every option the backend does not serve on CPU."""
    refused = [*_refused(vllm_config), *_refused_on_cpu(vllm_config)]
    if refused:
        raise ValueError("anabranch cannot serve this: " + "; ".join(refused) + ".")


def _refused(vllm_config: VllmConfig) -> Iterator[str]:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    text = vllm_config.model_config.hf_text_config
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    if hasattr(text, "index_topk"):
        yield "sparse attention (the model has index_topk)"
    prefill_size = parallel.prefill_context_parallel_size
    if prefill_size > 1:
        yield f"prefill_context_parallel_size must be 1, got {prefill_size}"
    stages = parallel.pipeline_parallel_size
    if stages > 1:
        yield f"pipeline_parallel_size must be 1, got {stages}"
    if parallel.dcp_q_replicate:
        yield "dcp_q_replicate must be off"
    if cache.cache_dtype not in ("auto", dtype):
        yield f"kv_cache_dtype must be auto or the model's {dtype}, got {cache.cache_dtype}"
    if vllm_config.kv_transfer_config is not None:
        yield "kv_transfer_config (KV connectors)"


def _refused_on_cpu(vllm_config: VllmConfig) -> Iterator[str]:
    if vllm_config.use_v2_model_runner:
        yield "model runner V2 (set VLLM_USE_V2_MODEL_RUNNER=0)"
    speculation, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    yield from _refused_speculation(vllm_config, SPECULATION)
    if speculation is not None and speculation.method == "mtp":
        drafted, sharded = speculation.num_speculative_tokens, parallel.decode_context_parallel_size
        if drafted > 1 and sharded > 1:  # slots of the later ones are computed as if unsharded
            yield f"num_speculative_tokens of mtp must be 1 under DCP, got {drafted}"
    if "+rotary_embedding" in vllm_config.compilation_config.custom_ops:
        yield "custom_ops +rotary_embedding, which rotates MLA queries wrongly on CPU"


def refused_on_cuda(vllm_config: VllmConfig) -> Iterator[str]:
    """Every option that the backend does not serve on CUDA, by name."""
    from vllm import envs

    yield from _refused(vllm_config)
    yield from _refused_speculation(vllm_config, SPECULATION_ON_CUDA)
    if vllm_config.parallel_config.use_ubatching:
        yield "dual batch overlap (enable_dbo, ubatch_size)"
    # The step's latents come with the call that updates the cache, which must run when attention
    # does and not be replayed from a graph that leaves attention out.
    splitting = vllm_config.compilation_config.splitting_ops or []
    if ATTENTION in splitting and CACHE_UPDATE not in splitting:
        yield f"splitting_ops must have {CACHE_UPDATE} too (turn use_inductor_graph_partition off)"
    if envs.VLLM_USE_BREAKABLE_CUDAGRAPH:
        yield "breakable CUDA graphs (set VLLM_USE_BREAKABLE_CUDAGRAPH=0)"


def _refused_speculation(vllm_config: VllmConfig, served: tuple[str, ...]) -> Iterator[str]:
    speculation = vllm_config.speculative_config
    if speculation is not None and speculation.method not in served:
        yield f"speculative method must be one of {', '.join(served)}, got {speculation.method}"
