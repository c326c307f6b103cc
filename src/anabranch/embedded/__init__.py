"""A small DeepSeek-V3 checkpoint that ships with the package, and the task it was trained for."""

from importlib.resources import files
from pathlib import Path

from anabranch.embedded import task

__all__ = ["embedded_path", "task"]


def embedded_path() -> Path:
    """The directory of the checkpoint, ready for `from_pretrained`."""
    return Path(str(files(__name__) / "checkpoint"))
