"""The stream sanitizer: proves from one run that no order of the streams can go wrong.

It watches every operator's reads and writes of memory, on the stream that it ran on, and keeps
happens-before by vector clocks. Two tasks that nothing orders must not meet in memory; memory
that is released must not be handed out again while another stream uses it. Whether the run
itself went well does not matter, nor how fast anything was: what is judged is what the schedule
guarantees.

    with sanitize() as sanitizer:
        my_step()
    sanitizer.check()

See `docs/sanitizer.md`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anabranch.streams import Event, Operation, Stream, StreamPair, provide, watch
from anabranch.streams.accelerator import AcceleratorStream
from anabranch.streams.accesses import (
    Access,
    Region,
    accesses,
    allocates_only,
    is_collective,
    is_view,
    operator_name,
    overlap,
    region,
    returns_arguments,
    storage_of,
    tensors_in,
)
from anabranch.streams.cpu import inline_streams
from anabranch.streams.findings import Fault, Finding, Site, StreamFaults
from anabranch.streams.naming import name_of
from anabranch.streams.order import Line, Order, Task, user_line
from anabranch.streams.waits import EarlyWaits

T = TypeVar("T")

CALLER = "caller's code"
UNNAMED = "memory without a name"

# Uses of one storage that are remembered before those that everything is ordered behind go.
MANY_USES = 128


@dataclass
class _Use:
    """The last time that one stream read, or wrote, one region of a storage."""

    task: Task
    operator: str
    line: Line
    region: Region
    reads: bool
    writes: bool


@dataclass
class _Memory:
    """A storage that is alive, or that was released while another stream may still use it."""

    stream: Hashable  # whose pool it was allocated from
    shape: tuple[int, ...]
    uses: dict[tuple[Hashable, Region, bool], _Use] = field(default_factory=dict)
    recorded: set[Hashable] = field(default_factory=set)
    foreign: bool = False  # whether another stream has used it
    name: str = UNNAMED
    death: weakref.ref[torch.UntypedStorage] | None = None


class Sanitizer:
    """Collects `findings`. Made by `sanitize`."""

    def __init__(self, home: Callable[[], Stream]) -> None:
        self.findings: list[Finding] = []
        self.operators = 0  # how many were watched
        self._home = home  # the stream that the caller's own code counts for, now
        self._main = home()  # the one that others are joined to
        self._order = Order()
        self._early_waits = EarlyWaits()
        self._memory: dict[int, _Memory] = {}
        self._released: deque[_Memory] = deque()
        self._collectives: dict[tuple[object, Hashable], _Use] = {}
        self._owners: weakref.WeakKeyDictionary[Task, Any] = weakref.WeakKeyDictionary()
        self._reported: set[tuple[object, ...]] = set()
        self._lock = threading.RLock()
        self._here = threading.local()
        self._caller_task: Task | None = None

    def check(self) -> None:
        """Raise StreamFaults if there are findings."""
        if self.findings:
            raise StreamFaults(self.findings)

    # What is asked of the streams (see `anabranch.streams.Watcher`).

    def run(self, stream: Stream, operation: Operation) -> Operation:
        with self._lock:
            self._caller_task = None
            task = self._order.task(stream, operation.__name__, user_line())
            owner = getattr(operation, "__self__", operation)
            # Weakly: a watched step must not keep memory that would be gone without the watching.
            # A method of a built-in type allows no such reference: its tensors go without a name.
            with suppress(TypeError):
                self._owners[task] = weakref.ref(owner)

        @functools.wraps(operation)
        def watched() -> None:
            with self._running(task):
                operation()

        return watched

    def record_event(self, stream: Stream, event: Event) -> None:
        with self._lock:
            self._caller_task = None
            self._order.record(stream, event)
            cycle = self._early_waits.record(stream, event)
            if cycle is not None:
                self._report(Fault.DEADLOCK, *cycle)

    def wait_event(self, stream: Stream, event: Event) -> bool:
        with self._lock:
            self._caller_task = None
            if self._order.wait(stream, event):
                self._early_waits.wait(stream, event)
                return True
            site = Site(f"wait_event({event.name})", stream.name, user_line())
            missing = Site(f"record_event({event.name})", "no stream", site.line)
            self._early_waits.wait_early(stream, event, site)
            self._report(Fault.UNRECORDED_EVENT, missing, site)
            return False

    def record_stream(self, stream: Stream, tensors: tuple[torch.Tensor, ...]) -> None:
        with self._lock:
            for tensor in tensors:
                storage = storage_of(tensor)
                if storage is not None:
                    self._remember(storage, tensor).recorded.add(stream)

    def synchronize(self, stream: Stream) -> bool:
        with self._lock:
            self._caller_task = None
            inside = getattr(self._here, "task", None)
            if inside is not None and self._waits_for_itself(inside, stream):
                waiting = Site(f"synchronize({stream.name})", _name(inside.stream), user_line())
                self._report(Fault.DEADLOCK, _site(inside, inside.line), waiting)
                return False
            self._order.caller_waits(stream)
            return True

    def launch(
        self,
        name: str,
        kernel: Callable[[], T],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> T:
        with self._lock:
            self.operators += 1
            task, line = self._task(), user_line()
            for tensor in reads:
                self._touch(Access(tensor, True, False), task, name, line)
            for tensor in writes:
                self._touch(Access(tensor, False, True), task, name, line)
        return kernel()

    def synchronize_event(self, event: Event) -> None:
        """The caller waits for `event`, in PyTorch's own `Event.synchronize`."""
        with self._lock:
            self._caller_task = None
            self._order.caller_waits_event(event)

    def _waits_for_itself(self, inside: Task, stream: Stream) -> bool:
        """Whether `stream` cannot get empty before `inside`, which waits for that, has ended."""
        return self._order.clock(stream).get(inside.stream, 0) >= inside.epoch

    # What runs.

    @contextmanager
    def _running(self, task: Task) -> Iterator[None]:
        """Attribute what this thread does to `task`."""
        outer = getattr(self._here, "task", None)
        self._here.task = task
        try:
            with self.watching():
                yield
        finally:
            self._here.task = outer

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See the operators of this thread; nested use sees each once."""
        if getattr(self._here, "watching", False):
            yield
            return
        self._here.watching = True
        try:
            with _Probe(self):
                yield
        finally:
            self._here.watching = False

    def _task(self) -> Task:
        """The running task, or a task of the home stream for the caller's own code."""
        task: Task | None = getattr(self._here, "task", None)
        if task is not None:
            return task
        home = self._home()
        if self._caller_task is None or self._caller_task.stream != home:
            self._caller_task = self._order.task(home, CALLER, user_line())
        return self._caller_task

    def before_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called by the probe with an operator that is about to run."""
        with self._lock:
            self.operators += 1
            if func._schema.name == "aten::record_stream":
                self.record_stream(AcceleratorStream(args[1], "stream"), (args[0],))
                return
            touched = accesses(func, args, kwargs)
            if not touched:
                return
            task, line, operator = self._task(), user_line(), operator_name(func)
            for access in touched:
                self._touch(access, task, operator, line)
            if is_collective(func):
                self._order_collectives(func, args, task, line)

    def after_operator(self, func: Any, result: Any) -> None:
        """Called by the probe with an operator's result."""
        if returns_arguments(func):
            return
        with self._lock:
            for tensor in tensors_in(result):
                storage = storage_of(tensor)
                # The memory of the arguments is known by now, so any other is new.
                if storage is None or storage._cdata in self._memory:
                    continue
                task, line = self._task(), user_line()
                self._allocate(storage, tensor, task, line)
                if not allocates_only(func):
                    self._touch(Access(tensor, False, True), task, operator_name(func), line)

    def _touch(self, access: Access, task: Task, operator: str, line: Line) -> None:
        storage = storage_of(access.tensor)
        if storage is None:
            return
        memory = self._remember(storage, access.tensor)
        use = _Use(task, operator, line, region(access.tensor), access.reads, access.writes)
        for earlier in memory.uses.values():
            if (
                earlier.task.stream != task.stream
                and (earlier.writes or use.writes)
                and not task.after(earlier.task)
                and not earlier.task.after(task)
                and overlap(earlier.region, use.region)
            ):
                self._report_race(earlier, use, access, memory)
        if task.stream != memory.stream and not memory.foreign:
            memory.foreign = True
            memory.name = self._name(access.tensor, task)
        memory.uses[task.stream, use.region, use.writes] = use
        if len(memory.uses) > MANY_USES:
            self._forget_ordered(memory)

    def _report_race(self, earlier: _Use, use: _Use, access: Access, memory: _Memory) -> None:
        first, second = sorted((earlier, use), key=lambda one: one.task.serial)
        # What the later task reads it wants from the earlier, unless it wrote that itself.
        rewritten = any(
            one is not second
            and one.task is second.task
            and one.writes
            and overlap(one.region, second.region)
            for one in memory.uses.values()
        )
        if not (first.writes and second.reads) or rewritten:
            fault = Fault.WORKSPACE_RACE
        elif second.task.stream == self._main:
            fault = Fault.EARLY_READ
        else:
            fault = Fault.DATA_RACE
        sites = _site_of(first), _site_of(second)
        if self._is_new(fault, *sites):
            shape = tuple(access.tensor.shape)
            name = self._name(access.tensor, use.task, earlier.task)
            self._report(fault, *sites, name, shape)

    def _name(self, tensor: torch.Tensor, *tasks: Task) -> str:
        """The name in the code of the first task that has one."""
        for task in tasks:
            owner = self._owners.get(task)
            name = name_of(tensor, None if owner is None else owner())
            if name is not None:
                return name
        return UNNAMED

    def _order_collectives(self, func: Any, args: tuple[Any, ...], task: Task, line: Line) -> None:
        """Two unordered collectives of one group may run in another order on another rank."""
        names = [argument.name for argument in func._schema.arguments]
        group = torch.distributed.ProcessGroup.unbox(args[names.index("process_group")])
        use = _Use(task, operator_name(func), line, Region(0, 0, ()), True, True)
        for (other, stream), earlier in self._collectives.items():
            if other is group and stream != task.stream and not task.after(earlier.task):
                self._report(Fault.DEADLOCK, _site_of(earlier), _site_of(use))
        self._collectives[group, task.stream] = use

    # Lifetimes.

    def _remember(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> _Memory:
        """The record of a storage. One that was there before the watching belongs to home."""
        memory = self._memory.get(storage._cdata)
        if memory is None:
            memory = _Memory(self._home(), tuple(tensor.shape))
            self._watch_release(storage, memory)
        return memory

    def _watch_release(self, storage: torch.UntypedStorage, memory: _Memory) -> None:
        key = storage._cdata

        def release(_: weakref.ref[torch.UntypedStorage]) -> None:
            # Runs wherever the last reference goes, so it may only do what cannot interfere.
            self._memory.pop(key, None)
            if memory.foreign:
                self._released.append(memory)

        memory.death = weakref.ref(storage, release)
        self._memory[key] = memory

    def _allocate(
        self, storage: torch.UntypedStorage, tensor: torch.Tensor, task: Task, line: Line
    ) -> None:
        """New memory on a stream may be what was released to the pool of that stream."""
        self._watch_release(storage, _Memory(task.stream, tuple(tensor.shape)))
        for _ in range(len(self._released)):
            memory = self._released.popleft()
            # On its last stream's release the allocator waits for the recorded streams only.
            unsafe = [
                use
                for use in memory.uses.values()
                if use.task.stream != memory.stream and use.task.stream not in memory.recorded
            ]
            if memory.stream == task.stream:
                unsafe = [use for use in unsafe if not task.after(use.task)]
                for use in unsafe:
                    self._report(
                        Fault.USE_AFTER_RELEASE,
                        _site_of(use),
                        _site(task, line, "allocation"),
                        memory.name,
                        memory.shape,
                    )
            elif unsafe:
                self._released.append(memory)

    def _forget_ordered(self, memory: _Memory) -> None:
        """Drop the uses that whatever any known stream may yet be given comes after."""
        clocks = {stream: self._order.clock(stream) for stream in self._order.streams()}
        for key, use in list(memory.uses.items()):
            stream = use.task.stream
            if all(
                clock.get(stream, 0) >= use.task.epoch
                for other, clock in clocks.items()
                if other != stream
            ):
                del memory.uses[key]

    # Reports.

    def _is_new(self, fault: Fault, first: Site, second: Site) -> bool:
        return (fault, first, second) not in self._reported

    def _report(
        self,
        fault: Fault,
        first: Site,
        second: Site,
        tensor: str | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        if self._is_new(fault, first, second):
            self._reported.add((fault, first, second))
            self.findings.append(Finding(fault, first, second, tensor, shape))


class _Probe(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows a sanitizer the operators of one thread."""

    def __init__(self, sanitizer: Sanitizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sanitizer = sanitizer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_view(func):
            return func(*args, **kwargs)
        self._sanitizer.before_operator(func, args, kwargs)
        result = func(*args, **kwargs)
        self._sanitizer.after_operator(func, result)
        return result


def _site(task: Task, line: Line, operator: str | None = None) -> Site:
    return Site(task.name, _name(task.stream), line, task.line, operator)


def _site_of(use: _Use) -> Site:
    return _site(use.task, use.line, use.operator)


def _name(stream: Hashable) -> str:
    return str(getattr(stream, "name", stream))


@contextmanager
def sanitize(streams: StreamPair | None = None) -> Iterator[Sanitizer]:
    """Watch what runs inside and collect findings; `Sanitizer.check` raises them.

    While it lasts `streams_for` gives `streams`. By default that is a pair that runs every
    operation at once on the caller's thread, so that the check is repeatable, and memory is
    released when the caller lets go of it, as on an accelerator. The caller's own code counts
    as work of `streams.main`. Raises RuntimeError when streams are already being watched.
    """
    pair = inline_streams() if streams is None else streams
    sanitizer = Sanitizer(lambda: pair.main)
    with ExitStack() as stack:
        stack.enter_context(provide(pair))
        stack.enter_context(watch(sanitizer))
        stack.enter_context(sanitizer.watching())
        yield sanitizer
