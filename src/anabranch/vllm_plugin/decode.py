"""A decode step inside an engine that stores the latents and projects to V itself.

Nothing here knows vLLM: the engine's cache, block table and process group come as they are.

On CPU the steps of a model repeat. A `FixedBatch` holds the lengths of each step of one size in the
same memory, all layers prepare their step of that size once, and from then on a layer copies its
queries and latents and runs what is prepared (`streams.recorded`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from anabranch.attention import AttentionKind, partial_attention, provider_for
from anabranch.cache import DecodeBatch, LatentCache
from anabranch.geometry import MLADims
from anabranch.schedules import RUN, Schedule
from anabranch.step import Buffers, DecodeStep, StepInputs
from anabranch.streams import repeated, streams_for
from anabranch.vllm_plugin.batches import FixedBatch


class LatentStep(DecodeStep):
    """A step that ends with the merge, in the caller's `output` `[T, H*L]`.

    The engine has stored this step's tokens already (HISTORY's lengths leave them out), and
    projects the merged rows to V after the step.
    """

    def __init__(
        self,
        dims: MLADims,
        group: dist.ProcessGroup | None,
        inputs: StepInputs,
        buffers: Buffers,
        output: torch.Tensor,
    ) -> None:
        super().__init__(dims, group, inputs, buffers, output)
        rows = output.view(self.tokens, self.own_heads, dims.kv_lora_rank)
        self.merged = rows, self.merged[1]

    def project(self) -> None:
        """Left to the engine."""

    def project_transposed(self) -> None:
        """Left to the engine."""

    def store(self) -> None:
        """Done by the engine before the step."""


class LatentDecoder:
    """Runs latent steps on one rank; one set of buffers may serve all layers of a model."""

    def __init__(
        self,
        dims: MLADims,
        group: dist.ProcessGroup | None,
        schedule: Schedule,
        buffers: Buffers,
    ) -> None:
        self.dims, self.group, self.schedule = dims, group, schedule
        self._buffers = buffers
        # An accelerator's caller may be on another stream at each step, as when it captures one.
        self._streams = streams_for(buffers.device) if buffers.device.type == "cpu" else None
        self._reserved = False

    @torch.no_grad()
    def step(self, inputs: StepInputs) -> torch.Tensor:
        """Merged attention `[T, H, L]` of this step's tokens over the whole sequence.

        Of `inputs`, `w_uv` is only read for its shape, and `batch.slot_mapping` not at all. Over a
        `FixedBatch` the result is overwritten by the next step, of this layer or another.
        """
        if isinstance(inputs.batch, FixedBatch):
            return self._repeat(inputs, inputs.batch)
        tokens, heads, rank = inputs.q_nope.shape
        output = inputs.q_nope.new_empty(tokens, heads * rank)
        if self._is_whole(inputs):
            self._attend_to_all(inputs, inputs.batch.seq_lens + 1, output.view(tokens, heads, rank))
            return output.view(tokens, heads, rank)
        step = LatentStep(self.dims, self.group, inputs, self._buffers, output)
        RUN[self.schedule](step, self._streams or streams_for(self._buffers.device))
        return output.view(tokens, heads, rank)

    @torch.no_grad()
    def reserve(self, w_uv: torch.Tensor, tokens: int, block_size: int) -> None:
        """Take every buffer as large as steps of up to `tokens` rows want it; run one over nothing.

        All ranks of the group must call this. Nothing that a graph holds moves after it.
        """
        dims = self.dims

        def zeros(*shape: int, dtype: torch.dtype = w_uv.dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=w_uv.device)

        cache = LatentCache(1, block_size, dims, w_uv.dtype, w_uv.device)

        def inputs(rows: int, sequences: int) -> StepInputs:
            lengths, slots = zeros(sequences, dtype=torch.int32), zeros(rows, dtype=torch.int64)
            return StepInputs(
                q_nope=zeros(rows, dims.num_heads, dims.kv_lora_rank),
                q_pe=zeros(rows, dims.num_heads, dims.qk_rope_head_dim),
                kv_c=zeros(rows, dims.kv_lora_rank),
                k_pe=zeros(rows, dims.qk_rope_head_dim),
                cache=cache,
                batch=DecodeBatch(lengths, lengths, zeros(sequences, 1, dtype=torch.int32), slots),
                w_uv=w_uv,
            )

        # Which kernel serves a size, and what scratch it wants, is not known here.
        for rows in range(1, tokens + 1):
            output = zeros(rows, dims.num_heads * dims.kv_lora_rank)
            LatentStep(dims, self.group, inputs(rows, rows), self._buffers, output)
        self.step(inputs(tokens, 1))

    def _repeat(self, inputs: StepInputs, batch: FixedBatch) -> torch.Tensor:
        key = self, self.schedule
        prepared = batch.prepared.get(key)
        if prepared is None or prepared.inputs.cache is not inputs.cache:
            prepared = batch.prepared[key] = self._prepare(inputs, batch)
        fixed = prepared.inputs
        fixed.q_nope.copy_(inputs.q_nope)
        fixed.q_pe.copy_(inputs.q_pe)
        fixed.kv_c.copy_(inputs.kv_c)
        fixed.k_pe.copy_(inputs.k_pe)
        prepared.run()
        return prepared.output

    def _prepare(self, inputs: StepInputs, batch: FixedBatch) -> PreparedStep:
        """The step over `batch` in this decoder's buffers, of which each is taken at its largest.

        So they stay where they are when a larger batch comes.
        """
        if not self._reserved:
            fixed, output = self._fixed(inputs, batch.most_tokens)
            LatentStep(self.dims, self.group, fixed, self._buffers, output).reserve()
            self._reserved = True
        fixed, output = self._fixed(inputs, len(inputs.q_nope))
        out = output.view(inputs.q_nope.shape)
        if self._is_whole(inputs):
            attend = partial(self._attend_to_all, fixed, batch.total_lens, out)
            return PreparedStep(fixed, out, repeated(self._buffers.device, attend))
        step = LatentStep(self.dims, self.group, fixed, self._buffers, output)
        step.repeat()
        streams = self._streams or streams_for(self._buffers.device)
        return PreparedStep(fixed, out, partial(RUN[self.schedule], step, streams))

    def _fixed(self, inputs: StepInputs, tokens: int) -> tuple[StepInputs, torch.Tensor]:
        """Inputs and output of `tokens` rows in the buffers."""

        def fixed(name: str, *shape: int) -> torch.Tensor:
            return self._buffers.take(name, tokens, *shape, dtype=inputs.q_nope.dtype)

        heads, rank = inputs.q_nope.shape[1:]
        # Side by side, as they are gathered and cached.
        query = fixed("fixed_query", heads, self.dims.latent_width)
        latent = fixed("fixed_latent", self.dims.latent_width)
        places = replace(
            inputs,
            q_nope=query[..., :rank],
            q_pe=query[..., rank:],
            kv_c=latent[:, :rank],
            k_pe=latent[:, rank:],
        )
        return places, fixed("output", heads * rank)

    def _is_whole(self, inputs: StepInputs) -> bool:
        """One rank, one token a sequence: the cache, which has it already, is all there is."""
        return self.group is None and inputs.q_nope.shape[0] == len(inputs.batch.seq_lens)

    def _attend_to_all(
        self, inputs: StepInputs, total_lens: torch.Tensor, out: torch.Tensor
    ) -> None:
        tokens, heads, _ = out.shape
        take, provider = self._buffers.take, provider_for(self._buffers.device)
        partial_attention(
            inputs.q_nope, inputs.q_pe, inputs.cache,
            replace(inputs.batch, seq_lens=total_lens),
            AttentionKind.HISTORY, self.dims,
            take("workspace", provider.workspace_bytes(heads, self.dims), dtype=torch.uint8),
            out=(out, take("history_lse", tokens, heads, dtype=torch.float32)),
        )  # fmt: skip


class PreparedStep(NamedTuple):
    """A step over a `FixedBatch`: `run` reads `inputs` and writes `output` `[T, H, L]`."""

    inputs: StepInputs
    output: torch.Tensor
    run: Callable[[], None]
