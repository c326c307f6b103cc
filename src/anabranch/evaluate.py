"""Accuracy of a checkpoint on a set of problems, for each number of ranks, dtype and schedule."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Protocol

import torch
from transformers.utils import logging

from anabranch.embedded import task
from anabranch.hf import Engine
from anabranch.launch import BadInput, Rank
from anabranch.schedules import Schedule

# A minus directly behind a digit or a bracket subtracts; elsewhere it belongs to the number.
_NUMBER = re.compile(r"(?:(?<![\d)])-)?\d[\d,]*(?:\.\d+)?")
_ANSWER_MARK = "####"


class Problem(Protocol):
    """A prompt whose continuation is right or wrong."""

    @property
    def prompt(self) -> str: ...

    def is_correct(self, completion: str) -> bool: ...


@dataclass(frozen=True)
class LedgerProblem:
    """A problem of the embedded task."""

    problem: task.Problem

    @property
    def prompt(self) -> str:
        return self.problem.prompt

    def is_correct(self, completion: str) -> bool:
        return task.is_correct(self.problem, completion)


@dataclass(frozen=True)
class WordProblem:
    """A problem in GSM8K's format: `answer` ends in `#### N`."""

    question: str
    answer: str

    @property
    def prompt(self) -> str:
        return f"Question: {self.question}\nAnswer:"

    def is_correct(self, completion: str) -> bool:
        """The last number of the completion is the number after `####`."""
        expected = last_number(self.answer.rpartition(_ANSWER_MARK)[2])
        return expected is not None and last_number(completion) == expected


def last_number(text: str) -> Decimal | None:
    """The last number in `text`, its thousands separators dropped; None without any."""
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


@dataclass(frozen=True)
class ProblemSet:
    """Problems, and how their completions end."""

    problems: Sequence[Problem]
    max_new_tokens: int
    stop: tuple[str, ...] = ()


def ledger_problems(count: int, context_tokens: int, seed: int) -> ProblemSet:
    """Seeded problems of the embedded task. Raises ValueError where no ledger fits."""
    drawn = task.problems(count, context_tokens, seed)
    return ProblemSet([LedgerProblem(problem) for problem in drawn], max_new_tokens=16)


def word_problems(path: Path, count: int | None) -> ProblemSet:
    """The first `count` problems of a JSONL file of `question` and `answer`; None: all.

    Raises ValueError, naming the line, for what is not such a problem.
    """
    problems: list[Problem] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if count is not None and len(problems) == count:
            break
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            problem = WordProblem(fields["question"], fields["answer"])
            numbered = _ANSWER_MARK in problem.answer and problem.is_correct(problem.answer)
        except (ValueError, KeyError, TypeError, AttributeError):
            numbered = False
        if not numbered:
            raise ValueError(
                f"line {number} must be JSON with a question and an answer that ends in "
                f"{_ANSWER_MARK} and a number"
            )
        problems.append(problem)
    if not problems:
        raise ValueError("there must be at least one problem, got none")
    return ProblemSet(problems, max_new_tokens=512, stop=("Question:",))


@dataclass(frozen=True)
class Plan:
    """What is evaluated on one number of ranks: every dtype with every schedule."""

    path: Path
    problems: ProblemSet
    dtypes: tuple[str, ...]
    schedules: tuple[Schedule, ...]
    batch_size: int
    chat: bool


@dataclass(frozen=True)
class Score:
    """How one configuration did. Times are of all problems together."""

    world_size: int
    dtype: str
    schedule: str
    correct: int
    total: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float
    completions: list[str]

    @property
    def accuracy(self) -> float:
        return self.correct / self.total


@dataclass(frozen=True)
class Progress:
    """So many more problems are done, and what the ranks are at."""

    problems: int
    configuration: str


def evaluate(rank: Rank, plan: Plan) -> list[Score]:
    """The job of every rank: one load for each dtype, the schedules switched in place."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return [score for dtype in plan.dtypes for score in _scores(rank, plan, dtype)]


def _scores(rank: Rank, plan: Plan, dtype: str) -> list[Score]:
    """Every schedule with one dtype; the weights are gone when this returns."""
    rank.report(Progress(0, f"{dtype}, loading"))
    try:
        engine = Engine.load(
            plan.path, group=rank.group, dtype=getattr(torch, dtype), device=rank.device
        )
    except ValueError as error:
        raise BadInput(str(error)) from error
    scores = []
    for schedule in plan.schedules:
        scores.append(_score(rank, plan, engine, dtype, schedule))
    return scores


def _score(rank: Rank, plan: Plan, engine: Engine, dtype: str, schedule: Schedule) -> Score:
    engine.schedule = schedule
    problems = plan.problems.problems
    completions: list[str] = []
    prefill_seconds = decode_seconds = 0.0
    decode_tokens = 0
    configuration = f"{dtype}, {schedule.value}"
    rank.report(Progress(0, configuration))
    for begin in range(0, len(problems), plan.batch_size):
        batch = problems[begin : begin + plan.batch_size]
        try:
            generations = engine.generate(
                [problem.prompt for problem in batch],
                max_new_tokens=plan.problems.max_new_tokens,
                stop=plan.problems.stop,
                chat=plan.chat,
            )
        except ValueError as error:
            raise BadInput(str(error)) from error
        completions += [generation.text for generation in generations]
        assert engine.stats is not None
        prefill_seconds += engine.stats.prefill_seconds
        decode_seconds += engine.stats.decode_seconds
        decode_tokens += engine.stats.decode_tokens
        rank.report(Progress(len(batch), configuration))
    correct = sum(
        problem.is_correct(completion)
        for problem, completion in zip(problems, completions, strict=True)
    )
    return Score(
        world_size=rank.world_size,
        dtype=dtype,
        schedule=schedule.value,
        correct=correct,
        total=len(problems),
        prefill_seconds=prefill_seconds,
        decode_tokens=decode_tokens,
        decode_seconds=decode_seconds,
        completions=completions,
    )
