"""The limits are in the wheel, and calls that a careless port makes are refused by them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import contract
import pytest
import torch
from contract import BMM, LIMITS, V1, V2, Refused

BF16 = torch.bfloat16
BATCH, HEADS, BLOCKS, BLOCK = 3, 32, 8, 128


def good_call(version: str = V2, layout: str = "BNSD", tokens: int = 1) -> dict[str, Any]:
    """A call that the documentation allows, by the names of `version`."""
    rows = BATCH * tokens
    shapes = {
        "BNSD": (BATCH, HEADS, tokens), "BSND": (BATCH, tokens, HEADS), "TND": (rows, HEADS),
    }  # fmt: skip
    keys = (BLOCKS, BLOCK) if layout == "BSND" else (BLOCKS, 1, BLOCK)
    call = {
        "query": torch.randn(*shapes[layout], 512).to(BF16),
        "query_rope": torch.randn(*shapes[layout], 64).to(BF16),
        "key": torch.randn(*keys, 512).to(BF16),
        "key_rope": torch.randn(*keys, 64).to(BF16),
        "block_table": torch.arange(BATCH * 2, dtype=torch.int32).view(BATCH, 2),
        "block_size": BLOCK, "input_layout": layout, "num_key_value_heads": 1,
        "sparse_mode": 0 if tokens == 1 else 3,
        "atten_mask": None if tokens == 1 else torch.ones(2048, 2048, dtype=torch.bool).triu(1),
    }  # fmt: skip
    call["value"] = call["key"]
    lens, ends = [130, 256, 5], list(range(tokens, rows + 1, tokens))
    if version == V2:
        names = {"actual_seq_kvlen": lens, "num_query_heads": HEADS, "return_softmax_lse": True}
        return call | names | ({"actual_seq_qlen": ends} if layout == "TND" else {})
    return call | {"actual_seq_lengths_kv": lens, "num_heads": HEADS, "softmax_lse_flag": True}


def run(version: str, call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return getattr(torch.ops.npu, version)(**call)  # type: ignore[no-any-return]


@pytest.mark.parametrize("limit", LIMITS)
def test_every_limit_is_a_sentence_of_the_wheel(limit: str) -> None:
    assert contract.documented(limit)


@pytest.mark.parametrize(
    ("version", "layout", "tokens"),
    [
        (V2, "BNSD", 1), (V2, "BSND", 1), (V2, "BSND", 4), (V2, "TND", 1), (V2, "TND", 4),
        (V1, "BNSD", 1), (V1, "BSND", 4),
    ],
)  # fmt: skip
def test_documented_calls_are_taken(version: str, layout: str, tokens: int) -> None:
    out, lse = run(version, good_call(version, layout, tokens))
    assert out.isfinite().all()
    assert lse.isfinite().all()


def strided(call: dict[str, Any]) -> None:
    """Views of vLLM's cache of one buffer, as they are on other devices."""
    buffer = torch.randn(BLOCKS, 1, BLOCK, 576).to(BF16)
    call |= {"key": buffer[..., :512], "value": buffer[..., :512], "key_rope": buffer[..., 512:]}


def strided_queries(call: dict[str, Any]) -> None:
    """Queries gathered over the group as one `[T, N*H, L + R]`."""
    rows = torch.randn(BATCH, HEADS, 1, 576).to(BF16)
    call |= {"query": rows[..., :512], "query_rope": rows[..., 512:]}


def with_heads(heads: int) -> Callable[[dict[str, Any]], None]:
    def change(call: dict[str, Any]) -> None:
        call["query"] = torch.randn(BATCH, heads, 1, 512).to(BF16)
        call["query_rope"] = torch.randn(BATCH, heads, 1, 64).to(BF16)
        for name in ("num_query_heads", "num_heads"):
            if name in call:
                call[name] = heads

    return change


def with_blocks(size: int) -> Callable[[dict[str, Any]], None]:
    def change(call: dict[str, Any]) -> None:
        call["key"] = call["value"] = torch.randn(BLOCKS, 1, size, 512).to(BF16)
        call["key_rope"] = torch.randn(BLOCKS, 1, size, 64).to(BF16)
        call["block_size"] = size
        call["actual_seq_kvlen"] = [1, 2, 3]

    return change


