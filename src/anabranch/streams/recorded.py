"""An operation on memory that stays, which from its second run on is the native calls of its first.

What a step does around its kernels, checks, views and addresses, costs more than small kernels do,
and after a product of large weights several times as much, for the interpreter has left the caches.
Where an operation's tensors stay in place, all of that has the same result each time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from anabranch.streams.accesses import is_view


class _Thread(threading.local):
    calls: list[Callable[[], None]] | None = None
    inside_call = False


_thread = _Thread()


def record_call(call: Callable[[], None]) -> None:
    """Note a native call, if this thread records an operation."""
    if _thread.calls is not None:
        _thread.calls.append(call)


def collective(call: Callable[[], None]) -> None:
    """Run a collective of PyTorch's, on tensors that `call` holds. The dispatcher shows it.

    A recording repeats `call`, whatever operators are in it.
    """
    record_call(call)
    _thread.inside_call = True
    try:
        call()
    finally:
        _thread.inside_call = False


def recorded(operation: Callable[[], None]) -> Callable[[], None]:
    """`operation`, whose later runs repeat the native calls of the first and nothing else.

    One that also ran operators of PyTorch's outside of those runs as it is each time: they may
    allocate, and what they are may depend on values that the host has read. Views are none.
    """
    calls: list[Callable[[], None]] | None = None

    @wraps(operation)
    def run() -> None:
        nonlocal calls
        if calls is None:
            calls = _record(operation)
        else:
            for call in calls:
                call()

    return run


def _record(operation: Callable[[], None]) -> list[Callable[[], None]]:
    """Run `operation`; returns the calls that repeat it."""
    operators = _Operators()
    calls = _thread.calls = []
    try:
        with operators:
            operation()
    finally:
        _thread.calls = None
    return [operation] if operators.ran else calls


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whether this thread runs operators other than views, and outside of calls, while entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.ran = self.ran or not (_thread.inside_call or is_view(func))
        return func(*args, **(kwargs or {}))
