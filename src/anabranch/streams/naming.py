"""Names for tensors: how the code that uses one would refer to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from anabranch.streams.accesses import overlap, region, storage_of
from anabranch.streams.order import user_frame

MOST_OBJECTS = 3000  # looked at before the search for a name is given up


def name_of(tensor: torch.Tensor, owner: object | None) -> str | None:
    """The shortest path to `tensor`'s memory from `owner` or the caller's local variables.

    None when there is no such path. `owner` is the object whose method is running, or a
    function that closes over tensors.
    """
    storage = storage_of(tensor)
    assert storage is not None
    wanted, target = storage._cdata, region(tensor)
    fallback = None
    for path, found in _tensors(owner, user_frame()):
        candidate = storage_of(found)
        if candidate is not None and candidate._cdata == wanted:
            if region(found) == target:
                return path
            if fallback is None and overlap(region(found), target):
                fallback = path
    return fallback


def _tensors(owner: object | None, frame: FrameType | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors within reach, nearest first."""
    queue: deque[tuple[str, Any]] = deque()
    if owner is not None:
        queue.extend(_children("", owner))
    for _ in range(3):
        if frame is None:
            break
        queue.extend((name, value) for name, value in frame.f_locals.items() if name != "self")
        frame = frame.f_back
    seen: set[int] = set()
    while queue and len(seen) < MOST_OBJECTS:
        path, value = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield path, value
        else:
            queue.extend(_children(path, value))


def _children(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield f"{path}[{index}]", item
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"{path}[{key!r}]", item
    elif callable(value) and getattr(value, "__closure__", None):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__, strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not assigned yet
                continue
    elif not isinstance(value, type) and hasattr(value, "__dict__"):
        for name, item in vars(value).items():
            yield f"{path}.{name}" if path else name, item
