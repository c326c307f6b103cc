"""The schedules of a decode step on ranks of this machine.

    python benchmarks/step.py
    python benchmarks/step.py --quick

Every rank computes with one thread, so that a rank stands for a device whatever their number; more
ranks than cores share the cores. The tokens of a step are those of one sequence.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import typer
from measure import (
    OUT,
    Case,
    OutOption,
    QuickOption,
    Report,
    Samples,
    Spread,
    interleave,
    interleave_by,
    lines_of,
    plot_lines,
    r_squared,
)

from anabranch import DCPDecoder, LatentCache, MLADims, Schedule, ShardLayout, launch
from anabranch.launch import Rank
from anabranch.streams import observe

HEADS = 64  # of all ranks together
RANK, ROPE, NOPE, V = 512, 64, 128, 128
BLOCK = 64
MOST_FLOPS = 2e11  # of history attention in one step: settings that need more are left out
SHOWN = ("history_attention", "current_attention", "exchange_history")


@dataclass(frozen=True)
class Setting:
    """One decode step."""

    context: int
    tokens: int
    dtype: str = "bfloat16"

    @property
    def flops(self) -> int:
        return 2 * HEADS * (2 * RANK + ROPE) * self.context * self.tokens


class OperationTimes:
    """An observer of streams: how long each operation took, and the tail of each step.

    The tail is what follows history attention on the main stream: all that schedules differ in.
    """

    def __init__(self) -> None:
        self.samples: Samples = {}
        self.tails: list[float] = []
        self._begin: dict[str, float] = {}
        self._history_end = 0.0

    def start(self, stream: str, kind: str, name: str) -> None:
        self._begin[stream] = time.perf_counter()

    def finish(self, stream: str, kind: str, name: str) -> None:
        now = time.perf_counter()
        if kind == "run":
            self.samples.setdefault(name, []).append(now - self._begin[stream])
        if name == "history_attention":
            self._history_end = now
        elif name == "store":
            self.tails.append(now - self._history_end)


def main(quick: QuickOption = False, out: OutOption = OUT) -> None:
    """Measure all schedules over ranks, context, tokens and dtype."""
    report = Report("step", quick)
    rounds = 3 if quick else 11
    sweeps = {
        "context": [Setting(2**power, 1) for power in range(10, 18)],
        "tokens": [Setting(4096, tokens) for tokens in (1, 4, 16, 64)],
        "dtype": [Setting(4096, 4, name) for name in ("bfloat16", "float16", "float32")],
    }
    if quick:
        sweeps = {
            "context": [Setting(1024, 1), Setting(4096, 1)],
            "tokens": [Setting(1024, 1), Setting(1024, 8)],
            "dtype": [Setting(1024, 1, name) for name in ("bfloat16", "float32")],
        }
    for size in (1, 2) if quick else (1, 2, 4):
        for sweep, chosen in sweeps.items():
            settings = [asdict(each) for each in chosen if each.flops <= MOST_FLOPS]
            results = launch.run(size, measure_on_rank, settings, rounds)
            for setting, result in zip(settings, results, strict=True):
                add_case(report, f"over {sweep}", {"ranks": size, **setting}, result)
    dispatch(report, quick)
    claims(report)
    report.finish(out)
    panels = {
        f"{size} rank(s), over {sweep}": lines
        for sweep in ("context", "tokens")
        for size in (1, 2, 4)
        for lines in lines_of(
            (c for c in report.section(f"over {sweep}") if c.setting["ranks"] == size),
            sweep,
            (),
        ).values()
    }
    plot_lines(out / "step.png", panels, "context, or tokens", "seconds")


def dispatch(report: Report, quick: bool) -> None:
    """What a step costs besides its kernels: one of next to nothing, eager and captured."""
    torch.set_num_threads(1)
    dims = MLADims(1, 16, 8, 8, 8, 0.2)
    cache = LatentCache(2, BLOCK, dims, torch.float32)
    for sequences in (1, 8):
        batch = ShardLayout().plan_batch([3] * sequences, [1] * sequences, [[0]] * sequences, BLOCK)
        inputs = {
            "q_nope": torch.randn(sequences, 1, 16), "q_pe": torch.randn(sequences, 1, 8),
            "kv_c": torch.randn(sequences, 16), "k_pe": torch.randn(sequences, 8),
            "cache": cache, "batch": batch, "w_uv": torch.randn(1, 16, 8),
        }  # fmt: skip
        for schedule in (Schedule.SERIAL, Schedule.OVERLAP):
            decoder = DCPDecoder(dims, None, schedule=schedule)
            captured = decoder.capture(sequences)
            contenders = {
                "eager": partial(decoder.step, **inputs),
                "captured": partial(captured.step, **inputs),
            }
            report.add(
                "dispatch",
                {"schedule": schedule.value, "sequences": sequences},
                interleave(contenders, 3 if quick else 15),
                [("eager", "captured")],
            )


def add_case(
    report: Report, section: str, setting: dict[str, Any], result: dict[str, Samples]
) -> Case:
    """Record one setting, with the operations of the serial schedule and what overlap hid."""
    timed = {name: Spread.of(values).median for name, values in result["operations"].items()}
    schedules = result["schedules"]
    case = report.add(
        section,
        setting,
        schedules,
        [("serial", "overlap"), ("comm_stream", "overlap"), ("serial", "auto")],
        {f"{name} ms": timed[name] * 1e3 for name in SHOWN},
    )
    tails = result["tails"]
    saved = [a - b for a, b in zip(tails["serial"], tails["overlap"], strict=True)]
    hideable = min(timed["current_attention"], timed["exchange_history"])
    case.figures["hideable / tail"] = hideable / Spread.of(tails["serial"]).median
    case.figures["hidden / hideable"] = Spread.of(saved).median / hideable
    best = min(case.ratios["serial / overlap"].median, case.ratios["comm_stream / overlap"].median)
    case.figures["best other / overlap"] = best
    return case


def claims(report: Report) -> None:
    cores = len(os.sched_getaffinity(0))
    history: dict[int, list[tuple[int, float]]] = {}
    for case in report.section("over context"):
        point = case.setting["context"], case.figures["history_attention ms"]
        history.setdefault(case.setting["ranks"], []).append(point)
    longest = {size: points[-1][1] for size, points in history.items()}
    for size, points in history.items():
        if size <= cores and len(points) > 2:
            fit = r_squared([x for x, _ in points], [y for _, y in points])
            report.at_least(f"R² of history attention over the context, {size} ranks", [fit], 0.99)
        if 1 < size <= cores:
            ratio = longest[1] / longest[size] / size
            report.at_least(f"1/N: history attention, N = {size}", [ratio], 0.9)


def measure_on_rank(
    rank: Rank, settings: list[dict[str, Any]], rounds: int
) -> list[dict[str, Samples]]:
    """Every rank takes part; a sample is one number for all of them."""
    torch.set_num_threads(1)
    return [measure_setting(rank, Setting(**setting), rounds) for setting in settings]


def measure_setting(rank: Rank, setting: Setting, rounds: int) -> dict[str, Samples]:
    """Samples of the schedules, and of the operations of the serial one, on all ranks."""
    decoder, inputs = prepare(rank, setting)
    observers = {Schedule.SERIAL: OperationTimes(), Schedule.OVERLAP: OperationTimes()}

    def timed(schedule: Schedule) -> Callable[[], object]:
        return lambda: decoder.step(**inputs, schedule=schedule)

    def observed(schedule: Schedule) -> Callable[[], None]:
        def run() -> None:
            with observe(observers[schedule]):
                decoder.step(**inputs, schedule=schedule)

        return run

    contenders = {schedule.value: timed(schedule) for schedule in Schedule}
    watched = {f"observed {schedule.value}": observed(schedule) for schedule in observers}

    def align() -> None:
        if rank.group is not None:
            dist.barrier(group=rank.group)

    schedules = interleave_by(contenders | watched, rounds, align)
    operations = {
        name: values[-rounds:] for name, values in observers[Schedule.SERIAL].samples.items()
    }
    exchange = {"exchange_history": operations["exchange_history"]}
    tails = {schedule.value: observers[schedule].tails[-rounds:] for schedule in observers}
    # The rank that came last to the exchange waited for none: its time is that of the exchange.
    return {
        "schedules": across(rank, {name: schedules[name] for name in contenders}, max),
        "operations": across(rank, operations, max) | across(rank, exchange, min),
        "tails": across(rank, tails, min),
    }


def across(rank: Rank, samples: Samples, choose: Callable[..., float]) -> Samples:
    """Of each sample that of one rank: the largest with `max`, the smallest with `min`."""
    if rank.group is None:
        return samples
    every: list[Samples] = [{} for _ in range(rank.world_size)]
    dist.all_gather_object(every, samples, group=rank.group)
    return {
        name: [choose(values) for values in zip(*(each[name] for each in every), strict=True)]
        for name in samples
    }


def prepare(rank: Rank, setting: Setting) -> tuple[DCPDecoder, dict[str, Any]]:
    """A decoder of this rank, and the arguments of its step."""
    torch.manual_seed(0)
    dtype = getattr(torch, setting.dtype)
    heads = HEADS // rank.world_size
    dims = MLADims(heads, RANK, ROPE, NOPE, V, (NOPE + ROPE) ** -0.5)
    layout = ShardLayout(rank.world_size, rank.index)
    blocks = layout.blocks_needed(setting.context + setting.tokens, BLOCK)
    cache = LatentCache(blocks, BLOCK, dims, dtype)
    cache.latent.normal_()
    cache.rope.normal_()
    table = torch.randperm(blocks).tolist()
    tokens = setting.tokens
    inputs = {
        "q_nope": torch.randn(tokens, heads, RANK, dtype=dtype),
        "q_pe": torch.randn(tokens, heads, ROPE, dtype=dtype),
        "kv_c": torch.randn(tokens, RANK, dtype=dtype),
        "k_pe": torch.randn(tokens, ROPE, dtype=dtype),
        "cache": cache,
        "batch": layout.plan_batch([setting.context], [tokens], [table], BLOCK),
        "w_uv": torch.randn(heads, RANK, V, dtype=dtype) / RANK**0.5,
    }
    return DCPDecoder(dims, rank.group, layout), inputs


if __name__ == "__main__":
    typer.run(main)
