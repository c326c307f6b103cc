"""Streams on CPU: the main stream is the caller's thread, the side stream a worker thread.

PyTorch releases the GIL inside operators and collectives, so the two overlap for real.

Threads: an intra-op team spans all its cores at every operator, and a team that waits for a
core which another thread keeps busy stalls as a whole. So the side stream runs with one
intra-op thread, and a process that overlaps should give the main stream one core less than it
owns (`anabranch` launches each rank with `cores // ranks` threads, at least one).
`benchmarks/threads.py` shows what the wrong choice costs.
"""

from __future__ import annotations

import threading
from functools import cache
from queue import SimpleQueue

import torch

# The name in `torch` may be another's: vLLM's workers put one there that does nothing.
from torch._C import set_num_threads

from anabranch.streams import Event, Operation, Stream, StreamError, StreamPair, observer

SIDE_THREADS = 1


class _Failure:
    """The first error on a stream: what runs behind it is skipped until the error is raised."""

    def __init__(self, stream: WorkerStream, operation: str, error: Exception) -> None:
        self.stream, self.operation, self.error = stream, operation, error

    def throw(self) -> None:
        self.stream._failure = None
        raise StreamError(
            f"{self.operation} failed on the {self.stream.name} stream: {self.error}"
        ) from self.error


class CPUEvent:
    """A point on a CPU stream; carries the failure of the stream it was recorded on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.failure: _Failure | None = None
        # A bare lock, held until the event is passed: half the latency of `threading.Event`.
        self._ahead = threading.Lock()
        self._ahead.acquire()

    def mark_passed(self) -> None:
        self._ahead.release()

    def wait(self) -> None:
        with self._ahead:
            pass


class CallerStream(Stream):
    """The main stream: every operation runs at once, on the thread that gives it."""

    def __init__(self, name: str = "main") -> None:
        self.name = name

    def _run(self, operation: Operation) -> None:
        _observed(self.name, operation)

    def _record_event(self, name: str) -> CPUEvent:
        event = CPUEvent(name)
        event.mark_passed()
        _note(self.name, "record", name)
        return event

    def _wait_event(self, event: Event) -> None:
        assert isinstance(event, CPUEvent)
        event.wait()
        _note(self.name, "wait", event.name)
        if event.failure is not None:
            event.failure.throw()

    def _record_stream(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Nothing to do: what the caller's thread was given to run has already run."""

    def _synchronize(self) -> None:
        """Nothing to do: what the caller's thread was given to run has already run."""


class WorkerStream(Stream):
    """A worker thread with a queue."""

    handoff_flops = 500_000  # current attention of this size takes some 50 microseconds

    def __init__(self, name: str = "side") -> None:
        self.name = name
        self._queue: SimpleQueue[Operation] = SimpleQueue()
        self._failure: _Failure | None = None
        threading.Thread(target=self._work, name=f"anabranch-{name}", daemon=True).start()

    def _run(self, operation: Operation) -> None:
        def run_unless_failed() -> None:
            if self._failure is None:
                try:
                    _observed(self.name, operation)
                except Exception as error:
                    self._failure = _Failure(self, operation.__name__, error)

        self._queue.put(run_unless_failed)

    def _record_event(self, name: str) -> CPUEvent:
        event = CPUEvent(name)

        def pass_event() -> None:
            event.failure = self._failure
            _note(self.name, "record", name)
            event.mark_passed()

        self._queue.put(pass_event)
        return event

    def _wait_event(self, event: Event) -> None:
        assert isinstance(event, CPUEvent)

        def wait() -> None:
            event.wait()
            _note(self.name, "wait", event.name)
            self._failure = self._failure or event.failure

        self._queue.put(wait)

    def _record_stream(self, tensors: tuple[torch.Tensor, ...]) -> None:
        def let_go(kept: tuple[torch.Tensor, ...] = tensors) -> None:
            """The queue held a reference until the stream got here."""

        self._queue.put(let_go)

    def _synchronize(self) -> None:
        event = self._record_event("synchronize")
        event.wait()
        if event.failure is not None:
            event.failure.throw()

    def _work(self) -> None:
        set_num_threads(SIDE_THREADS)
        with torch.inference_mode():
            while True:
                self._queue.get()()


@cache
def cpu_streams() -> StreamPair:
    """One pair per process: the side stream is made once and shared by every layer."""
    return StreamPair(CallerStream(), WorkerStream())


@cache
def inline_streams() -> StreamPair:
    """Both streams on the caller's thread, which runs every operation as soon as it is given.

    That is the order in which the host of an accelerator gives work to its streams, so what a
    `Watcher` learns from these holds there. The main stream is that of `cpu_streams`.
    """
    return StreamPair(cpu_streams().main, CallerStream("side"))


def _observed(stream: str, operation: Operation) -> None:
    watcher = observer()
    if watcher is None:
        operation()
        return
    watcher.start(stream, "run", operation.__name__)
    try:
        operation()
    finally:
        watcher.finish(stream, "run", operation.__name__)


def _note(stream: str, kind: str, name: str) -> None:
    watcher = observer()
    if watcher is not None:
        watcher.start(stream, kind, name)
        watcher.finish(stream, kind, name)
