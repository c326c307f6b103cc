"""Both kinds of partial attention, every provider, against float64."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings

from anabranch import (
    AttentionKind,
    LatentCache,
    ShardLayout,
    merge_partials,
    native,
    partial_attention,
)
from anabranch.attention import Provider, cpu, cpu_fallback, provider_for, reference
from partials import attend, check_shards_and_current
from problem import TOLERANCE, Problem, dims, layouts_and_problems, relative_error

PROVIDERS = pytest.mark.parametrize(
    "provider", [reference, cpu, cpu_fallback], ids=["reference", "cpu", "cpu_fallback"]
)


@PROVIDERS
@settings(max_examples=60)
@given(case=layouts_and_problems())
def test_shards_and_current_merge_to_the_whole_sequence(
    provider: Provider, case: tuple[int, int, Problem]
) -> None:
    check_shards_and_current(*case, provider)


@PROVIDERS
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("world_size", [2, 8])
def test_sharding_is_no_less_exact_than_one_pass(
    provider: Provider, dtype: torch.dtype, world_size: int
) -> None:
    problem = Problem([3000, 777], [1, 3], dims(8, 64, 16), dtype)

    def error(size: int) -> float:
        parts = [attend(problem, ShardLayout(size, rank, 1), provider) for rank in range(size)]
        outs, lses = (torch.stack(x) for x in zip(*(history for history, _ in parts), strict=True))
        return relative_error(merge_partials(outs, lses, *parts[0][1])[0], problem.answer()[0])

    assert error(world_size) <= 1.5 * error(1)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rank", [24, 32, 48])  # rows of any number of register tiles, or none
@pytest.mark.parametrize("heads", [1, 3, 5, 8, 9, 16, 17, 21, 64, 65])
def test_few_rows_cross_register_and_key_tiles(heads: int, rank: int, dtype: torch.dtype) -> None:
    problem = Problem([1, 95, 97, 200], [1, 1, 1, 1], dims(heads, rank, 9), dtype)
    history, current = attend(problem, ShardLayout(), cpu)
    out, _ = merge_partials(history[0][None], history[1][None], *current)
    assert relative_error(out, problem.answer()[0]) < TOLERANCE[dtype]


@pytest.mark.parametrize("provider", [cpu, cpu_fallback])
def test_a_prefill_chunk_crosses_row_and_key_tiles(provider: Provider) -> None:
    problem = Problem([2500], [700], dims(4), block_size=64)
    history, current = attend(problem, ShardLayout(), provider)
    assert problem.tokens * 4 > 2 * cpu_fallback.ROW_TILE
    assert problem.past[0] > 2 * cpu_fallback.KEY_TILE
    out, _ = merge_partials(history[0][None], history[1][None], *current)
    assert relative_error(out, problem.answer()[0]) < 1e-5


@PROVIDERS
def test_scores_far_beyond_the_range_of_exp(provider: Provider) -> None:
    """LSE is a natural log and the maximum is subtracted: scores of hundreds are exact."""
    problem = Problem([300], [1], dims(2))
    problem.queries.mul_(200)
    history, current = attend(problem, ShardLayout(), provider)
    out, lse = merge_partials(history[0][None], history[1][None], *current)
    expected, expected_lse = problem.answer()
    assert expected_lse.max() > 500
    assert relative_error(out, expected) < 1e-4
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-3)


def test_bad_arguments_are_named() -> None:
    problem = Problem([5], [2], dims(2))
    cache, batch = problem.shard(ShardLayout())
    q_nope, q_pe = problem.queries[..., :32], problem.queries[..., 32:]
    pair = problem.current_keys[:, :32], problem.current_keys[:, 32:]
    history, current = AttentionKind.HISTORY, AttentionKind.CURRENT
    with pytest.raises(ValueError, match="kv must be a LatentCache for HISTORY, got tuple"):
        partial_attention(q_nope, q_pe, pair, batch, history, problem.dims)
    with pytest.raises(ValueError, match="kv must be the pair"):
        partial_attention(q_nope, q_pe, cache, batch, current, problem.dims)
    with pytest.raises(ValueError, match=r"q_pe must have shape \[2, 2, 8\], got \[2, 2, 7\]"):
        partial_attention(q_nope, q_pe[..., 1:], cache, batch, history, problem.dims)
    with pytest.raises(ValueError, match=r"batch.slot_mapping must have shape \[1\], got \[2\]"):
        partial_attention(q_nope[:1], q_pe[:1], cache, batch, history, problem.dims)
    short = (pair[0][:1], pair[1])
    with pytest.raises(ValueError, match=r"kv_c must have shape \[2, 32\], got \[1, 32\]"):
        partial_attention(q_nope, q_pe, short, batch, current, problem.dims)
    small = torch.empty(8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="workspace must hold"):
        partial_attention(q_nope, q_pe, cache, batch, history, problem.dims, small)


def test_the_cpu_provider_serves_the_cpu() -> None:
    assert provider_for("cpu") is cpu
    assert provider_for("meta") is reference


@PROVIDERS
def test_scratch_for_all_heads_serves_any_fewer(provider: Provider) -> None:
    sizes = [provider.workspace_bytes(heads, dims(1)) for heads in range(1, 3000, 7)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_keys_are_shared_among_threads(threads: int) -> None:
    """Work is cut anywhere: inside sequences, and with more threads than sequences or keys."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for past in ([1500], [0, 3, 0], [1, 700, 40, 0, 900]):
            problem = Problem(past, [2] * len(past), dims(4), torch.bfloat16)
            history, current = attend(problem, ShardLayout(), cpu)
            out, _ = merge_partials(history[0][None], history[1][None], *current)
            assert relative_error(out, problem.answer()[0]) < TOLERANCE[torch.bfloat16]
    finally:
        torch.set_num_threads(before)


