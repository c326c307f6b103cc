"""Split-KV attention in the interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import on_triton

from anabranch import AttentionKind, LatentCache, ShardLayout, merge_partials, partial_attention
from anabranch.attention import cuda
from problem import SIZES, TOLERANCE, Problem, dims, poison, relative_error

Pair = tuple[torch.Tensor, torch.Tensor]


@st.composite
def cases(draw: st.DrawFn) -> tuple[ShardLayout, int, Problem]:
    """A rank of a group, multiprocessors, and a step with lengths around every boundary.

    As `problem.layouts_and_problems`, with fewer ranks and tokens: the interpreter is slow.
    """
    world_size = draw(st.sampled_from([1, 2, 3]))
    block_size = draw(st.sampled_from([1, 16, 64]))
    interleave = draw(st.sampled_from([i for i in (1, 2, 16) if block_size % i == 0]))
    stripe = block_size * world_size
    edges = [0, 1, block_size - 1, block_size, block_size + 1, stripe - 1, stripe, stripe + 1]
    past = draw(st.lists(st.sampled_from(edges) | st.integers(0, 130), min_size=1, max_size=4))
    most = draw(st.sampled_from([1, 4]))
    problem = Problem(
        past,
        [draw(st.integers(1, most)) for _ in past],
        dims(draw(st.sampled_from([1, 3, 8, 20])), *draw(st.sampled_from(SIZES))),
        draw(st.sampled_from(list(TOLERANCE))),
        block_size,
        draw(st.sampled_from([0, 1, 5])),
        draw(st.integers(0, 2**16)),
    )
    rank = draw(st.integers(0, world_size - 1))
    return ShardLayout(world_size, rank, interleave), draw(st.integers(1, 9)), problem


def attend(problem: Problem, layout: ShardLayout, processors: int = 4) -> tuple[Pair, Pair]:
    """HISTORY of one rank and CURRENT, both through poisoned memory and one shared workspace."""
    cache, batch = problem.shard(layout)
    rank, heads = problem.dims.kv_lora_rank, problem.dims.num_heads
    q_nope, q_pe = problem.queries[..., :rank], problem.queries[..., rank:]
    current = problem.current_keys
    results = []
    with on_triton(processors):
        size = cuda.workspace_bytes(heads, problem.dims)
        workspace = torch.full((size,), 255, dtype=torch.uint8)
        for kind, kv in (
            (AttentionKind.HISTORY, cache),
            (AttentionKind.CURRENT, (current[:, :rank], current[:, rank:])),
        ):
            out = q_nope.new_empty(q_nope.shape), torch.empty(problem.tokens, heads)
            poison(*out)
            partial_attention(q_nope, q_pe, kv, batch, kind, problem.dims, workspace, out=out)
            results.append(out)
    return results[0], results[1]


def expected_history(problem: Problem, layout: ShardLayout) -> Pair:
    """Float64 attention of each row to what this rank keeps of the past."""
    rank = problem.dims.kv_lora_rank
    out = torch.zeros(problem.tokens, problem.dims.num_heads, rank, dtype=torch.float64)
    lse = torch.full((problem.tokens, problem.dims.num_heads), -torch.inf, dtype=torch.float64)
    row = 0
    for keys, past, new in zip(problem.keys, problem.past, problem.new, strict=True):
        own = keys[:past][layout.owner(torch.arange(past)) == layout.rank].double()
        for _ in range(new):
            if len(own):
                scores = problem.queries[row].double() @ own.T * problem.dims.scale
                out[row], lse[row] = scores.softmax(-1) @ own[:, :rank], scores.logsumexp(-1)
            row += 1
    return out, lse


def check(result: Pair, expected: Pair, dtype: torch.dtype) -> None:
    assert relative_error(result[0], expected[0]) < TOLERANCE[dtype]
    torch.testing.assert_close(result[1].double(), expected[1], rtol=1e-4, atol=1e-3)


@settings(max_examples=40)
@given(case=cases())
def test_both_kinds_agree_with_float64(case: tuple[ShardLayout, int, Problem]) -> None:
    layout, processors, problem = case
    history, current = attend(problem, layout, processors)
    check(history, expected_history(problem, layout), problem.dtype)
    fresh = Problem([0] * len(problem.new), problem.new, problem.dims, problem.dtype)
    object.__setattr__(fresh, "queries", problem.queries[: fresh.tokens])
    object.__setattr__(
        fresh, "keys", [k[p:] for k, p in zip(problem.keys, problem.past, strict=True)]
    )
    check((current[0][: fresh.tokens], current[1][: fresh.tokens]), fresh.answer(), problem.dtype)
    empty = expected_history(problem, layout)[1] == -torch.inf
    assert history[0][empty].eq(0).all()
    assert history[1][empty].eq(-torch.inf).all()
    for out, lse in (history, current):
        assert out[fresh.tokens :].eq(0).all()
        assert lse[fresh.tokens :].eq(-torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world_size", [2, 4])
def test_sharding_is_no_less_exact_than_one_pass(dtype: torch.dtype, world_size: int) -> None:
    problem = Problem([500, 77], [1, 3], dims(8, 64, 16), dtype)

    def error(size: int) -> float:
        parts = [attend(problem, ShardLayout(size, rank, 1)) for rank in range(size)]
        outs, lses = (torch.stack(x) for x in zip(*(history for history, _ in parts), strict=True))
        return relative_error(merge_partials(outs, lses, *parts[0][1])[0], problem.answer()[0])

    assert error(world_size) <= 1.5 * error(1)


@pytest.mark.parametrize("processors", [1, 5, 64])
def test_several_lanes_and_uneven_sequences(processors: int) -> None:
    """128 heads and more fill several row tiles; a sequence with many tokens has more of them."""
    problem = Problem([70, 0, 130], [1, 2, 5], dims(40), torch.bfloat16, padding_rows=3)
    history, _ = attend(problem, ShardLayout(), processors)
    check(history, expected_history(problem, ShardLayout()), torch.bfloat16)


def test_a_chunk_longer_than_a_key_tile_is_causal() -> None:
    problem = Problem([0, 0], [75, 3], dims(2))
    check(attend(problem, ShardLayout())[1], problem.answer(), torch.float32)


def test_scores_far_beyond_the_range_of_exp() -> None:
    problem = Problem([300], [1], dims(2))
    problem.queries.mul_(200)
    history, current = attend(problem, ShardLayout())
    out, lse = merge_partials(history[0][None], history[1][None], *current)
    expected, expected_lse = problem.answer()
    assert expected_lse.max() > 500
    assert relative_error(out, expected) < 1e-4
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("native", [True, False], ids=["converted", "decoded"])
def test_an_fp8_cache_holds_values_times_its_scale(dtype: torch.dtype, native: bool) -> None:
    """Both ways to read FP8: the compiler's type, and the bits where a target has no such type."""
    fp8 = torch.float8_e4m3fn
    problem = Problem([70, 0], [2, 1], dims(4), dtype, 16, 0, 3, fp8, 0.01)
    cache, batch = problem.shard(ShardLayout())
    out, lse = problem.queries[..., :32].new_empty(3, 4, 32), torch.empty(3, 4)
    chip = cuda.Chip((9, 0) if native else (8, 0), 4)
    for launch in cuda.launches(
        problem.queries[..., :32], problem.queries[..., 32:], cuda.paged_keys(cache, batch), batch,
        problem.dims.scale, out, lse, torch.empty(cuda.scratch_bytes(chip, 32), dtype=torch.uint8),
        chip,
    ):  # fmt: skip
        launch.run()
    stored = (problem.keys[0][:70].float() / 0.01).clamp(-448, 448).to(fp8).double() * 0.01
    for row in range(2):
        scores = problem.queries[row].double() @ stored.T * problem.dims.scale
        assert relative_error(out[row], scores.softmax(-1) @ stored[:, :32]) < TOLERANCE[dtype]
        torch.testing.assert_close(lse[row].double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-3)
    assert out[2].eq(0).all()


