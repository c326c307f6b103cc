"""Partial attention on Ascend NPU: `npu_fused_infer_attention_score_v2` of torch_npu, "FIA" here.

What FIA takes at these widths is in the documentation of the torch_npu wheel, and the limits below
are its. It reads lengths on the host and wants pages. One token of a sequence attends without a
mask (sparse_mode 0); several attend through the causal one (sparse_mode 3), which fits CURRENT and
never HISTORY, where every row sees every key. So HISTORY goes as sequences of one token: the
tokens of a sequence become further heads of it, which is a view, or where those are too many each
token becomes a sequence with the same row of the block table.

CURRENT has no pages. Its keys are laid on scratch pages, which lie in the workspace before FIA's
own part.

The source of this design calls FIA in two ways that are not documented: HISTORY of several tokens
without a mask, and CURRENT without pages. vllm-ascend, which has them, pins CANN 9.1: from that
version on they are used here.

Floor of one decode step: that of `anabranch.attention.cuda`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import groupby
from typing import Any

import torch

from anabranch import streams
from anabranch.attention import reference
from anabranch.cache import DecodeBatch, LatentCache
from anabranch.geometry import MLADims

RANK, ROPE = 512, 64
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
BLOCK_SIZES = (16, 128)
DTYPES = (torch.bfloat16, torch.float16)
MOST_QUERIES = 16  # tokens of one sequence under the causal mask
MOST_SEQUENCES = 65536
MOST_KEYS = 262144  # of one sequence
MOST_CACHE = 2**31 - 1  # elements of the latent pages
MASK = 2048
PAGE = 128  # tokens of a scratch page
ALIGNMENT = 512  # of FIA's part of the workspace
SOURCE_CANN = (9, 1)


def missing() -> str | None:
    """Why no NPU can be served here, or None."""
    try:
        with redirect_stdout(sys.stderr):  # it prints its warnings
            import_module("torch_npu")
    except ModuleNotFoundError as error:
        if error.name == "torch_npu":
            return "torch_npu: not installed"
        return f"torch_npu: cannot be imported: {error}"
    except (ImportError, RuntimeError, OSError) as error:  # libraries of CANN, mostly
        return f"torch_npu: cannot be imported: {error}"
    if not hasattr(torch.ops.npu, "npu_fused_infer_attention_score_v2"):
        return "torch_npu: this version has no npu_fused_infer_attention_score_v2"
    return None


@cache
def cann_version() -> str:
    """The version of CANN, as torch_npu tells it; empty where it is not installed."""
    return str(import_module("torch_npu.npu.utils").get_cann_version())


def as_the_source(version: str) -> bool:
    """Whether FIA of CANN `version` is called in the source's two undocumented ways."""
    numbers = version.split(".")[:2]
    return all(map(str.isdigit, numbers)) and tuple(map(int, numbers)) >= SOURCE_CANN


@dataclass(frozen=True)
class Call:
    """One call of FIA, less its lengths. Layout BNSD with one token a sequence, or TND.

    `query` and `rope` are `[rows, heads, 1, .]` or `[rows, heads, .]`, `each` rows a sequence; the
    keys are pages `[blocks, 1, block, .]` with a `table` `[sequences, blocks]`, or `[rows, 1, .]`
    without.
    """

    layout: str
    query: torch.Tensor
    rope: torch.Tensor
    latent: torch.Tensor
    key_rope: torch.Tensor
    table: torch.Tensor | None
    each: int = 1
    causal: bool = False

    @property
    def ends(self) -> list[int]:
        """The rows up to the last of each sequence."""
        return list(range(self.each, self.query.shape[0] + 1, self.each))

    def arguments(self, scale: float, key_lens: Sequence[int]) -> dict[str, Any]:
        """Keywords of FIA. Raises ValueError for a length that it does not take."""
        if max(key_lens) > MOST_KEYS:  # where a replay has longer ones than the capture
            raise ValueError(f"batch.seq_lens must be at most {MOST_KEYS}, got {max(key_lens)}")
        keywords: dict[str, Any] = {
            "query": self.query, "key": self.latent, "value": self.latent,
            "query_rope": self.rope, "key_rope": self.key_rope, "actual_seq_kvlen": key_lens,
            "num_query_heads": self.query.shape[1], "num_key_value_heads": 1,
            "softmax_scale": scale, "input_layout": self.layout,
            "sparse_mode": 3 if self.causal else 0, "return_softmax_lse": True,
        }  # fmt: skip
        if self.layout == "TND":
            keywords["actual_seq_qlen"] = self.ends
        if self.causal:
            keywords["atten_mask"] = _causal_mask(self.query.device)
        if self.table is not None:
            keywords |= {"block_table": self.table, "block_size": self.latent.shape[2]}
        return keywords

    def bytes_needed(self) -> int:
        """FIA's workspace for lengths as long as the shapes allow. Asked once for each shape."""
        table = None if self.table is None else self.table.shape
        query, latent = self.query, self.latent
        key = query.shape, latent.shape, table, self.each, self.causal, query.dtype, query.device
        if key not in _asked:
            longest = self.ends
            if self.table is not None:
                room = self.table.shape[1] * latent.shape[2]
                longest = [min(room, MOST_KEYS)] * self.table.shape[0]
            operator = torch.ops.npu._npu_fused_infer_attention_score_v2_get_max_workspace
            _asked[key] = operator(**self.arguments(1.0, longest)).nbytes
        return _asked[key]


