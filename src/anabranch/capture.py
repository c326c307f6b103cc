"""A decode step on fixed buffers, replayed for changing lengths, block tables and inputs.

What a graph capture fixes is fixed here on every device: the memory of inputs, buffers and
workspace, the cache, the weight, dtypes and widths. What changes between replays is copied into
the fixed inputs. On CPU a captured step is the eager one prepared once per size, whose operations
repeat the native calls of their first run: replays allocate no tensor memory and build no step. On
CUDA and NPU each size is a graph, with both streams in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from anabranch.cache import DecodeBatch, LatentCache
from anabranch.schedules import Schedule
from anabranch.step import Buffers, DecodeStep, StepInputs
from anabranch.streams import repeatable

if TYPE_CHECKING:
    from anabranch.decoder import DCPDecoder


class CapturedStep:
    """A replayable step of one layer; made by `DCPDecoder.capture`.

    The first call fixes the dtype, `cache`, `w_uv` and the width of the block table, and
    reserves buffers for `max_tokens` rows and as many sequences. A later call that changes any
    of these, or exceeds them, raises ValueError before any work. The first call of a size under a
    schedule captures the step, on CUDA and NPU as a graph. On NPU it also fixes the number of
    tokens of a sequence, where all have the same.
    """

    def __init__(self, decoder: DCPDecoder, max_tokens: int) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        self.max_tokens = max_tokens
        self._decoder = decoder
        self._fixed: _Fixed | None = None

    @torch.no_grad()
    def step(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_c: torch.Tensor,
        k_pe: torch.Tensor,
        cache: LatentCache,
        batch: DecodeBatch,
        w_uv: torch.Tensor,
    ) -> torch.Tensor:
        """Arguments and result of `DCPDecoder.step`, the same bits under the decoder's schedule.

        The result is a view of the captured output: the next call overwrites it.
        """
        inputs = StepInputs(q_nope, q_pe, kv_c, k_pe, cache, batch, w_uv)
        self._decoder.check(inputs)
        if self._fixed is None:
            self._fixed = _Fixed(self._decoder, self.max_tokens, inputs)
        self._fixed.check(inputs)
        return self._fixed.run(inputs)


class _Fixed:
    """The memory of a captured step, and a prepared step for each size and schedule so far."""

    def __init__(self, decoder: DCPDecoder, max_tokens: int, like: StepInputs) -> None:
        def fixed(tensor: torch.Tensor, *widths: int) -> torch.Tensor:
            with torch.inference_mode(False):  # as `Buffers.take`
                return tensor.new_zeros(max_tokens, *widths)

        batch = like.batch
        self._decoder, self._max_tokens = decoder, max_tokens
        self._inputs = StepInputs(
            q_nope=fixed(like.q_nope, *like.q_nope.shape[1:]),
            q_pe=fixed(like.q_pe, *like.q_pe.shape[1:]),
            kv_c=fixed(like.kv_c, *like.kv_c.shape[1:]),
            k_pe=fixed(like.k_pe, *like.k_pe.shape[1:]),
            cache=like.cache,
            batch=DecodeBatch(
                seq_lens=fixed(batch.seq_lens),
                query_lens=fixed(batch.query_lens),
                block_table=fixed(batch.block_table, *batch.block_table.shape[1:]),
                slot_mapping=fixed(batch.slot_mapping),
            ),
            w_uv=like.w_uv,
        )
        dims = decoder.dims
        self._output = fixed(like.q_nope, dims.num_heads * dims.v_head_dim)
        self._identity = self._identify(like)
        self._buffers = Buffers(decoder.device)
        self._steps: dict[tuple[int, int, Schedule], DecodeStep] = {}
        self._replays: dict[tuple[int, int, Schedule], Callable[[], None]] = {}
        # A step over nothing takes every buffer at its largest: none moves once a graph holds it.
        self._inputs.batch.slot_mapping.fill_(-1)
        decoder.run(decoder.prepare(self._inputs, self._buffers, self._output), decoder.schedule)

    def check(self, inputs: StepInputs) -> None:
        """Raise ValueError, naming it, when `inputs` change what the capture fixed."""
        batch, width = inputs.batch, self._inputs.batch.block_table.shape[1]
        sizes = {
            "tokens": (batch.num_tokens, self._max_tokens),
            "sequences": (batch.seq_lens.shape[0], self._max_tokens),
            "block_table columns": (batch.block_table.shape[1], width),
        }
        for name, (size, most) in sizes.items():
            if size > most:
                raise ValueError(f"{name} must be at most {most}, as captured, got {size}")
        for name, value in self._identify(inputs).items():
            if value != self._identity[name]:
                raise ValueError(f"{name} must be as captured, {self._identity[name]}, got {value}")

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Replay the step of this size, captured on its first use. Returns the captured output."""
        decoder, batch = self._decoder, inputs.batch
        schedule = decoder.schedule
        key = batch.num_tokens, batch.seq_lens.shape[0], schedule
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self._prepare(*key[:2])
        self._load(step, inputs)
        if key not in self._replays:
            self._replays[key] = repeatable(decoder.device, lambda: decoder.run(step, schedule))
        self._replays[key]()
        return step.output

    @staticmethod
    def _load(step: DecodeStep, inputs: StepInputs) -> None:
        """Copy what may change into the fixed memory, where the step reads it."""
        batch = inputs.batch
        for name in ("q_nope", "q_pe", "kv_c", "k_pe"):
            getattr(step.inputs, name).copy_(getattr(inputs, name))
        for name in ("seq_lens", "query_lens", "slot_mapping"):
            getattr(step.inputs.batch, name).copy_(getattr(batch, name))
        # Columns beyond the given ones are padding, which is never followed.
        step.inputs.batch.block_table[:, : batch.block_table.shape[1]].copy_(batch.block_table)

    def _prepare(self, tokens: int, sequences: int) -> DecodeStep:
        whole, batch = self._inputs, self._inputs.batch
        inputs = StepInputs(
            q_nope=whole.q_nope[:tokens],
            q_pe=whole.q_pe[:tokens],
            kv_c=whole.kv_c[:tokens],
            k_pe=whole.k_pe[:tokens],
            cache=whole.cache,
            batch=DecodeBatch(
                seq_lens=batch.seq_lens[:sequences],
                query_lens=batch.query_lens[:sequences],
                block_table=batch.block_table[:sequences],
                slot_mapping=batch.slot_mapping[:tokens],
            ),
            w_uv=whole.w_uv,
        )
        step = self._decoder.prepare(inputs, self._buffers, self._output[:tokens])
        step.repeat()
        return step

    @staticmethod
    def _identify(inputs: StepInputs) -> dict[str, object]:
        cache, weight = inputs.cache, inputs.w_uv
        return {
            "dtype": inputs.q_nope.dtype,
            "cache": (cache.latent.data_ptr(), cache.rope.data_ptr(), *cache.latent.stride()),
            "w_uv": (weight.data_ptr(), *weight.stride()),
        }