@pytest.mark.parametrize("native", [True, False], ids=["converted", "decoded"])
def test_every_fp8_value_is_read_as_pytorch_reads_it(native: bool) -> None:
    """With one key the output is that key: all 256 codes pass through, one sequence with NaN."""
    fp8 = torch.float8_e4m3fn
    codes = torch.arange(256, dtype=torch.uint8).view(fp8)
    finite = torch.where(codes.float().isfinite(), codes.float(), 0).to(fp8)
    cache = LatentCache(2, 1, dims(1, 256, 0), fp8)
    cache.latent[0, 0], cache.latent[1, 0] = finite, codes
    batch = ShardLayout().plan_batch([1, 1], [1, 1], [[0, 0], [1, 1]], 1)
    query, empty = torch.zeros(2, 1, 256), torch.zeros(2, 1, 0)
    out, lse = torch.empty(2, 1, 256), torch.empty(2, 1)
    chip = cuda.Chip((9, 0) if native else (8, 0), 4)
    scratch = torch.empty(cuda.scratch_bytes(chip, 256), dtype=torch.uint8)
    keys = cuda.paged_keys(cache, batch)
    for launch in cuda.launches(query, empty, keys, batch, 1.0, out, lse, scratch, chip):
        launch.run()
    assert torch.equal(out[0, 0], finite.float())
    assert out[1].isnan().all()


