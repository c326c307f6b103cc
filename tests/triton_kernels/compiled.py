"""Compile the kernels for a GPU that is not there, as the provider would launch them on it.

    python tests/triton_kernels/compiled.py 90      prints a report as JSON

The launches are those of the library, at the sizes of DeepSeek-V3 (L 512, R 64). Shared memory is
from Triton's report, registers and spills are from the log of the assembler, as Triton ran it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from anabranch import DecodeBatch, LatentCache, MLADims
from anabranch.attention import cuda
from anabranch.triton_kernels import Launch, by_token, exchange, merge, store

PROCESSORS = {80: 108, 90: 132, 100: 148}
# Bytes of shared memory that one program may use (CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability").
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
RANK, ROPE, HEADS = 512, 64, 128
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Report:
    """What a launch takes on its target; registers and spills per thread."""

    shared: int
    registers: int
    spilled_bytes: int


def compiled(launch: Launch, target: int) -> Report:
    """Compile for `sm_<target>` with the types and alignments that a call would have."""
    signature, constants, alignment = {}, {}, {}
    for position, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(position,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            alignment[(position,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[parameter.name] = "i32"
            if value % 16 == 0:
                alignment[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    knobs.compilation.always_compile = True
    knobs.nvidia.dump_ptxas_log = True
    with redirect_stdout(StringIO()) as log:
        kernel = triton.compile(
            ASTSource(launch.kernel, signature, constants, alignment),
            target=GPUTarget("cuda", target, 32),
            options={"num_warps": launch.warps, "num_stages": launch.stages},
        )
    used = re.search(r"Used (\d+) registers", log.getvalue())
    spilled = re.search(r"(\d+) bytes spill stores", log.getvalue())
    assert used is not None, log.getvalue()
    assert spilled is not None, log.getvalue()
    return Report(kernel.metadata.shared, int(used[1]), int(spilled[1]))


def launches(target: int) -> Iterator[tuple[str, Launch]]:
    """Every kernel in every shape class that the provider distinguishes."""
    chip = cuda.Chip((target // 10, target % 10), PROCESSORS[target])
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    fp8 = torch.float8_e4m3fn
    for heads in (128, 32, 16):
        for dtype, stored, block_size in (
            (bf16, bf16, 64), (bf16, bf16, 16), (fp16, fp16, 64), (fp16, fp16, 16),
            (bf16, fp8, 64), (bf16, fp8, 16), (fp16, fp8, 64), (bf16, None, 64),
        ):  # fmt: skip
            attend, reduce = _attention(chip, heads, dtype, stored, block_size)
            kind = "CURRENT" if stored is None else f"{TYPES[stored]} pages of {block_size}"
            yield f"attend, {heads} heads {TYPES[dtype]}, {kind}", attend
        if heads != 32:
            yield f"reduce, {heads} heads", reduce
    yield "attend, 128 heads fp32", _attention(chip, 128, fp32, fp32, 64)[0]
    shards, tokens = 8, 64
    out, lse = _meta(tokens, HEADS, RANK, dtype=bf16), _meta(tokens, HEADS)
    packed = _meta(shards, tokens, HEADS // shards, RANK + 2, dtype=bf16)
    yield "pack BF16", exchange.pack_launch(out, lse, packed)
    own = HEADS // shards
    received, logs = packed[..., :RANK], _meta(shards, tokens, own, RANK // 2 + 1)[..., 0]
    local = _meta(tokens, own, RANK, dtype=bf16), _meta(tokens, own)
    yield "merge BF16, 8 shards", merge.merge_launch(received, logs, local, *local)
    lengths, table = _meta(tokens, dtype=torch.int32), _meta(tokens, 4096, dtype=torch.int32)
    batch = DecodeBatch(lengths, lengths, table, _meta(tokens, dtype=torch.int64))
    yield "spread", by_token.spread_launch(batch, 64, table, lengths)
    yield "settle", by_token.settle_launch(out, lse, batch, 0.69, out, lse)
    rows, slots = _meta(tokens, RANK + ROPE, dtype=bf16), _meta(tokens, dtype=torch.int64)
    for name, dtype in (("BF16", bf16), ("FP8", fp8)):
        cache = LatentCache(128, 64, _dims(HEADS), dtype, "meta")
        pages = cache.latent, cache.rope
        launch = store.store_launch(
            rows[:, :RANK], rows[:, RANK:], slots, *pages, 0.5, has_fp8=chip.has_fp8
        )
        yield f"store {name}", launch


def _attention(
    chip: cuda.Chip,
    heads: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    block_size: int,
) -> tuple[Launch, Launch]:
    """HISTORY over a cache of `cache_dtype`, or CURRENT without one, 64 sequences."""
    sequences = 64
    queries = _meta(sequences, heads, RANK + ROPE, dtype=dtype)
    lengths = _meta(sequences, dtype=torch.int32)
    batch = DecodeBatch(
        lengths, lengths, _meta(sequences, 1024, dtype=torch.int32),
        _meta(sequences, dtype=torch.int64),
    )  # fmt: skip
    if cache_dtype is None:
        current = _meta(sequences, RANK + ROPE, dtype=dtype)
        keys = cuda.step_keys(current[:, :RANK], current[:, RANK:], batch)
    else:
        cache = LatentCache(128, block_size, _dims(heads), cache_dtype, "meta")
        keys = cuda.paged_keys(cache, batch)
    return cuda.launches(
        queries[..., :RANK], queries[..., RANK:], keys, batch, 0.07,
        _meta(sequences, heads, RANK, dtype=dtype), _meta(sequences, heads),
        _meta(cuda.scratch_bytes(chip, RANK), dtype=torch.uint8), chip,
    )  # fmt: skip


def _dims(heads: int) -> MLADims:
    return MLADims(heads, RANK, ROPE, 128, 128, 0.07)


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


if __name__ == "__main__":
    wanted = int(sys.argv[1])
    reports = {name: vars(compiled(launch, wanted)) for name, launch in launches(wanted)}
    print(json.dumps(reports, indent=2))
