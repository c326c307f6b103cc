"""What a team of two intra-op threads costs while another thread of the process is busy.

    python benchmarks/threads.py
    python benchmarks/threads.py --quick

A team meets at the end of every operator. When one of its threads waits for a core that a
thread outside the team keeps busy, the whole team waits, so two threads can be slower than one.
This is why `anabranch.streams.cpu` gives the side stream one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import typer
from measure import OUT, OutOption, QuickOption, Report, interleave, lines_of, plot_lines


def main(quick: QuickOption = False, out: OutOption = OUT) -> None:
    """Measure products with one and two threads, alone and beside a busy thread."""
    report = Report("threads", quick)
    for size in (128, 512) if quick else (64, 128, 256, 512, 1024, 2048):
        contenders = {"one thread": product(size, 1), "two threads": product(size, 2)}
        for beside in ("nothing", "a busy thread"):
            with busy_thread(beside != "nothing"):
                samples = interleave(contenders, 5 if quick else 15)
            report.add(
                "products",
                {"size": size, "beside": beside},
                samples,
                [("one thread", "two threads")],
            )
    report.finish(out)
    panels = lines_of(report.section("products"), "size", ("beside",))
    plot_lines(out / "threads.png", panels, "rows, columns", "seconds")


def product(size: int, threads: int) -> Callable[[], None]:
    a, b = torch.randn(2, size, size)
    result = torch.empty_like(a)

    def run() -> None:
        torch.set_num_threads(threads)
        torch.mm(a, b, out=result)

    return run


@contextmanager
def busy_thread(wanted: bool) -> Iterator[None]:
    """A thread that multiplies with one intra-op thread, without the GIL, until the end."""
    done = threading.Event()

    def work() -> None:
        torch.set_num_threads(1)
        a, b = torch.randn(2, 512, 512)
        result = torch.empty_like(a)
        while not done.is_set():
            torch.mm(a, b, out=result)

    thread = threading.Thread(target=work)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        done.set()
        if wanted:
            thread.join()


if __name__ == "__main__":
    typer.run(main)
