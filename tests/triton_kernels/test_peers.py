"""HISTORY by FlashMLA and FlashInfer: the calls against what the libraries demand and return."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import on_triton
from miniature import (
    BLACKWELL,
    HOPPER,
    Calls,
    Refused,
    flashinfer_decode,
    flashmla_module,
    loaded,
    peers_on,
)
from test_attention import check, expected_history
from test_step import NoReadBack

from anabranch import (
    AttentionKind,
    DCPDecoder,
    LatentCache,
    Schedule,
    ShardLayout,
    partial_attention,
)
from anabranch.attention import cuda, flashinfer, flashmla, peers
from anabranch.attention.peer import Peer, Shape, history, joined_pages
from anabranch.cache import joined
from anabranch.triton_kernels import by_token
from problem import TOLERANCE, Problem, dims, layouts_and_problems, relative_error

BF16, FP16 = torch.bfloat16, torch.float16
CHIPS = {HOPPER: "flashmla", BLACKWELL: "flashinfer", (8, 0): None}


def shape(**changed: Any) -> Shape:
    given = {
        "capability": HOPPER, "heads": 128, "rank": 512, "rope": 64, "dtype": BF16,
        "cache_dtype": BF16, "block_size": 64, "tokens": 8, "sequences": 8,
    }  # fmt: skip
    return Shape(**(given | changed))


def peer_history(problem: Problem, layout: ShardLayout | None = None) -> tuple[torch.Tensor, ...]:
    """HISTORY of one rank into poisoned memory."""
    cache, batch = problem.shard(layout or ShardLayout())
    rank, heads = problem.dims.kv_lora_rank, problem.dims.num_heads
    out = torch.full((problem.tokens, heads, rank), torch.nan, dtype=problem.dtype)
    lse = torch.full((problem.tokens, heads), torch.nan)
    size = cuda.workspace_bytes(heads, problem.dims, cache, batch)
    partial_attention(
        problem.queries[..., :rank], problem.queries[..., rank:], cache, batch,
        AttentionKind.HISTORY, problem.dims, torch.empty(size, dtype=torch.uint8), out=(out, lse),
    )  # fmt: skip
    return out, lse


@settings(max_examples=40)
@given(
    case=layouts_and_problems(
        worlds=(1, 2, 3), block_sizes=(32, 64), heads=(8, 16, 64), sizes=((512, 64, 16),),
        dtypes=(BF16, FP16),
    ),
    chip=st.sampled_from([HOPPER, BLACKWELL]),
    planned=st.booleans(),
)  # fmt: skip
def test_history_of_a_peer_agrees_with_float64(
    case: tuple[int, int, Problem], chip: tuple[int, int], planned: bool
) -> None:
    """The steps of the CPU's tests, at the widths that peers know; what they refuse is Triton's."""
    world_size, interleave, problem = case
    layout = ShardLayout(world_size, problem.seed % world_size, interleave)
    with peers_on(chip, planned=planned) as calls:
        form = shape(
            capability=chip, heads=problem.dims.num_heads, dtype=problem.dtype,
            cache_dtype=problem.dtype, block_size=problem.block_size, tokens=problem.tokens,
            sequences=len(problem.past),
        )  # fmt: skip
        peer = peers.serving(form)
        if peer is None:
            assert not any(each.takes(form) for each in peers.PEERS)
            return
        out, lse = peer_history(problem, layout)
    assert len(getattr(calls, peer.name)) == 1
    expected = expected_history(problem, layout)
    check((out, lse), expected, problem.dtype)
    empty = expected[1] == -torch.inf
    assert out[empty].eq(0).all()
    assert lse[empty].eq(-torch.inf).all()


@pytest.mark.parametrize("planned", [True, False], ids=["April 2025", "April 2026"])
@pytest.mark.parametrize("chip", [HOPPER, BLACKWELL])
def test_ragged_steps_empty_shards_and_padding(chip: tuple[int, int], planned: bool) -> None:
    """Several tokens of a sequence see the same keys, and none of them the step's own."""
    problem = Problem(
        [70, 0, 1, 64, 130], [1, 3, 2, 1, 4], dims(64, 512, 64), BF16, 64, 2, 3
    )  # fmt: skip
    with peers_on(chip, planned=planned) as calls:
        out, lse = peer_history(problem)
    assert calls == Calls(**{CHIPS[chip]: [torch.Size([13, 1, 64, 576])]})
    expected = expected_history(problem, ShardLayout())
    check((out, lse), expected, BF16)
    assert out[1:4].eq(0).all()
    assert out[11:].eq(0).all()
    assert torch.equal(lse == -torch.inf, expected[1] == -torch.inf)


