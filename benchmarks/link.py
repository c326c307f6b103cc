"""When overlap pays: a map of its gain over context, tokens of a step, and link.

    sudo python benchmarks/link.py
    sudo python benchmarks/link.py --quick

Two ranks in network namespaces, joined by a veth pair. Its rate is set by `tc ... tbf`; its
delay, for which a kernel may lack netem, by a shim that sleeps before every collective that
crosses the link: the caller waits as it would for a distant peer, and no core is held. The shim
is put in place here; the package knows nothing of it.

`hideable` is the smaller of current attention and pack + exchange, as timed in the serial
schedule: no schedule can save more. `hidden / hideable` is what overlap saved of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
import typer
from measure import OUT, Case, OutOption, QuickOption, Report, Samples, pyplot
from namespaces import missing, namespace_pair
from step import Setting, add_case, measure_on_rank

from anabranch import exchange
from anabranch.launch import Rank

MATTERS = 0.05  # of what follows history attention: less is lost in the noise


@dataclass(frozen=True)
class Link:
    """A rate in Gbit/s, None: as fast as the kernel copies; and a one-way delay."""

    gigabits: float | None = None
    delay_ms: float = 0

    def __str__(self) -> str:
        rate = "unshaped" if self.gigabits is None else f"{self.gigabits:g} Gbit/s"
        return rate + (f" + {self.delay_ms:g} ms" if self.delay_ms else "")


LINKS = [Link(), Link(10), Link(1), Link(10, 1), Link(1, 5)]


def main(quick: QuickOption = False, out: OutOption = OUT) -> None:
    """Measure the schedules over links between two ranks."""
    if reason := missing():
        raise typer.BadParameter(reason)
    report = Report("link", quick)
    contexts, tokens = ([64, 1024], [1, 16]) if quick else ([64, 1024, 4096, 16384], [1, 4, 16, 64])
    settings = [asdict(Setting(context, count)) for context in contexts for count in tokens]
    for link in [Link(1, 1)] if quick else LINKS:
        with namespace_pair() as pair:
            if link.gigabits is not None:
                pair.shape(link.gigabits)
            job, rounds = "link:measure_with_delay", 5 if quick else 15
            results = pair.run(job, settings, rounds, link.delay_ms / 1e3)
        for setting, result in zip(settings, results, strict=True):
            add_case(report, "map", {"link": str(link), **setting}, result)
    claims(report)
    report.finish(out)
    draw(report.section("map"), out / "link.png")


def claims(report: Report) -> None:
    shaped = [case for case in report.section("map") if case.setting["link"] != str(Link())]
    report.at_least(
        f"of the hideable hidden, on shaped links, where it is {MATTERS:.0%} of the tail",
        [
            case.figures["hidden / hideable"]
            for case in shaped
            if case.figures["hideable / tail"] >= MATTERS
        ],
        0.9,
    )
    auto = [case.ratios["serial / auto"].median for case in report.section("map")]
    report.at_least("serial over auto", auto, 0.97)
    lost = [case for case in report.section("map") if case.figures["best other / overlap"] < 1]
    lost.sort(key=lambda case: case.figures["best other / overlap"])
    report.note(f"overlap is slower than the best of the others in {len(lost)} settings")
    for case in lost[:5]:
        where = ", ".join(f"{name} {value}" for name, value in case.setting.items())
        report.note(f"{1 / case.figures['best other / overlap'] - 1:.1%} slower: {where}")


def measure_with_delay(
    rank: Rank, settings: list[dict[str, Any]], rounds: int, delay: float
) -> list[dict[str, Samples]]:
    with delayed(delay):
        return measure_on_rank(rank, settings, rounds)


@contextmanager
def delayed(seconds: float) -> Iterator[None]:
    """Make the collectives of a decode step begin `seconds` late, holding no core meanwhile."""

    def later(collective: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: Any, **options: Any) -> object:
            time.sleep(seconds)
            return collective(*arguments, **options)

        return run

    if seconds == 0:
        yield
        return
    with (
        mock.patch.object(dist, "all_to_all_single", later(dist.all_to_all_single)),
        mock.patch.object(exchange, "_all_gather", later(exchange._all_gather)),
    ):
        yield


def draw(cases: list[Case], path: Path) -> None:
    """One panel a link: time of the best other schedule over that of overlap."""
    plt = pyplot()
    if plt is None:
        return
    links = list(dict.fromkeys(case.setting["link"] for case in cases))
    contexts = sorted({case.setting["context"] for case in cases})
    tokens = sorted({case.setting["tokens"] for case in cases})
    gain = {
        (case.setting["link"], case.setting["tokens"], case.setting["context"]): case.figures[
            "best other / overlap"
        ]
        for case in cases
    }
    figure, axes = plt.subplots(
        1, len(links), figsize=(2.9 * len(links) + 1, 3), squeeze=False, layout="constrained"
    )
    for axis, link in zip(axes.flat, links, strict=True):
        grid = [[gain[link, count, context] for context in contexts] for count in tokens]
        image = axis.imshow(grid, cmap="RdBu", vmin=0.8, vmax=1.2, origin="lower", aspect="auto")
        for row, values in enumerate(grid):
            for column, value in enumerate(values):
                axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8)
        axis.set(title=link, xlabel="context", ylabel="tokens of the step")
        axis.set_xticks(range(len(contexts)), contexts)
        axis.set_yticks(range(len(tokens)), tokens)
    figure.colorbar(image, ax=axes, label="best other / overlap")
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
