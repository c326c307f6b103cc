"""What the streams cost: on a step, and under the sanitizer.

    python benchmarks/streams.py [--rounds 50] > streams.json

Three questions, each answered by medians of interleaved rounds on one intra-op thread:
- calls: the stream calls of each schedule around operations that do nothing, against the same
  plain calls. That is all that streams can cost a step, threads woken and waited for included.
- step: a decode step of a small layer per schedule.
- watched: the same step under the sanitizer.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from measure import interleave

from anabranch import DCPDecoder, LatentCache, MLADims, Schedule, ShardLayout
from anabranch.schedules import RUN
from anabranch.streams.cpu import cpu_streams
from anabranch.streams.sanitizer import sanitize

DIMS = MLADims(16, 512, 64, 128, 128, 192**-0.5)
FIXED = (Schedule.SERIAL, Schedule.COMM_STREAM, Schedule.OVERLAP)
OPERATIONS = (
    "gather_queries", "history_attention", "current_attention", "exchange_history",
    "exchange_history_converted", "merge", "project", "project_transposed", "store",
)  # fmt: skip


def medians(rounds: int, contenders: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds of each, which take turns."""
    samples = interleave(contenders, rounds)
    return {name: round(statistics.median(times) * 1e6, 2) for name, times in samples.items()}


def idle_step() -> SimpleNamespace:
    """A step whose operations do nothing."""

    def nothing() -> None:
        pass

    held = (torch.zeros(1),)
    results = dict.fromkeys(
        ("current_inputs", "current_results", "history_results", "received_memory"), held
    )
    return SimpleNamespace(**dict.fromkeys(OPERATIONS, nothing), **results)


def calls(rounds: int) -> dict[str, float]:
    step, streams = idle_step(), cpu_streams()

    def plain() -> None:
        for name in OPERATIONS[:7]:
            getattr(step, name)()

    variants: dict[str, Callable[[], object]] = {"plain calls": plain}
    for schedule in FIXED:
        variants[schedule.value] = lambda run=RUN[schedule]: run(step, streams)
    return medians(rounds, variants)


def steps(rounds: int) -> Iterator[tuple[str, Callable[[], object]]]:
    draw = torch.Generator().manual_seed(0)
    layout, length, block_size = ShardLayout(), 512, 64
    cache = LatentCache(length // block_size + 1, block_size, DIMS, torch.float32)
    cache.latent.normal_(generator=draw)
    cache.rope.normal_(generator=draw)
    batch = layout.plan_batch([length], [1], [list(range(cache.num_blocks))], block_size)
    heads, rank, rope = DIMS.num_heads, DIMS.kv_lora_rank, DIMS.qk_rope_head_dim
    shapes = ((1, heads, rank), (1, heads, rope), (1, rank), (1, rope))
    inputs = [torch.randn(*shape, generator=draw) for shape in shapes]
    w_uv = torch.randn(heads, rank, DIMS.v_head_dim, generator=draw)
    for schedule in FIXED:
        decoder = DCPDecoder(DIMS, schedule=schedule)
        yield (
            schedule.value,
            lambda decoder=decoder: decoder.step(*inputs, cache, batch, w_uv),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="What the streams cost.")
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    variants = dict(steps(rounds))
    plain = medians(rounds, variants)
    with sanitize(cpu_streams()):
        watched = medians(max(rounds // 5, 10), variants)
    idle = calls(rounds)
    report = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "rounds": rounds,
        "calls_us": idle,
        "streams_cost_us": {
            name: round(value - idle["plain calls"], 2)
            for name, value in idle.items()
            if name != "plain calls"
        },
        "step_us": plain,
        "watched_step_us": watched,
        "sanitizer_factor": {name: round(watched[name] / plain[name], 1) for name in plain},
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
