"""Split-KV attention over one part of the keys, in two stages.

Stage 1 (`attend`). The work on one sequence is a grid of row tiles by key blocks. A row is a
(token, head) pair: all rows of a sequence share its keys, so several tokens or many heads fill a
tile alike. Row tiles are dealt to lanes in turn; the (sequence, tile, block) units of a lane form
one line, which the lane's programs cut into equal shares. Shares are found from the lengths on
the device, so nothing waits for the host and a captured launch stays right when lengths change.
Programs of different lanes walk the same keys side by side, which then come from the L2 cache.

A program that covers all blocks of a tile writes the result; else it leaves FP32 partials in
scratch: at most two, for only the first and the last tile of its share can be incomplete.

Stage 2 (`reduce`) merges the partials of each row that was cut, and fills rows without keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _lengths(query_lens, key_lens, batch, BATCH: tl.constexpr):
    """Query and key counts of all sequences, `[BATCH]`, 0 beyond `batch`."""
    index = tl.arange(0, BATCH)
    queries = tl.load(query_lens + index, mask=index < batch, other=0)
    keys = tl.load(key_lens + index, mask=index < batch, other=0)
    return index, queries, keys


@triton.jit
def _units(queries, keys, heads, lane, lanes, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Key blocks of each sequence, and units of work that the lane has on it."""
    tiles = tl.cdiv(queries * heads, ROWS)
    blocks = tl.cdiv(keys, KEYS)
    return blocks, (tiles - lane + lanes - 1) // lanes * blocks


@triton.jit
def _pick(values, index, which):
    """`values[which]` of a vector in registers."""
    return tl.sum(tl.where(index == which, values, 0), 0)


@triton.jit
def _before(values, index, which):
    """Sum of `values[:which]`."""
    return tl.sum(tl.where(index < which, values, 0), 0)


@triton.jit
def _values(stored, dtype: tl.constexpr):
    """Stored keys in the dtype of the query.

    Bytes are FP8 e4m3 for a target whose compiler has no such type: an FP16 with the same bits
    in its low exponent is 2^-8 times the value, subnormals included.
    """
    if stored.dtype == tl.uint8:
        bits = stored.to(tl.uint16)
        shifted = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        number = shifted.to(tl.float32) * 256
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), number).to(dtype)
    return stored.to(dtype)


