"""Adversarial execution: every order that the events of a schedule allow, on the CPU.

A device is free to run streams in any order that events do not forbid, and to hand released
memory out again at once. Hardware mostly happens to do neither, which is why a schedule with a
missing event passes its tests for months. Here the same schedule meets all of it:

- `record` runs a program once, as the host of an accelerator would: operations are given in
  program order, and every allocation takes an address from a caching allocator, which reuses what
  was released to the same stream unless `record_stream` protects it. Fresh memory is NaN.
- `Trace.replay` runs the recorded operators again, by address, in another order. Operators that
  come too early read stale memory or NaN, and those that come too late overwrite.

So a schedule that only works by luck gives wrong numbers, and the same ones each time.
"""

from __future__ import annotations

import ctypes
import random
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anabranch.streams import Event, Operation, Stream, StreamPair, provide, watch
from anabranch.streams.accesses import (
    accesses,
    allocates_only,
    is_view,
    operator_name,
    returns_arguments,
    storage_of,
    tensors_in,
)
from anabranch.streams.cpu import inline_streams
from anabranch.streams.order import Order, Task, user_line

T = TypeVar("T")
Program = Callable[[StreamPair], Iterable[torch.Tensor]]

ALIGNMENT = 64
POISON = 0xFF  # every float of these bytes is NaN


class _Block:
    """Memory with an address of its own. It outlives the tensors that are placed in it."""

    def __init__(self, size: int, stream: Hashable) -> None:
        self.size, self.stream = size, stream
        self._raw = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
        self._offset = -self._raw.data_ptr() % ALIGNMENT
        self.bytes = self._raw[self._offset : self._offset + size]
        self.bytes.fill_(POISON)
        self.initial: torch.Tensor | None = None  # content before the program, if it had any

    def hand_out(self, on_release: Callable[[], None]) -> torch.UntypedStorage:
        """A storage over this block; `on_release` is called when the last tensor in it goes."""
        owner = (ctypes.c_char * self.size).from_address(self.bytes.data_ptr())
        weakref.finalize(owner, on_release)
        return torch.frombuffer(owner, dtype=torch.uint8).untyped_storage()

    def restore(self) -> None:
        """Make the content what it was before the program."""
        if self.initial is None:
            self.bytes.fill_(POISON)
        else:
            self.bytes.copy_(self.initial)


class _Foreign(_Block):
    """Memory that was there before the program: used where it is, and never released."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(storage)
        self.initial = self.bytes.clone()


@dataclass
class _Kernel:
    """One operator, its tensors by address."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[torch.Tensor]  # where new results go

    def run(self) -> None:
        result = self.func(*self.args, **self.kwargs)
        for leaf in result if isinstance(result, tuple) else (result,):
            if isinstance(leaf, torch.ScriptObject):  # the handle of a collective
                torch.distributed.Work.unbox(leaf).wait()
        if self.outputs:
            values = [one for one in tensors_in(result) if storage_of(one) is not None]
            for output, value in zip(self.outputs, values, strict=False):
                if output.shape == value.shape:  # otherwise what it read was garbage already
                    output.copy_(value)


@dataclass
class _Work:
    """A task and the operators that it ran."""

    task: Task
    kernels: list[_Kernel] = field(default_factory=list)


@dataclass(frozen=True)
class Segment:
    """Operators `[first, last)` of one task."""

    task: int
    first: int
    last: int


@dataclass(frozen=True)
class Damage:
    """A legal order that gives other numbers than the order in which the work was given."""

    order: tuple[str, ...]
    result: int
    error: float

    def __str__(self) -> str:
        order = " → ".join(self.order)
        return f"result {self.result} is off by {self.error:g} in the order {order}"


