"""Mutants of the shipped schedules: one event, wait, record_stream or join removed or misplaced.

A mutant is made from the source of the real schedule: one statement of its body is deleted or
moved. So the mutants follow the schedules when those change.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from programs import ScheduleFunction

from anabranch import schedules
from anabranch.schedules import RUN, Schedule

MUTABLE = ("record_event", "wait_event", "record_stream")


class Unrecorded:
    """Stands for an event until it is recorded, as `torch.cuda.Event()` does."""

    def __init__(self, name: str) -> None:
        self.name = name


@dataclass(frozen=True)
class Mutant:
    """`statement` deleted (`after` is None), or moved behind the statement `after`."""

    schedule: Schedule
    statement: str
    after: str | None
    order: tuple[str, ...]  # the statements as they stand now
    run: ScheduleFunction

    def __str__(self) -> str:
        change = "removed" if self.after is None else f"moved behind `{self.after}`"
        return f"{self.schedule.value}: `{self.statement}` {change}"


def mutants(schedule: Schedule) -> Iterator[Mutant]:
    """Every removal, and every displacement that changes the order of the statements."""
    function = RUN[schedule]
    lines, first_line = inspect.getsourcelines(function)
    tree = ast.parse("".join(lines))
    ast.increment_lineno(tree, first_line - 1)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    preamble = [one for one in definition.body if _call(one) is None]
    body = [one for one in definition.body if _call(one) is not None]
    for index, statement in enumerate(body):
        if _call(statement) not in MUTABLE:
            continue
        rest = body[:index] + body[index + 1 :]
        yield _mutant(schedule, definition, preamble, statement, rest, None)
        for place in range(len(rest) + 1):
            if place != index:
                moved = [*rest[:place], statement, *rest[place:]]
                after = rest[place - 1] if place else preamble[-1]
                yield _mutant(schedule, definition, preamble, statement, moved, after)


def _mutant(
    schedule: Schedule,
    definition: ast.FunctionDef,
    preamble: list[ast.stmt],
    statement: ast.stmt,
    body: list[ast.stmt],
    after: ast.stmt | None,
) -> Mutant:
    events = [
        ast.parse(f"{one.targets[0].id} = _unrecorded({one.targets[0].id!r})").body[0]
        for one in definition.body
        if isinstance(one, ast.Assign)
        and isinstance(one.targets[0], ast.Name)
        and _call(one) == "record_event"
    ]
    mutated = ast.FunctionDef(
        name=definition.name,
        args=definition.args,
        body=[*preamble, *events, *body],
        decorator_list=[],
        returns=None,
    )
    module = ast.fix_missing_locations(
        ast.copy_location(ast.Module(body=[mutated], type_ignores=[]), definition)
    )
    namespace = dict(vars(schedules), _unrecorded=Unrecorded)
    exec(compile(module, schedules.__file__, "exec"), namespace)
    return Mutant(
        schedule,
        _text(statement),
        None if after is None else _text(after),
        tuple(map(_text, body)),
        namespace[definition.name],
    )


def _call(statement: ast.stmt) -> str | None:
    """The method of a stream that a statement calls."""
    value = statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        return value.func.attr
    return None


def _text(statement: ast.stmt) -> str:
    """The call itself, without the name that its result is given."""
    value = statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None
    return ast.unparse(value if isinstance(value, ast.Call) else statement)
