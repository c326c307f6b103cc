"""The attention backend on vLLM's CUDA platform. No GPU has run this.

vLLM honours `--attention-backend CUSTOM` there, so no platform of ours is needed, and its own
backends serve prefill. What differs from CPU:

- A step is localised on the device: the host knows how many tokens it has, and no length.
- vLLM captures whole decode steps in graphs, which hold addresses. So lengths are written where
  they were before, and every buffer is taken at its largest before the first graph.
- What is not served is refused when vLLM asks the backend whether it suits the configuration, in
  every worker, before its first layer is made.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.ops.dcp import get_dcp_workspace_max_num_tokens
from vllm.v1.kv_cache_interface import AttentionSpec

from anabranch.cache import DecodeBatch, LatentCache
from anabranch.vllm_plugin.backend import MLABackend, MLAImpl, MLAMetadataBuilder
from anabranch.vllm_plugin.batches import localise
from anabranch.vllm_plugin.decode import LatentDecoder
from anabranch.vllm_plugin.refusals import refused_on_cuda

PAGE = 64  # what the attention kernel likes best: `docs/cuda.md`, tiles
logger = logging.getLogger("vllm.anabranch")  # vLLM shows what is logged below `vllm`


class CudaMLABackend(MLABackend):
    """What vLLM asks about the backend on CUDA."""

    supported_dtypes = [torch.bfloat16, torch.float16]  # noqa: RUF012 - those of vLLM's prefill

    @staticmethod
    def get_impl_cls() -> type[CudaMLAImpl]:
        return CudaMLAImpl

    @staticmethod
    def get_builder_cls() -> type[CudaMetadataBuilder]:
        return CudaMetadataBuilder

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return PAGE

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return bool(capability.major >= 8)

    @classmethod
    def supports_combination(cls, *args: Any, **options: Any) -> str | None:
        """Everything that the rest of the configuration asks for and is not served, or None."""
        return "; ".join(refused_on_cuda(get_current_vllm_config())) or None


class CudaMLAImpl(MLAImpl):
    """One layer of one rank."""

    def _cache_in(self, buffer: torch.Tensor) -> LatentCache:
        """Made anew each time: vLLM frees the buffer of its memory profile; nobody may hold it."""
        return LatentCache.from_buffer(buffer, self.kv_lora_rank)


class CudaMetadataBuilder(MLAMetadataBuilder):
    """Localises each step on the device, once for all layers."""

    # Graphs of whole steps: those of decodes that bring the same number of tokens each.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        tokens = get_dcp_workspace_max_num_tokens(vllm_config)
        sequences = vllm_config.scheduler_config.max_num_seqs
        self._seq_lens, self._query_lens = torch.zeros(
            2, sequences, dtype=torch.int32, device=device
        )
        # vLLM stores: the step has nothing of its own to write.
        self._slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        layer: Any = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        decoder: LatentDecoder = layer.impl.decoder
        logger.warning(
            "anabranch serves MLA on CUDA, schedule %s, exchange by one all-to-all whatever "
            "dcp_comm_backend says: no GPU has run this yet.",
            decoder.schedule.value,
        )
        decoder.reserve(layer.W_UV, tokens, self.page_size)

    def _localise(
        self,
        total_lens: torch.Tensor,
        query_start_on_cpu: torch.Tensor,
        query_start: torch.Tensor,
        block_table: torch.Tensor,
        tokens: int,
    ) -> DecodeBatch:
        sequences = len(block_table)
        seq_lens, query_lens = self._seq_lens[:sequences], self._query_lens[:sequences]
        localise(self._layout, total_lens, query_start, seq_lens, query_lens)
        return DecodeBatch(seq_lens, query_lens, block_table, self._slots[:tokens])