_asked: dict[tuple[Any, ...], int] = {}
_largest: dict[tuple[Any, ...], int] = {}


def history(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cache: LatentCache,
    batch: DecodeBatch,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor | None,
) -> None:
    """HISTORY. Block ids are read on the device: one outside the cache is not detected."""
    heads, rank = q_nope.shape[1:]
    reason = refusal(heads, rank, q_pe.shape[2], q_nope.dtype, batch, cache)
    if reason is not None:
        _tell(reason)
        reference.history(q_nope, q_pe, cache, batch, scale, out, lse, workspace)
        return
    each = tokens_each(batch)

    def keys() -> list[int]:
        return _by_row(batch, each, lambda length, queries: [length] * queries)

    if _nothing_to_see(keys(), out, lse):
        return
    latent, rope, table = cache.latent, cache.rope, batch.block_table
    shared = 1  # rows that go under one length
    if each and each * heads in HEADS:
        call, shared = _one_token_each(q_nope, q_pe, latent, rope, table, each), each
    elif each and as_the_source(cann_version()):
        call, shared = _several_tokens(q_nope, q_pe, latent, rope, table, each, False), each
    elif each:
        call = _one_token_each(q_nope, q_pe, latent, rope, table.repeat_interleave(each, 0))
    else:
        owners = streams.host_fed(lambda: _owners(batch), q_nope.device)
        call = _one_token_each(q_nope, q_pe, latent, rope, table.index_select(0, owners))
    _launch(call, scale, lambda: keys()[::shared], out, lse, batch, workspace)
    _mark_empty(keys(), out, lse)


def current(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    batch: DecodeBatch,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: torch.Tensor | None,
) -> None:
    """CURRENT."""
    heads, rank = q_nope.shape[1:]
    reason = refusal(heads, rank, q_pe.shape[2], q_nope.dtype, batch)
    if reason is not None:
        _tell(reason)
        reference.current(q_nope, q_pe, kv_c, k_pe, batch, scale, out, lse, workspace)
        return
    each = tokens_each(batch)

    def keys() -> list[int]:
        return _by_row(batch, each, lambda _, queries: range(1, queries + 1))

    if _nothing_to_see(keys(), out, lse):
        return
    # Without pages no row can be left out, as a replay may want to: a graph has the pages.
    dense = each and all(keys()) and not streams.capturing() and as_the_source(cann_version())
    if dense:
        call = _several_tokens(q_nope, q_pe, kv_c.contiguous(), k_pe.contiguous(), None, each)
        _launch(call, scale, lambda: call.ends, out, lse, batch, workspace)
        return
    latent, rope = _scratch_pages(q_nope, batch, workspace)
    if each:
        sequences = batch.num_tokens // each
        for pages, tokens in ((latent, kv_c), (rope, k_pe)):
            pages[:sequences, :each].copy_(tokens.view(sequences, each, -1))
        table = _own_page(sequences, q_nope.device)
    else:
        slots = streams.host_fed(lambda: _scratch_slots(batch)[0], q_nope.device)
        table = streams.host_fed(lambda: _scratch_slots(batch)[1], q_nope.device)
        for pages, tokens in ((latent, kv_c), (rope, k_pe)):
            pages.flatten(0, 1).index_copy_(0, slots, tokens)
    if each > 1:
        call = _several_tokens(q_nope, q_pe, latent, rope, table, each)
        _launch(call, scale, lambda: keys()[each - 1 :: each], out, lse, batch, workspace)
    else:
        call = _one_token_each(q_nope, q_pe, latent, rope, table)
        _launch(call, scale, keys, out, lse, batch, workspace)
    _mark_empty(keys(), out, lse)