@pytest.mark.parametrize("unit", [1.0, math.log(2)])
def test_the_lse_is_converted_exactly(unit: float) -> None:
    """One rounding of FP32, whatever the base; the marks of a peer become ours."""
    logs = torch.randn(3, 5) * 100
    logs[0, 0] = torch.inf
    batch = ShardLayout().plan_batch([5, 0], [2, 1], [[0], [1]], 16)
    given, out, lse = torch.randn(3, 5, 512), torch.empty(3, 5, 512), torch.empty(3, 5)
    given[2] = torch.nan
    by_token.settle_launch(given, logs, batch, unit, out, lse).run()
    nearest = (logs.double() * float(torch.tensor(unit, dtype=torch.float32))).float()
    assert lse[0, 0].isnan()
    assert torch.equal(lse[:2].flatten()[1:], nearest[:2].flatten()[1:])
    assert lse[2].eq(-torch.inf).all()
    assert torch.equal(out[:2], given[:2])
    assert out[2].eq(0).all()
    # In place, as FlashInfer wants it.
    by_token.settle_launch(given, logs, batch, unit, given, logs).run()
    assert torch.equal(given, out)
    assert torch.equal(logs.nan_to_num(), lse.nan_to_num())


def test_every_token_gets_the_blocks_of_its_sequence() -> None:
    """More blocks than one program copies, sequences without tokens, and no padding followed."""
    past, new = [64 * 1500 - 1, 0, 65, 3], [1, 2, 0, 3]
    blocks = [list(range(1500)), [7], [8, 9], [10]]
    batch = ShardLayout().plan_batch(past, new, blocks, 64)
    for row, used in zip(batch.block_table, (1500, 0, 2, 1), strict=True):
        row[used:] = 2**31 - 1
    object.__setattr__(batch, "slot_mapping", torch.full((8,), -1))
    tables = torch.full((8, 1500), -5, dtype=torch.int32)
    lengths = torch.full((8,), -5, dtype=torch.int32)
    by_token.spread_launch(batch, 64, tables, lengths).run()
    assert lengths.tolist() == [64 * 1500 - 1, 1, 1, 3, 3, 3, 1, 1]
    assert tables[0].tolist() == blocks[0]
    for row in (3, 4, 5):
        assert tables[row].tolist() == [10] + [0] * 1499
    assert tables[[1, 2, 6, 7]].eq(0).all()