def test_current_attention_has_the_same_bits_on_any_number_of_threads() -> None:
    problem = Problem([0] * 5, [4, 1, 300, 2, 9], dims(6))
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        results.append(attend(problem, ShardLayout(), cpu)[1])
    torch.set_num_threads(before)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@PROVIDERS
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_an_fp8_cache_holds_values_times_its_scale(
    provider: Provider, dtype: torch.dtype, block_size: int
) -> None:
    fp8 = torch.float8_e4m3fn
    problem = Problem(
        [300, 0, 17], [1, 1, 1], dims(4), dtype, block_size, cache_dtype=fp8, cache_scale=0.01
    )
    (out, lse), _ = attend(problem, ShardLayout(), provider)
    rows = [keys[:past] for keys, past in zip(problem.keys, problem.past, strict=True)]
    for row, keys in enumerate(rows):
        if len(keys) == 0:
            assert out[row].eq(0).all()
            continue
        stored = (keys.float() / 0.01).clamp(-448, 448).to(fp8).double() * 0.01
        scores = problem.queries[row].double() @ stored.T * problem.dims.scale
        expected = scores.softmax(-1) @ stored[:, :32]
        assert relative_error(out[row], expected) < TOLERANCE[dtype]
        torch.testing.assert_close(lse[row].double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-3)


def test_every_fp8_value_is_read_as_pytorch_reads_it() -> None:
    """With one key the output is that key: all 256 codes pass through the kernel."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = torch.where(codes.float().isfinite(), codes.float(), 0).to(torch.float8_e4m3fn)
    cache = LatentCache(1, 1, dims(1, 256, 0), torch.float8_e4m3fn)
    cache.latent[0, 0] = codes
    batch = ShardLayout().plan_batch([1], [1], [[0, 0]], 1)
    q_nope, q_pe = torch.zeros(1, 1, 256), torch.zeros(1, 1, 0)
    out, _ = partial_attention(q_nope, q_pe, cache, batch, AttentionKind.HISTORY, dims(1, 256, 0))
    assert torch.equal(out.flatten(), codes.float())


def test_the_bf16_product_gives_the_same_answer() -> None:
    """The path of a CPU with BF16 units, run here through the same BLAS whatever the CPU."""
    library = native.library()
    assert library is not None
    forced = library._replace(bf16gemm=native.blas("cblas_gemm_bf16bf16f32"))
    if not forced.bf16gemm:
        pytest.skip("this PyTorch exports no cblas_gemm_bf16bf16f32")
    problem = Problem([700, 0, 33], [1, 3, 2], dims(4), torch.bfloat16)
    with mock.patch.object(native, "library", return_value=forced):
        history, current = attend(problem, ShardLayout(2, 0), cpu)
        other, _ = attend(problem, ShardLayout(2, 1), cpu)
    outs, lses = (torch.stack(parts) for parts in zip(history, other, strict=True))
    out, _ = merge_partials(outs, lses, *current)
    assert relative_error(out, problem.answer()[0]) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("block", [-1, 10**6])
def test_a_block_outside_the_cache_is_an_error_not_a_read(block: int) -> None:
    problem = Problem([20, 40], [1, 1], dims(2))
    cache, batch = problem.shard(ShardLayout())
    batch.block_table[1, 2] = block
    rank = problem.dims.kv_lora_rank
    with pytest.raises(ValueError, match=r"block_table\[1\] must name blocks in \[0, 7\)"):
        partial_attention(
            problem.queries[..., :rank], problem.queries[..., rank:], cache, batch,
            AttentionKind.HISTORY, problem.dims,
        )  # fmt: skip


@PROVIDERS
def test_a_query_that_is_not_a_number_is_not_hidden(provider: Provider) -> None:
    problem = Problem([300], [2], dims(2))
    problem.queries[1, 0, 3] = torch.nan
    for out, lse in attend(problem, ShardLayout(), provider):
        assert out[1, 0].isnan().all()
        assert lse[1, 0].isnan()
        assert out[0].isfinite().all()
        assert out[1, 1].isfinite().all()
