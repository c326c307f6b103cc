"""The exchange of history: bytes on the wire and time, native against converted dtype.

    sudo python benchmarks/exchange.py
    python benchmarks/exchange.py --quick

`native` packs in the dtype of attention; `converted` is the arrangement before the change, which
makes a float32 copy of everything first. As root the two ranks sit in network namespaces, and the
bytes are those that their interface counted; on loopback only what is passed to the
collective is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import typer
from measure import OUT, OutOption, QuickOption, Report, interleave_by, lines_of, plot_lines
from namespaces import missing, namespace_pair, sent_bytes
from step import across

from anabranch import exchange_partials, launch
from anabranch.launch import Rank

HEADS, WIDTH = 128, 512  # heads of all ranks together
COUNTED = 10  # exchanges per reading of the counters
GIGABITS = 10.0


def main(quick: QuickOption = False, out: OutOption = OUT) -> None:
    """Measure pack and all-to-all of history partials."""
    report = Report("exchange", quick)
    tokens = [1, 16] if quick else [1, 4, 16, 64, 256]
    dtypes = ["bfloat16"] if quick else ["bfloat16", "float16", "float32"]
    settings = [{"dtype": dtype, "tokens": count} for dtype in dtypes for count in tokens]
    rounds = 5 if quick else 21
    for size in (2,) if quick else (2, 4):
        results = launch.run(size, measure_on_rank, settings, rounds, False)
        add_cases(report, {"link": "loopback", "ranks": size}, settings, results)
    reason = missing()
    if reason:
        report.note(f"bytes on the wire were not counted: {reason}")
    else:
        with namespace_pair() as pair:
            for link in ("veth", f"{GIGABITS:g} Gbit/s"):
                if link != "veth":
                    pair.shape(GIGABITS)
                results = pair.run("exchange:measure_on_rank", settings, rounds, True)
                add_cases(report, {"link": link, "ranks": 2}, settings, results)
    for kind in ("passed", "wire"):
        name = f"native / converted, {kind}"
        ratios = [
            case.figures[name]
            for case in report.section("exchange")
            if case.setting["dtype"] != "float32" and name in case.figures
        ]
        report.at_most(f"native over converted bytes, 16 bit, {kind}", ratios, 0.51)
    report.finish(out)
    panels = lines_of(report.section("exchange"), "tokens", ("link", "ranks", "dtype"))
    plot_lines(out / "exchange.png", panels, "tokens", "seconds")


def add_cases(
    report: Report,
    where: dict[str, Any],
    settings: list[dict[str, Any]],
    results: list[dict[str, Any]],
) -> None:
    for setting, result in zip(settings, results, strict=True):
        figures = {}
        for kind in ("passed", "wire"):
            if kind in result:
                counted = result[kind]
                figures |= {f"{name} KiB, {kind}": counted[name] / 1024 for name in counted}
                figures[f"native / converted, {kind}"] = counted["native"] / counted["converted"]
        ratio = [("converted", "native")]
        report.add("exchange", {**where, **setting}, result["seconds"], ratio, figures)


def measure_on_rank(
    rank: Rank, settings: list[dict[str, Any]], rounds: int, on_link: bool
) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [measure_setting(rank, rounds, on_link, **setting) for setting in settings]


def measure_setting(
    rank: Rank, rounds: int, on_link: bool, dtype: str, tokens: int
) -> dict[str, Any]:
    """Seconds, bytes passed to the collective, and bytes the interface sent, per exchange."""
    out = torch.randn(tokens, HEADS, WIDTH).to(getattr(torch, dtype))
    lse = torch.randn(tokens, HEADS)
    group = rank.group
    contenders = {
        "native": lambda: exchange_partials(out, lse, group),
        "converted": lambda: exchange_partials(out.float(), lse, group),
    }
    result: dict[str, Any] = {"passed": {}}
    samples = interleave_by(contenders, rounds, lambda: dist.barrier(group=group))
    result["seconds"] = across(rank, samples, max)
    for name, run in contenders.items():
        with passed_bytes() as passed:
            run()
        result["passed"][name] = sum(passed)
        if on_link:
            dist.barrier(group=group)
            before = sent_bytes()
            for _ in range(COUNTED):
                run()
            dist.barrier(group=group)  # now the peer has received all of it
            result.setdefault("wire", {})[name] = (sent_bytes() - before) / COUNTED
    return result


@contextmanager
def passed_bytes() -> Iterator[list[int]]:
    """Sizes of what is given to `all_to_all_single`, a rank's share for itself included."""
    sizes: list[int] = []
    collective = dist.all_to_all_single

    def count(output: torch.Tensor, input: torch.Tensor, **options: Any) -> object:
        sizes.append(input.nbytes)
        return collective(output, input, **options)

    with mock.patch.object(dist, "all_to_all_single", count):
        yield sizes


if __name__ == "__main__":
    typer.run(main)