@pytest.mark.parametrize("chip", [HOPPER, BLACKWELL])
def test_schedules_on_a_peer_give_the_same_bits_and_the_right_answer(
    chip: tuple[int, int],
) -> None:
    problem = Problem([40, 0, 77], [1, 1, 1], dims(8, 512, 64), BF16, 64, padding_rows=0)
    results = []
    with peers_on(chip) as calls:
        decoder = DCPDecoder(problem.dims)
        for schedule in Schedule:
            results.append(decoder.step(*step_inputs(problem), schedule=schedule))
    assert len(getattr(calls, CHIPS[chip])) == len(Schedule)
    expected = problem.projected_answer().flatten(1)
    assert relative_error(results[0], expected) < TOLERANCE[BF16]
    for result in results[1:]:
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("chip", [HOPPER, BLACKWELL])
def test_a_replay_on_a_peer_follows_new_lengths_and_tables(chip: tuple[int, int]) -> None:
    problems = [
        Problem([90, 0, 20], [1, 1, 1], dims(8, 512, 64), BF16, 64, seed=1),
        Problem([3, 64, 47], [1, 1, 1], dims(8, 512, 64), BF16, 64, seed=2),
        Problem([0, 0, 0], [1, 1, 1], dims(8, 512, 64), BF16, 64, seed=3),
    ]
    with peers_on(chip) as calls:
        decoder = DCPDecoder(problems[0].dims)
        captured = decoder.capture(3)
        shared = LatentCache(16, 64, problems[0].dims, BF16)
        shared.latent.fill_(torch.nan)
        shared.rope.fill_(torch.nan)
        weight = problems[0].w_uv.clone()
        for problem in problems:
            *inputs, cache, batch, w_uv = step_inputs(problem)
            for pages in ("latent", "rope"):
                getattr(shared, pages)[: cache.num_blocks] = getattr(cache, pages)
            weight.copy_(w_uv)
            table = batch.block_table[:, :4]
            object.__setattr__(
                batch, "block_table", torch.nn.functional.pad(table, (0, 5 - table.shape[1]))
            )
            replayed = captured.step(*inputs, shared, batch, weight)
            expected = problem.projected_answer().flatten(1)
            assert relative_error(replayed, expected) < TOLERANCE[BF16]
    assert len(getattr(calls, CHIPS[chip])) >= len(problems)


@pytest.mark.parametrize("library", peers.PEERS, ids=lambda library: library.name)
def test_nothing_around_a_peer_is_read_back_to_the_host(library: Peer) -> None:
    """What a graph needs; the library's own part is a stand-in that does nothing."""
    problem = Problem([40, 0], [1, 1], dims(8, 512, 64), BF16, 64)
    cache, batch = problem.shard(ShardLayout())
    pages, given = joined_pages(cache), (torch.ones(2, 8, 512, dtype=BF16), torch.ones(2, 8))
    assert pages is not None
    out, lse = torch.empty(2, 8, 512, dtype=BF16), torch.empty(2, 8)
    with on_triton(), NoReadBack():
        history(
            replace(library, attend=lambda *arguments: given),
            shape(heads=8, tokens=2, sequences=2),
            problem.queries[..., :512], problem.queries[..., 512:], pages, batch, 1.0, out, lse,
            None,
        )  # fmt: skip
    torch.testing.assert_close(lse[0], given[1][0] * library.lse_unit)
    assert lse[1].eq(-torch.inf).all()
    assert torch.equal(out[0], given[0][0])


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "flashmla"),
        ({"heads": 16}, "flashmla"),
        ({"heads": 3}, "flashmla"),
        ({"dtype": FP16, "cache_dtype": FP16}, "flashmla"),
        ({"tokens": 16}, "flashmla"),
        ({"tokens": 16, "heads": 32}, None),  # the keys once for both tokens
        ({"tokens": 0}, None),
        ({"tokens": 20000, "sequences": 20000}, None),
        ({"block_size": 16}, None),
        ({"block_size": 128}, None),
        ({"rank": 256}, None),
        ({"rope": 0}, None),
        ({"dtype": torch.float32, "cache_dtype": torch.float32}, None),
        ({"cache_dtype": torch.float8_e4m3fn}, None),
        ({"capability": (8, 0)}, None),
        ({"capability": (12, 0)}, None),
        ({"capability": BLACKWELL}, "flashinfer"),
        ({"capability": (10, 3), "block_size": 32, "heads": 16}, "flashinfer"),
        ({"capability": BLACKWELL, "heads": 96}, None),
        ({"capability": BLACKWELL, "heads": 3}, None),
        ({"capability": BLACKWELL, "heads": 256}, None),
        ({"capability": BLACKWELL, "block_size": 16}, None),
        ({"capability": BLACKWELL, "dtype": FP16, "cache_dtype": FP16}, None),
        ({"capability": BLACKWELL, "cache_dtype": torch.float8_e4m3fn}, None),
        ({"capability": BLACKWELL, "tokens": 2000, "sequences": 2000}, None),
    ],
)  # fmt: skip
def test_which_peer_serves_which_shape(changed: dict[str, Any], expected: str | None) -> None:
    with peers_on(HOPPER):
        peer = peers.serving(shape(**changed))
    assert (peer and peer.name) == expected