def narrow(call: dict[str, Any]) -> None:
    for name in ("query", "key", "value"):
        call[name] = call[name][..., :256].contiguous()


def without_pages(call: dict[str, Any]) -> None:
    """CURRENT as the source gives it, on a CANN before that."""
    rows = call["query"].shape[0]
    call |= {
        "key": torch.randn(rows, 1, 512).to(BF16), "key_rope": torch.randn(rows, 1, 64).to(BF16),
        "block_table": None, "block_size": 0, "actual_seq_kvlen": call["actual_seq_qlen"],
    }  # fmt: skip
    call["value"] = call["key"]


def change(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda call: call.update(values)


MASK = torch.ones(2048, 2048, dtype=torch.bool)
# Where a number is given, a public report of vllm-ascend has the call, or its repair.
CARELESS: dict[str, tuple[str, tuple[Any, ...], Callable[[dict[str, Any]], None]]] = {
    "views of one cache buffer": ("dense memory", (V2,), strided),
    "slices of gathered queries": ("dense memory", (V2,), strided_queries),
    "FP32 as in the tests of other devices": (
        "dtype", (V2,), lambda call: call.update(query=call["query"].float()),
    ),
    "the rope left out of the keys": ("both ropes", (V2,), change(key_rope=None)),
    # #9632, #8045
    "a model with kv_lora_rank 256": ("head dimension", (V2,), narrow),
    "20 heads": ("query heads", (V2,), with_heads(20)),
    "256 heads of a large group": ("query heads", (V2,), with_heads(256)),
    "16 heads in version 1": ("query heads, v1", (V1,), with_heads(16)),
    "blocks of 64 tokens": ("pages", (V2,), with_blocks(64)),
    "blocks of 256 tokens": ("pages", (V2,), with_blocks(256)),
    "CURRENT without a block table": ("pages", (V2, "TND", 4), without_pages),
    "HISTORY of several tokens with sparse_mode 0": (
        "mask", (V2, "TND", 4), change(sparse_mode=0, atten_mask=None),
    ),
    "one token with sparse_mode 3": ("mask", (V2,), change(sparse_mode=3, atten_mask=MASK.triu(1))),
    # #15503: taken without a word outside MLA, and wrong there
    "a mask over the keys of one token": (
        "mask", (V2,), change(atten_mask=torch.zeros(1, 1, 1, 256, dtype=torch.bool)),
    ),
    "sparse_mode 3 without its mask": ("mask", (V2, "TND", 4), change(atten_mask=None)),
    # #15503
    "a mask as large as the keys": (
        "mask shape", (V2, "TND", 4), change(atten_mask=torch.ones(4, 256, dtype=torch.bool)),
    ),
    "a mask turned round": ("mask shape", (V2, "TND", 4), change(atten_mask=MASK.tril())),
    "a BF16 mask": ("mask dtype", (V2, "TND", 4), change(atten_mask=MASK.to(BF16).triu(1))),
    "no key lengths": ("key lengths", (V2,), change(actual_seq_kvlen=None)),
    # #8107
    "lengths of fewer sequences": ("count of lengths", (V2,), change(actual_seq_kvlen=[1, 2])),
    # #4518, #6357, #6403, #6596
    "padding left out of TND's query lengths": (
        "rows", (V2, "TND", 4), change(actual_seq_qlen=[4, 8, 11]),
    ),
    "TND's query lengths not summed up": (
        "rows", (V2, "TND", 4), change(actual_seq_qlen=[4, 4, 4]),
    ),
    # #9518
    "one key length too many for TND": (
        "count of lengths, TND", (V2, "TND", 4), change(actual_seq_kvlen=[130, 256, 5, 0]),
    ),
    "a chunk of 17 tokens": ("tokens of a sequence", (V2, "TND", 17), change()),
    "a table narrower than its longest sequence": (
        "block table", (V2,), change(actual_seq_kvlen=[300, 1, 1]),
    ),
    "a 64-bit block table": (
        "block table dtype", (V2,), change(block_table=torch.zeros(BATCH, 2, dtype=torch.int64)),
    ),
    "a block id that is padding": (
        "block ids", (V2,), change(block_table=torch.full((BATCH, 2), 99, dtype=torch.int32)),
    ),
    "pages of four axes under BSND": (
        "key layout", (V2, "BSND", 4),
        lambda call: call.update(
            {name: call[name].unsqueeze(1) for name in ("key", "value", "key_rope")}
        ),
    ),
    "TND in version 1": ("layout, v1", (V1, "TND"), change()),
}  # fmt: skip


@pytest.mark.parametrize("case", CARELESS)
def test_careless_attention_calls_are_refused(case: str) -> None:
    limit, form, careless = CARELESS[case]
    call = good_call(*form)
    careless(call)
    with pytest.raises(Refused) as refused:
        run(form[0], call)
    assert refused.value.limit == limit


def test_the_page_counts_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "npu.md").read_text()
    assert f"{len(CARELESS)} attention calls" in page


