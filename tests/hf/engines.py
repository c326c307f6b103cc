"""Functions the ranks run: one loads an engine, several cases use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from anabranch import Schedule, ShardLayout
from anabranch.hf import Engine, Generation
from ranks import rank_group


def load(path: Path, interleave: int = 1, **settings: Any) -> Engine:
    """The engine of this rank."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    layout = ShardLayout(dist.get_world_size(), dist.get_rank(), interleave)
    return Engine.load(path, group=rank_group(), layout=layout, **settings)


def logits_and_tokens(
    path: Path,
    prompts: list[list[int]],
    count: int,
    prefill_chunk: int,
    schedules: list[Schedule],
    settings: dict[str, Any],
) -> tuple[list[torch.Tensor], list[list[list[int]]]]:
    """Logits of the prompts, and greedy tokens under each schedule."""
    engine = load(path, **settings)
    logits = engine.logits(prompts, prefill_chunk=prefill_chunk)
    generated = []
    for schedule in schedules:
        engine.schedule = schedule
        results = engine.generate(prompts, max_new_tokens=count, prefill_chunk=prefill_chunk)
        generated.append([result.token_ids for result in results])
    return logits, generated


def generations(
    path: Path, prompts: list[Any], calls: list[dict[str, Any]], settings: dict[str, Any]
) -> list[list[Generation]]:
    """Several `generate` calls on one engine."""
    engine = load(path, **settings)
    return [engine.generate(prompts, **call) for call in calls]


def refusal(path: Path, settings: dict[str, Any]) -> str:
    """The error of loading."""
    try:
        load(path, **settings)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""
