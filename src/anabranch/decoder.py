"""DCPDecoder: one decode step of one MLA layer under context parallelism."""

from __future__ import annotations

import torch
import torch.distributed as dist

from anabranch.cache import DecodeBatch, LatentCache
from anabranch.capture import CapturedStep
from anabranch.exchange import gather_heads
from anabranch.geometry import MLADims, ShardLayout
from anabranch.schedules import RUN, Schedule
from anabranch.step import Buffers, DecodeStep, ProjectFirstStep, StepInputs
from anabranch.streams import streams_for


class DCPDecoder:
    """Runs decode steps on one rank of a DCP group. One decoder may serve all layers of a model.

    - `dims`: dimensions with the heads of this rank.
    - `group`: the process group, or None for a single rank.
    - `layout`: must have the size and the rank of `group`.
    - `schedule`: see `anabranch.schedules`; all give the same bits.
    - `project_first`: project HISTORY before the exchange, which then carries V columns per
      head instead of L, at N times the V-up work. `step` then takes the gathered weights, see
      `gather_w_uv`. Equal within rounding.

    Raises ValueError when these contradict each other.
    """

    def __init__(
        self,
        dims: MLADims,
        group: dist.ProcessGroup | None = None,
        layout: ShardLayout | None = None,
        schedule: Schedule = Schedule.OVERLAP,
        device: torch.device | str | None = None,
        *,
        project_first: bool = False,
    ) -> None:
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        layout = ShardLayout(size, rank) if layout is None else layout
        if (layout.world_size, layout.rank) != (size, rank):
            raise ValueError(
                f"layout must have world_size {size} and rank {rank} as the group has, "
                f"got {layout.world_size} and {layout.rank}"
            )
        self.dims, self.group, self.layout = dims, group, layout
        self.schedule = schedule
        self.device = torch.device("cpu" if device is None else device)
        self.project_first = project_first
        self._buffers = Buffers(self.device)

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
        *,
        schedule: Schedule | None = None,
    ) -> torch.Tensor:
        """Attention of this step's T tokens over the whole sequence, projected to V.

        - `q_nope` `[T, H, L]` absorbed, `q_pe` `[T, H, R]` rotated: this rank's heads.
        - `kv_c` `[T, L]` normalised, `k_pe` `[T, R]` rotated: the same on every rank.
        - `cache`: this rank's shard; receives the tokens of this step that it owns.
        - `batch`: from `ShardLayout.plan_batch`.
        - `w_uv` `[H, L, V]`; under `project_first` the gathered `[N*H, L, V]`.
        - `schedule`: another schedule for this step alone (prefill: `Schedule.SERIAL`).

        Returns `[T, H*V]` in the dtype of `q_nope`; rows beyond `sum(batch.query_lens)` are 0.
        Every rank must call this with the same T. Raises ValueError before any work for inputs
        that do not fit, ExchangeError or StreamError when a peer or an operation fails.
        """
        inputs = StepInputs(q_nope, q_pe, kv_c, k_pe, cache, batch, w_uv)
        self.check(inputs)
        output = q_nope.new_empty(q_nope.shape[0], self.dims.num_heads * self.dims.v_head_dim)
        step = self.prepare(inputs, self._buffers, output)
        self.run(step, self.schedule if schedule is None else schedule)
        return output

    def capture(self, max_tokens: int) -> CapturedStep:
        """A step on fixed buffers for up to `max_tokens` rows: see `anabranch.capture`."""
        return CapturedStep(self, max_tokens)

    def prepare(self, inputs: StepInputs, buffers: Buffers, output: torch.Tensor) -> DecodeStep:
        """Lay a step out in `buffers`, ready for `run`."""
        kind = ProjectFirstStep if self.project_first else DecodeStep
        return kind(self.dims, self.group, inputs, buffers, output)

    def run(self, step: DecodeStep, schedule: Schedule) -> None:
        """Give the operations of a prepared step to the streams: the caller's and the side one."""
        RUN[schedule](step, streams_for(self.device))

    def gather_w_uv(self, w_uv: torch.Tensor) -> torch.Tensor:
        """Gather `[H, L, V]` of every rank to `[N*H, L, V]`, once, for `project_first`."""
        heads, rank, width = w_uv.shape
        by_head = gather_heads(w_uv.reshape(1, heads, rank * width), self.group)
        return by_head.view(-1, rank, width)

    def check(self, inputs: StepInputs) -> None:
        """Raise ValueError, naming the argument, for inputs that do not fit this decoder."""
        dims, batch = self.dims, inputs.batch
        tokens = batch.num_tokens
        heads, rank, rope = dims.num_heads, dims.kv_lora_rank, dims.qk_rope_head_dim
        weights = heads * (self.layout.world_size if self.project_first else 1)
        expected = {
            "q_nope": (tokens, heads, rank),
            "q_pe": (tokens, heads, rope),
            "kv_c": (tokens, rank),
            "k_pe": (tokens, rope),
            "w_uv": (weights, rank, dims.v_head_dim),
        }
        for name, shape in expected.items():
            tensor: torch.Tensor = getattr(inputs, name)
            if tensor.shape != shape:
                raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
            if tensor.dtype != inputs.q_nope.dtype:
                raise ValueError(
                    f"{name} must have the dtype of q_nope, {inputs.q_nope.dtype}, "
                    f"got {tensor.dtype}"
                )