def test_padding_left_in_dense_keys_is_refused() -> None:
    """vllm-ascend #5397, on the CANN that takes keys without pages."""
    call = good_call(V2, "TND", 4)
    without_pages(call)
    call["actual_seq_kvlen"] = [4, 8, 11]
    with contract.contract("9.1.0"), pytest.raises(Refused) as refused:
        run(V2, call)
    assert refused.value.limit == "rows"


def test_version_1_keywords_are_refused_by_the_schema_of_version_2() -> None:
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'num_heads'"):
        run(V2, good_call() | {"num_heads": HEADS})


def out_call(workspace: torch.Tensor | None) -> None:
    call = good_call()
    results = [torch.empty_like(call["query"]), torch.empty(BATCH, HEADS, 1, 1)]
    operator = torch.ops.npu.npu_fused_infer_attention_score_v2.out
    operator(**call, workspace=workspace, out=results)


def test_a_workspace_of_another_dtype_or_size_is_refused() -> None:
    needed = contract.workspace_size(contract.named(
        torch.ops.npu.npu_fused_infer_attention_score_v2.default, (), good_call()
    ))  # fmt: skip
    out_call(torch.empty(needed // 2, dtype=BF16))
    for wrong in (torch.empty(needed, dtype=torch.uint8), torch.empty(needed // 4, dtype=BF16)):
        with pytest.raises(Refused, match="workspace"):
            out_call(wrong)


PERMUTED = {"perm_x1": (1, 0, 2), "perm_x2": (0, 1, 2), "perm_y": (1, 0, 2)}


@pytest.mark.parametrize(
    ("heads", "rank", "width", "limit"),
    [
        (128, 512, 128, "batch times K"),  # vllm-ascend #3578, #16809; sglang #34715
        (127, 512, 128, None),
        (16, 520, 128, "K and N"),
        (16, 512, 64, "K and N"),
    ],
)
def test_careless_products_are_refused(
    heads: int, rank: int, width: int, limit: str | None
) -> None:
    x, weight = torch.randn(2, heads, rank).to(BF16), torch.randn(heads, rank, width).to(BF16)
    product = torch.ops.npu.npu_transpose_batchmatmul
    if limit is None:
        expected = torch.einsum("thl,hlv->thv", x.double(), weight.double())
        torch.testing.assert_close(
            product(x, weight, **PERMUTED).double(), expected, rtol=1e-2, atol=0.5
        )
        return
    with pytest.raises(Refused, match=limit):
        product(x, weight, **PERMUTED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"perm_y": (0, 1, 2)}, "perm_y should be"),
        ({"perm_x1": (2, 1, 0)}, "perm_x1 should be"),
        ({"perm_x2": (0, 2, 1)}, "perm_x2 should be"),
        ({"bias": torch.zeros(128)}, "bias is not supported"),
        ({"transpose": True}, "Unknown keyword argument"),
    ],
)
def test_the_wheel_itself_refuses_wrong_permutations(change: dict[str, Any], message: str) -> None:
    """These are checked by the schema and the Meta kernel of torch_npu."""
    x, weight = torch.randn(2, 4, 128).to(BF16), torch.randn(4, 128, 128).to(BF16)
    with pytest.raises(RuntimeError, match=message):
        getattr(torch.ops.npu, BMM)(x, weight, **(PERMUTED | change))
