"""The cache `generate` carries from step to step: one paged latent cache per MLA layer.

Transformers counts columns of the left-padded batch; the latent caches hold tokens. `DCPCache`
translates: it answers in columns, allocates blocks in tokens, and plans each step once, at its
first MLA layer, for all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation.utils import ALL_CACHE_NAMES

from anabranch.cache import DecodeBatch, LatentCache
from anabranch.geometry import ShardLayout

CACHE_ARGUMENT: str = ALL_CACHE_NAMES[0]
"""What Transformers calls the cache: `cache`, and in older versions `past_key_values`."""

PositionEmbeddings = tuple[torch.Tensor, torch.Tensor] | torch.Tensor | None
"""What a model's rotary module returns: (cos, sin), complex frequencies, or nothing."""


def cos_sin(embeddings: PositionEmbeddings) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rotary module returned as two real tensors, empty ones for nothing."""
    if embeddings is None:
        return torch.empty(0), torch.empty(0)
    if isinstance(embeddings, torch.Tensor):
        return embeddings.real, embeddings.imag
    return embeddings


@dataclass
class Step:
    """One forward over columns `begin ... end` of the padded batch, shared by all its layers.

    `rows` `[T]` are the indices of the valid tokens in the flattened `[B * columns]`, or None
    where nothing is padding. `prefill` is true for a step of more than one column.
    """

    begin: int
    end: int
    batch: DecodeBatch
    rows: torch.Tensor | None
    _embeddings: PositionEmbeddings = None
    _angles: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def prefill(self) -> bool:
        return self.end - self.begin > 1

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """`[B, columns, ...]` (or `[1, columns, ...]`, shared by the batch) to `[T, ...]`."""
        size = self.batch.query_lens.shape[0]
        flat = padded.expand(size, *padded.shape[1:]).flatten(0, 1)
        return flat if self.rows is None else flat[self.rows]

    def angles(self, embeddings: PositionEmbeddings) -> tuple[torch.Tensor, torch.Tensor]:
        """`cos_sin` of `embeddings`, packed; once for all layers that share the embeddings."""
        if self._angles is None or self._embeddings is not embeddings:
            cos, sin = cos_sin(embeddings)
            if embeddings is not None:
                cos, sin = self.pack(cos), self.pack(sin)
            self._embeddings, self._angles = embeddings, (cos, sin)
        return self._angles

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """`[T, width]` to `[B, columns, width]`, zero in the padding."""
        size, columns = self.batch.query_lens.shape[0], self.end - self.begin
        if self.rows is not None:
            flat = packed.new_zeros(size * columns, packed.shape[-1])
            packed = flat.index_copy_(0, self.rows, packed)
        return packed.view(size, columns, -1)


class LatentLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One MLA layer's latent cache, as Transformers sees it."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, latents: LatentCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.latents = latents
        self.columns = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the latent cache is allocated before the first step."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise TypeError("this cache serves only attention that was replaced by anabranch")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "the sharded latent cache serves one run of greedy decoding or sampling: beam search "
            "and assisted decoding, which reorder or shorten it, are not supported"
        )

    reset = reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _refuse


class DCPCache(Cache):
    """The `cache` argument of a model whose MLA layers were replaced, for one batch.

    `latents` are the latent caches by layer index, all of one geometry; `others` is what
    Transformers itself keeps for the other layers of a hybrid model. Sequences take blocks as they
    grow. All ranks hold the same block tables; each stores the tokens it owns.
    """

    def __init__(
        self, layout: ShardLayout, latents: Mapping[int, LatentCache], others: Mapping[int, Any]
    ) -> None:
        layers = {**others, **{index: LatentLayer(cache) for index, cache in latents.items()}}
        super().__init__(layers=[layers[index] for index in range(len(layers))])
        self._layout = layout
        self._geometry = next(iter(latents.values()))
        self._used_blocks = 0
        self._tables: list[list[int]] = []
        self._lengths: list[int] = []
        self._step: Step | None = None

    def step_for(
        self, layer_index: int, size: int, columns: int, valid: torch.Tensor | None
    ) -> tuple[Step, LatentCache]:
        """The step that a layer is about to run over `[size, columns]`, and its latent cache.

        `valid` `[size, columns]` is false in the padding; None: no padding. The first layer to
        ask plans the step, the others get the same one.
        """
        layer: Any = self.layers[layer_index]
        step = self._step
        if step is None or layer.columns == step.end:
            step = self._step = self._plan(layer.columns, size, columns, valid)
        if (layer.columns, layer.columns + columns) != (step.begin, step.end):
            raise RuntimeError(
                f"layer {layer_index} runs columns {layer.columns} to {layer.columns + columns} "
                f"in a step over {step.begin} to {step.end}: layers must advance together"
            )
        layer.columns = step.end
        return step, layer.latents

    def _plan(self, begin: int, size: int, columns: int, valid: torch.Tensor | None) -> Step:
        if not self._tables:
            self._tables = [[] for _ in range(size)]
            self._lengths = [0] * size
        elif len(self._tables) != size:
            raise ValueError(f"the cache holds {len(self._tables)} sequences, got {size}")
        if valid is not None and valid.shape != (size, columns):
            raise ValueError(
                f"attention_mask must be the padding of the batch, [batch, columns], got a mask "
                f"that gives {list(valid.shape)} for {size} sequences of {columns} columns"
            )
        counts = [columns] * size if valid is None else valid.sum(1).tolist()
        rows = None
        if valid is not None and sum(counts) < size * columns:
            rows = valid.flatten().nonzero().squeeze(1)
        lengths = [past + new for past, new in zip(self._lengths, counts, strict=True)]
        for table, length in zip(self._tables, lengths, strict=True):
            self._grow(table, length)
        batch = self._layout.plan_batch(
            self._lengths,
            counts,
            self._tables,
            self._geometry.block_size,
            device=self._geometry.latent.device,
        )
        self._lengths = lengths
        return Step(begin, begin + columns, batch, rows)

    def _grow(self, table: list[int], length: int) -> None:
        """Append blocks to a sequence's `table` until it holds `length` tokens."""
        missing = self._layout.blocks_needed(length, self._geometry.block_size) - len(table)
        free = self._geometry.num_blocks - self._used_blocks
        if missing > free:
            raise ValueError(
                f"the latent cache is full: a sequence of {length} tokens needs {missing} more "
                f"blocks, {free} of {self._geometry.num_blocks} are free"
            )
        table.extend(range(self._used_blocks, self._used_blocks + missing))
        self._used_blocks += missing
