"""Options that several commands have, and the checks that need no weights."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from anabranch.launch import BadInput, joined_world_size, ranks_here
from anabranch.streams import DEVICES, lacking

EMBEDDED = "embedded"

Choice = TypeVar("Choice", bound=enum.Enum)
Reader = Callable[[Any], Any]


class DType(enum.Enum):
    """Of weights, cache and computation."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="DIR|embedded",
        help="Directory of a Transformers checkpoint with MLA, or the small one in the package.",
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device", metavar="|".join(DEVICES), help="Where the ranks compute, one device each."
    ),
]
ChatOption = Annotated[bool, typer.Option("--chat", help="Put each prompt into the chat template.")]
JSONOption = Annotated[
    bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")
]


def whole(least: int) -> Reader:
    """Reads a whole number of at least `least`."""

    def read(text: str | int) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise ValueError(f"must be a whole number of at least {least}, got {text}")
        return number

    return read


def decimal(allowed: str, holds: Callable[[float], bool]) -> Reader:
    """Reads a number for which `holds`, which `allowed` says in words."""

    def read(text: str | float) -> float:
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if not holds(number):
            raise ValueError(f"must be {allowed}, got {text}")
        return number

    return read


def one_of(choices: type[Choice]) -> Reader:
    """Reads the value of a member of `choices`."""

    def read(text: str | Choice) -> Choice:
        try:
            return choices(text)
        except ValueError:
            raise ValueError(f"must be {names(choices, ' or ')}, got {text}") from None

    return read


def names(choices: type[enum.Enum], separator: str) -> str:
    """The values of all members, in one text."""
    return separator.join(str(each.value) for each in choices)


def option(read: Reader, metavar: str, description: str) -> Any:
    """An option that `read` makes a value of, or says with a ValueError what is allowed."""

    def parse(text: Any) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return typer.Option(parser=parse, metavar=metavar, help=description)


def world_size_of(dcp: int | None) -> int:
    """The ranks that `--dcp` asks for; under a launcher those it started, which must agree."""
    started = joined_world_size()
    if started is None:
        return 1 if dcp is None else dcp
    if dcp not in (None, started):
        raise BadInput(
            f"--dcp must be the number of ranks that the launcher started, {started}, got {dcp}"
        )
    return started


def check_device(device: str, world_sizes: list[int]) -> None:
    """Refuse a type of devices that is not known, or of which this machine has too few."""
    if device not in DEVICES:
        raise BadInput(f"--device must be {' or '.join(DEVICES)}, got {device}")
    lacks = lacking(device, max(map(ranks_here, world_sizes)))
    if lacks is not None:
        raise BadInput(f"--device {device}: {lacks}")


def check_model(model: str, world_sizes: list[int]) -> Path:
    """The checkpoint's directory, once its config has shown that all these ranks can run it."""
    # Here and below, what takes seconds to import is imported when a command needs it.
    from anabranch.embedded import embedded_path
    from anabranch.hf import CheckpointError, check_checkpoint

    path = embedded_path() if model == EMBEDDED else Path(model)
    if not path.is_dir():
        raise BadInput(f"--model must be a directory or '{EMBEDDED}', got {model}")
    try:
        config = check_checkpoint(path, 1)
    except CheckpointError as error:
        raise BadInput(f"--model {model}: {error}") from error
    for world_size in world_sizes:
        heads = config.num_attention_heads
        if heads % world_size:
            raise BadInput(
                f"--dcp must divide the {heads} attention heads of {model}, got {world_size}"
            )
    return path


def count_ranks(world_size: int) -> str:
    """For a person to read."""
    return "1 rank" if world_size == 1 else f"{world_size} ranks"
