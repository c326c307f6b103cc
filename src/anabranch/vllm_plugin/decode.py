"""A decode step inside an engine that stores the latents and projects to V itself.

Nothing here knows vLLM: the engine's cache, block table and process group come as they are.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
import torch.distributed as dist

from anabranch.attention import AttentionKind, partial_attention, provider_for
from anabranch.cache import DecodeBatch
from anabranch.geometry import MLADims, ShardLayout
from anabranch.schedules import RUN, Schedule
from anabranch.step import Buffers, DecodeStep, StepInputs
from anabranch.streams import streams_for


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
        self._streams = streams_for(buffers.device)

    @torch.no_grad()
    def step(self, inputs: StepInputs) -> torch.Tensor:
        """Merged attention `[T, H, L]` of this step's tokens over the whole sequence.

        Of `inputs`, `w_uv` is only read for its shape, and `batch.slot_mapping` not at all.
        """
        tokens, heads, rank = inputs.q_nope.shape
        output = inputs.q_nope.new_empty(tokens, heads * rank)
        if self.group is None and tokens == len(inputs.batch.seq_lens):
            self._attend_to_all(inputs, output.view(tokens, heads, rank))
            return output.view(tokens, heads, rank)
        step = LatentStep(self.dims, self.group, inputs, self._buffers, output)
        RUN[self.schedule](step, self._streams)
        return output.view(tokens, heads, rank)

    def _attend_to_all(self, inputs: StepInputs, out: torch.Tensor) -> None:
        """One rank, one token a sequence: the cache, which has it already, is all there is."""
        tokens, heads, _ = out.shape
        take, provider = self._buffers.take, provider_for(self._buffers.device)
        partial_attention(
            inputs.q_nope, inputs.q_pe, inputs.cache,
            replace(inputs.batch, seq_lens=inputs.batch.seq_lens + 1),
            AttentionKind.HISTORY, self.dims,
            take("workspace", provider.workspace_bytes(heads, self.dims), dtype=torch.uint8),
            out=(out, take("history_lse", tokens, heads, dtype=torch.float32)),
        )  # fmt: skip


def decode_batch(
    layout: ShardLayout,
    total_lens: torch.Tensor,
    query_start: torch.Tensor,
    block_table: torch.Tensor,
) -> DecodeBatch:
    """The batch of a step in an engine's terms.

    - `total_lens` `[B]`: length of each sequence on all ranks together, this step included.
    - `query_start` `[B + 1]`: where each sequence's rows begin; the last entry is T.
    - `block_table` `[B, max_blocks]` int32, used as it is.
    """
    starts = query_start.tolist()
    query_lens = [end - begin for begin, end in pairwise(starts)]
    history = [
        layout.local_length(total - new)
        for total, new in zip(total_lens.tolist(), query_lens, strict=True)
    ]
    device = block_table.device
    return DecodeBatch(
        seq_lens=torch.tensor(history, dtype=torch.int32, device=device),
        query_lens=torch.tensor(query_lens, dtype=torch.int32, device=device),
        block_table=block_table,
        # The engine stores: the step has nothing of its own to write.
        slot_mapping=torch.full((starts[-1],), -1, dtype=torch.int64, device=device),
    )
