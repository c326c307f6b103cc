"""What the backend does not serve, refused by name before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SPECULATION = ("ngram", "mtp")


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Raise ValueError that names every option the backend does not serve."""
    refused = list(_refused(vllm_config))
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
    if vllm_config.use_v2_model_runner:
        yield "model runner V2 (set VLLM_USE_V2_MODEL_RUNNER=0)"
    speculation = vllm_config.speculative_config
    if speculation is not None and speculation.method not in SPECULATION:
        yield (
            f"speculative method must be one of {', '.join(SPECULATION)}, got {speculation.method}"
        )
    elif speculation is not None and speculation.method == "mtp":
        drafted, sharded = speculation.num_speculative_tokens, parallel.decode_context_parallel_size
        if drafted > 1 and sharded > 1:  # slots of the later ones are computed as if unsharded
            yield f"num_speculative_tokens of mtp must be 1 under DCP, got {drafted}"
    if "+rotary_embedding" in vllm_config.compilation_config.custom_ops:
        yield "custom_ops +rotary_embedding, which rotates MLA queries wrongly on CPU"