def workspace_bytes(
    num_heads: int,
    dims: MLADims,
    cache: LatentCache | None = None,
    batch: DecodeBatch | None = None,
) -> int:
    """Scratch of a step, HISTORY with `num_heads` and CURRENT with `dims.num_heads`, in bytes.

    The scratch pages and the largest that FIA asks for among the calls a step of these shapes
    may make. It depends on the step: without one it is 0.
    """
    if cache is None or batch is None:
        return 0
    rank, rope = dims.kv_lora_rank, dims.qk_rope_head_dim
    latent, own = cache.latent, dims.num_heads
    taken = (
        refusal(num_heads, rank, rope, latent.dtype, batch, cache) is None,
        refusal(own, rank, rope, latent.dtype, batch) is None,
    )
    sizes = batch.num_tokens, batch.block_table.shape, latent.shape
    key = num_heads, own, taken, sizes, latent.dtype, latent.device
    if key not in _largest:
        calls: list[Call] = []
        if taken[0] and batch.num_tokens:
            calls += _history_calls(num_heads, cache, batch)
        if taken[1] and batch.num_tokens:
            calls += _current_calls(own, cache, batch)
        most = max((call.bytes_needed() for call in calls), default=0)
        _largest[key] = _page_bytes(batch, latent.dtype) + most if calls else 0
    return _largest[key]


def tokens_each(batch: DecodeBatch) -> int:
    """How many tokens every sequence has, where that is the same for all and FIA takes it, else 0.

    Row t is then token `t % n` of sequence `t // n`. With one each, the last sequences may have
    none: their rows are padding.
    """
    lens = batch.query_lens.tolist()
    _, each = _shared_out(batch)
    same = all(queries == each for queries in lens)
    ones_first = each == 1 and max(lens) <= 1 and lens == sorted(lens, reverse=True)
    return each if ones_first or (same and each <= MOST_QUERIES) else 0


def refusal(
    heads: int,
    rank: int,
    rope: int,
    dtype: torch.dtype,
    batch: DecodeBatch,
    cache: LatentCache | None = None,
) -> str | None:
    """Why FIA does not take these sizes, naming the argument, or None. `cache` for HISTORY.

    Raises ValueError for lengths that are not on the host.
    """
    for name in ("seq_lens", "query_lens"):
        device = getattr(batch, name).device
        if device.type != "cpu":
            raise ValueError(
                f"batch.{name} must be on the CPU, where the NPU's operator reads it, got {device}"
            )
    limits = {
        "dtype": (dtype in DTYPES, "bfloat16 or float16", dtype),
        "kv_lora_rank": (rank == RANK, RANK, rank),
        "qk_rope_head_dim": (rope == ROPE, ROPE, rope),
        "heads": (heads in HEADS, "a power of two up to 128", heads),
        "tokens": (
            batch.num_tokens <= MOST_SEQUENCES,
            f"at most {MOST_SEQUENCES}",
            batch.num_tokens,
        ),
    }
    if cache is not None:
        latent, longest = cache.latent, max(batch.seq_lens.tolist(), default=0)
        apart = latent.is_contiguous() and cache.rope.is_contiguous()
        limits |= {
            "cache dtype": (latent.dtype == dtype, f"that of the query, {dtype}", latent.dtype),
            "block_size": (cache.block_size in BLOCK_SIZES, "16 or 128", cache.block_size),
            "cache": (apart, "two contiguous buffers", "views of one"),
            "cache size": (latent.numel() <= MOST_CACHE, f"at most {MOST_CACHE}", latent.numel()),
            "seq_lens": (longest <= MOST_KEYS, f"at most {MOST_KEYS}", longest),
        }
    for name, (met, allowed, got) in limits.items():
        if not met:
            return f"{name} must be {allowed}, got {got}"
    return None


def _tell(reason: str) -> None:
    """Plain PyTorch serves what FIA does not take: slowly, and not in a graph."""
    if streams.capturing():
        raise ValueError(f"{reason}: only the NPU's own attention operator can be captured")
    warnings.warn(f"plain PyTorch serves attention on this NPU: {reason}", stacklevel=3)


