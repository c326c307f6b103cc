"""Stream bugs that others met in production, as small programs, each with its repair.

Written from public reports: the shape of the fault, not the code. A program takes a pair of
streams and returns tensors whose values a wrong order would change. `repaired` adds what was
missing. `tests/streams/test_known_bugs.py` wants the faulty one found, and the repaired one clean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from anabranch.streams import Stream, StreamPair
from anabranch.streams.check import lone_group
from anabranch.streams.cpu import CallerStream
from anabranch.streams.findings import Fault

Results = list[torch.Tensor]


@dataclass(frozen=True)
class KnownBug:
    """Where it was reported, what the sanitizer must call it, and the program."""

    reports: str
    fault: Fault
    program: Callable[[StreamPair, bool], Results]

    def __str__(self) -> str:
        return self.program.__name__


KNOWN_BUGS: list[KnownBug] = []


def known_bug(reports: str, fault: Fault) -> Callable[..., Callable[[StreamPair, bool], Results]]:
    def add(program: Callable[[StreamPair, bool], Results]) -> Callable[..., Results]:
        KNOWN_BUGS.append(KnownBug(reports, fault, program))
        return program

    return add


@known_bug("meta-pytorch/torchrec#4231", Fault.USE_AFTER_RELEASE)
def stashed_activation(streams: StreamPair, repaired: bool) -> Results:
    """A copy on the side stream still reads an activation whose memory is given away."""
    main, side = streams
    stash, later = torch.zeros(64), torch.zeros(64)
    activation = torch.full((64,), 3.0)
    side.wait_event(main.record_event("computed"))

    def copy_out(source: torch.Tensor = activation) -> None:
        stash.copy_(source)

    side.run(copy_out)
    if repaired:
        side.record_stream(activation)
    del activation, copy_out
    main.run(lambda: later.copy_(torch.full((64,), 5.0)))
    main.wait_event(side.record_event("stashed"))
    return [stash, later]


@known_bug("NVIDIA/TensorRT-LLM#15265", Fault.USE_AFTER_RELEASE)
def handed_over_from_side(streams: StreamPair, repaired: bool) -> Results:
    """Events order the consumer, but the block goes back to the stream that allocated it."""
    main, side = streams
    weight, scores, scratch = torch.full((64,), 2.0), torch.zeros(64), torch.zeros(64)
    made: list[torch.Tensor] = []
    side.wait_event(main.record_event("start"))
    side.run(lambda: made.append(weight * 2))
    main.wait_event(side.record_event("prologue"))
    main.run(lambda: scores.copy_(made[0]))
    if repaired:
        main.record_stream(made[0])
    made.clear()
    side.run(lambda: scratch.copy_(weight * 7))
    main.wait_event(side.record_event("next prologue"))
    return [scores, scratch]


@known_bug("vllm-project/vllm#28419, vllm-project/vllm#28430", Fault.WORKSPACE_RACE)
def shared_experts_read_what_routed_experts_overwrite(
    streams: StreamPair, repaired: bool
) -> Results:
    """The routed experts work in place on the input of the shared experts."""
    main, side = streams
    hidden, shared = torch.full((8, 8), 1.0), torch.zeros(8, 8)
    private = hidden.clone()
    side.wait_event(main.record_event("input"))
    side.run(lambda: torch.add(private if repaired else hidden, 1, out=shared))
    main.run(lambda: torch.full((8, 8), 9.0, out=hidden))
    main.wait_event(side.record_event("shared done"))
    return [shared, hidden]


@known_bug("vllm-project/vllm#28879", Fault.EARLY_READ)
def shared_output_added_too_early(streams: StreamPair, repaired: bool) -> Results:
    """The sum of routed and shared experts does not wait for the shared ones."""
    main, side = streams
    hidden, shared, total = torch.ones(8, 8), torch.zeros(8, 8), torch.zeros(8, 8)
    side.wait_event(main.record_event("input"))
    side.run(lambda: torch.mul(hidden, 4, out=shared))
    done = side.record_event("shared done")
    if repaired:
        main.wait_event(done)
    main.run(lambda: torch.add(hidden, shared, out=total))
    main.wait_event(done)
    return [total]


@known_bug("flashinfer-ai/flashinfer#4476", Fault.WORKSPACE_RACE)
def staging_keyed_by_shape(streams: StreamPair, repaired: bool) -> Results:
    """Two calls of one shape on two streams are given the same staging buffer."""
    staging: dict[object, torch.Tensor] = {}
    results = [torch.zeros(8), torch.zeros(8)]
    inputs = [torch.full((8,), 1.0), torch.full((8,), 2.0)]

    def decode(stream: Stream, source: torch.Tensor, out: torch.Tensor) -> None:
        key = (source.shape, stream.name) if repaired else source.shape
        buffer = staging.setdefault(key, torch.zeros(8))

        def kernel() -> None:
            buffer.copy_(source)
            torch.mul(buffer, 10, out=out)

        stream.run(kernel)

    staging[(inputs[1].shape, "side")] = torch.zeros(8)  # both made before the streams part
    staging[(inputs[0].shape, "main")] = torch.zeros(8)
    staging[inputs[0].shape] = torch.zeros(8)
    streams.side.wait_event(streams.main.record_event("inputs"))
    decode(streams.main, inputs[0], results[0])
    decode(streams.side, inputs[1], results[1])
    streams.main.wait_event(streams.side.record_event("done"))
    return results


@known_bug("vllm-project/vllm#41623, vllm-project/vllm#42884", Fault.WORKSPACE_RACE)
def send_buffer_at_the_offset_of_attention_output(streams: StreamPair, repaired: bool) -> Results:
    """Two users of a workspace are both given offset 0 while the exchange is still reading."""
    main, side = streams
    workspace, received, merged = torch.zeros(128), torch.zeros(64), torch.zeros(64)
    send = workspace[:64]
    output = workspace[64:] if repaired else workspace[:64]
    main.run(lambda: torch.full((64,), 6.0, out=send))
    side.wait_event(main.record_event("packed"))
    side.run(lambda: received.copy_(send))  # the exchange
    main.run(lambda: torch.full((64,), 1.0, out=output))  # the next attention
    main.wait_event(side.record_event("exchanged"))
    main.run(lambda: torch.add(received, output, out=merged))
    return [merged]


@known_bug("sgl-project/sglang#31117, NVIDIA/nccl#522", Fault.DEADLOCK)
def one_communicator_from_two_streams(streams: StreamPair, repaired: bool) -> Results:
    """Two all-reduces of one group that nothing orders: each rank may start with another."""
    main, side = streams
    group = lone_group()
    first, second = torch.ones(4), torch.ones(4)
    side.wait_event(main.record_event("inputs"))
    main.run(lambda: dist.all_reduce(first, group=group))
    if repaired:
        side.wait_event(main.record_event("first reduced"))
    side.run(lambda: dist.all_reduce(second, group=group))
    main.wait_event(side.record_event("second reduced"))
    return [first, second]


@known_bug("torch/cutorch#222", Fault.EARLY_READ)
def waits_for_the_last_stream_only(streams: StreamPair, repaired: bool) -> Results:
    """A barrier over several streams that in truth waits for the one recorded last."""
    main, side = streams
    third = CallerStream("third")
    parts, total = torch.zeros(2, 8), torch.zeros(8)
    start = main.record_event("start")
    done = []
    for row, stream in zip(parts, (side, third), strict=True):
        stream.wait_event(start)
        stream.run(lambda row=row: row.fill_(5.0))
        done.append(stream.record_event(f"{stream.name} done"))
    for event in done if repaired else done[-1:]:
        main.wait_event(event)
    main.run(lambda: torch.sum(parts, 0, out=total))
    for event in done:
        main.wait_event(event)
    return [total]


@known_bug("Genesis-Embodied-AI/quadrants#649", Fault.WORKSPACE_RACE)
def argument_buffer_refilled(streams: StreamPair, repaired: bool) -> Results:
    """The second launch refills the persistent argument buffer that the first still reads."""
    main, side = streams
    arguments, results = torch.zeros(4), torch.zeros(2, 4)
    own = torch.zeros(4)
    main.run(lambda: arguments.fill_(1.0))
    side.wait_event(main.record_event("arguments"))
    side.run(lambda: torch.mul(arguments, 2, out=results[0]))
    buffer = own if repaired else arguments
    main.run(lambda: buffer.fill_(100.0))
    main.run(lambda: torch.mul(buffer, 2, out=results[1]))
    main.wait_event(side.record_event("launched"))
    return [results]


@known_bug("ROCm/MIOpen#3299", Fault.DATA_RACE)
def copied_on_another_stream(streams: StreamPair, repaired: bool) -> Results:
    """Inputs are copied on the default stream; the working stream does not wait for them."""
    main, side = streams
    source, device, result = torch.full((8,), 3.0), torch.zeros(8), torch.zeros(8)
    side.wait_event(main.record_event("allocated"))
    main.run(lambda: device.copy_(source))
    if repaired:
        side.wait_event(main.record_event("copied"))
    side.run(lambda: torch.mul(device, 2, out=result))
    main.wait_event(side.record_event("done"))
    return [result]