def test_without_the_packages_all_is_tritons() -> None:
    for library, name in ((flashmla, "flash_mla"), (flashinfer, "flashinfer")):
        library.missing.cache_clear()
        with mock.patch.object(library, "find_spec", return_value=None):
            assert library.missing() == f"{name}: not installed"
            assert peers.serving(shape()) is None
            assert peers.serving(shape(capability=BLACKWELL)) is None
        library.missing.cache_clear()


def test_a_library_that_cannot_be_used_says_why() -> None:
    old = ModuleType("flashinfer.mla")
    old.trtllm_batch_decode_with_kv_cache_mla = lambda query, workspace_buffer: None  # type: ignore[attr-defined]
    with peers_on(BLACKWELL):
        with loaded({"flashinfer.mla": old}):
            assert "0.7 or later" in str(flashinfer.missing())
        flashinfer.missing.cache_clear()
        with mock.patch.object(flashinfer, "import_module", side_effect=OSError("libcuda.so.1")):
            assert flashinfer.missing() == "flashinfer: cannot be imported: libcuda.so.1"
        with mock.patch.object(flashmla, "import_module", side_effect=ImportError("no cuda")):
            assert flashmla.missing() == "flash_mla: cannot be imported: no cuda"


@pytest.mark.parametrize(("supported", "reason"), [(True, None), (False, "not compiled")])
def test_vllm_brings_flashmla_to_a_process_that_runs_it(
    supported: bool, reason: str | None
) -> None:
    calls = Calls()
    module = flashmla_module(calls, planned=False)
    module.is_flashmla_dense_supported = lambda: (supported, reason)  # type: ignore[attr-defined]
    modules = {"vllm": ModuleType("vllm"), flashmla.IN_VLLM: module}
    problem = Problem([70, 3], [1, 1], dims(4, 512, 64), BF16, 64)
    with peers_on(HOPPER), mock.patch.object(flashmla, "find_spec", return_value=None):
        assert flashmla.missing() == "flash_mla: not installed"
        flashmla.missing.cache_clear()
        with loaded(modules):
            assert flashmla.missing() == (None if supported else "flash_mla: not compiled")
            result = peer_history(problem)
    check(result, expected_history(problem, ShardLayout()), BF16)
    assert len(calls.flashmla) == supported


def test_pages_that_a_peer_cannot_read_are_left_to_triton() -> None:
    problem = Problem([70, 0, 20], [1, 1, 1], dims(4, 512, 64), BF16, 64)
    cache, batch = problem.shard(ShardLayout())
    size = cache.num_blocks, 64, 576
    apart = LatentCache.from_parts(cache.latent.contiguous(), cache.rope.contiguous())
    room = torch.full((cache.num_blocks, 64 * 576 + 8), torch.nan, dtype=BF16)
    spaced = LatentCache.from_buffer(room[:, : 64 * 576].unflatten(1, (64, 576)), 512)
    shifted = torch.full((64 * 576 * cache.num_blocks + 1,), torch.nan, dtype=BF16)
    odd = LatentCache.from_buffer(shifted[1:].view(size), 512)
    for other in (apart, spaced, odd):
        other.latent.copy_(cache.latent)
        other.rope.copy_(cache.rope)
        assert joined_pages(other) is None
        with peers_on(HOPPER) as calls:
            result = partial_attention(
                problem.queries[..., :512], problem.queries[..., 512:], other, batch,
                AttentionKind.HISTORY, problem.dims,
            )  # fmt: skip
        assert calls == Calls()
        check(result, expected_history(problem, ShardLayout()), BF16)


