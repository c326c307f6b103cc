"""When overlap pays: a map of its gain over context, tokens of a step, and link.

    sudo python benchmarks/link.py
    sudo python benchmarks/link.py --quick

Two ranks in network namespaces, joined by a veth pair. Its rate is set by `tc ... tbf`; its
delay, for which a kernel may lack netem, by a shim that sleeps before every collective that
crosses the link: the caller waits as it would for a distant peer, and no core is held. The shim
is put in place here; the package knows nothing of it.

`hideable` is the smaller of current attention and pack + exchange, as timed in the serial
schedule: no schedule can save more. `hidden / hideable` is what overlap saved of it. `waits` is the
part of the exchange that the link adds to an unshaped one, which is all processor time here. A rank
has one core, so only that part leaves the core to current attention: `hidden / waiting` is what
overlap saved of the smaller of current attention and it.
"""

from __future__ import annotations

import math
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
from step import HEADS, RANK, ROPE, Setting, add_case, measure_on_rank

from anabranch import exchange
from anabranch.launch import Rank
from anabranch.streams import streams_for

RANKS = 2
MOST_FLOPS = 1e11  # of history attention in one step: settings that need more are left out


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
    contexts, tokens = [256, 1024, 4096, 16384], [1, 16, 64, 256]
    if quick:
        contexts, tokens = [64, 1024], [1, 16]
    every = [Setting(context, count) for context in contexts for count in tokens]
    settings = [setting for setting in every if setting.flops <= MOST_FLOPS]
    unshaped: dict[Setting, float] = {}
    for link in [Link(), Link(1, 1)] if quick else LINKS:
        with namespace_pair() as pair:
            if link.gigabits is not None:
                pair.shape(link.gigabits)
            job, rounds = "link:measure_with_delay", 5 if quick else 9
            asked = [asdict(setting) for setting in settings]
            results = pair.run(job, asked, rounds, link.delay_ms / 1e3)
        for setting, result in zip(settings, results, strict=True):
            case = add_case(report, "map", {"link": str(link), **asdict(setting)}, result)
            exchange_ms = case.figures["exchange_history ms"]
            waits = exchange_ms - unshaped.setdefault(setting, exchange_ms)
            add_what_waits(case, setting, waits)
    claims(report)
    report.finish(out)
    draw(report.section("map"), out / "link.png")


def add_what_waits(case: Case, setting: Setting, waits: float) -> None:
    """Figures in milliseconds: what can be hidden, what only waits, what overlap hid."""
    current = case.figures["current_attention ms"]
    hideable = min(current, case.figures["exchange_history ms"])
    case.figures["hideable ms"] = hideable
    case.figures["waiting ms"] = max(min(current, waits), 0.0)
    case.figures["hidden ms"] = case.figures["hidden / hideable"] * hideable
    case.figures["auto overlaps"] = float(auto_overlaps(setting))


def auto_overlaps(setting: Setting) -> bool:
    """Whether `auto` overlaps a step of this size, as `anabranch.schedules.auto` decides."""
    pairs = setting.tokens * (setting.tokens + 1) // 2
    flops = 2 * pairs * HEADS // RANKS * (2 * RANK + ROPE)
    return flops >= streams_for("cpu").side.handoff_flops


def by_link(report: Report) -> None:
    """All settings of a link together: the noise of single ones exceeds what they can hide."""
    for link in dict.fromkeys(case.setting["link"] for case in report.section("map")):
        cases = [case for case in report.section("map") if case.setting["link"] == link]

        def total(name: str, cases: list[Case] = cases) -> float:
            return sum(case.figures[name] for case in cases)

        def best(names: tuple[str, ...], cases: list[Case] = cases) -> float:
            return sum(min(case.seconds[name].median for name in names) for case in cases)

        figures = {name: total(name) for name in ("hideable ms", "waiting ms", "hidden ms")}
        figures["hidden / hideable"] = figures["hidden ms"] / figures["hideable ms"]
        if figures["waiting ms"] > 0:
            figures["hidden / waiting"] = figures["hidden ms"] / figures["waiting ms"]
        figures["serial / overlap"] = best(("serial",)) / best(("overlap",))
        figures["comm_stream / overlap"] = best(("comm_stream",)) / best(("overlap",))
        figures["best / auto"] = best(("serial", "comm_stream", "overlap")) / best(("auto",))
        report.add("by link", {"link": link}, {}, (), figures)


def claims(report: Report) -> None:
    by_link(report)
    links = report.section("by link")
    shaped = [case for case in links if case.setting["link"] != str(Link())]
    for part, named in (
        ("hideable", "current attention and pack + exchange"),
        ("waiting", "current attention and the wait of the exchange"),
    ):
        report.at_least(
            f"hidden of the smaller of {named}, shaped links",
            [
                case.figures[f"hidden / {part}"]
                for case in shaped
                if f"hidden / {part}" in case.figures
            ],
            0.9,
        )
    report.at_least("best over auto", [case.figures["best / auto"] for case in links], 0.98)
    cases = report.section("map")
    same = [
        case.seconds["overlap" if case.figures["auto overlaps"] else "serial"].median
        / case.seconds["auto"].median
        for case in cases
    ]
    report.note(
        "the same code timed twice, auto and the schedule it chose: quotients of single settings "
        f"from {min(same):.2f} to {max(same):.2f}, the noise of this run"
    )
    lost = [case for case in cases if case.figures["best other / overlap"] < 1]
    lost.sort(key=lambda case: case.figures["best other / overlap"])
    report.note(f"overlap is slower than the best of the others in {len(lost)} of {len(cases)}")
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
        grid = [
            [gain.get((link, count, context), float("nan")) for context in contexts]
            for count in tokens
        ]
        image = axis.imshow(grid, cmap="RdBu", vmin=0.8, vmax=1.2, origin="lower", aspect="auto")
        for row, values in enumerate(grid):
            for column, value in enumerate(values):
                label = "" if math.isnan(value) else f"{value:.2f}"
                axis.text(column, row, label, ha="center", va="center", fontsize=8)
        axis.set(title=link, xlabel="context", ylabel="tokens of the step")
        axis.set_xticks(range(len(contexts)), contexts)
        axis.set_yticks(range(len(tokens)), tokens)
    figure.colorbar(image, ax=axes, label="best other / overlap")
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