def _by_row(batch: DecodeBatch, each: int, keys: Callable[[int, int], Sequence[int]]) -> list[int]:
    """Keys of every row from `keys(history, queries)` of its sequence; 0 for padding.

    Raises ValueError where the lengths have lost the form that a graph was captured with.
    """
    if each and tokens_each(batch) != each:
        raise ValueError(
            f"batch.query_lens must be {each} for every sequence, as captured, "
            f"got {batch.query_lens.tolist()}"
        )
    rows = [count for lens in batch.host_lens() for count in keys(*lens)]
    return rows + [0] * (batch.num_tokens - len(rows))


def _nothing_to_see(keys: Sequence[int], out: torch.Tensor, lse: torch.Tensor) -> bool:
    """Whether no row has a key; if so, says it in the results. A graph must launch all the same."""
    if any(keys) or streams.capturing():
        return False
    _mark_empty(keys, out, lse)
    return True


def _mark_empty(keys: Sequence[int], out: torch.Tensor, lse: torch.Tensor) -> None:
    """Output 0 and LSE -inf for rows without keys, whatever FIA left there.

    Not in a graph, where other rows may be empty at each replay: the merge takes any mark.
    """
    if streams.capturing():
        return
    row = 0
    for empty, run in groupby(count == 0 for count in keys):
        first, row = row, row + len(list(run))
        if empty:
            out[first:row].zero_()
            lse[first:row].fill_(-torch.inf)


def _owners(batch: DecodeBatch) -> torch.Tensor:
    """The sequence of each row, `[T]`; 0 for padding."""
    queries = batch.query_lens.long()
    owners = torch.arange(len(queries)).repeat_interleave(queries)
    return torch.nn.functional.pad(owners, (0, batch.num_tokens - len(owners)))


def _page_count(batch: DecodeBatch) -> int:
    """Scratch pages that hold any `T` tokens of `B` sequences, and one more for padding rows."""
    return batch.query_lens.shape[0] + batch.num_tokens // PAGE + 1


def _page_bytes(batch: DecodeBatch, dtype: torch.dtype) -> int:
    size = _page_count(batch) * PAGE * (RANK + ROPE) * dtype.itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT


