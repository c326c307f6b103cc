"""The attention backend: vLLM's own MLA scaffolding with this library's decode step in it.

vLLM's layer calls `do_kv_cache_update` with all of a step's latents, then `forward_mha` for the
rows of prefills and `forward_mqa` for those of decodes. Prefill is vLLM's. The decode step runs
whole inside `forward_mqa`: gather of queries, HISTORY, CURRENT, exchange and merge, under the
schedule the user names.

For that the layer must not gather and combine around `forward_mqa`, which it does when the
implementation's `dcp_world_size` is above 1: the implementation shows it 1, and keeps the group
to itself (`SINGLE_RANK_TO_LAYER` in `tests/vllm/test_adaptations.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed.parallel_state import get_dcp_group
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionLayer, AttentionType
from vllm.v1.attention.ops.dcp import MLADCPManager
from vllm.v1.kv_cache_interface import AttentionSpec

from anabranch.cache import DecodeBatch, LatentCache
from anabranch.geometry import MLADims, ShardLayout
from anabranch.step import Buffers, StepInputs
from anabranch.vllm_plugin.batches import FixedBatches
from anabranch.vllm_plugin.decode import LatentDecoder
from anabranch.vllm_plugin.settings import read_settings

# One set of buffers for all layers on a device: their steps come one after the other.
_buffers: dict[torch.device, Buffers] = {}


class MLABackend(MLACommonBackend):  # type: ignore[misc]
    """What vLLM asks about the backend."""

    supported_dtypes = [torch.float32, torch.bfloat16, torch.float16]  # noqa: RUF012
    supported_kv_cache_dtypes = ["auto", "bfloat16", "float16"]  # noqa: RUF012

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[MLAImpl]:
        return MLAImpl

    @staticmethod
    def get_builder_cls() -> type[MLAMetadataBuilder]:
        return MLAMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any


@dataclass
class MLADecodeMetadata(MLACommonDecodeMetadata):  # type: ignore[misc]
    """Decodes of one step; `batch` is what this rank attends to."""

    batch: DecodeBatch


@dataclass
class MLAMetadata(MLACommonMetadata[MLADecodeMetadata]):  # type: ignore[misc]
    """One step, of latents of any width."""

    def __post_init__(self) -> None:
        """Without vLLM's check of the width, which is about its own kernels."""


class MLAMetadataBuilder(MLACommonMetadataBuilder[MLAMetadata]):  # type: ignore[misc]
    """Localises each step once, for all layers.

    Decodes may bring different numbers of tokens (speculation).
    """

    query_len_support = QueryLenSupport.VARLEN

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        parallel = vllm_config.parallel_config
        size, rank = parallel.decode_context_parallel_size, 0
        if size > 1:
            rank = get_dcp_group().rank_in_group
            _give_managers(layer_names, vllm_config, device)
        super().__init__(
            kv_cache_spec,
            layer_names,
            vllm_config,
            device,
            metadata_cls=MLAMetadata,
            supports_dcp_with_varlen=True,
        )
        self._layout = ShardLayout(size, rank, parallel.cp_kv_cache_interleave_size)
        self._batches = FixedBatches(self._layout, _most_tokens(vllm_config))

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> MLADecodeMetadata:
        total_lens = seq_lens_device  # of this rank alone if the cache is sharded
        if dcp_tot_seq_lens_device is not None:
            total_lens = dcp_tot_seq_lens_device
        return MLADecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            batch=self._localise(
                total_lens,
                query_start_loc_cpu,
                query_start_loc_device,
                block_table_tensor,
                num_decode_tokens,
            ),
        )

    def _localise(
        self,
        total_lens: torch.Tensor,
        query_start_on_cpu: torch.Tensor,
        query_start: torch.Tensor,
        block_table: torch.Tensor,
        tokens: int,
    ) -> DecodeBatch:
        """What this rank attends to in a step of decodes that bring so many `tokens`."""
        return self._batches.load(total_lens, query_start_on_cpu, block_table)


def this_device() -> torch.device:
    """Where this process computes."""
    kind: str = current_platform.device_type
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.accelerator.current_device_index())


def _most_tokens(vllm_config: VllmConfig) -> int:
    """Rows of the largest step of decodes: each sequence brings a token and what is drafted."""
    speculation = vllm_config.speculative_config
    drafted = 0 if speculation is None else speculation.num_speculative_tokens
    return int(vllm_config.scheduler_config.max_num_seqs * (1 + drafted))


