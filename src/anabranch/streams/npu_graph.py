"""Work on the streams of an Ascend NPU, captured as a graph that follows new lengths.

The attention operator reads its lengths on the host, so a graph holds those it was captured with.
torch_npu lets them be replaced: the launch is captured as a task group, and before it the stream
waits for an external event. A replay gives each group its new arguments on a stream of their own
and records the event. What lies before the first attention runs meanwhile.

Not yet run on hardware. `tests/npu` runs it on graphs in miniature with torch_npu's signatures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from anabranch.streams import capture_into


@dataclass(frozen=True)
class _Task:
    """A captured launch: what to call, with what, its task group and the event it waits for."""

    operator: Callable[..., object]
    arguments: Callable[[], dict[str, Any]]
    group: object
    event: Any


class _Updates:
    """What the host must do again for a replay."""

    def __init__(self) -> None:
        self.tasks: list[_Task] = []
        self.fed: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []

    def updatable(
        self, operator: Callable[..., object], arguments: Callable[[], dict[str, Any]]
    ) -> None:
        npu = _npu()
        stream, event = npu.current_stream(), npu.ExternalEvent()
        event.wait(stream)
        event.reset(stream)
        given = arguments()
        npu.graph_task_group_begin(stream)
        operator(**given)
        group = npu.graph_task_group_end(stream)
        self.tasks.append(_Task(operator, arguments, group, event))

    def host_fed(self, values: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
        target = torch.empty_like(values(), device=device)
        self.fed.append((target, values))
        return target


def captured(device: torch.device, work: Callable[[], None]) -> Callable[[], None]:
    """Run `work` once, capture it, and return the replay on the caller's current stream.

    The first run compiles kernels and connects communicators, which no capture allows. The streams
    are as in `anabranch.streams.graph`. The replay raises what the arguments of an updatable
    launch raise, before any work.
    """
    npu = _npu()
    stream = npu.Stream(device)
    stream.wait_stream(npu.current_stream(device))
    with npu.stream(stream):
        work()
    npu.current_stream(device).wait_stream(stream)
    graph, updates, passed = npu.NPUGraph(), _Updates(), npu.Event()
    # The threads that watch over collectives may call the driver meanwhile.
    with (
        npu.graph(graph, stream=stream, capture_error_mode="thread_local"),
        capture_into(updates),
    ):
        work()

    def replay() -> None:
        launches = [(task, task.arguments()) for task in updates.tasks]
        fed = [(target, values()) for target, values in updates.fed]
        if launches or fed:
            passed.synchronize()  # the last replay reads its arguments until it has ended
        for target, values in fed:
            target.copy_(values)
        graph.replay()
        update = _update_stream(device)
        with npu.stream(update):
            for task, arguments in launches:
                npu.graph_task_update_begin(update, task.group)
                task.operator(**arguments)
                npu.graph_task_update_end(update)
                task.event.record(update)
        passed.record(npu.current_stream(device))

    return replay


@cache
def _update_stream(device: torch.device) -> Any:
    return _npu().Stream(device)


def _npu() -> Any:
    return torch.npu  # type: ignore[attr-defined]
