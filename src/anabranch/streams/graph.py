"""Work on the streams of a CUDA device, captured as a graph.

Not yet run on hardware: it is small, and all that it captures is tested elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def captured(device: torch.device, work: Callable[[], None]) -> Callable[[], None]:
    """Run `work` once, capture it, and return the replay on the caller's current stream.

    The first run compiles kernels, connects communicators and reserves the workspaces of cuBLAS,
    none of which a capture allows. During the capture the caller's stream is the capturing one,
    so `streams_for` makes it the main stream; the side stream enters the graph by waiting for an
    event of the main stream, and leaves it where the main stream joins it.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # The threads that watch over collectives may call the driver meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
    return graph.replay
