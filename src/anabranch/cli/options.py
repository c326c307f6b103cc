"""Options that several commands have, and the checks that need no weights."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from anabranch.launch import BadInput, joined_world_size

EMBEDDED = "embedded"


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
JSONOption = Annotated[
    bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")
]


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