def _give_managers(layer_names: list[str], vllm_config: VllmConfig, device: torch.device) -> None:
    """Give the layers the manager of collectives that vLLM's builder expects of them.

    A layer makes one only if its implementation lets it gather and combine. Here its
    all-gather of latents serves prefill with context; its combine is never called.
    """
    context = vllm_config.compilation_config.static_forward_context
    layers: list[Any] = [context[name] for name in layer_names]
    first, dtype = layers[0], vllm_config.model_config.dtype
    manager = MLADCPManager(
        vllm_config=vllm_config,
        device=device,
        num_heads=first.num_heads,
        query_head_dim=first.kv_lora_rank + first.qk_rope_head_dim,
        output_head_dim=first.kv_lora_rank,
        query_dtype=dtype,
        output_dtype=dtype,
        padded_num_heads=None,
        is_lse_base_on_e=True,
        use_pcp=False,
    )
    for layer in layers:
        layer.dcp_manager = manager


class MLAImpl(MLACommonImpl[MLAMetadata]):  # type: ignore[misc]
    """One layer of one rank."""

    can_return_lse_for_decode = True  # what vLLM asks of a backend before it shards the cache
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla: Any,
    ) -> None:
        options = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
        }
        given = [name for name, value in options.items() if value]
        if given or attn_type != AttentionType.DECODER:
            raise ValueError(
                f"anabranch serves plain causal MLA, not {', '.join(given) or attn_type}"
            )
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
            kv_cache_dtype, logits_soft_cap, attn_type, kv_sharing_target_layer_name, **mla,
        )  # fmt: skip
        self.supports_quant_query_input = False
        config = get_current_vllm_config()
        self._group_size: int = config.parallel_config.decode_context_parallel_size
        self.dcp_world_size: int = 1  # see the module's docstring
        self._latents: tuple[torch.Tensor, torch.Tensor] | None = None
        self._buffer: torch.Tensor | None = None
        dims = MLADims(
            num_heads=num_heads,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
            qk_nope_head_dim=self.qk_nope_head_dim,
            v_head_dim=self.v_head_dim,
            scale=self.scale,
        )
        group = get_dcp_group().device_group if self._group_size > 1 else None
        schedule = read_settings(config.additional_config).schedule
        device = this_device()
        buffers = _buffers.setdefault(device, Buffers(device))
        self.decoder = LatentDecoder(dims, group, schedule, buffers)

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Store the tokens this rank owns, and keep all of them for CURRENT.

        `forward_mqa`, which comes next, is not given them, and the cache lacks those of the
        other ranks.
        """
        self._latents = kv_c_normed, k_pe.squeeze(1)
        if kv_cache.numel() == 0:
            return
        rows = slot_mapping.shape[0]
        cache = self._cache_in(kv_cache)
        cache.write(kv_c_normed[:rows], k_pe[:rows].squeeze(1), slot_mapping)

    def forward_mqa(
        self,
        q: tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLAMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, None]:
        """The decode step: `[T, H, L]` of this rank's heads over the whole sequences."""
        assert attn_metadata.decode is not None
        assert self._latents is not None, "vLLM must update the cache before it attends"
        q_nope, q_pe = q
        tokens = q_nope.shape[0]
        kv_c, k_pe = self._latents
        self._latents = None
        inputs = StepInputs(
            q_nope,
            q_pe,
            kv_c[:tokens],  # vLLM puts decodes first
            k_pe[:tokens],
            self._cache_in(kv_c_and_k_pe_cache),
            attn_metadata.decode.batch,
            layer.W_UV,
        )
        return self.decoder.step(inputs), None

    def _cache_in(self, buffer: torch.Tensor) -> LatentCache:
        """vLLM's buffer as a cache, the same object as long as it is the same tensor."""
        if buffer is not self._buffer:
            self._buffer, self._cache = buffer, LatentCache.from_buffer(buffer, self.kv_lora_rank)
        return self._cache

    def _compute_prefill_context(
        self,
        q: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLAMetadata,
        k_scale: torch.Tensor,
    ) -> Any:
        """A prefill's earlier tokens: vLLM's form for a sharded cache where it is sharded."""
        if self._group_size == 1:
            return super()._compute_prefill_context(q, kv_c_and_k_pe_cache, attn_metadata, k_scale)
        return self._context_parallel_compute_prefill_context(
            q, kv_c_and_k_pe_cache, attn_metadata, k_scale, self._group_size
        )
