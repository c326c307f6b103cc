"""What the documentation of the torch_npu wheel demands of the operators used here, and their
results in PyTorch.

The schema and the Meta kernel of an operator are the wheel's own: wrong keywords, types and
permutations are refused by those. Meta does not look at lengths, alignment, masks or pages. That
is what the limits below are for: each holds the sentence it comes from, and a test finds every
sentence in the wheel. A call that meets them is computed on CPU tensors.

Where an operator leaves something undefined, the result is poison: rows without keys have output
NaN and LSE +inf, and a workspace is overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

DOCS = "_op_plugin_docs.py"
FUSION = "dynamo/npugraph_ex/patterns/batch_matmul_transpose.py"
V1, V2 = "npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"
BMM = "npu_transpose_batchmatmul"

# Limit: file of the wheel, and the sentence. Those of FIA hold at head dimension 512 with rope.
LIMITS = {
    "dense memory": (DOCS, "不支持非连续的Tensor"),
    "dtype": (DOCS, "数据类型支持float16、bfloat16、int8"),
    "rope dtype": (DOCS, "query_rope的数据类型、数据格式与query一致"),
    "both ropes": (DOCS, "query_rope和key_rope要求同时配置或同时不配置"),
    "head dimension": (DOCS, "query的d只支持512、128"),
    "query heads": (DOCS, "query_rope配置时要求query的s为1-16、n为1/2/4/8/16/32/64/128"),
    "query heads, v1": (DOCS, "query_rope配置时要求query的S为1-16、N为32、64、128, D为512"),
    "query rope": (DOCS, "query_rope的shape中d为64, 其余维度与query一致"),
    "key": (DOCS, "key_rope配置时要求key的n为1, d为512, keyRope的shape中d为64, 其余维度与key一致"),
    "key is value": (DOCS, "key和value的shape需保证一致"),
    "layout": (
        DOCS, "input_layout形状支持BSH、BSND、BNSD、BNSD_NBSD、BSND_NBSD、BSH_NBSD、TND、TND_NTD",
    ),
    "layout, v1": (
        DOCS, "input_layout形状支持BSH、BSND、BNSD, 当数据格式为NZ时input_layout不支持BNSD",
    ),
    "pages": (DOCS, "该场景下, 必须开启PageAttention, 此时block_size支持16、128"),
    "key layout": (
        DOCS,
        "当query的input_layout为BSH、BSND时, kv cache排布只支持(blocknum, blocksize, H)一种格式",
    ),
    "key lengths": (DOCS, "page attention场景下, 必须传入actual_seq_kvlen"),
    "count of lengths": (DOCS, "传入长度大于等于Batch时取seqlenKv的前Batch个数. 其他长度不支持"),
    "count of lengths, TND": (DOCS, "此时actual_seq_kvlen长度等于key/value的batch值"),
    "no negative length": (DOCS, "该参数应为非负数"),
    "block table": (
        DOCS, "block_table必须为二维, 第一维长度需等于B, 第二维长度不能小于maxBlockNumPerSeq",
    ),
    "block ids": (DOCS, "当前不会对blockid的合法性进行校验, 需用户自行保证"),
    "block table dtype": (DOCS, "block_table: Tensor类型, 数据类型支持int32"),
    "mask": (DOCS, "Q_S等于1时只支持sparse=0且不传mask, Q_S大于1时只支持sparse=3且传入mask"),
    "mask shape": (DOCS, "其中S的值需要固定为2048, 且需要用户保证传入的atten_mask为下三角"),
    "mask dtype": (DOCS, "数据类型支持bool、int8和uint8"),
    "query lengths": (DOCS, "actual_seq_qlen和actual_seq_kvlen必须传入"),
    "rows": (DOCS, "T表示所有Batch输入样本序列长度的累加和"),
    "cumulative": (DOCS, "因此后一个元素的值必须大于等于前一个元素的值"),
    "tokens of a sequence": (DOCS, "支持query每个batch的s为1-16"),
    "batch": (DOCS, "支持B轴小于等于65536"),
    "longest": (DOCS, "支持S轴小于等于262144"),
    "cache size": (DOCS, "参数key、value各自对应tensor的shape所有维度相乘不能超过int32的表示范围"),
    "workspace": (DOCS, "workspace(可选): 一维Device侧的Input Tensor, 数据类型与Query一致"),
    "batch times K": (FUSION, "K*B must be in range [1, 65536) when perm_x1=[1, 0, 2]"),
    "K and N": (FUSION, "kn_alignment = 128"),
}  # fmt: skip


class Refused(RuntimeError):
    """What the operator would refuse, or silently get wrong. `limit` is a key of `LIMITS`."""

    def __init__(self, limit: str, got: object) -> None:
        super().__init__(f"{limit}: got {got}; {LIMITS[limit][0]}: {LIMITS[limit][1]}")
        self.limit = limit


def demand(met: object, limit: str, got: object) -> None:
    if not met:
        raise Refused(limit, got)


@dataclass
class Contract:
    """What was called, with which arguments, and the version of CANN that is played."""

    cann: str = "8.5.0"
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


_contract = Contract()


@contextmanager
def contract(cann: str = "8.5.0") -> Iterator[Contract]:
    """A fresh record of calls."""
    global _contract
    before, _contract = _contract, Contract(cann)
    try:
        yield _contract
    finally:
        _contract = before


def documented(limit: str) -> bool:
    """Whether the wheel has the sentence of `limit`, whatever its spaces and kinds of comma."""
    import torch_npu

    source, sentence = LIMITS[limit]
    text = (Path(torch_npu.__file__).parent / source).read_text()
    # A message of the fusion pass is cut into two strings.
    plain = "".join(text.replace('"\n', "").replace(' f"', "").replace("\uff0c", ",").split())
    return "".join(sentence.replace("65536)", "{max_kb_value})").split()) in plain


@dataclass
class Sequences:
    """FIA's batch, whatever the layout: rows `[rows, N, D]`, which each sequence has, its keys."""

    query: torch.Tensor
    rope: torch.Tensor
    rows: list[range]
    heads_before_rows: bool  # of the LSE, (B, N, S, 1)


