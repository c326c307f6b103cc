"""vllm-ascend's MLA under decode context parallelism, with this library's decode step in it.

vllm-ascend 0.30 takes HISTORY and CURRENT apart where a sequence brings several tokens. Here
every decode step goes that way, and what `_forward_decode_split_attention` does is the library's
step, under the schedule the user names. No NPU has run this: what it overrides, calls and reads
is checked against the published sources by `tests/vllm/test_vllm_ascend.py`.

vllm-ascend's platform names its backend whatever is registered or asked for, so `attach` puts a
choice in the two places where that backend names its classes (`ASCEND_CLASSES` in the test). That
is done only where the environment names a schedule in `ANABRANCH_ASCEND_SCHEDULE`.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport
from vllm_ascend.ascend_forward_context import _EXTRA_CTX
from vllm_ascend.attention.context_parallel.mla_cp import (
    AscendMlaDCPImpl,
    AscendMlaDCPMetadataBuilder,
)
from vllm_ascend.attention.mla_v1 import AscendMLABackend, AscendMLAImpl

from anabranch.cache import DecodeBatch, LatentCache
from anabranch.geometry import MLADims
from anabranch.step import Buffers, StepInputs
from anabranch.vllm_plugin import ASCEND_SCHEDULE
from anabranch.vllm_plugin.decode import LatentDecoder
from anabranch.vllm_plugin.settings import read_schedule

SPECULATION = ("ngram",)
_buffers: dict[torch.device, Buffers] = {}


class MLADCPMetadataBuilder(AscendMlaDCPMetadataBuilder):  # type: ignore[misc]
    """A decode step reads lengths on the host, so a graph of a whole step cannot hold it."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> Any:
        return AttentionCGSupport.NEVER


class MLADCPImpl(AscendMlaDCPImpl):  # type: ignore[misc]
    """One layer of one rank."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        config = get_current_vllm_config()
        self._refuse(config)
        dims = MLADims(
            num_heads=self.num_heads,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
            qk_nope_head_dim=self.qk_nope_head_dim,
            v_head_dim=self.v_head_dim,
            scale=self.scale,
        )
        device = this_device()
        buffers = _buffers.setdefault(device, Buffers(device))
        schedule = read_schedule(ASCEND_SCHEDULE, os.environ[ASCEND_SCHEDULE])
        self._decoder = LatentDecoder(dims, self.dcp_device_group, schedule, buffers)

    def _refuse(self, config: VllmConfig) -> None:
        parallel, speculation = config.parallel_config, config.speculative_config
        refused = {
            "prefill_context_parallel_size above 1": parallel.prefill_context_parallel_size > 1,
            "enable_kv_nz": self.enable_kv_nz,
            "a quantised cache": self.fa_quant_layer,
            "speculation other than n-gram": speculation is not None
            and speculation.method not in SPECULATION,
        }
        given = [name for name, refuse in refused.items() if refuse]
        if given:
            raise ValueError(f"anabranch cannot serve this on Ascend: {', '.join(given)}.")

    def _decode_requires_current_kv(self, attn_metadata: Any) -> bool:
        return attn_metadata.decode is not None

    def reorg_decode_q(
        self, decode_q_nope: torch.Tensor, decode_q_pe: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's heads: the step gathers those of the others itself."""
        own: tuple[torch.Tensor, torch.Tensor]
        own = AscendMLAImpl.reorg_decode_q(self, decode_q_nope, decode_q_pe)
        return own

    def _forward_decode_split_attention(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache_k_nope: torch.Tensor,
        cache_k_pe: torch.Tensor,
        current_k_nope: torch.Tensor,
        current_k_pe: torch.Tensor,
        block_size: int,
        attn_metadata: Any,
    ) -> torch.Tensor:
        """The decode step: `[T, H*V]` of this rank's heads over the whole sequences."""
        if _EXTRA_CTX.capturing:
            raise RuntimeError("anabranch's decode step cannot be captured whole in a graph")
        tokens, rank, rope = q_nope.shape[0], self.kv_lora_rank, self.qk_rope_head_dim
        inputs = StepInputs(
            q_nope,
            q_pe.view(tokens, -1, rope),
            current_k_nope.view(tokens, rank),
            current_k_pe.view(tokens, rope),
            LatentCache.from_parts(
                cache_k_nope.view(-1, block_size, rank), cache_k_pe.view(-1, block_size, rope)
            ),
            decode_batch(attn_metadata.decode, tokens),
            self.W_UV,
        )
        projected: torch.Tensor = self._v_up_proj_batch_major(self._decoder.step(inputs))
        return projected


def this_device() -> torch.device:
    return torch.device("npu", torch.accelerator.current_device_index())


def decode_batch(decode: Any, tokens: int) -> DecodeBatch:
    """The step that vllm-ascend's decode metadata describes. Lengths stay on the host.

    `cp_history_seq_len` counts this rank's tokens before the step, `actual_seq_lengths_q` is
    where each sequence's rows end.
    """
    ends = [0, *decode.actual_seq_lengths_q]
    query_lens = [end - begin for begin, end in pairwise(ends)]
    sequences = len(query_lens)
    return DecodeBatch(
        seq_lens=torch.tensor(decode.cp_history_seq_len[:sequences], dtype=torch.int32),
        query_lens=torch.tensor(query_lens, dtype=torch.int32),
        block_table=decode.block_table[:sequences],
        # vllm-ascend has stored the tokens: the step has nothing to write.
        slot_mapping=torch.full((tokens,), -1, dtype=torch.int64),
    )


def attach() -> None:
    """Let vllm-ascend's backend name the classes above for sharded caches."""
    theirs = AscendMLABackend.get_impl_cls, AscendMLABackend.get_builder_cls

    def get_impl_cls() -> Any:
        named = theirs[0]()
        return MLADCPImpl if named is AscendMlaDCPImpl else named

    def get_builder_cls() -> Any:
        named = theirs[1]()
        return MLADCPMetadataBuilder if named is AscendMlaDCPMetadataBuilder else named

    AscendMLABackend.get_impl_cls = staticmethod(get_impl_cls)
    AscendMLABackend.get_builder_cls = staticmethod(get_builder_cls)