def _scratch_slots(batch: DecodeBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The scratch slot of each row `[T]`, and the pages of its sequence `[T, .]`."""
    tokens, columns = batch.num_tokens, -(-batch.num_tokens // PAGE)
    slots = torch.full((tokens,), (_page_count(batch) - 1) * PAGE)
    table = torch.zeros(tokens, columns, dtype=torch.int32)
    row = page = 0
    for queries in batch.query_lens.tolist():
        slots[row : row + queries] = page * PAGE + torch.arange(queries)
        pages = -(-queries // PAGE)
        table[row : row + queries, :pages] = torch.arange(page, page + pages, dtype=torch.int32)
        row, page = row + queries, page + pages
    return slots, table


def _scratch_pages(
    like: torch.Tensor, batch: DecodeBatch, workspace: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages `[pages, PAGE, L]` and `[pages, PAGE, R]` at the start of the workspace."""
    size, pages = _page_bytes(batch, like.dtype), _page_count(batch)
    if workspace is None:
        workspace = torch.empty(size, dtype=torch.uint8, device=like.device)
    elif workspace.numel() < size:
        raise ValueError(f"workspace must hold {size} bytes and more, got {workspace.numel()}")
    flat = workspace[: pages * PAGE * (RANK + ROPE) * like.itemsize].view(like.dtype)
    latent, rope = flat[: pages * PAGE * RANK], flat[pages * PAGE * RANK :]
    return latent.view(pages, PAGE, RANK), rope.view(pages, PAGE, ROPE)


@cache
def _own_page(sequences: int, device: torch.device) -> torch.Tensor:
    """The block table `[B, 1]` of sequences that have one page each."""
    return torch.arange(sequences, dtype=torch.int32, device=device).unsqueeze(1)


@cache
def _causal_mask(device: torch.device) -> torch.Tensor:
    """What sparse_mode 3 wants, whatever the lengths: true where a key is not seen."""
    return torch.ones(MASK, MASK, dtype=torch.bool, device=device).triu(1)


def _one_token_each(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    table: torch.Tensor,
    fold: int = 1,
) -> Call:
    """Each row, or `fold` rows with their heads in one, as a sequence of a single token."""
    tokens, heads = q_nope.shape[:2]
    query, query_rope = (
        part.contiguous().view(tokens // fold, fold * heads, 1, -1) for part in (q_nope, q_pe)
    )
    table = table.contiguous()
    return Call("BNSD", query, query_rope, latent.unsqueeze(1), rope.unsqueeze(1), table)


def _several_tokens(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    table: torch.Tensor | None,
    each: int,
    causal: bool = True,
) -> Call:
    """Sequences of `each` rows, which see the keys up to their own, or all of them."""
    query, query_rope = q_nope.contiguous(), q_pe.contiguous()
    pages = latent.unsqueeze(1), rope.unsqueeze(1)
    table = None if table is None else table.contiguous()
    return Call("TND", query, query_rope, *pages, table, each, causal)


def _launch(
    call: Call,
    scale: float,
    key_lens: Callable[[], list[int]],
    out: torch.Tensor,
    lse: torch.Tensor,
    batch: DecodeBatch,
    workspace: torch.Tensor | None,
) -> None:
    """FIA into `out` and `lse`, which are views of its results: both have their rows in order."""
    needed, taken = call.bytes_needed(), _page_bytes(batch, out.dtype)
    if workspace is None:
        scratch = torch.empty(needed, dtype=torch.uint8, device=out.device)
    elif workspace.numel() < taken + needed:
        raise ValueError(f"workspace must hold {taken + needed} bytes, got {workspace.numel()}")
    else:
        scratch = workspace[taken : taken + needed]
    log_shape = call.query.shape[:2] + (1,) * (call.query.dim() - 2)
    results = {
        "workspace": scratch.view(out.dtype),
        "out": [out.view(call.query.shape), lse.view(log_shape)],
    }
    streams.updatable(
        torch.ops.npu.npu_fused_infer_attention_score_v2.out,
        lambda: call.arguments(scale, key_lens()) | results,
    )


def _history_calls(heads: int, cache: LatentCache, batch: DecodeBatch) -> Iterator[Call]:
    """Every form that `history` gives to FIA for a step of these shapes."""
    query = _empty_query(heads, cache, batch)
    pages, width = (cache.latent, cache.rope), batch.block_table.shape[1]
    yield _one_token_each(*query, *pages, _empty_table(cache, batch.num_tokens, width))
    sequences, each = _shared_out(batch)
    if each * heads in HEADS:
        yield _one_token_each(*query, *pages, _empty_table(cache, sequences, width), each)
    if 1 < each <= MOST_QUERIES and as_the_source(cann_version()):
        yield _several_tokens(*query, *pages, _empty_table(cache, sequences, width), each, False)


def _current_calls(heads: int, cache: LatentCache, batch: DecodeBatch) -> Iterator[Call]:
    """Every form that `current` gives to FIA for a step of these shapes."""
    query, tokens = _empty_query(heads, cache, batch), batch.num_tokens
    like, count = cache.latent, _page_count(batch)
    pages = like.new_empty(count, PAGE, RANK), like.new_empty(count, PAGE, ROPE)
    yield _one_token_each(*query, *pages, _empty_table(cache, tokens, -(-tokens // PAGE)))
    sequences, each = _shared_out(batch)
    if 1 < each <= MOST_QUERIES:
        yield _several_tokens(*query, *pages, _empty_table(cache, sequences, 1), each)
    if 1 <= each <= MOST_QUERIES and as_the_source(cann_version()):
        keys = like.new_empty(tokens, RANK), like.new_empty(tokens, ROPE)
        yield _several_tokens(*query, *keys, None, each)


def _shared_out(batch: DecodeBatch) -> tuple[int, int]:
    """Sequences, and the tokens of each if all have the same, else 0."""
    sequences = batch.query_lens.shape[0]
    if not sequences or batch.num_tokens % sequences:
        return sequences, 0
    return sequences, batch.num_tokens // sequences


def _empty_query(
    heads: int, cache: LatentCache, batch: DecodeBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    like, tokens = cache.latent, batch.num_tokens
    return like.new_empty(tokens, heads, RANK), like.new_empty(tokens, heads, ROPE)


def _empty_table(cache: LatentCache, sequences: int, blocks: int) -> torch.Tensor:
    return torch.empty(sequences, blocks, dtype=torch.int32, device=cache.latent.device)