class Trace:
    """A recorded program, ready to be run again in any legal order. Made by `record`."""

    def __init__(
        self, work: list[_Work], blocks: list[_Block], results: list[torch.Tensor]
    ) -> None:
        self._work, self._blocks, self._results = work, blocks, results
        self.expected = [result.clone() for result in results]
        self._queues: dict[Hashable, list[int]] = {}
        for index, one in enumerate(work):
            self._queues.setdefault(one.task.stream, []).append(index)

    def kernels(self, task: int) -> int:
        """How many operators a task ran."""
        return len(self._work[task].kernels)

    def fingerprint(self) -> tuple[object, ...]:
        """Equal for traces that run the same operators on the same memory in the same orders."""
        numbers = {block.bytes.data_ptr(): number for number, block in enumerate(self._blocks)}
        starts = sorted(numbers)

        def place(tensor: torch.Tensor) -> tuple[object, ...]:
            if not tensor.numel():
                return ()
            start = starts[bisect_right(starts, tensor.data_ptr()) - 1]
            return numbers[start], tensor.data_ptr() - start, tensor.shape, tensor.stride()

        return tuple(
            (
                one.task.name,
                getattr(one.task.stream, "name", None),
                tuple(sorted((str(key), n) for key, n in one.task.clock.items())),
                tuple(
                    (str(kernel.func), *map(place, tensors_in((kernel.args, kernel.outputs))))
                    for kernel in one.kernels
                    if isinstance(kernel.func, torch._ops.OpOverload)
                ),
            )
            for one in self._work
        )

    def unordered_pairs(self) -> list[tuple[int, int]]:
        """Tasks that nothing orders, each pair in the order given."""
        return [
            (a, b)
            for b in range(len(self._work))
            for a in range(b)
            if not self._work[b].task.after(self._work[a].task)
        ]

    def orders(self) -> Iterator[list[int]]:
        """Every legal order of whole tasks."""

        def extend(done: dict[Hashable, int], order: list[int]) -> Iterator[list[int]]:
            if len(order) == len(self._work):
                yield list(order)
            for stream, index in self._ready(done):
                order.append(index)
                yield from extend({**done, stream: done.get(stream, 0) + 1}, order)
                order.pop()

        return extend({}, [])

    def count_orders(self) -> int:
        """How many legal orders of whole tasks there are."""
        return self._count([1] * len(self._work))

    def count_operator_orders(self) -> int:
        """How many legal orders of single operators there are."""
        return self._count([self.kernels(index) for index in range(len(self._work))])

    def _count(self, steps: list[int]) -> int:
        """Paths from the start to the end where task i takes `steps[i]` steps.

        A state says, for each stream, how many tasks it has done and steps of the next.
        """
        streams = list(self._queues)

        def advance(state: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
            """Pass by the tasks that take no step."""
            done = {stream: tasks for stream, (tasks, _) in zip(streams, state, strict=True)}
            for stream, index in self._ready(done):
                if steps[index] == 0:
                    place = streams.index(stream)
                    return advance((*state[:place], (done[stream] + 1, 0), *state[place + 1 :]))
            return state

        ways = {advance(tuple((0, 0) for _ in streams)): 1}
        for _ in range(sum(steps)):
            after: dict[tuple[tuple[int, int], ...], int] = {}
            for state, count in ways.items():
                done = {stream: tasks for stream, (tasks, _) in zip(streams, state, strict=True)}
                for stream, index in self._ready(done):
                    place = streams.index(stream)
                    inside = state[place][1] + 1
                    whole = inside == steps[index]
                    here = (done[stream] + 1, 0) if whole else (done[stream], inside)
                    target = advance((*state[:place], here, *state[place + 1 :]))
                    after[target] = after.get(target, 0) + count
            ways = after
        return sum(ways.values())

    def preempted(self) -> Iterator[list[Segment]]:
        """Every legal order in which one task is interrupted once, by one it is not ordered with.

        Scratch that two tasks share is damaged only while both are at work.
        """
        for a, b in self.unordered_pairs():
            for inner, outer in ((a, b), (b, a)):
                before = self._before(inner) | self._before(outer)
                if inner in before or outer in before:
                    continue
                for cut in range(1, self.kernels(outer)):
                    yield [
                        *(self._whole(index) for index in sorted(before)),
                        Segment(outer, 0, cut),
                        self._whole(inner),
                        Segment(outer, cut, self.kernels(outer)),
                        *(
                            self._whole(index)
                            for index in range(len(self._work))
                            if index not in before and index not in (inner, outer)
                        ),
                    ]

    def random_order(self, seed: int) -> list[Segment]:
        """A legal order of single operators, drawn by `seed`."""
        draw = random.Random(seed)
        done: dict[Hashable, int] = {}
        inside: dict[Hashable, int] = {}
        order: list[Segment] = []
        while choices := [
            (stream, self._queues[stream][done.get(stream, 0)])
            for stream in self._queues
            if done.get(stream, 0) < len(self._queues[stream])
        ]:
            stream, index = draw.choice(
                [one for one in choices if inside.get(one[0]) or self._may_start(one[1], done)]
            )
            first = inside.get(stream, 0)
            last = min(first + draw.randint(1, 8), self.kernels(index))
            order.append(Segment(index, first, last))
            inside[stream] = last
            if last == self.kernels(index):
                inside[stream] = 0
                done[stream] = done.get(stream, 0) + 1
        return order

    def replay(self, order: Sequence[int | Segment]) -> list[torch.Tensor]:
        """Run the program in `order`, from the state of memory before it. Returns its results."""
        for block in self._blocks:
            block.restore()
        with torch.no_grad():
            for one in order:
                segment = self._whole(one) if isinstance(one, int) else one
                for kernel in self._work[segment.task].kernels[segment.first : segment.last]:
                    try:
                        kernel.run()
                    except (RuntimeError, IndexError):
                        # An index that is garbage here would be a wild access on a device.
                        for output in kernel.outputs:
                            output.view(torch.uint8).fill_(POISON)
        return [result.clone() for result in self._results]

    def damage(self, order: Sequence[int | Segment]) -> Damage | None:
        """Replay `order`; None when every result is the expected one, to the bit."""
        for index, (got, wanted) in enumerate(zip(self.replay(order), self.expected, strict=True)):
            if not torch.equal(got, wanted):
                error = (got.double() - wanted.double()).abs().max().item()
                return Damage(tuple(self._describe(order)), index, error)
        return None

    def first_damage(self) -> Damage | None:
        """Try every order of whole tasks, then every preemption; the first that does damage."""
        for order in self.orders():
            if (found := self.damage(order)) is not None:
                return found
        for segments in self.preempted():
            if (found := self.damage(segments)) is not None:
                return found
        return None

    def _ready(self, done: dict[Hashable, int]) -> list[tuple[Hashable, int]]:
        ready = []
        for stream, queue in self._queues.items():
            position = done.get(stream, 0)
            if position < len(queue) and self._may_start(queue[position], done):
                ready.append((stream, queue[position]))
        return ready

    def _may_start(self, index: int, done: dict[Hashable, int]) -> bool:
        clock = self._work[index].task.clock
        return all(done.get(stream, 0) >= count for stream, count in clock.items())

    def _before(self, index: int) -> set[int]:
        """The tasks that have run before a task starts."""
        clock = self._work[index].task.clock
        return {
            other
            for stream, queue in self._queues.items()
            for other in queue[: clock.get(stream, 0)]
        }

    def _whole(self, index: int) -> Segment:
        return Segment(index, 0, self.kernels(index))

    def _describe(self, order: Sequence[int | Segment]) -> Iterator[str]:
        for one in order:
            if isinstance(one, int) or one == self._whole(one.task):
                yield self._work[one if isinstance(one, int) else one.task].task.name
            else:
                name = self._work[one.task].task.name
                yield f"{name}[{one.first}:{one.last}]"


def record(program: Program) -> Trace:
    """Run `program` once and record it.

    It gets a pair of streams, which `streams_for` returns too while it runs, and returns the
    tensors to compare. Its own code counts as work of the main stream. Collectives may be used
    in a world of one rank only, as a replay repeats them.
    """
    pair = inline_streams()
    recorder = _Recorder(pair.main)
    with torch.no_grad(), provide(pair), watch(recorder), recorder:
        results = list(program(pair))
        shadows = [recorder.shadow(result) for result in results]
    return Trace(recorder.work, recorder.blocks, shadows)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The host and the allocator of a simulated device."""

    def __init__(self, home: Stream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: list[_Work] = []
        self.blocks: list[_Block] = []
        self._home = home
        self._order = Order()
        self._current: _Work | None = None  # of the operation that is running
        self._caller: _Work | None = None  # of the caller's code since the last call
        self._placed: dict[int, _Block] = {}  # by the storage handed to the program
        self._protected: dict[_Block, set[Hashable]] = {}
        self._pool: list[_Block] = []

    # What is asked of the streams.

    def run(self, stream: Stream, operation: Operation) -> Operation:
        work = self._begin(stream, operation.__name__)

        def recorded() -> None:
            outer, self._current = self._current, work
            try:
                operation()
            finally:
                self._current = outer

        recorded.__name__ = operation.__name__
        return recorded

    def record_event(self, stream: Stream, event: Event) -> None:
        self._caller = None
        self._order.record(stream, event)

    def wait_event(self, stream: Stream, event: Event) -> bool:
        self._caller = None
        return self._order.wait(stream, event)

    def record_stream(self, stream: Stream, tensors: tuple[torch.Tensor, ...]) -> None:
        for tensor in tensors:
            self._protected.setdefault(self._block(tensor), set()).add(stream)

    def synchronize(self, stream: Stream) -> bool:
        self._caller = None
        self._order.caller_waits(stream)
        return True

    def launch(
        self,
        name: str,
        kernel: Callable[[], T],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> T:
        for tensor in (*reads, *writes):
            self._block(tensor)  # which takes down what it held before
        self._now().kernels.append(_Kernel(kernel, (), {}, []))
        return kernel()

    def _begin(self, stream: Hashable, name: str) -> _Work:
        self._caller = None
        work = _Work(self._order.task(stream, name, user_line()))
        self.work.append(work)
        return work

    def _now(self) -> _Work:
        if self._current is not None:
            return self._current
        if self._caller is None:
            self._caller = self._begin(self._home, "caller's code")
        return self._caller

    # What runs.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        lifted = operator_name(func) == "lift_fresh"  # data of the host comes to the device
        if is_view(func) and not lifted:
            return func(*args, **kwargs)
        shadows = _map(self.shadow, args), {k: _map(self.shadow, v) for k, v in kwargs.items()}
        result = func(*args, **kwargs)
        if returns_arguments(func):
            kernel = _Kernel(func, *shadows, [])
            if torch.Tag.nondeterministic_seeded in func.tags:
                (touched,) = (one.tensor for one in accesses(func, args, kwargs) if one.writes)
                kernel = _upload(self.shadow(touched), touched)
            self._now().kernels.append(kernel)
            return result
        given = {one._cdata for t in tensors_in((*args, *kwargs.values()))
                 if (one := storage_of(t)) is not None}  # fmt: skip
        outputs: list[torch.Tensor] = []
        values: list[torch.Tensor] = []

        def place(tensor: torch.Tensor) -> torch.Tensor:
            storage = storage_of(tensor)
            if storage is None or (storage._cdata in given and not lifted):
                return tensor
            placed = self._place(tensor)
            if not allocates_only(func):
                outputs.append(self.shadow(placed))
                values.append(tensor)
                outputs[-1].copy_(tensor)
            return placed

        placed = _map(place, result)
        if lifted or torch.Tag.nondeterministic_seeded in func.tags:
            self._now().kernels.extend(map(_upload, outputs, values))
        elif not allocates_only(func):
            self._now().kernels.append(_Kernel(func, *shadows, outputs))
        return placed

    def shadow(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, without holding on to the storage that the program was handed."""
        if storage_of(tensor) is None:
            return tensor
        storage = self._block(tensor).bytes.untyped_storage()
        offset = self._block(tensor).bytes.storage_offset() // tensor.element_size()
        return torch.empty(0, dtype=tensor.dtype).set_(
            storage, offset + tensor.storage_offset(), tensor.shape, tensor.stride()
        )

    # The allocator.

    def _block(self, tensor: torch.Tensor) -> _Block:
        storage = tensor.untyped_storage()
        block = self._placed.get(storage._cdata)
        if block is None:
            block = _Foreign(storage)
            self.blocks.append(block)
            self._placed[storage._cdata] = block
        return block

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Move a new tensor to memory of the simulated device."""
        size = tensor.untyped_storage().nbytes()
        stream = self._now().task.stream
        block = self._take(size, stream)
        storage = block.hand_out(lambda: self._release(key, block))
        key = storage._cdata
        self._placed[key] = block
        return torch.empty(0, dtype=tensor.dtype).set_(
            storage, tensor.storage_offset(), tensor.shape, tensor.stride()
        )

    def _take(self, size: int, stream: Hashable) -> _Block:
        for block in reversed(self._pool):  # the most recent: the likeliest to be still in use
            if block.stream == stream and block.size >= size:
                self._pool.remove(block)
                # Whoever gets it does not find what it left.
                self._now().kernels.append(_Kernel(block.bytes.fill_, (POISON,), {}, []))
                block.bytes.fill_(POISON)
                return block
        block = _Block(size, stream)
        self.blocks.append(block)
        return block

    def _release(self, key: int, block: _Block) -> None:
        """To the pool at once, unless another stream is known to use it: then it may be long."""
        self._placed.pop(key, None)
        if not self._protected.pop(block, set()) - {block.stream}:
            self._pool.append(block)


def _upload(target: torch.Tensor, content: torch.Tensor) -> _Kernel:
    """What cannot be computed again (random numbers, data of the host) is copied again."""
    return _Kernel(target.copy_, (content.clone(),), {}, [])


def _map(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map(function, item) for item in value)
    return value


class Delays:
    """An `Observer` that holds each operation up for a random while, on the real threads."""

    def __init__(self, seed: int, longest: float = 1e-3) -> None:
        self._draw, self._longest = random.Random(seed), longest

    def start(self, stream: str, kind: str, name: str) -> None:
        time.sleep(self._draw.random() * self._longest)

    def finish(self, stream: str, kind: str, name: str) -> None:
        """Nothing to do."""
