"""HISTORY by the kernels of another library: what such a peer takes, and one call of it.

A peer attends with one token of each sequence, so every token of a step goes to it as a sequence
of its own. That is right for any lengths, for several tokens of a sequence, which all see the
same keys, and for padding rows; it needs nothing on the host but shapes, so that a graph may hold
it. The price is that the keys of a sequence are read once for each of its tokens. From 64 heads
on the products hide that, as a tile of 64 rows has no room for another token; with fewer heads a
step of several tokens is left to Triton.

Peers differ in what they leave in a row that has no keys, one of them NaN, and not every version
says so. None is ever given such a row: it reads one key of page 0, and the result is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from anabranch import streams
from anabranch.cache import DecodeBatch, LatentCache, joined

RANK, ROPE = 512, 64  # what the peers know of L and R
SHARING_HEADS = 64  # fewer heads than these share a tile among the tokens of a sequence


@dataclass(frozen=True)
class Shape:
    """What decides which kernel serves HISTORY: all of it is known on the host.

    `capability` is `(major, minor)` of the chip; `heads` are those that attend.
    """

    capability: tuple[int, int]
    heads: int
    rank: int
    rope: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    block_size: int
    tokens: int
    sequences: int

    @classmethod
    def of(
        cls,
        capability: tuple[int, int],
        heads: int,
        widths: tuple[int, int],
        dtype: torch.dtype,
        cache: LatentCache,
        batch: DecodeBatch,
    ) -> Shape:
        """Of a step whose queries are of `dtype` and `widths` `(L, R)`."""
        return cls(
            capability, heads, *widths, dtype, cache.latent.dtype, cache.block_size,
            batch.num_tokens, batch.seq_lens.shape[0],
        )  # fmt: skip


@dataclass(frozen=True)
class Peer:
    """A library and the calls of it that are used.

    - `missing` says why it cannot be used on this machine, or None.
    - `attend(query, pages, table, lengths, scale, out, lse, workspace)`: one token a sequence,
      `query` `[T, heads, L + R]`, `pages` `[num_blocks, block_size, L + R]`, `table`
      `[T, max_blocks]` and `lengths` `[T]` int32, of which none is 0. Returns output and LSE, in
      `out` `[T, heads, L]` and `lse` `[T, heads]` or in memory of its own; whatever it allocates is
      of the current stream, and is used there alone.
    - `lse_unit`: the natural logarithm of the base of its LSE.
    - `workspace_bytes(shape)`: what `attend` wants in `workspace`.
    """

    name: str
    capabilities: tuple[tuple[int, int], ...]
    dtypes: tuple[torch.dtype, ...]
    block_sizes: tuple[int, ...]
    heads: Callable[[int], bool]
    most_tokens: int
    lse_unit: float
    missing: Callable[[], str | None]
    workspace_bytes: Callable[[Shape], int]
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]]

    def takes(self, shape: Shape) -> bool:
        """Whether it serves HISTORY of this shape, if it is there."""
        return (
            shape.capability in self.capabilities
            and (shape.rank, shape.rope) == (RANK, ROPE)
            and shape.dtype in self.dtypes
            and shape.cache_dtype == shape.dtype
            and shape.block_size in self.block_sizes
            and self.heads(shape.heads)
            and 0 < shape.tokens <= self.most_tokens
            and (shape.tokens <= shape.sequences or shape.heads >= SHARING_HEADS)
        )


def history(
    peer: Peer,
    shape: Shape,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    pages: torch.Tensor,
    batch: DecodeBatch,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor | None,
) -> None:
    """HISTORY by `peer`, which takes `shape`. Arguments of a provider, with `pages` joined."""
    from anabranch.triton_kernels import by_token

    query = joined(q_nope, q_pe)
    if query is None or not query.is_contiguous():
        query = torch.cat([q_nope, q_pe], -1)
    table = batch.block_table.new_empty(shape.tokens, batch.block_table.shape[1])
    lengths = table.new_empty(shape.tokens)
    by_token.spread_launch(batch, shape.block_size, table, lengths).run()
    needed = peer.workspace_bytes(shape)
    if workspace is None or workspace.numel() < needed:
        workspace = query.new_empty(needed, dtype=torch.uint8)
    scratch = workspace[:needed]
    given = streams.launch(
        peer.name,
        lambda: peer.attend(query, pages, table, lengths, scale, out, lse, scratch),
        reads=(query, pages, table, lengths),
        writes=(out, lse, scratch),
    )
    by_token.settle_launch(*given, batch, peer.lse_unit, out, lse).run()


def joined_pages(cache: LatentCache) -> torch.Tensor | None:
    """The pages `[num_blocks, block_size, L + R]` as a peer reads them, or None if they are not so.

    Whole pages in dense memory, each at an address that the loads of 16 bytes can take.
    """
    pages = joined(cache.latent, cache.rope)
    if pages is None or not pages.numel() or not pages.is_contiguous() or pages.data_ptr() % 16:
        return None
    return pages