def test_an_empty_step_and_a_table_without_blocks_reach_no_peer() -> None:
    sizes = dims(4, 512, 64)
    cache = LatentCache(1, 64, sizes, BF16)
    for tokens in (0, 2):
        batch = ShardLayout().plan_batch([0] * tokens, [1] * tokens, [[0]] * tokens, 64)
        object.__setattr__(batch, "block_table", batch.block_table[:, :0])
        queries = torch.zeros(tokens, 4, 576, dtype=BF16)
        with peers_on(HOPPER) as calls:
            out, lse = partial_attention(
                queries[..., :512], queries[..., 512:], cache, batch, AttentionKind.HISTORY, sizes
            )
        assert calls == Calls()
        assert out.eq(0).all()
        assert lse.eq(-torch.inf).all()


def test_two_halves_are_joined_only_where_they_lie_side_by_side() -> None:
    whole = torch.arange(24.0).view(2, 12)
    view = joined(whole[:, 2:5], whole[:, 5:9])
    assert view is not None
    assert torch.equal(view, whole[:, 2:9])
    assert view.data_ptr() == whole[:, 2:].data_ptr()
    for left, right in (
        (whole[:, 2:5], whole[:, 6:9]),
        (whole[:, 5:9], whole[:, 2:5]),
        (whole[:1, 2:5], whole[1:, 5:9]),
        (whole[:, 2:5], whole.clone()[:, 5:9]),
        (whole[:, 0:6:2], whole[:, 3:9:2]),
    ):
        assert joined(left, right) is None


def careless_flashmla() -> Iterator[tuple[str, dict[str, Any]]]:
    """Arguments of the real call, one of them wrong, and what is said of it."""
    yield "dtype", {"k_cache": torch.zeros(3, 64, 1, 576)}
    yield "page_block_size", {"k_cache": torch.zeros(3, 16, 1, 576, dtype=BF16)}
    yield "one head", {"k_cache": torch.zeros(3, 64, 576, dtype=BF16)[..., None]}
    yield "576", {"head_dim_v": 576}
    yield "seqlens_k", {"cache_seqlens": torch.tensor([3, 9])}
    yield "block_table", {"block_table": torch.zeros(2, 2, dtype=torch.int64)}
    yield "one row", {"block_table": torch.zeros(1, 2, dtype=torch.int32)}
    yield "no mask", {"causal": True}
    yield "no mask", {"softmax_scale": None}
    yield "batch size", {"q": torch.zeros(0, 1, 4, 576, dtype=BF16)}
    yield "BF16 or FP16", {"q": torch.zeros(2, 1, 4, 576)}
    yield "aligned", {"q": torch.zeros(2 * 4 * 576 + 1, dtype=BF16)[1:].view(2, 1, 4, 576)}


@pytest.mark.parametrize(("said", "wrong"), list(careless_flashmla()))
def test_the_miniature_of_flashmla_refuses_careless_calls(said: str, wrong: dict[str, Any]) -> None:
    given = {
        "q": torch.zeros(2, 1, 4, 576, dtype=BF16),
        "k_cache": torch.zeros(3, 64, 1, 576, dtype=BF16),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "cache_seqlens": torch.tensor([3, 9], dtype=torch.int32),
        "head_dim_v": 512, "softmax_scale": 1.0, "causal": False,
    }  # fmt: skip
    module = flashmla_module(Calls(), planned=False)

    def call(arguments: dict[str, Any]) -> None:
        module.flash_mla_with_kvcache(
            **arguments, tile_scheduler_metadata=module.get_mla_metadata()[0], num_splits=None
        )

    with on_triton():
        call(given)
        with pytest.raises(Refused, match=said):
            call(given | wrong)


def test_a_plan_of_flashmla_is_of_its_lengths_alone() -> None:
    for planned in (True, False):
        module = flashmla_module(Calls(), planned=planned)
        lens = torch.tensor([3, 9], dtype=torch.int32)
        pages, query = torch.zeros(3, 64, 1, 576, dtype=BF16), torch.zeros(2, 1, 4, 576, dtype=BF16)
        table = torch.zeros(2, 2, dtype=torch.int32)
        plan = module.get_mla_metadata(lens, 4, 1)
        with on_triton():
            module.flash_mla_with_kvcache(query, pages, table, lens, 512, *plan, softmax_scale=1.0)
            with pytest.raises(Refused, match=r"lengths"):
                module.flash_mla_with_kvcache(
                    query, pages, table, lens + 1, 512, *plan, softmax_scale=1.0
                )