def test_a_query_that_is_not_a_number_is_not_hidden() -> None:
    problem = Problem([300], [2], dims(2))
    problem.queries[1, 0, 3] = torch.nan
    for out, lse in attend(problem, ShardLayout()):
        assert out[1, 0].isnan().all()
        assert lse[1, 0].isnan()
        assert out[0].isfinite().all()
        assert out[1, 1].isfinite().all()


def test_no_tokens_and_no_sequences() -> None:
    for padding in (0, 3):
        problem = Problem([], [], dims(2), padding_rows=padding)
        cache = LatentCache(1, 16, problem.dims, torch.float32)
        batch = ShardLayout().plan_batch([], [], [], 16)
        object.__setattr__(batch, "slot_mapping", torch.full((padding,), -1))
        queries = torch.full((padding, 2, 40), torch.nan)
        with on_triton():
            out, lse = partial_attention(
                queries[..., :32], queries[..., 32:], cache, batch,
                AttentionKind.HISTORY, problem.dims,
            )  # fmt: skip
        assert out.eq(0).all()
        assert lse.eq(-torch.inf).all()


def test_a_workspace_that_is_too_small_is_refused() -> None:
    problem = Problem([5], [2], dims(2))
    cache, batch = problem.shard(ShardLayout())
    with on_triton(), pytest.raises(ValueError, match="workspace must hold"):
        partial_attention(
            problem.queries[..., :32], problem.queries[..., 32:], cache, batch,
            AttentionKind.HISTORY, problem.dims, torch.empty(8, dtype=torch.uint8),
        )  # fmt: skip


def test_blocks_that_are_no_whole_number_of_entries_apart() -> None:
    problem = Problem([70, 0, 20], [2, 1, 1], dims(4))
    cache, batch = problem.shard(ShardLayout())
    entries = cache.block_size * 40
    apart = torch.full((cache.num_blocks, entries + 8), torch.nan)
    buffer = apart[:, :entries].unflatten(1, (cache.block_size, 40))
    buffer[..., :32], buffer[..., 32:] = cache.latent, cache.rope
    queries = problem.queries[..., :32], problem.queries[..., 32:]
    results = []
    with on_triton():
        for each in (cache, LatentCache.from_buffer(buffer, 32)):
            assert cuda.paged_keys(each, batch).layout["BLOCK_ENTRIES"] == 16 * (each is cache)
            kind = AttentionKind.HISTORY
            results.append(partial_attention(*queries, each, batch, kind, problem.dims))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
