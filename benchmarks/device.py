"""One GPU in under five minutes: every kernel against float64, then timed against its floor.

    python benchmarks/device.py
    python benchmarks/device.py --device npu              an Ascend NPU, with torch_npu and CANN
    python benchmarks/device.py --device cpu --quick      the same logic, tiny, on any machine
    python benchmarks/device.py --floors                  the floors on an H200, needs no device

Needs nothing but PyTorch and Triton. Where FlashMLA or FlashInfer would serve HISTORY, that is
checked and timed as it would run, beside Triton's; where FlashInfer is installed, so is its kernel
that the host must plan. A floor is the longer of two times: the bytes that must move at the
measured rate of a copy, the products at the measured rate of a large matrix product. Each time is a
median of CUDA events around a replayed graph, so that the host is not measured, and the calls in a
graph take turns over memory several times the size of the L2 cache.

The step is that of one rank among N on one GPU: its shard is real, and the all-to-all is a copy
of the same bytes on the main stream ("copy exchange"). No interconnect is measured here.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from anabranch import (
    AttentionKind,
    DCPDecoder,
    DecodeBatch,
    LatentCache,
    MLADims,
    Schedule,
    ShardLayout,
    merge_partials,
    pack_partials,
    partial_attention,
    unpack_partials,
    v_up,
)
from anabranch.attention import npu, peers, provider_for
from anabranch.attention.peer import Shape
from anabranch.schedules import RUN
from anabranch.step import Buffers, DecodeStep, StepInputs
from anabranch.streams import repeatable, streams_for

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SHARDS = 8
BLOCK = {"npu": 128}  # tokens of a block where it is not 64
H200_COPY_RATE, H200_MATRIX_RATE = 4.3e12, 790e12  # bytes and BF16 FLOPs a second, as measured
L2_BYTES = 256 * 2**20  # what the calls of a graph rotate over: several times the L2 of any GPU


@dataclass(frozen=True)
class Size:
    """Sizes of one run."""

    rank: int
    rope: int
    v: int
    heads: tuple[int, ...]  # of all ranks together
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    most_keys: int  # settings with more keys than this in all are left out
    copy_bytes: int
    matrix: int
    rotated_bytes: int
    repeats: int


FULL = Size(
    512, 64, 128, (16, 128), (1, 4, 16, 64), (4096, 16384, 65536, 262144), 64 * 262144, 2**31,
    8192, L2_BYTES, 20,
)  # fmt: skip
QUICK = Size(32, 8, 16, (8, 16), (1, 3), (100, 300), 1000, 2**16, 64, 2**16, 3)


@dataclass(frozen=True)
class Work:
    """Bytes that a kernel must move and products it must make, of rows in 16 bits."""

    moved: int
    flops: int = 0

    def floor(self, copy_rate: float, matrix_rate: float) -> float:
        """Seconds: the longer of the two."""
        return max(self.moved / copy_rate, self.flops / matrix_rate)


def history_work(size: Size, heads: int, keys: int, itemsize: int) -> Work:
    width = size.rank + size.rope
    return Work(keys * width * itemsize, 2 * heads * (size.rank + width) * keys)


def pack_work(size: Size, tokens: int, heads: int) -> Work:
    return Work(2 * tokens * heads * (size.rank * 2 + 4))


def merge_work(size: Size, tokens: int, heads: int) -> Work:
    """SHARDS received partials and the local one are read, one row is written."""
    return Work((SHARDS + 2) * tokens * heads * (size.rank * 2 + 4))


def v_up_work(size: Size, tokens: int, heads: int) -> Work:
    moved = tokens * heads * (size.rank + size.v) + heads * size.rank * size.v
    return Work(moved * 2, 2 * tokens * heads * size.rank * size.v)


def store_work(size: Size, tokens: int) -> Work:
    return Work(2 * tokens * (size.rank + size.rope) * 2)


def second_stage_work(size: Size, processors: int) -> Work:
    """The most partials that can be: two tiles of 64 FP32 rows for each multiprocessor."""
    return Work(processors * 2 * 64 * (size.rank + 1) * 4)


def floors() -> Iterator[tuple[str, str, Work]]:
    """Kernel, setting and work at the sizes of DeepSeek-V3."""
    size = FULL
    for itemsize, name in ((2, "HISTORY"), (1, "HISTORY, FP8 cache")):
        for heads in size.heads:
            for batch, context in ((1, 4096), (1, 262144), (16, 65536), (64, 4096), (64, 262144)):
                work = history_work(size, heads, batch * context, itemsize)
                yield name, f"{heads} heads, batch {batch}, context {context}", work
    yield "second stage", "at its most, 132 multiprocessors", second_stage_work(size, 132)
    for tokens in (64, 512):
        yield "pack", f"{tokens} tokens, 128 heads", pack_work(size, tokens, 128)
        merged = f"{tokens} tokens, 16 heads, {SHARDS} shards and the local pair"
        yield "merge", merged, merge_work(size, tokens, 16)
        yield "V-up", f"{tokens} tokens, 16 heads", v_up_work(size, tokens, 16)
        yield "cache write", f"{tokens} tokens", store_work(size, tokens)


def floor_table() -> str:
    """`floors` as Markdown, in the units of `docs/cuda.md`."""
    lines = [
        "| kernel | setting | MB | GFLOP | predicted us | bound by |",
        "|---|---|---|---|---|---|",
    ]
    for kernel, setting, work in floors():
        products = work.flops / H200_MATRIX_RATE > work.moved / H200_COPY_RATE
        lines.append(
            f"| {kernel} | {setting} | {work.moved / 1e6:.2f} | {work.flops / 1e9:.2f} | "
            f"{work.floor(H200_COPY_RATE, H200_MATRIX_RATE) * 1e6:.2f} | "
            f"{'products' if products else 'bandwidth'} |"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Timing:
    """One setting of one kernel: median seconds, its floor, and the fraction of it reached."""

    section: str
    setting: dict[str, Any]
    seconds: float
    floor: float
    of_floor: float


class Bench:
    """The device, what it can do at most, and what has been measured and checked."""

    def __init__(self, device: torch.device, size: Size) -> None:
        self.device, self.size = device, size
        self.random = torch.Generator(device).manual_seed(0)
        self.timings: list[Timing] = []
        self.checks: dict[str, float] = {}
        self.failed: list[str] = []
        self.copy_rate = self.matrix_rate = 1.0
        self.block = BLOCK.get(device.type, 64)
        # Dtypes of the step and its cache. The NPU's operator takes no others than these.
        self.dtypes = [(each, each) for each in (torch.bfloat16, torch.float16)]
        if device.type != "npu":
            fp8 = torch.bfloat16, torch.float8_e4m3fn
            self.dtypes += [(torch.float32, torch.float32), fp8]

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        values = torch.empty(shape, dtype=dtype, device=self.device)
        return values.normal_(generator=self.random)

    def dims(self, heads: int) -> MLADims:
        size = self.size
        return MLADims(heads, size.rank, size.rope, 128, size.v, (128 + size.rope) ** -0.5)

    def seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """Median seconds of one of `calls`, which take turns inside one graph."""

        def work() -> None:
            for call in calls:
                call()

        return self.replay_seconds(repeatable(self.device, work)) / len(calls)

    def replay_seconds(self, replay: Callable[[], object]) -> float:
        """Median seconds of `replay`, by events of the device, on a CPU by the clock."""
        repeats = self.size.repeats
        for _ in range(3):
            replay()
        if self.device.type == "cpu":
            samples = []
            for _ in range(repeats):
                begin = time.perf_counter()
                replay()
                samples.append(time.perf_counter() - begin)
            return statistics.median(samples)
        of_device = getattr(torch, self.device.type)  # torch.cuda or torch.npu
        events = [
            tuple(of_device.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)
        ]
        for begin_event, end_event in events:
            begin_event.record()
            replay()
            end_event.record()
        of_device.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in events) / 1e3

    def add(self, section: str, setting: dict[str, Any], seconds: float, work: Work) -> None:
        floor = work.floor(self.copy_rate, self.matrix_rate)
        self.timings.append(Timing(section, setting, seconds, floor, floor / seconds))
        print(line(self.timings[-1]), flush=True)

    def check(self, name: str, error: float, allowed: float) -> None:
        """Note an error; one above `allowed`, or that is not a number, fails the run."""
        self.checks[name] = error
        correct = error <= allowed
        if not correct:
            self.failed.append(name)
        verdict = "ok" if correct else "WRONG"
        print(f"check {name}: error {error:.2g}, allowed {allowed:.2g}: {verdict}", flush=True)

    def rotated(self, bytes_of_one: int) -> int:
        """How many buffers of a call make up the memory to rotate over."""
        return max(2, min(64, self.size.rotated_bytes // max(bytes_of_one, 1)))


def exact(values: torch.Tensor) -> torch.Tensor:
    """`values` in float64, on the CPU: not every device has products of float64."""
    return values.cpu().double()


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of `expected`, in float64."""
    expected = exact(expected)
    return float((exact(result) - expected).norm() / expected.norm().clamp_min(1e-30))


