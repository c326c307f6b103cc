"""A step's lengths in an engine's terms, as this rank sees them.

`decode_batch` makes them on the host, `localise` on the device; those of `FixedBatches` stay where
they are.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from anabranch.cache import DecodeBatch
from anabranch.geometry import ShardLayout
from anabranch.schedules import Schedule

if TYPE_CHECKING:
    from anabranch.vllm_plugin.decode import LatentDecoder, PreparedStep

MOST_BATCHES = 64  # a layer's step over one takes some kilobytes


@dataclass(frozen=True, eq=False)
class FixedBatch(DecodeBatch):
    """A batch whose tensors stay where they are, and what layers have prepared over it.

    `total_lens` `[B]` int32: length of each sequence on all ranks together, this step included.
    """

    total_lens: torch.Tensor
    most_tokens: int
    prepared: dict[tuple[LatentDecoder, Schedule], PreparedStep] = field(default_factory=dict)


class FixedBatches:
    """The batches of an engine on CPU, by size; the least recently used of many is forgotten.

    `most_tokens`: rows of the largest step, for which buffers are reserved.
    """

    def __init__(self, layout: ShardLayout, most_tokens: int) -> None:
        self._layout, self._most_tokens = layout, most_tokens
        self._batches: OrderedDict[tuple[int, ...], FixedBatch] = OrderedDict()

    def load(
        self, total_lens: torch.Tensor, query_start: torch.Tensor, block_table: torch.Tensor
    ) -> FixedBatch:
        """The batch of a step, arguments as `decode_batch`; the last of this size is overwritten.

        An engine's block table stays in place too: it is read where it is, not copied.
        """
        batch = decode_batch(self._layout, total_lens, query_start, block_table)
        key = batch.num_tokens, len(total_lens), block_table.data_ptr(), *block_table.stride()
        fixed = self._batches.get(key)
        if fixed is None:
            with torch.inference_mode(False):  # as `Buffers.take`
                lens = torch.empty(3, len(total_lens), dtype=torch.int32)
                slots = torch.full_like(batch.slot_mapping, -1)
            fixed = FixedBatch(
                seq_lens=lens[0],
                query_lens=lens[1],
                total_lens=lens[2],
                block_table=block_table,
                slot_mapping=slots,
                most_tokens=self._most_tokens,
            )
            self._batches[key] = fixed
            if len(self._batches) > MOST_BATCHES:
                self._batches.popitem(last=False)
        self._batches.move_to_end(key)
        fixed.seq_lens.copy_(batch.seq_lens)
        fixed.query_lens.copy_(batch.query_lens)
        fixed.total_lens.copy_(total_lens)
        return fixed


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


def localise(
    layout: ShardLayout,
    total_lens: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor,
) -> None:
    """The lengths of `decode_batch`, read and written where they are: the host waits for nothing.

    `seq_lens` and `query_lens` `[B]` int32 receive them. Sequences without tokens are padding.
    """
    torch.sub(query_start[1:], query_start[:-1], out=query_lens)
    past = total_lens - query_lens
    stripe = layout.interleave * layout.world_size
    own = past % stripe - layout.rank * layout.interleave
    torch.add(past // stripe * layout.interleave, own.clamp(0, layout.interleave), out=seq_lens)
