"""The three schedules of one decode step. Start reading here.

All run the same operations (`anabranch.step`) and give the same bits. They differ in which
stream runs what, and so in what can overlap:

    serial       one stream, no overlap: the yardstick, and what prefill uses
    comm_stream  current attention on main while the side stream converts, packs and exchanges
    overlap      main packs and exchanges while current attention runs on the side stream

A fourth name, `auto`, takes `overlap` or `serial` for each step, whichever pays.

A schedule rests on three disciplines. Events give the order: the side stream must not touch
the shared workspace before history attention is done with it. `record_stream` gives the
lifetime: memory one stream allocated and another uses must not be recycled in between. The join
(`main.wait_event`) comes before the merge, which would otherwise read stale memory.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from anabranch.step import DecodeStep
from anabranch.streams import StreamPair


class Schedule(enum.Enum):
    """Name of a schedule: `Schedule("overlap")` reads it from text."""

    SERIAL = "serial"
    COMM_STREAM = "comm_stream"
    OVERLAP = "overlap"
    AUTO = "auto"


def serial(step: DecodeStep, streams: StreamPair) -> None:
    """Everything on the main stream."""
    main = streams.main
    main.run(step.gather_queries)
    main.run(step.history_attention)
    main.run(step.current_attention)
    main.run(step.exchange_history)
    main.run(step.merge)
    main.run(step.project)
    main.run(step.store)


def comm_stream(step: DecodeStep, streams: StreamPair) -> None:
    """The arrangement before the change: the side stream converts to FP32 and exchanges."""
    main, side = streams
    main.run(step.gather_queries)
    main.run(step.history_attention)
    history_ready = main.record_event("history_ready")
    side.record_stream(*step.history_results)
    main.record_stream(*step.received_memory)  # before the side stream looks for that memory
    side.wait_event(history_ready)
    side.run(step.exchange_history_converted)
    exchange_done = side.record_event("exchange_done")
    main.run(step.current_attention)
    main.wait_event(exchange_done)
    main.run(step.merge)
    main.run(step.project_transposed)
    main.run(step.store)


def overlap(step: DecodeStep, streams: StreamPair) -> None:
    """The anabranch: current attention leaves the main stream and rejoins before the merge."""
    main, side = streams
    main.run(step.gather_queries)
    main.run(step.history_attention)
    history_ready = main.record_event("history_ready")
    side.record_stream(*step.current_inputs)
    side.wait_event(history_ready)  # the workspace is shared, the data is not
    side.run(step.current_attention)
    current_done = side.record_event("current_done")
    main.record_stream(*step.current_results)
    main.run(step.exchange_history)
    main.wait_event(current_done)  # the join
    main.run(step.merge)
    main.run(step.project)
    main.run(step.store)


def auto(step: DecodeStep, streams: StreamPair) -> None:
    """`overlap` where current attention outlasts its hand-off to the side stream, else `serial`.

    Without a group there is no exchange to overlap with. Ranks may choose differently: under
    both schedules the collectives run on the main stream, in the same order.
    """
    handoff = streams.side.handoff_flops
    # The work is counted on the host.
    if step.group is not None and (handoff == 0 or step.current_flops() >= handoff):
        overlap(step, streams)
    else:
        serial(step, streams)


RUN: dict[Schedule, Callable[[DecodeStep, StreamPair], None]] = {
    Schedule.SERIAL: serial,
    Schedule.COMM_STREAM: comm_stream,
    Schedule.OVERLAP: overlap,
    Schedule.AUTO: auto,
}
