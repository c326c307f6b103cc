"""The operations of one decode step on one rank.

`DecodeStep` holds a step's inputs and the buffers it writes; each method is one operation, which
a schedule gives to a stream. `anabranch.schedules` says which runs where.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from anabranch import vup
from anabranch.attention import AttentionKind, partial_attention, provider_for
from anabranch.cache import DecodeBatch, LatentCache, joined
from anabranch.exchange import exchange_partials, gather_heads, lse_columns
from anabranch.geometry import MLADims
from anabranch.merge import merge_partials
from anabranch.streams import repeated


class Buffers:
    """Storage by name that grows to the largest request and is reused from step to step.

    One set serves all layers of a model: a buffer's next use is ordered behind its last by the
    schedule. In steady state nothing is allocated.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._storage: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """The buffer `name` as a contiguous tensor of `shape`; its content is undefined."""
        size = math.prod(shape)
        flat = self._storage.get((name, dtype))
        if flat is None or flat.numel() < size:
            with torch.inference_mode(False):  # what that mode makes cannot be written outside it
                flat = torch.empty(size, dtype=dtype, device=self.device)
            self._storage[name, dtype] = flat
        return flat[:size].view(shape)


@dataclass(frozen=True)
class StepInputs:
    """What a caller gives to one step; shapes as in `DCPDecoder.step`."""

    q_nope: torch.Tensor
    q_pe: torch.Tensor
    kv_c: torch.Tensor
    k_pe: torch.Tensor
    cache: LatentCache
    batch: DecodeBatch
    w_uv: torch.Tensor


