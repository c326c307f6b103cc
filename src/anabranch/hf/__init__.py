"""Transformers checkpoints: load from a local directory, generate over the ranks of a group.

engine = Engine.load("path/to/checkpoint", group=group)
[generation] = engine.generate(["Once upon a time"], max_new_tokens=32)
"""

from anabranch.hf.cache import DCPCache
from anabranch.hf.checkpoint import CheckpointError, check_checkpoint
from anabranch.hf.engine import Engine, Generation, GenerationStats

__all__ = [
    "CheckpointError",
    "DCPCache",
    "Engine",
    "Generation",
    "GenerationStats",
    "check_checkpoint",
]