def line(timing: Timing) -> str:
    setting = ", ".join(f"{name} {value}" for name, value in timing.setting.items())
    return (
        f"{timing.section:<22} {setting:<44} {timing.seconds * 1e6:>10.1f} us"
        f"{timing.floor * 1e6:>10.1f} us  {timing.of_floor:>6.1%}"
    )


class Paged:
    """A cache filled with random latents, and batches over disjoint shuffled blocks of it."""

    def __init__(
        self, bench: Bench, heads: int, batch: int, context: int, sets: int, dtype: torch.dtype
    ) -> None:
        self.dims = bench.dims(heads)
        block = bench.block
        blocks = -(-(context + 1) // block)
        total = sets * batch * blocks
        scale = 0.02 if dtype == torch.float8_e4m3fn else 1.0
        self.cache = LatentCache(total, block, self.dims, dtype, bench.device, scale=scale)
        for chunk in range(0, total, 1024):
            shape = min(1024, total - chunk), block, self.dims.latent_width
            values = bench.normal(*shape)
            pages = slice(chunk, chunk + shape[0])
            rank = self.dims.kv_lora_rank
            self.cache.latent[pages] = self.cache._stored(values[..., :rank])
            self.cache.rope[pages] = self.cache._stored(values[..., rank:])
        order = torch.randperm(total, generator=torch.Generator().manual_seed(0))
        tables = order.view(sets, batch, blocks).to(torch.int32)
        lengths = torch.full((batch,), context, dtype=torch.int32)
        ones = torch.ones(batch, dtype=torch.int32)
        slots = tables[:, :, context // block].long() * block + context % block
        if bench.device.type != "npu":  # whose operator reads lengths on the host
            lengths, ones = lengths.to(bench.device), ones.to(bench.device)
        self.batches = [
            DecodeBatch(lengths, ones, *(t.to(bench.device) for t in (table, slot)))
            for table, slot in zip(tables, slots, strict=True)
        ]


def rates(bench: Bench) -> None:
    """The copy and the matrix product that floors are measured against."""
    source = torch.zeros(bench.size.copy_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    bench.copy_rate = 2 * source.nbytes / bench.seconds([lambda: target.copy_(source)])
    edge = bench.size.matrix
    a, b = bench.normal(edge, edge), bench.normal(edge, edge)
    product = torch.empty_like(a)
    bench.matrix_rate = 2 * edge**3 / bench.seconds([lambda: torch.mm(a, b, out=product)])
    copied, multiplied = bench.copy_rate / 1e9, bench.matrix_rate / 1e12
    print(f"copy {copied:.0f} GB/s, BF16 product {multiplied:.1f} TFLOP/s")


@contextmanager
def without_peers() -> Iterator[None]:
    """HISTORY is Triton's, whatever is installed."""
    with mock.patch.object(peers, "PEERS", ()):
        yield


def peers_here(device: torch.device) -> list[str]:
    """The libraries that serve HISTORY of some shapes on `device`."""
    if device.type != "cuda":
        return []
    chip = torch.cuda.get_device_capability(device)
    there = [peer for peer in peers.PEERS if chip in peer.capabilities]
    return [peer.name for peer in there if peer.missing() is None]


def check_attention(bench: Bench) -> None:
    """HISTORY over ragged lengths and CURRENT of several tokens, in every dtype."""
    _check_attention(bench, "")
    if peers_here(bench.device):
        with without_peers():
            _check_attention(bench, ", Triton alone")


def _check_attention(bench: Bench, kernels: str) -> None:
    block = bench.block
    past, new = [0, 1, block, 777, 3001], [1, 4, 2, 1, 3]
    if bench.size is QUICK:
        past = [0, 1, block, 99, 130]
    rank, tokens = bench.size.rank, sum(new)
    for heads in bench.size.heads:
        for dtype, stored in bench.dtypes:
            dims = bench.dims(heads)
            blocks = [-(-(p + n) // block) for p, n in zip(past, new, strict=True)]
            ids = iter(torch.randperm(sum(blocks)).tolist())
            tables = [[next(ids) for _ in range(count)] for count in blocks]
            fp8 = stored == torch.float8_e4m3fn
            cache = LatentCache(
                sum(blocks), block, dims, stored, bench.device, scale=0.02 if fp8 else 1.0
            )
            cache.latent.fill_(torch.nan)
            cache.rope.fill_(torch.nan)
            plan = ShardLayout().plan_batch
            keys = bench.normal(sum(past), dims.latent_width, dtype=dtype)
            fill = plan([0] * len(past), past, tables, block, device=bench.device)
            cache.write(keys[:, :rank], keys[:, rank:], fill.slot_mapping)
            kept = (exact(cache._stored(keys)) * cache.scale).split(past)
            batch = plan(past, new, tables, block, device=bench.device)
            query = bench.normal(tokens, heads, dims.latent_width, dtype=dtype)
            current = bench.normal(tokens, dims.latent_width, dtype=dtype)
            for kind, kv in (
                (AttentionKind.HISTORY, cache),
                (AttentionKind.CURRENT, (current[:, :rank], current[:, rank:])),
            ):
                out, lse = partial_attention(
                    query[..., :rank], query[..., rank:], kv, batch, kind, dims
                )
                expected, expected_lse = exact(torch.zeros_like(out)), exact(lse).clone()
                row = 0
                for b, count in enumerate(new):
                    for token in range(count):
                        first = row - token
                        seen = (
                            kept[b] if kind is AttentionKind.HISTORY else current[first : row + 1]
                        )
                        seen = exact(seen)
                        scores = exact(query[row]) @ seen.T * dims.scale
                        if len(seen):
                            expected[row] = scores.softmax(-1) @ seen[:, :rank]
                        expected_lse[row] = scores.logsumexp(-1)
                        row += 1
                case = f"{kind.value} {heads} heads {dtype} over {stored}{kernels}"
                name = case.replace("torch.", "")
                bench.check(name, relative_error(out, expected), TOLERANCE[dtype])
                empty = expected_lse == -torch.inf
                apart = (exact(lse) - expected_lse)[~empty].abs().max()
                same = torch.equal(empty, exact(lse) == -torch.inf)
                bench.check(f"{name}, LSE", float(apart) if same else torch.inf, 1e-3)


def check_step(bench: Bench) -> None:
    """N shards in turn, exchanged by slices; and every schedule of one rank, eager and captured."""
    rank, heads, past, new = bench.size.rank, SHARDS * 2, [130, 0, 517], [1, 2, 1]
    dims, tokens = bench.dims(heads), sum(new)
    weights = bench.normal(heads, rank, bench.size.v)
    keys = [bench.normal(p + n, dims.latent_width) for p, n in zip(past, new, strict=True)]
    query = bench.normal(tokens, heads, dims.latent_width)
    current = torch.cat([k[p:] for k, p in zip(keys, past, strict=True)])
    history = torch.cat([k[:p] for k, p in zip(keys, past, strict=True)])
    expected, row = torch.zeros(tokens, heads, rank, dtype=torch.float64), 0
    for sequence, p, n in zip(keys, past, new, strict=True):
        for token in range(n):
            seen = exact(sequence[: p + token + 1])
            scores = exact(query[row]) @ seen.T * dims.scale
            expected[row] = scores.softmax(-1) @ seen[:, :rank]
            row += 1
    expected = torch.einsum("thl,hlv->thv", expected, exact(weights)).flatten(1)

    def shard(layout: ShardLayout) -> tuple[LatentCache, DecodeBatch]:
        block = bench.block
        blocks = [layout.blocks_needed(p + n, block) for p, n in zip(past, new, strict=True)]
        ids = iter(range(sum(blocks)))
        tables = [[next(ids) for _ in range(count)] for count in blocks]
        cache = LatentCache(sum(blocks), block, dims, torch.bfloat16, bench.device)
        fill = layout.plan_batch([0] * len(past), past, tables, block, device=bench.device)
        cache.write(history[:, :rank], history[:, rank:], fill.slot_mapping)
        return cache, layout.plan_batch(past, new, tables, block, device=bench.device)

    packed = []
    for index in range(SHARDS):
        cache, batch = shard(ShardLayout(SHARDS, index))
        partial = partial_attention(
            query[..., :rank], query[..., rank:], cache, batch, AttentionKind.HISTORY, dims
        )
        packed.append(pack_partials(*partial, SHARDS))
    own = partial_attention(
        query[..., :rank], query[..., rank:], (current[:, :rank], current[:, rank:]), batch,
        AttentionKind.CURRENT, dims,
    )  # fmt: skip
    results = []
    for index in range(SHARDS):
        part = slice(index * 2, index * 2 + 2)
        received = unpack_partials(torch.stack([each[index] for each in packed]))
        merged, _ = merge_partials(
            *received, own[0][:, part].contiguous(), own[1][:, part].contiguous()
        )
        results.append(v_up(merged, weights[part]))
    bench.check(
        f"step on {SHARDS} virtual ranks", relative_error(torch.cat(results, 1), expected), 1e-2
    )
    decoder = DCPDecoder(dims, device=bench.device)
    for schedule in Schedule:
        cache, batch = shard(ShardLayout())
        arguments = (
            query[..., :rank], query[..., rank:], current[:, :rank], current[:, rank:], cache,
            batch, weights,
        )  # fmt: skip
        result = decoder.step(*arguments, schedule=schedule)
        bench.check(f"step, {schedule.value}", relative_error(result, expected), 1e-2)
        decoder.schedule = schedule
        captured = decoder.capture(tokens)
        for _ in range(3):
            replayed = captured.step(*arguments)
        bench.check(f"captured step, {schedule.value}", relative_error(replayed, result), 0.0)


def time_attention(bench: Bench) -> None:
    size = bench.size
    for heads in size.heads:
        for batch in size.batches:
            for context in size.contexts:
                for stored in (stored for dtype, stored in bench.dtypes if dtype == torch.bfloat16):
                    if batch * context <= size.most_keys:
                        _time_history(bench, heads, batch, context, stored)


def _time_history(bench: Bench, heads: int, batch: int, context: int, stored: torch.dtype) -> None:
    size = bench.size
    keys, width = batch * context, size.rank + size.rope
    work = history_work(size, heads, keys, stored.itemsize)
    paged = Paged(bench, heads, batch, context, bench.rotated(work.moved), stored)
    query = bench.normal(batch, heads, width)
    out = query.new_empty(batch, heads, size.rank), torch.empty(batch, heads, device=bench.device)
    provider = provider_for(bench.device)
    needed = provider.workspace_bytes(heads, paged.dims, paged.cache, paged.batches[0])
    workspace = torch.empty(needed, dtype=torch.uint8, device=bench.device)

    def attend(step: DecodeBatch) -> Callable[[], object]:
        return lambda: partial_attention(
            query[..., : size.rank], query[..., size.rank :], paged.cache, step,
            AttentionKind.HISTORY, paged.dims, workspace, out=out,
        )  # fmt: skip

    setting = {"heads": heads, "batch": batch, "context": context}
    name = "history BF16" if stored == torch.bfloat16 else "history FP8 cache"
    named = ", ".join(f"{name} {value}" for name, value in setting.items())
    calls = [attend(each) for each in paged.batches]
    with without_peers():
        bench.add(name, setting, bench.seconds(calls), work)
        calls[0]()
    ours = out[0].clone(), out[1].clone()
    peer = _peer(bench, paged, query)
    if peer is not None:
        calls[0]()
        _compare(bench, f"{peer}, {named}", out, ours)
        bench.add(f"history, {peer}", setting, bench.seconds(calls), work)
    if stored == torch.bfloat16 and keys <= size.most_keys // 16:
        plain = [_plain(paged, query, each, context) for each in paged.batches]
        bench.add("history, plain PyTorch", setting, bench.seconds(plain), work)
    if stored == torch.bfloat16 and bench.device.type == "cuda" and find_spec("flashinfer"):
        scratch = torch.empty(128 * 2**20, dtype=torch.uint8, device=bench.device)
        calls = [flashinfer_history(paged, query, each, scratch) for each in paged.batches]
        theirs, base_2 = calls[0]()
        _compare(bench, f"FlashInfer, planned, {named}", (theirs, base_2 * math.log(2)), ours)
        bench.add("FlashInfer, planned", setting, bench.seconds(calls), work)


def _peer(bench: Bench, paged: Paged, query: torch.Tensor) -> str | None:
    """The library that serves HISTORY of this setting."""
    if bench.device.type != "cuda":
        return None
    chip, dims = torch.cuda.get_device_capability(bench.device), paged.dims
    widths = dims.kv_lora_rank, dims.qk_rope_head_dim
    peer = peers.serving(
        Shape.of(chip, query.shape[1], widths, query.dtype, paged.cache, paged.batches[0])
    )
    return None if peer is None else peer.name


def _compare(
    bench: Bench,
    name: str,
    theirs: tuple[torch.Tensor, torch.Tensor],
    ours: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Two kernels on one problem, both with a natural LSE."""
    bench.check(f"Triton against {name}", relative_error(ours[0], theirs[0]), 1e-2)
    apart = float((ours[1] - theirs[1]).abs().max())
    bench.check(f"Triton against {name}, LSE", apart, 1e-2)


def flashinfer_history(
    paged: Paged, query: torch.Tensor, batch: DecodeBatch, scratch: torch.Tensor
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """HISTORY by FlashInfer, planned here for the lengths that `batch` has now."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    rank, table = paged.dims.kv_lora_rank, batch.block_table
    pages = -(-batch.seq_lens // paged.cache.block_size)
    used = torch.arange(table.shape[1], device=table.device) < pages[:, None]
    wrapper = BatchMLAPagedAttentionWrapper(scratch)
    wrapper.plan(
        qo_indptr=_starts(batch.query_lens), kv_indptr=_starts(pages), kv_indices=table[used],
        kv_len_arr=batch.seq_lens, num_heads=query.shape[1], head_dim_ckv=rank,
        head_dim_kpe=query.shape[2] - rank, page_size=paged.cache.block_size, causal=False,
        sm_scale=paged.dims.scale, q_data_type=query.dtype, kv_data_type=paged.cache.latent.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(
        q_nope=query[..., :rank], q_pe=query[..., rank:], ckv_cache=paged.cache.latent,
        kpe_cache=paged.cache.rope, return_lse=True,
    )  # fmt: skip


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    """`[B + 1]` int32: where each of the sequences of these lengths begins, and where all end."""
    ends = lengths.cumsum(0, dtype=torch.int32)
    return torch.cat([ends.new_zeros(1), ends])


def _plain(
    paged: Paged, query: torch.Tensor, batch: DecodeBatch, context: int
) -> Callable[[], object]:
    """Gather, product, softmax, product, for sequences of one length."""
    rank, scale = paged.dims.kv_lora_rank, paged.dims.scale

    def run() -> torch.Tensor:
        table = batch.block_table.long()
        latent = paged.cache.latent[table].flatten(1, 2)[:, :context]
        rope = paged.cache.rope[table].flatten(1, 2)[:, :context]
        scores = query[..., :rank] @ latent.mT + query[..., rank:] @ rope.mT
        return (scores.float() * scale).softmax(-1).to(query.dtype) @ latent

    return run


def time_small_kernels(bench: Bench) -> None:
    """Pack, merge, V-up and the cache write: all bound by bandwidth."""
    size, heads = bench.size, max(bench.size.heads)
    own = heads // SHARDS
    for tokens in (64, 512) if size is FULL else (3,):
        sets = bench.rotated(pack_work(size, tokens, heads).moved)
        outs = [bench.normal(tokens, heads, size.rank) for _ in range(sets)]
        lses = [bench.normal(tokens, heads, dtype=torch.float32) for _ in range(sets)]
        wires = [pack_partials(o, lse, SHARDS) for o, lse in zip(outs, lses, strict=True)]
        setting = {"tokens": tokens, "heads": heads, "shards": SHARDS}
        packs = [_pack(*each) for each in zip(outs, lses, wires, strict=True)]
        bench.add("pack", setting, bench.seconds(packs), pack_work(size, tokens, heads))
        local = bench.normal(tokens, own, size.rank), bench.normal(tokens, own, dtype=torch.float32)
        merged = torch.empty_like(local[0]), torch.empty_like(local[1])
        merges = [_merge(unpack_partials(wire), local, merged) for wire in wires]
        bench.add("merge", setting, bench.seconds(merges), merge_work(size, tokens, own))
        weights = [bench.normal(own, size.rank, size.v) for _ in range(sets)]
        result = local[0].new_empty(tokens, own * size.v)
        projections = [_v_up(local[0], weight, result) for weight in weights]
        bench.add("V-up", setting, bench.seconds(projections), v_up_work(size, tokens, own))


def _pack(out: torch.Tensor, lse: torch.Tensor, wire: torch.Tensor) -> Callable[[], object]:
    return lambda: pack_partials(out, lse, SHARDS, packed=wire)


def _merge(
    received: tuple[torch.Tensor, torch.Tensor],
    local: tuple[torch.Tensor, torch.Tensor],
    out: tuple[torch.Tensor, torch.Tensor],
) -> Callable[[], object]:
    return lambda: merge_partials(*received, *local, out=out)


def _v_up(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
    return lambda: v_up(x, weight, out=out)


class VirtualGroup:
    """Stands for rank 0 of N where the others are not there."""

    def size(self) -> int:
        return SHARDS

    def rank(self) -> int:
        return 0


class VirtualStep(DecodeStep):
    """A step whose collectives are copies of the same bytes on the main stream."""

    def gather_queries(self) -> None:
        take, width = self.buffers.take, self.dims.latent_width
        shape = self.world_size, self.tokens, self.own_heads
        received = take("queries_by_rank", *shape, width, dtype=self.dtype)
        received[..., : self.dims.kv_lora_rank] = self.inputs.q_nope
        received[..., self.dims.kv_lora_rank :] = self.inputs.q_pe
        every = take("queries", self.tokens, self.all_heads, width, dtype=self.dtype)
        every.view(self.tokens, *shape[::2], width).copy_(received.transpose(0, 1))
        rank = self.dims.kv_lora_rank
        self.q_nope, self.q_pe = every[..., :rank], every[..., rank:]

    def exchange_history(self) -> None:
        self._exchange(self.sent[0], self.dtype)

    def exchange_history_converted(self) -> None:
        self._exchange(self.sent[0].float(), torch.float32)

    def _exchange(self, out: torch.Tensor, dtype: torch.dtype) -> None:
        send, receive = self._wire(dtype)
        pack_partials(out, self.sent[1], self.world_size, packed=send)
        receive.copy_(send)
        self.received = unpack_partials(receive)


def time_step(bench: Bench) -> None:
    """One rank of N with the copy exchange: three schedules, given by the host and as a graph."""
    size, heads = bench.size, max(bench.size.heads) // SHARDS
    for batch, context in ((16, 65536), (64, 16384)) if size is FULL else ((2, 100),):
        local = context // SHARDS
        paged = Paged(bench, heads * SHARDS, batch, local, 1, torch.bfloat16)
        width = size.rank + size.rope
        query, current = bench.normal(batch, heads, width), bench.normal(batch, width)
        inputs = StepInputs(
            query[..., : size.rank], query[..., size.rank :],
            current[:, : size.rank], current[:, size.rank :],
            paged.cache, paged.batches[0], bench.normal(heads, size.rank, size.v),
        )  # fmt: skip
        output = query.new_empty(batch, heads * size.v)
        group: Any = VirtualGroup()
        step = VirtualStep(bench.dims(heads), group, inputs, Buffers(bench.device), output)
        keys, every = batch * local, heads * SHARDS
        attended = history_work(size, every, keys, 2)
        # Packed, copied: each reads and writes all partials.
        moved = attended.moved + 2 * pack_work(size, batch, every).moved
        work = Work(moved, attended.flops)
        for schedule in Schedule:

            def run(schedule: Schedule = schedule, step: DecodeStep = step) -> None:
                RUN[schedule](step, streams_for(bench.device))

            setting = {"batch": batch, "context": context, "schedule": schedule.value}
            bench.add("step, copy exchange", setting, bench.replay_seconds(run), work)
            graph = repeatable(bench.device, run)
            bench.add("step graph, copy exch.", setting, bench.replay_seconds(graph), work)


def described(device: torch.device) -> dict[str, str]:
    name = platform.processor()
    if device.type == "npu":
        name = torch.npu.get_device_name(device)
    elif device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = f"{properties.name}, sm_{properties.major}{properties.minor}"
    return {
        "device": name,
        "provider": getattr(provider_for(device), "__name__", ""),
        "peers": ", ".join(peers_here(device)),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cann": npu.cann_version() if device.type == "npu" else "",
    }


def sections() -> Iterator[Callable[[Bench], None]]:
    yield from (
        check_attention, check_step, rates, time_small_kernels, time_step, time_attention
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Check and time every kernel on one device.")
    parser.add_argument("--device", default="cuda", help="cuda, npu, or cpu to try the script")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, seconds")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/device.json"))
    parser.add_argument("--floors", action="store_true", help="print the floors, run nothing")
    options = parser.parse_args()
    if options.floors:
        print(floor_table())
        return
    begin = time.time()
    # To ask also makes PyTorch know the device.
    lacking = npu.missing() if options.device.startswith("npu") else None
    if lacking is not None:
        parser.error(lacking)
    device = torch.device(options.device)
    bench = Bench(device, QUICK if options.quick else FULL)
    with torch.no_grad():
        for section in sections():
            section(bench)
    content = {
        "benchmark": "device",
        "quick": options.quick,
        "seconds": time.time() - begin,
        "machine": described(device),
        "copy_bytes_per_second": bench.copy_rate,
        "matrix_flops_per_second": bench.matrix_rate,
        "checks": bench.checks,
        "failed": bench.failed,
        "timings": [asdict(timing) for timing in bench.timings],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"\n{'kernel':<22} {'setting':<44} {'time':>13}{'floor':>13}  of floor")
    for timing in bench.timings:
        print(line(timing))
    print(f"{len(bench.checks)} checks, failed: {', '.join(bench.failed) or 'none'}")
    print(f"{options.out} ({content['seconds']:.0f} s)")
    raise SystemExit(1 if bench.failed else 0)


if __name__ == "__main__":
    main()