class DecodeStep:
    """One step of one layer: merge in the latent space, then project the merged rows to V.

    `output` `[T, H*V]` is the caller's: it outlives the step, so it is not one of the buffers.
    """

    def __init__(
        self,
        dims: MLADims,
        group: dist.ProcessGroup | None,
        inputs: StepInputs,
        buffers: Buffers,
        output: torch.Tensor,
    ) -> None:
        self.dims, self.group, self.inputs, self.buffers = dims, group, inputs, buffers
        self.world_size = 1 if group is None else group.size()
        self.tokens, self.own_heads = inputs.q_nope.shape[:2]
        self.all_heads = self.world_size * self.own_heads
        self.dtype = inputs.q_nope.dtype
        self.output = output
        # One for all that need scratch, in turn; fewer heads never need more than all heads.
        size = max(
            provider_for(buffers.device).workspace_bytes(
                self.all_heads, dims, inputs.cache, inputs.batch
            ),
            vup.workspace_bytes(dims.kv_lora_rank, dims.v_head_dim, buffers.device),
        )
        self.workspace = buffers.take("workspace", size, dtype=torch.uint8)
        self.history = self._partials("history", self.all_heads, dims.kv_lora_rank)
        self.current = self._partials("current", self.own_heads, dims.kv_lora_rank)
        self.merged = self._partials("merged", self.own_heads, dims.kv_lora_rank)
        # What travels; `ProjectFirstStep` narrows it.
        self.sent = self.history
        self.q_nope, self.q_pe = inputs.q_nope, inputs.q_pe
        if group is not None:
            self._lay_out_queries()
        self._wires: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}

    def reserve(self) -> None:
        """Take every buffer that `serial` and `overlap` use, as `run` would."""
        if self.group is not None:
            self._wire(self.dtype)

    def repeat(self) -> None:
        """Prepare to run more than once, on the same memory: see `streams.repeated`."""
        for operation in (
            self.gather_queries, self.history_attention, self.current_attention,
            self.exchange_history, self.exchange_history_converted, self.merge,
            self.project, self.project_transposed, self.store,
        ):  # fmt: skip
            setattr(self, operation.__name__, repeated(self.buffers.device, operation))

    def _lay_out_queries(self) -> None:
        """Where `gather_queries` puts those of all heads, and history attention finds them."""
        rank, heads, width = self.dims.kv_lora_rank, self.own_heads, self.dims.latent_width
        take, dtype, inputs = self.buffers.take, self.dtype, self.inputs
        self._joined = joined(inputs.q_nope, inputs.q_pe)
        if self._joined is None:
            self._own = take("query", self.tokens, heads, width, dtype=dtype)
        received = take("queries_by_rank", self.world_size, self.tokens, heads, width, dtype=dtype)
        every = (
            received.view(1, self.all_heads, width)
            if self.tokens == 1
            else take("queries", self.tokens, self.all_heads, width, dtype=dtype)
        )
        self._gathered = received, every
        self.q_nope, self.q_pe = every[..., :rank], every[..., rank:]

    def _partials(self, name: str, heads: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.buffers.take(name, self.tokens, heads, width, dtype=self.dtype)
        return out, self.buffers.take(f"{name}_lse", self.tokens, heads, dtype=torch.float32)

    def _wire(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Send and receive buffer; the same each time, though the buffers may have grown."""
        if dtype not in self._wires:
            width = self.sent[0].shape[-1] + lse_columns(dtype)
            shape = self.world_size, self.tokens, self.own_heads, width
            send, receive = (
                self.buffers.take(name, *shape, dtype=dtype) for name in ("send", "receive")
            )
            self._wires[dtype] = send, receive
        return self._wires[dtype]

    @property
    def current_inputs(self) -> tuple[torch.Tensor, ...]:
        """What current attention reads."""
        return self.inputs.q_nope, self.inputs.q_pe, self.inputs.kv_c, self.inputs.k_pe

    @property
    def current_results(self) -> tuple[torch.Tensor, ...]:
        """What current attention writes."""
        return self.current

    @property
    def history_results(self) -> tuple[torch.Tensor, ...]:
        """What the exchange reads."""
        return self.sent

    @property
    def received_memory(self) -> tuple[torch.Tensor, ...]:
        """What the exchange of converted partials writes."""
        return (self._wire(torch.float32)[1],)

    def current_flops(self) -> int:
        """Work of current attention: two products for each pair of a token and one it sees."""
        pairs = sum(new * (new + 1) // 2 for _, new in self.inputs.batch.host_lens())
        dims = self.dims
        return 2 * pairs * self.own_heads * (dims.latent_width + dims.kv_lora_rank)

    def gather_queries(self) -> None:
        """All-gather the absorbed queries over the group, along the heads."""
        if self.group is None:
            return
        own = self._joined
        if own is None:
            rank, own = self.dims.kv_lora_rank, self._own
            own[..., :rank] = self.inputs.q_nope
            own[..., rank:] = self.inputs.q_pe
        gather_heads(own, self.group, buffers=self._gathered)

    def history_attention(self) -> None:
        """Partial attention of all heads over this rank's pages."""
        partial_attention(
            self.q_nope, self.q_pe, self.inputs.cache, self.inputs.batch,
            AttentionKind.HISTORY, self.dims, self.workspace, out=self.history,
        )  # fmt: skip

    def current_attention(self) -> None:
        """Partial attention of this rank's heads over this step's tokens."""
        self._attend_current(self.current)

    def _attend_current(self, out: tuple[torch.Tensor, torch.Tensor]) -> None:
        inputs = self.inputs
        partial_attention(
            inputs.q_nope, inputs.q_pe, (inputs.kv_c, inputs.k_pe), inputs.batch,
            AttentionKind.CURRENT, self.dims, self.workspace, out=out,
        )  # fmt: skip

    def exchange_history(self) -> None:
        """Pack in the native dtype and exchange; the merge is deferred."""
        wire = self._wire(self.dtype)
        self.received = exchange_partials(*self.sent, self.group, buffers=wire)

    def exchange_history_converted(self) -> None:
        """The exchange before the change: a float32 copy of everything, then pack and exchange."""
        wire = self._wire(torch.float32)
        out, lse = self.sent
        self.received = exchange_partials(out.float(), lse, self.group, buffers=wire)

    def merge(self) -> None:
        """Merge the received shards and the local pair, each read where it is."""
        merge_partials(*self.received, *self.current, out=self.merged)

    def project(self) -> None:
        """V-up, batch-major."""
        vup.v_up(self.merged[0], self.inputs.w_uv, out=self.output, workspace=self.workspace)

    def project_transposed(self) -> None:
        """V-up before the change: transpose, product, transpose."""
        vup.v_up_transposed(
            self.merged[0], self.inputs.w_uv, out=self.output, workspace=self.workspace
        )

    def store(self) -> None:
        """Keep the tokens of this step that this rank owns."""
        inputs = self.inputs
        inputs.cache.write(inputs.kv_c, inputs.k_pe, inputs.batch.slot_mapping)


class ProjectFirstStep(DecodeStep):
    """V-up is linear, so it may come before the exchange, which then carries V columns, not L.

    Each rank projects its HISTORY partials with the weights of all heads, so `inputs.w_uv` is
    the gathered `[N*H, L, V]`; the merge happens on `[T, H, V]`, straight into the output.
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
        width = dims.v_head_dim
        self.sent = self._partials("history_projected", self.all_heads, width)
        self.latent_current = self.current
        self.current = self._partials("current_projected", self.own_heads, width)
        self.merged = self.output.view(self.tokens, self.own_heads, width), self.merged[1]

    def history_attention(self) -> None:
        super().history_attention()
        self._project(self.history, self.inputs.w_uv, self.sent)

    def current_attention(self) -> None:
        self._attend_current(self.latent_current)
        first = 0 if self.group is None else self.group.rank() * self.own_heads
        own_weights = self.inputs.w_uv[first : first + self.own_heads]
        self._project(self.latent_current, own_weights, self.current)

    def project(self) -> None:
        """Nothing left to do: the merge wrote projected rows."""

    def project_transposed(self) -> None:
        """Nothing left to do: the merge wrote projected rows."""

    def _project(
        self,
        latent: tuple[torch.Tensor, torch.Tensor],
        w_uv: torch.Tensor,
        projected: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        vup.v_up(latent[0], w_uv, out=projected[0].flatten(1), workspace=self.workspace)
        projected[1].copy_(latent[1])
