"""Lower the kernels for an Ascend NPU that is not there, as Triton-Ascend would on it.

    python tests/triton_kernels/ascend.py      prints, as JSON, what each launch is lowered to

Needs triton-ascend. The steps are its own, with the target given: Triton IR, its passes
(`make_ttir`), and the adapter that comes with it, whose output its compiler in CANN takes. Sizes
are those of DeepSeek-V3.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch
from triton._C.libtriton import ir
from triton.backends.ascend.compiler import make_ttir, ttir_to_linalg
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from anabranch import LatentCache, MLADims
from anabranch.triton_kernels import Launch, exchange, merge, store

TARGET = GPUTarget("npu", "Ascend910B", 0)
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
TOKENS, HEADS, SHARDS, RANK, ROPE = 64, 128, 8, 512, 64


def lowered(launch: Launch) -> str:
    """The launch in the IR that Triton-Ascend's adapter gives."""
    signature, constants = {}, {}
    for parameter in launch.kernel.params:
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
        else:
            signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
    backend = make_backend(TARGET)
    options = backend.parse_options({"num_warps": launch.warps, "num_stages": launch.stages})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(launch.kernel, signature, constants, None)
    module = source.make_ir(
        options, backend.get_codegen_implementation(), backend.get_module_map(), context
    )
    metadata = dict(vars(options))
    return str(ttir_to_linalg(make_ttir(module, metadata, options), metadata, options))


def launches(row_tile: int = 1) -> Iterator[tuple[str, Launch]]:
    """What an NPU launches, in both dtypes of its attention."""
    own = HEADS // SHARDS
    for name, dtype in (("BF16", torch.bfloat16), ("FP16", torch.float16)):
        out, lse = _meta(TOKENS, HEADS, RANK, dtype=dtype), _meta(TOKENS, HEADS)
        packed = _meta(SHARDS, TOKENS, own, RANK + 2, dtype=dtype)
        yield f"pack {name}", exchange.pack_launch(out, lse, packed, row_tile)
        received, logs = packed[..., :RANK], _meta(SHARDS, TOKENS, own, RANK // 2 + 1)[..., 0]
        local = _meta(TOKENS, own, RANK, dtype=dtype), _meta(TOKENS, own)
        yield f"merge {name}", merge.merge_launch(received, logs, local, *local)
        yield f"merge {name} without a local pair", merge.merge_launch(received, logs, None, *local)
        rows, slots = _meta(TOKENS, RANK + ROPE, dtype=dtype), _meta(TOKENS, dtype=torch.int64)
        cache = LatentCache(128, 128, MLADims(own, RANK, ROPE, 128, 128, 0.07), dtype, "meta")
        pages = cache.latent.contiguous(), cache.rope.contiguous()
        yield (
            f"store {name}",
            store.store_launch(rows[:, :RANK], rows[:, RANK:], slots, *pages, 1.0),
        )


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


if __name__ == "__main__":
    print(json.dumps({name: lowered(launch) for name, launch in launches()}))