@triton.jit
def _page(pages, block, num_keys, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """The pages of a block's keys: one where it holds all of them, else one for each."""
    key = block * KEYS
    if BLOCK_SIZE % KEYS != 0:
        key += tl.arange(0, KEYS)
    return tl.load(pages + key // BLOCK_SIZE, mask=key < num_keys, other=0)


@triton.jit
def _entry(block, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """The entries of a block's keys in their pages, with as little division as there can be."""
    if KEYS % BLOCK_SIZE == 0:
        return tl.arange(0, KEYS) % BLOCK_SIZE
    elif BLOCK_SIZE % KEYS == 0:
        return block % (BLOCK_SIZE // KEYS) * KEYS + tl.arange(0, KEYS)
    else:
        return (block * KEYS + tl.arange(0, KEYS)) % BLOCK_SIZE


@triton.jit
def _at(page, entry, block, ENTRY: tl.constexpr, BLOCK_ENTRIES: tl.constexpr):
    """Offsets of keys. BLOCK_ENTRIES: the distance of pages in entries, 0 if that is not whole.

    Numbers of entries fit in 32 bits: half the registers, up to the last multiplication.
    """
    if BLOCK_ENTRIES > 0:
        return (page * BLOCK_ENTRIES + entry).to(tl.int64) * ENTRY
    else:
        return page.to(tl.int64) * block + entry * ENTRY


@triton.jit
def attend(
    q_nope, q_pe, latent, rope, table, query_lens, key_lens, out, lse, partial_out, partial_lse,
    q_nope_token, q_nope_head, q_pe_token, q_pe_head,
    latent_block, rope_block, table_row, batch, heads, scale, cache_scale,
    PAGED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    LATENT_ENTRY: tl.constexpr, ROPE_ENTRY: tl.constexpr, BLOCK_ENTRIES: tl.constexpr,
    RANK: tl.constexpr, ROPE: tl.constexpr, RANK_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BATCH: tl.constexpr, PRECISION: tl.constexpr,
    ASYNC_DOT: tl.constexpr,
):  # fmt: skip
    """Grid `(lanes, shares)`. PAGED: every row sees all keys; else row t sees keys 0 to t."""
    lane, lanes = tl.program_id(0), tl.num_programs(0)
    part, parts = tl.program_id(1), tl.num_programs(1)
    index, queries, keys = _lengths(query_lens, key_lens, batch, BATCH)
    _, units = _units(queries, keys, heads, lane, lanes, ROWS, KEYS)
    total_units = tl.sum(units, 0)
    share = tl.cdiv(total_units, parts)
    first = part * share
    stop = tl.minimum(first + share, total_units)
    # From here on sequences are walked one by one, in scalars: what the compiler would carry
    # past the loop over keys from sums over all sequences is more than it has registers for.
    b = tl.sum((tl.cumsum(units, 0) <= first).to(tl.int32), 0)
    before = _before(units, index, b)
    first_token = _before(queries, index, b)
    columns = tl.arange(0, RANK_BLOCK)
    rope_columns = tl.arange(0, ROPE_BLOCK)
    in_rank = columns < RANK
    in_rope = rope_columns < ROPE
    dtype = q_nope.dtype.element_ty
    log2_scale = scale * cache_scale * LOG2_E  # scores in units of log 2, for exp2

    unit = first
    while tl.condition(unit < stop, disable_licm=True):
        num_queries, num_keys = tl.load(query_lens + b), tl.load(key_lens + b)
        num_rows = num_queries * heads
        count, own = _units(num_queries, num_keys, heads, lane, lanes, ROWS, KEYS)
        if unit >= before + own:
            before += own
            first_token += num_queries
            b += 1
        else:
            done = unit - before
            start = done % count
            first_row = (done // count * lanes + lane) * ROWS
            next_unit = tl.minimum(stop, unit - start + count)
            end = start + next_unit - unit

            at = tl.arange(0, ROWS)
            query = (first_row + at) // heads
            valid = first_row + at < num_rows
            token = (first_token + query).to(tl.int64)
            head = (first_row + at) % heads
            q = tl.load(
                q_nope + (token * q_nope_token + head * q_nope_head)[:, None] + columns,
                mask=valid[:, None] & in_rank, other=0.0,
            )  # fmt: skip
            if ROPE > 0:
                q_rope = tl.load(
                    q_pe + (token * q_pe_token + head * q_pe_head)[:, None] + rope_columns,
                    mask=valid[:, None] & in_rope, other=0.0,
                )  # fmt: skip
            visible = end
            if not PAGED:  # blocks in the future of all rows of the tile
                visible = tl.minimum(end, tl.cdiv(tl.max(query, 0) + 1, KEYS))

            peak = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, RANK_BLOCK], tl.float32)
            pages = table + b.to(tl.int64) * table_row
            if PAGED:
                page = _page(pages, start, num_keys, BLOCK_SIZE, KEYS)
            for block in tl.range(start, visible, disable_licm=ASYNC_DOT):
                key = block * KEYS + tl.arange(0, KEYS)
                exists = key < num_keys
                if PAGED:
                    entry = _entry(block, BLOCK_SIZE, KEYS)
                    latent_at = _at(page, entry, latent_block, LATENT_ENTRY, BLOCK_ENTRIES)
                    rope_at = _at(page, entry, rope_block, ROPE_ENTRY, BLOCK_ENTRIES)
                    # One block ahead: the keys wait for no table.
                    page = _page(pages, block + 1, num_keys, BLOCK_SIZE, KEYS)
                else:
                    latent_at = (first_token + key).to(tl.int64) * LATENT_ENTRY
                    rope_at = (first_token + key).to(tl.int64) * ROPE_ENTRY
                k = tl.load(
                    latent + latent_at[:, None] + columns,
                    mask=exists[:, None] & in_rank, other=0.0,
                )  # fmt: skip
                k = _values(k, dtype)
                scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                if ROPE > 0:
                    k_rope = tl.load(
                        rope + rope_at[:, None] + rope_columns,
                        mask=exists[:, None] & in_rope, other=0.0,
                    )  # fmt: skip
                    k_rope = _values(k_rope, dtype)
                    scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision=PRECISION)
                seen = exists[None, :]
                if not PAGED:
                    seen = seen & (key[None, :] <= query[:, None])
                scores = tl.where(seen, scores * log2_scale, float("-inf"))
                higher = tl.maximum(peak, tl.max(scores, 1))
                shift = tl.where(higher == float("-inf"), 0.0, higher)  # no key seen yet
                weights = tl.exp2(scores - shift[:, None])
                decay = tl.exp2(peak - shift)
                total = total * decay + tl.sum(weights, 1)
                acc = acc * decay[:, None]
                acc = tl.dot(weights.to(dtype), k, acc, input_precision=PRECISION)
                peak = higher

            empty = total == 0
            acc = acc * (cache_scale / tl.where(empty, 1.0, total))[:, None]
            natural = tl.where(empty, float("-inf"), (peak + tl.log2(total)) * LN_2)
            # Rows of a tile are consecutive in memory, wherever they go.
            cells = at[:, None] * RANK + columns
            if next_unit - unit == count:
                to = (first_token * heads + first_row).to(tl.int64)
                kept = at < num_rows - first_row
                tl.store(out + to * RANK + cells, acc, mask=kept[:, None] & in_rank)
                tl.store(lse + to + at, natural, mask=kept)
            else:
                piece = (lane * parts + part) * 2 + (unit > first).to(tl.int32)
                to = piece.to(tl.int64) * ROWS
                tl.store(partial_out + to * RANK + cells, acc, mask=in_rank[None, :])
                tl.store(partial_lse + to + at, natural)
            unit = next_unit


@triton.jit
def reduce(
    query_lens, key_lens, out, lse, partial_out, partial_lse,
    batch, heads, lanes, parts,
    RANK: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """Grid `(tokens * heads, ceil(RANK / COLUMNS))`: the rows that `attend` has not written."""
    to = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_rank = columns < RANK
    index, queries, keys = _lengths(query_lens, key_lens, batch, BATCH)
    token, head = to // heads, to % heads
    b = tl.sum((tl.cumsum(queries, 0) <= token).to(tl.int32), 0)  # BATCH or more: a padding row
    row = (token - _before(queries, index, b)) * heads + head
    tile = row // ROWS
    lane = tile % lanes
    blocks, units = _units(queries, keys, heads, lane, lanes, ROWS, KEYS)
    share = tl.cdiv(tl.sum(units, 0), parts)
    count = _pick(blocks, index, b)
    at = to.to(tl.int64)
    if count == 0:
        tl.store(out + at * RANK + columns, tl.zeros([COLUMNS], tl.float32), mask=in_rank)
        tl.store(lse + at, float("-inf"))
    else:
        start = _before(units, index, b) + tile // lanes * count
        first, last = start // share, (start + count - 1) // share
        if first < last:
            peak = -float("inf")
            total = 0.0
            acc = tl.zeros([COLUMNS], tl.float32)
            for begin in tl.range(first, last + 1, SPLITS):
                part = begin + tl.arange(0, SPLITS)
                wanted = part <= last
                # Only the first piece may start inside its program's share.
                second = (part * share < start).to(tl.int32)
                piece = ((lane * parts + part) * 2 + second).to(tl.int64) * ROWS + row % ROWS
                logs = tl.load(partial_lse + piece, mask=wanted, other=float("-inf"))
                payload = tl.load(
                    partial_out + piece[:, None] * RANK + columns,
                    mask=wanted[:, None] & in_rank, other=0.0,
                )  # fmt: skip
                higher = tl.maximum(peak, tl.max(logs, 0))
                shift = tl.where(higher == float("-inf"), 0.0, higher)
                weights = tl.exp2((logs - shift) * LOG2_E)
                decay = tl.exp2((peak - shift) * LOG2_E)
                total = total * decay + tl.sum(weights, 0)
                acc = acc * decay + tl.sum(weights[:, None] * payload, 0)
                peak = higher
            tl.store(out + at * RANK + columns, acc / total, mask=in_rank)
            tl.store(lse + at, peak + tl.log2(total) * LN_2)
