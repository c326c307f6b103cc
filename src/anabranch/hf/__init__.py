"""Transformers checkpoints: load from a local directory, generate over the ranks of a group.

engine = Engine.load("path/to/checkpoint", group=group)
[generation] = engine.generate(["Once upon a time"], max_new_tokens=32)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from anabranch.hf.checkpoint import CheckpointError, check_checkpoint

if TYPE_CHECKING:
    from anabranch.hf.cache import DCPCache
    from anabranch.hf.engine import Engine, Generation, GenerationStats

__all__ = [
    "CheckpointError",
    "DCPCache",
    "Engine",
    "Generation",
    "GenerationStats",
    "check_checkpoint",
]


# Imported when asked for: it takes seconds, which a refused checkpoint can do without.
_HOMES = {
    "DCPCache": "anabranch.hf.cache",
    "Engine": "anabranch.hf.engine",
    "Generation": "anabranch.hf.engine",
    "GenerationStats": "anabranch.hf.engine",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