def careless_flashinfer() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "auto", {"backend": "auto"}
    yield "num_heads_q", {"query": torch.zeros(2, 1, 96, 576, dtype=BF16)}
    yield "T, 1", {"query": torch.zeros(1, 2, 8, 576, dtype=BF16)}
    yield "block_size", {"kv_cache": torch.zeros(3, 16, 576, dtype=BF16)}
    yield "bfloat16", {"kv_cache": torch.zeros(3, 64, 576, dtype=FP16)}
    yield "dimensions", {"qk_rope_head_dim": 0}
    yield "out", {"out": torch.zeros(2, 8, 512, dtype=BF16)}
    yield "lse", {"lse": torch.zeros(2, 8, 1)}
    yield "lse", {"return_lse": False}
    yield "workspace", {"workspace_buffer": torch.zeros(2**20, dtype=torch.uint8)}
    yield "max_seq_len", {"max_seq_len": 8}
    yield "a page", {"block_tables": torch.full((2, 2), 2**31 - 1, dtype=torch.int32)}


@pytest.mark.parametrize(("said", "wrong"), list(careless_flashinfer()))
def test_the_miniature_of_flashinfer_refuses_careless_calls(
    said: str, wrong: dict[str, Any]
) -> None:
    size = flashinfer.workspace_bytes(shape(heads=8, tokens=2))
    given = {
        "query": torch.zeros(2, 1, 8, 576, dtype=BF16),
        "kv_cache": torch.zeros(3, 64, 576, dtype=BF16),
        "workspace_buffer": torch.zeros(size, dtype=torch.uint8),
        "qk_nope_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "block_tables": torch.zeros(2, 2, dtype=torch.int32),
        "seq_lens": torch.tensor([3, 9], dtype=torch.int32), "max_seq_len": 128,
        "out": torch.zeros(2, 1, 8, 512, dtype=BF16), "lse": torch.zeros(2, 8), "return_lse": True,
        "backend": "trtllm-gen", "bmm1_scale": 1.0,
    }  # fmt: skip
    decode = flashinfer_decode(Calls())
    with peers_on(BLACKWELL):
        decode(**given)
        with pytest.raises(Refused, match=said):
            decode(**(given | wrong))


def test_a_row_without_keys_given_to_flashinfer_would_come_back_as_nan() -> None:
    """Why no peer is given one: this fails if `spread` gives lengths of 0."""
    problem = Problem([70, 0], [1, 1], dims(8, 512, 64), BF16, 64)
    with peers_on(BLACKWELL):
        seen: list[list[int]] = []

        def watched(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
            seen.append(arguments[3].tolist())
            return flashinfer._attend(*arguments)

        with mock.patch.object(peers, "PEERS", (replace(flashinfer.PEER, attend=watched),)):
            out, _ = peer_history(problem)
    assert seen == [[70, 1]]
    assert out[1].eq(0).all()


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer is not installed")
def test_the_miniature_has_the_signature_of_the_wheel() -> None:
    """Read, not imported: that takes CUDA."""
    spec = find_spec("flashinfer")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "mla" / "_core.py").read_text()
    name = "trtllm_batch_decode_with_kv_cache_mla"
    function = next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    arguments = function.args
    assert arguments.posonlyargs == arguments.kwonlyargs == []
    names = [argument.arg for argument in arguments.args]
    defaults = [ast.literal_eval(default) for default in arguments.defaults]
    ours = inspect.signature(flashinfer_decode(Calls())).parameters
    assert list(ours) == names
    assert [p.default for p in ours.values() if p.default is not p.empty] == defaults
    assert "base-2 for ``trtllm-gen``" in source


def step_inputs(problem: Problem) -> tuple[Any, ...]:
    cache, batch = problem.shard(ShardLayout())
    queries, current = problem.queries, problem.current_keys
    return (
        queries[..., :512], queries[..., 512:], current[:, :512], current[:, 512:],
        cache, batch, problem.w_uv,
    )  # fmt: skip
