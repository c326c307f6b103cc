"""vLLM's CPU platform with this plugin's attention backend in it.

vLLM loads a platform through its `vllm.platform_plugins` entry points. This one is vLLM's own
CPU platform; it differs for MLA models that ask for the backend, or for context parallelism,
and nowhere else.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from anabranch.vllm_plugin.refusals import refuse_unsupported
from anabranch.vllm_plugin.settings import read_settings

if TYPE_CHECKING:  # vLLM loads the platform while it imports its configuration
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = logging.getLogger("vllm.anabranch")  # vLLM shows what is logged below `vllm`

DEFAULT_BLOCK_SIZE = 16
ROTARY = "rotary_embedding"


class AnabranchCpuPlatform(CpuPlatform):  # type: ignore[misc]
    """The CPU platform of vLLM, with MLA under decode context parallelism."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Configure as vLLM does, but keep what only its own CPU MLA backends cannot do."""
        if not _chosen(vllm_config):
            super().check_and_update_config(vllm_config)
            return
        schedule = read_settings(vllm_config.additional_config).schedule
        refuse_unsupported(vllm_config)
        vllm_config.attention_config.backend = AttentionBackendEnum.CUSTOM
        speculation = vllm_config.speculative_config
        if speculation is not None and speculation.attention_backend is None:
            speculation.attention_backend = AttentionBackendEnum.CUSTOM  # of a draft's own layers
        asked = _Asked.of(vllm_config)
        super().check_and_update_config(vllm_config)
        asked.restore(vllm_config)
        _use_correct_rotary(vllm_config)
        logger.info(
            "anabranch serves MLA: chunked prefill %s, prefix caching %s, block size %d, "
            "schedule %s, exchange by one all-to-all whatever dcp_comm_backend says.",
            *("on" if flag else "off" for flag in (asked.chunked_prefill, asked.prefix_caching)),
            asked.block_size,
            schedule.value,
        )

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        """Path of the backend's class: ours if it is named, which vLLM's CPU platform ignores."""
        if selected_backend == AttentionBackendEnum.CUSTOM and attn_selector_config.use_mla:
            path: str = AttentionBackendEnum.CUSTOM.get_path()
            return path
        inherited: str = super().get_attn_backend_cls(
            selected_backend, attn_selector_config, num_heads
        )
        return inherited

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """vLLM's substitutes for Triton kernels, and those that context parallelism needs."""
        super().register_triton_kernel_overrides()
        from anabranch.vllm_plugin.kernels import register_cpu_kernels

        register_cpu_kernels()


def _chosen(vllm_config: VllmConfig) -> bool:
    """Whether the backend is named, or needed because vLLM has none for what is asked."""
    model = vllm_config.model_config
    if model is None or not model.use_mla:
        return False
    backend = vllm_config.attention_config.backend
    parallel = vllm_config.parallel_config.decode_context_parallel_size > 1
    return backend == AttentionBackendEnum.CUSTOM or (backend is None and parallel)


@dataclass(frozen=True)
class _Asked:
    """What vLLM's CPU platform overrules for the sake of its own MLA backends."""

    block_size: int
    chunked_prefill: Any
    prefix_caching: Any
    max_num_batched_tokens: int

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> _Asked:
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        return cls(
            cache.block_size if cache.user_specified_block_size else DEFAULT_BLOCK_SIZE,
            scheduler.enable_chunked_prefill,
            cache.enable_prefix_caching,
            scheduler.max_num_batched_tokens,
        )

    def restore(self, vllm_config: VllmConfig) -> None:
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        cache.block_size = self.block_size
        cache.enable_prefix_caching = self.prefix_caching
        scheduler.enable_chunked_prefill = self.chunked_prefill
        scheduler.max_num_batched_tokens = self.max_num_batched_tokens


def _use_correct_rotary(vllm_config: VllmConfig) -> None:
    """Rotate in PyTorch: vLLM's CPU operator is wrong for MLA's queries `[T, H, R]`.

    It would be used without compilation (`enforce_eager`), and silently give wrong tokens.
    """
    operators = vllm_config.compilation_config.custom_ops
    if f"-{ROTARY}" not in operators:
        operators.append(f"-{ROTARY}")