def named(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, defaults included, as the schema has them."""
    arguments = operator._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments}
    return given | {a.name: v for a, v in zip(arguments, args, strict=False)} | kwargs


def to_v2(call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of version 1 under the names of version 2."""
    renamed = {
        "actual_seq_lengths": "actual_seq_qlen", "actual_seq_lengths_kv": "actual_seq_kvlen",
        "num_heads": "num_query_heads", "scale": "softmax_scale",
        "softmax_lse_flag": "return_softmax_lse",
    }  # fmt: skip
    return {renamed.get(name, name): value for name, value in call.items()}


def sequences(call: dict[str, Any]) -> Sequences:
    """Rows of each sequence; the query must be of a layout that is computed here."""
    layout, query, rope = call["input_layout"], call["query"], call["query_rope"]
    heads = call["num_query_heads"]
    if layout == "TND":
        ends = call["actual_seq_qlen"]
        demand(ends is not None, "query lengths", ends)
        demand(list(ends) == sorted(ends) and ends[0] >= 0, "cumulative", ends)
        demand(ends[-1] == query.shape[0], "rows", f"{ends[-1]} of {query.shape[0]} rows")
        starts = [0, *ends[:-1]]
        return Sequences(query, rope, list(map(range, starts, ends)), False)
    if layout == "BSH":
        query, rope = (part.unflatten(2, (heads, -1)) for part in (query, rope))
    elif layout == "BNSD":
        query, rope = query.transpose(1, 2), rope.transpose(1, 2)
    batch, length = query.shape[:2]
    given = call["actual_seq_qlen"]
    lens = [length] * batch if given is None or length == 1 else list(given)
    lens = lens * batch if len(lens) == 1 else lens
    demand(len(lens) >= batch, "count of lengths", len(lens))
    rows = [range(b * length, b * length + lens[b]) for b in range(batch)]
    return Sequences(query.flatten(0, 1), rope.flatten(0, 1), rows, True)


def check_fia(version: str, call: dict[str, Any]) -> tuple[Sequences, list[int]]:
    """Raise Refused unless the documentation allows the call; its sequences and key lengths."""
    second = version == V2
    query, key, value, layout = (call[n] for n in ("query", "key", "value", "input_layout"))
    rope, key_rope, mask, table = (
        call[n] for n in ("query_rope", "key_rope", "atten_mask", "block_table")
    )
    demand((rope is None) == (key_rope is None), "both ropes", "one of them")
    if rope is None:
        raise NotImplementedError("only the MLA form of the operator is computed here")
    parts = {"query": query, "key": key, "value": value, "query_rope": rope, "key_rope": key_rope}
    optional = {"atten_mask": mask, "block_table": table}
    for name, tensor in (parts | optional).items():
        demand(tensor is None or tensor.is_contiguous(), "dense memory", f"a strided {name}")
    for name, tensor in parts.items():
        demand(tensor.dtype in (torch.float16, torch.bfloat16), "dtype", f"{name} {tensor.dtype}")
        demand(tensor.dtype == query.dtype, "rope dtype", f"{name} {tensor.dtype}")
    known = ("BSH", "BSND", "BNSD", "TND") if second else ("BSH", "BSND", "BNSD")
    demand(layout in known, "layout" if second else "layout, v1", layout)
    heads = call["num_query_heads"]
    width = query.shape[-1] // heads if layout == "BSH" else query.shape[-1]
    demand(width == 512, "head dimension", width)
    powers = (1, 2, 4, 8, 16, 32, 64, 128) if second else (32, 64, 128)
    demand(heads in powers, "query heads" if second else "query heads, v1", heads)
    rope_shape = (*query.shape[:-1], 64 * heads if layout == "BSH" else 64)
    demand(rope.shape == rope_shape, "query rope", list(rope.shape))
    demand(call["num_key_value_heads"] == 1, "key", call["num_key_value_heads"])
    demand(key.shape[-1] == 512 and key_rope.shape == (*key.shape[:-1], 64), "key", key.shape)
    demand(key.shape == value.shape, "key is value", value.shape)
    batch = sequences(call)
    demand(len(batch.rows) <= 65536, "batch", len(batch.rows))
    counts = [len(rows) for rows in batch.rows]
    several = max(counts) > 1 if layout == "TND" else query.shape[1 + (layout == "BNSD")] > 1
    if layout == "TND" or several:
        demand(all(1 <= n <= 16 for n in counts), "tokens of a sequence", counts)
    # Two calls of the source that are in no documentation, on the CANN that it runs on.
    of_source = tuple(map(int, _contract.cann.split("."))) >= (9, 1) and layout == "TND"
    if table is None and of_source:
        ends = call["actual_seq_kvlen"]
        lens = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        demand(ends[-1] == key.shape[0], "rows", f"{ends[-1]} of {key.shape[0]} keys")
        demand(call["sparse_mode"] == 3 and mask is not None, "mask", call["sparse_mode"])
    else:
        demand(table is not None and call["block_size"] in (16, 128), "pages", call["block_size"])
        lens = check_pages(call, batch)
        if several and not (of_source and call["sparse_mode"] == 0 and mask is None):
            demand(call["sparse_mode"] == 3 and mask is not None, "mask", call["sparse_mode"])
        if not several:
            demand(call["sparse_mode"] == 0 and mask is None, "mask", call["sparse_mode"])
            demand(max(lens) <= 262144, "longest", max(lens))
    if mask is not None:
        demand(mask.dtype in (torch.bool, torch.int8, torch.uint8), "mask dtype", mask.dtype)
        demand(mask.shape[-2:] == (2048, 2048), "mask shape", list(mask.shape))
        whole = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
        demand(torch.equal(mask.view(2048, 2048).bool(), whole), "mask shape", "other content")
    return batch, lens


def check_pages(call: dict[str, Any], batch: Sequences) -> list[int]:
    """Raise Refused unless lengths, table and pages fit together; the lengths."""
    key, table, block = call["key"], call["block_table"], call["block_size"]
    lens, count = call["actual_seq_kvlen"], len(batch.rows)
    demand(lens is not None, "key lengths", None)
    if call["input_layout"] == "TND":
        demand(len(lens) == count, "count of lengths, TND", len(lens))
    else:
        demand(len(lens) == 1 or len(lens) >= count, "count of lengths", len(lens))
        lens = lens * count if len(lens) == 1 else lens[:count]
    demand(min(lens) >= 0, "no negative length", min(lens))
    demand(table.dtype == torch.int32, "block table dtype", table.dtype)
    if call["input_layout"] in ("BSH", "BSND"):
        demand(key.dim() == 3, "key layout", key.shape)
    else:
        demand(key.dim() == 3 or key.shape[1] == 1, "key", key.shape)
    demand(key.shape[-2] == block, "pages", f"pages of {key.shape[-2]} with block_size {block}")
    demand(key.numel() <= 2**31 - 1, "cache size", key.numel())
    blocks = [-(-length // block) for length in lens]
    fits = table.dim() == 2 and table.shape[0] == count and table.shape[1] >= max(blocks)
    demand(fits, "block table", f"{list(table.shape)} for {blocks} blocks")
    used = torch.cat([row[:n] for row, n in zip(table, blocks, strict=True)])
    inside = (used >= 0) & (used < key.shape[0])
    demand(inside.all(), "block ids", used[~inside].tolist())
    return list(lens)


def attend(call: dict[str, Any], batch: Sequences, lens: list[int]) -> tuple[torch.Tensor, ...]:
    """The documented result: output and LSE in the shapes of the layout."""
    causal = call["sparse_mode"] == 3
    rows, heads, _ = batch.query.shape
    out = torch.full(batch.query.shape, torch.nan, dtype=torch.float32)
    lse = torch.full((rows, heads), torch.inf)
    start = 0
    for b, (own, length) in enumerate(zip(batch.rows, lens, strict=True)):
        if call["block_table"] is None:
            keys = torch.cat((call["key"], call["key_rope"]), -1)[start : start + length, 0]
            start += length
        else:
            blocks = call["block_table"][b, : -(-length // call["block_size"])].long()
            pages = call["key"][blocks], call["key_rope"][blocks]
            keys = torch.cat([page.reshape(-1, page.shape[-1])[:length] for page in pages], -1)
        for index, row in enumerate(own):
            seen = keys[: length - len(own) + index + 1] if causal else keys
            if len(seen):
                query = torch.cat((batch.query[row], batch.rope[row]), -1).float()
                scores = query @ seen.float().T * call["softmax_scale"]
                out[row] = scores.softmax(-1) @ seen[:, :512].float()
                lse[row] = scores.logsumexp(-1)
    out = out.to(call["query"].dtype)
    if batch.heads_before_rows:
        each = rows // len(batch.rows)
        lse = lse.view(-1, each, heads).transpose(1, 2)
        out = out.view(-1, each, heads, 512)
        out = out.transpose(1, 2) if call["input_layout"] == "BNSD" else out
    return out.reshape(call["query"].shape), lse.unsqueeze(-1)


def workspace_size(call: dict[str, Any]) -> int:
    """Bytes that FIA is played to need: more for more rows, heads and keys."""
    lens = call["actual_seq_kvlen"]
    return 2 * call["query"].nbytes + 64 * max(lens) + 512 * len(lens)


def meta_results(name: str, call: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The wheel's own Meta kernel on the same arguments."""
    operator = getattr(torch.ops.npu, name).default
    given = {a.name for a in operator._schema.arguments}

    def meta(value: object) -> object:
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    results = operator(**{n: meta(v) for n, v in call.items() if n in given})
    return results if isinstance(results, tuple) else (results,)


def same_form(name: str, call: dict[str, Any], results: Sequence[torch.Tensor]) -> None:
    """The results computed here have the shapes and dtypes that the wheel infers."""
    for result, expected in zip(results, meta_results(name, call), strict=True):
        assert result.shape == expected.shape, (name, result.shape, expected.shape)
        assert result.dtype == expected.dtype, (name, result.dtype, expected.dtype)


def fia(name: str, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    overload = getattr(torch.ops.npu, name).out
    call = named(overload, args, kwargs)
    workspace, out = call["workspace"], call["out"]
    normal = call if name == V2 else to_v2(call)
    batch, lens = check_fia(name, normal)
    same_form(name, call, out)
    for tensor in out:
        demand(tensor.is_contiguous(), "dense memory", "a strided result")
    if workspace is not None:
        right = workspace.dim() == 1 and workspace.dtype == normal["query"].dtype
        demand(right, "workspace", (list(workspace.shape), workspace.dtype))
        needed = workspace_size(normal)
        demand(workspace.nbytes >= needed, "workspace", f"{workspace.nbytes} of {needed} bytes")
        workspace.view(torch.uint8).fill_(255)
    for target, result in zip(out, attend(normal, batch, lens), strict=True):
        target.copy_(result)
    _contract.calls.append((f"{name}.out", call))
    return tuple(out)


def fia_functional(name: str, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    call = named(getattr(torch.ops.npu, name).default, args, kwargs)
    normal = call if name == V2 else to_v2(call)
    results = attend(normal, *check_fia(name, normal))
    if normal["return_softmax_lse"]:
        same_form(name, call, results)
    _contract.calls.append((name, call))
    return results


def max_workspace(name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    call = named(getattr(torch.ops.npu, f"_{name}_get_max_workspace").default, args, kwargs)
    normal = call if name == V2 else to_v2(call)
    _contract.calls.append((f"_{name}_get_max_workspace", call))
    size = workspace_size(normal)
    return torch.zeros(-(-size // 2), dtype=normal["query"].dtype)


def transpose_batchmatmul(*args: Any, **kwargs: Any) -> torch.Tensor:
    call = named(torch.ops.npu.npu_transpose_batchmatmul.default, args, kwargs)
    (expected,) = meta_results(BMM, call)
    x, weight = call["input"], call["weight"]
    plain = [0, 1, 2]
    x = x.permute(call["perm_x1"] or plain)
    weight = weight.permute(call["perm_x2"] or plain)
    batch, k = x.shape[0], x.shape[2]
    if list(call["perm_x1"] or plain) == [1, 0, 2]:
        demand(1 <= batch * k < 65536, "batch times K", batch * k)
    demand(k % 128 == 0 and weight.shape[2] % 128 == 0, "K and N", (k, weight.shape[2]))
    result = torch.bmm(x.float(), weight.float()).to(x.dtype)
    result = result.permute(call["perm_y"] or [1, 0, 2]).contiguous()
    assert result.shape == expected.shape
    _contract.calls.append((BMM, call))
    return result


def install() -> torch.library.Library:
    """Serve these operators on CPU tensors, as long as the returned library lives."""
    library = torch.library.Library("npu", "IMPL")
    for name in (V1, V2):
        for overload, function in (
            (name, fia_functional),
            (f"{name}.out", fia),
            (f"_{name}_get_max_workspace", max_workspace),
        ):  # fmt: skip
            library.impl(overload, _of(function, name), "CPU")
    library.impl(BMM, transpose_batchmatmul, "CPU")
    return library


def _of(function: Any, name: str) -> Any:
    return lambda *args, **kwargs: function(name, *args, **kwargs)
