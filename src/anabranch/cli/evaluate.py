"""`anabranch evaluate`: accuracy on a set of problems over a grid of configurations."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

from anabranch.cli.options import (
    EMBEDDED,
    ChatOption,
    DeviceOption,
    DType,
    JSONOption,
    ModelOption,
    Reader,
    check_device,
    check_model,
    count_ranks,
    names,
    one_of,
    option,
    whole,
    world_size_of,
)
from anabranch.launch import BadInput, joined_world_size, run
from anabranch.schedules import Schedule
from anabranch.streams import DEVICES

if TYPE_CHECKING:
    from anabranch.evaluate import Plan, ProblemSet, Progress, Score
    from anabranch.served import ServedScore

DEFAULT_PROBLEMS = 100


def evaluate(
    model: ModelOption = EMBEDDED,
    dcp: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Ranks. Default: 1, or all that torchrun made."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE,...", help=f"Of {names(DType, ', ')}.")
    ] = DType.FLOAT32.value,
    schedule: Annotated[
        str, typer.Option(metavar="SCHEDULE,...", help=f"Of {names(Schedule, ', ')}.")
    ] = Schedule.OVERLAP.value,
    problems: Annotated[
        int | None,
        option(whole(1), "N", f"How many. Default: {DEFAULT_PROBLEMS}, or all of --data."),
    ] = None,
    context_tokens: Annotated[
        int, option(whole(1), "N", "Length of the embedded task's prompts.")
    ] = 4000,
    seed: Annotated[int, option(whole(0), "N", "Of the embedded task's problems.")] = 0,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSONL in GSM8K's format, not the embedded task."),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(metavar="URL,...", help="Ask servers with OpenAI's API, such as vLLM's."),
    ] = None,
    chat: ChatOption = False,
    batch_size: Annotated[int, option(whole(1), "N", "Problems decoded together.")] = 10,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the JSON of --json there too.")
    ] = None,
    device: DeviceOption = "cpu",
    as_json: JSONOption = False,
) -> None:
    """Score a checkpoint for each number of ranks, dtype and schedule, or what servers have.

    The embedded task: find a key in a long ledger, then add or subtract.
    In GSM8K's format the last number of the completion counts.

    Examples:
      anabranch evaluate --dcp 1,2,4 --schedule serial,overlap
      anabranch evaluate --dcp 2 --problems 10 --context-tokens 1000 --json
      anabranch evaluate --model ~/DeepSeek-V2-Lite --data gsm8k.jsonl --dcp 1,4
      anabranch evaluate --server http://127.0.0.1:8000,http://127.0.0.1:8001
    """
    world_sizes = _world_sizes(dcp)
    check_device(device, world_sizes)
    dtypes = _listed("--dtype", dtype, one_of(DType))
    schedules = _listed("--schedule", schedule, one_of(Schedule))
    if out is not None and not out.parent.is_dir():
        raise BadInput(f"--out must be in an existing directory, got {out}")
    if server is not None:
        settings = (model, EMBEDDED), (dcp, None), (dtype, "float32"), (schedule, "overlap")
        if device != DEVICES[0]:
            raise BadInput("--device is the server's with --server")
        if any(given != default for given, default in settings):
            raise BadInput("--model, --dcp, --dtype and --schedule are the server's with --server")
        problem_set = _problem_set(data, problems, context_tokens, seed)
        scores: Sequence[Score | ServedScore]
        scores, table = _of_servers(server, problem_set, batch_size, chat)
    else:
        path = check_model(model, world_sizes)
        problem_set = _problem_set(data, problems, context_tokens, seed)

        from anabranch.evaluate import Plan

        plan = Plan(
            path=path,
            problems=problem_set,
            dtypes=tuple(each.value for each in dtypes),
            schedules=tuple(schedules),
            batch_size=batch_size,
            chat=chat,
        )
        own = _on_ranks(world_sizes, plan, device)
        if own is None:  # another rank of the launcher's speaks
            return
        scores, table = own, _table(own)

    document = json.dumps(
        {
            "model": model if server is None else None,
            "data": None if data is None else str(data),
            "problems": len(problem_set.problems),
            "context_tokens": context_tokens if data is None else None,
            "seed": seed if data is None else None,
            "scores": [{**asdict(score), "accuracy": score.accuracy} for score in scores],
        },
        indent=2,
        ensure_ascii=False,
    )
    if out is not None:
        out.write_text(document + "\n", encoding="utf-8")
    if as_json:
        print(document)
    else:
        Console().print(table)


def _on_ranks(world_sizes: list[int], plan: Plan, device: str) -> list[Score] | None:
    from anabranch.evaluate import evaluate as job

    scores: list[Score] = []
    configurations = len(world_sizes) * len(plan.dtypes) * len(plan.schedules)
    bar = _progress_bar()
    task = bar.add_task("starting", total=configurations * len(plan.problems.problems))
    for world_size in world_sizes:
        ranks = count_ranks(world_size)

        def show(news: Progress, ranks: str = ranks) -> None:
            bar.start()  # by the first news, and not before: a fork must not find its thread
            bar.update(task, description=f"{ranks}, {news.configuration}", advance=news.problems)

        try:
            part = run(world_size, job, plan, report=show, device=device)
        finally:
            bar.stop()
        if part is None:
            return None
        scores += part
    return scores


def _of_servers(
    servers: str, problems: ProblemSet, at_once: int, chat: bool
) -> tuple[list[ServedScore], Table]:
    from anabranch.served import Server
    from anabranch.served import evaluate as ask

    scores = []
    with _progress_bar() as bar:
        task = bar.add_task("starting")
        found = [Server(url) for url in _listed("--server", servers, str)]
        bar.update(task, total=len(found) * len(problems.problems))
        for each in found:
            bar.update(task, description=each.url)
            done = partial(bar.advance, task)
            scores.append(ask(each, problems, at_once=at_once, chat=chat, report=done))
    table = Table("server", "model")
    for name in ("correct", "as in row 1", "seconds", "tokens/s"):
        table.add_column(name, justify="right")
    for score in scores:
        table.add_row(
            score.server, score.model, *_marks(score, scores[0]),
            f"{score.seconds:.1f}", f"{score.tokens / score.seconds:.1f}",
        )  # fmt: skip
    return scores, table


def _progress_bar() -> ProgressBar:
    return ProgressBar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not Console(stderr=True).is_terminal,
    )


def _table(scores: list[Score]) -> Table:
    table = Table()
    for name in ("ranks", "dtype", "schedule"):
        table.add_column(name, justify="right" if name == "ranks" else "left")
    for name in ("correct", "as in row 1", "prefill s", "tokens/s"):
        table.add_column(name, justify="right")
    for score in scores:
        speed = score.decode_tokens / score.decode_seconds if score.decode_seconds else 0.0
        table.add_row(
            str(score.world_size),
            score.dtype,
            score.schedule,
            *_marks(score, scores[0]),
            f"{score.prefill_seconds:.1f}",
            f"{speed:.1f}",
        )
    return table


def _marks(score: Score | ServedScore, first: Score | ServedScore) -> tuple[str, str]:
    """How many completions are correct, and how many are those of the first row."""
    same = sum(map(operator.eq, score.completions, first.completions))
    return f"{score.correct}/{score.total}", f"{same}/{score.total}"


def _problem_set(
    data: Path | None, problems: int | None, context_tokens: int, seed: int
) -> ProblemSet:
    from anabranch.evaluate import ledger_problems, word_problems

    if data is None:
        try:
            return ledger_problems(problems or DEFAULT_PROBLEMS, context_tokens, seed)
        except ValueError as error:
            raise BadInput(f"--context-tokens {context_tokens}: {error}") from error
    try:
        return word_problems(data, problems)
    except (OSError, ValueError) as error:
        raise BadInput(f"--data {data}: {error}") from error


def _world_sizes(dcp: str | None) -> list[int]:
    if dcp is None:
        return [world_size_of(None)]
    sizes = _listed("--dcp", dcp, whole(1))
    if joined_world_size() is not None and len(sizes) > 1:
        raise BadInput(f"--dcp must be a single number under a launcher, got {dcp}")
    return [world_size_of(size) for size in sizes]


def _listed(name: str, text: str, read: Reader) -> list[Any]:
    """The values in `text`, which commas separate, each once, in order."""
    try:
        return list(dict.fromkeys(read(word.strip()) for word in text.split(",")))
    except ValueError as error:
        raise BadInput(f"each {name} {error}") from None
