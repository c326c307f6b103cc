"""The parts of the plugin that need no vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from anabranch import DecodeBatch, LatentCache, MLADims, Schedule, ShardLayout, step, vllm_plugin
from anabranch.attention import cpu
from anabranch.step import Buffers, StepInputs
from anabranch.streams import StreamPair
from anabranch.streams.cpu import WorkerStream, inline_streams
from anabranch.vllm_plugin import batches, decode, versions
from anabranch.vllm_plugin.batches import FixedBatch, FixedBatches, decode_batch, localise
from anabranch.vllm_plugin.decode import LatentDecoder, PreparedStep
from anabranch.vllm_plugin.settings import Settings, read_settings
from problem import Problem, dims, relative_error
from ranks import Ranks, rank_group


@dataclass
class Engine:
    """What an engine has of a problem on this rank: all tokens stored, its own heads, a table."""

    layout: ShardLayout
    dims: MLADims
    cache: LatentCache
    table: torch.Tensor
    rows: tuple[torch.Tensor, ...]  # q_nope, q_pe, kv_c, k_pe
    w_uv: torch.Tensor
    total_lens: torch.Tensor
    query_start: torch.Tensor

    def inputs(self, batch: DecodeBatch) -> StepInputs:
        return StepInputs(*self.rows, self.cache, batch, self.w_uv)


def engine_of(problem: Problem, interleave: int) -> Engine:
    rank, size = dist.get_rank(), dist.get_world_size()
    layout = ShardLayout(size, rank, interleave)
    heads, columns = problem.dims.num_heads // size, problem.dims.kv_lora_rank
    own = slice(rank * heads, (rank + 1) * heads)
    queries, current = problem.queries[:, own], problem.current_keys
    kv_c, k_pe = current[:, :columns], current[:, columns:]
    cache, planned = problem.shard(layout)
    cache.write(kv_c, k_pe, planned.slot_mapping)
    total = torch.tensor([past + new for past, new in zip(problem.past, problem.new, strict=True)])
    return Engine(
        layout, replace(problem.dims, num_heads=heads), cache, planned.block_table,
        (queries[..., :columns], queries[..., columns:], kv_c, k_pe), problem.w_uv[own],
        total, torch.tensor([0, *problem.new]).cumsum(0),
    )  # fmt: skip


def latent_step(problem: Problem, interleave: int) -> list[torch.Tensor]:
    """The step as an engine runs it, from total lengths."""
    engine = engine_of(problem, interleave)
    batch = decode_batch(engine.layout, engine.total_lens, engine.query_start, engine.table)
    assert torch.equal(batch.seq_lens, problem.shard(engine.layout)[1].seq_lens)
    buffers = Buffers(torch.device("cpu"))
    decoders = [LatentDecoder(engine.dims, rank_group(), each, buffers) for each in Schedule]
    return [decoder.step(engine.inputs(batch)) for decoder in decoders]


@pytest.mark.parametrize("new", [[1, 3, 1, 2], [1, 1, 1, 1]])
@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("size", [1, 2])
def test_a_step_in_an_engine_is_right_under_every_schedule(
    ranks: type[Ranks], size: int, interleave: int, new: list[int]
) -> None:
    problem = Problem([0, 1, 40, 33], new, dims(4), block_size=16)
    expected = problem.answer()[0]
    for rank, results in enumerate(ranks(size).run(latent_step, problem, interleave)):
        heads = problem.dims.num_heads // size
        own = expected[:, rank * heads : (rank + 1) * heads]
        for result in results:
            assert torch.equal(result, results[0])
            assert relative_error(result, own) < 1e-5


def repeated_steps(problems: list[Problem]) -> list[bool]:
    """Layers over batches that stay: is each of their steps equal to one over a fresh batch?

    Every problem is a layer with a cache of its own, and each is stepped again and again while
    lengths change, larger sizes come, schedules change and forgotten sizes come back.
    """
    engines = [engine_of(problem, 1) for problem in problems]
    known, buffers = FixedBatches(engines[0].layout, 4), Buffers(torch.device("cpu"))
    fresh = Buffers(torch.device("cpu"))
    equal = []
    for schedule in [*Schedule, *Schedule]:
        for engine in [*engines, *reversed(engines)]:
            layer = LatentDecoder(engine.dims, rank_group(), schedule, buffers)
            other = LatentDecoder(engine.dims, rank_group(), schedule, fresh)
            for shorter in (0, 3, 1):
                total = engine.total_lens - shorter
                fixed = known.load(total, engine.query_start, engine.table)
                batch = decode_batch(engine.layout, total, engine.query_start, engine.table)
                result = layer.step(engine.inputs(fixed))
                equal.append(torch.equal(result, other.step(engine.inputs(batch))))
                changed = replace(engine.inputs(fixed), q_nope=-engine.rows[0])
                again = other.step(replace(changed, batch=batch))
                equal.append(torch.equal(layer.step(changed), again))
    return equal


@pytest.mark.parametrize("size", [1, 2])
def test_steps_over_a_batch_that_stays_equal_those_over_a_fresh_one(
    ranks: type[Ranks], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MOST_BATCHES", 3)
    problems = [
        Problem([40, 3 + seed], new, dims(4), block_size=16, seed=seed)
        for seed, new in enumerate([[1, 1], [2, 1], [1, 1], [4, 3], [1, 3]])
    ]
    for equal in ranks(size).run(repeated_steps, problems):
        assert equal == [True] * len(equal)


def test_a_layer_prepares_its_step_once_for_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[int] = []

    def count(decoder: LatentDecoder, inputs: StepInputs, batch: FixedBatch) -> PreparedStep:
        prepared.append(len(inputs.q_nope))
        return prepare(decoder, inputs, batch)

    prepare = LatentDecoder._prepare
    monkeypatch.setattr(LatentDecoder, "_prepare", count)
    problem = Problem([20, 3], [2, 1], dims(2), block_size=16)
    cache, planned = problem.shard(ShardLayout())
    queries, current = problem.queries, problem.current_keys
    rows = queries[..., :32], queries[..., 32:], current[:, :32], current[:, 32:]
    known = FixedBatches(ShardLayout(), 4)
    layer = LatentDecoder(problem.dims, None, Schedule.OVERLAP, Buffers(torch.device("cpu")))
    for longer in range(3):
        total = torch.tensor([20 + longer, 4])
        batch = known.load(total, torch.tensor([0, 2, 3]), planned.block_table)
        layer.step(StepInputs(*rows, cache, batch, problem.w_uv))
    assert prepared == [3]


@given(
    sequences=st.lists(st.tuples(st.integers(0, 700), st.integers(1, 5)), min_size=1, max_size=9),
    padding=st.integers(0, 3),
    size=st.sampled_from([1, 2, 3, 8]),
    interleave=st.sampled_from([1, 4, 64]),
)
def test_lengths_on_the_device_are_those_of_the_host(
    sequences: list[tuple[int, int]], padding: int, size: int, interleave: int
) -> None:
    """The last sequences are padding, as in a graph: no tokens, no past."""
    query_lens = [new for _, new in sequences] + [0] * padding
    totals = [past + new for past, new in sequences] + [0] * padding
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    total_lens = torch.tensor(totals, dtype=torch.int32)
    seq_lens, lens = torch.full((2, len(totals)), -7, dtype=torch.int32)
    table = torch.zeros(len(totals), 1, dtype=torch.int32)
    for rank in range(size):
        layout = ShardLayout(size, rank, interleave)
        expected = decode_batch(layout, total_lens, starts, table)
        localise(layout, total_lens, starts, seq_lens, lens)
        assert torch.equal(seq_lens, expected.seq_lens)
        assert torch.equal(lens, expected.query_lens)


def test_the_host_reads_no_length_on_a_device() -> None:
    """Tensors of the meta device have no values to read."""

    def lengths(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device="meta")

    layout, table = ShardLayout(2, 1, 4), torch.zeros(3, 1, device="meta")
    localise(layout, lengths(3), lengths(4), lengths(3), lengths(3))
    with pytest.raises(NotImplementedError):
        decode_batch(layout, lengths(3), lengths(4), table)


def test_no_buffer_moves_after_it_was_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever scratch the kernels of each size want: here those of 5 rows more than any other."""

    def workspace_bytes(heads: int, dims: MLADims, cache: object = None, batch: Any = None) -> int:
        own = cpu.workspace_bytes(heads, dims)
        return own + (1 << 20 if batch is not None and batch.num_tokens == 5 else 0)

    provider = SimpleNamespace(
        history=cpu.history, current=cpu.current, workspace_bytes=workspace_bytes
    )
    monkeypatch.setattr(step, "provider_for", lambda _: provider)
    monkeypatch.setattr(decode, "provider_for", lambda _: provider)
    buffers = Buffers(torch.device("cpu"))
    decoder = LatentDecoder(dims(2), None, Schedule.SERIAL, buffers)
    problems = [Problem([9] * count, [1] * count, dims(2)) for count in range(1, 9)]
    problems += [Problem([9, 4], [2, count], dims(2)) for count in range(1, 7)]
    decoder.reserve(problems[0].w_uv, 8, 16)
    reserved = {name: memory.data_ptr() for name, memory in buffers._storage.items()}
    for problem in problems:
        cache, batch = problem.shard(ShardLayout())
        current = problem.current_keys.split([32, 8], -1)
        cache.write(*current, batch.slot_mapping)
        out = decoder.step(
            StepInputs(*problem.queries.split([32, 8], -1), *current, cache, batch, problem.w_uv)
        )
        assert relative_error(out, problem.answer()[0]) < 1e-5
    assert reserved == {name: memory.data_ptr() for name, memory in buffers._storage.items()}


def test_streams_of_an_accelerator_are_asked_for_at_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph is captured on a stream of its own, which is the main stream then."""
    asked = []

    class OnCPU(Buffers):
        """Says that it is on a GPU, which this machine need not have."""

        def take(self, name: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype)

    def streams_for(device: torch.device) -> StreamPair:
        asked.append(device.type)
        return inline_streams()

    monkeypatch.setattr(decode, "streams_for", streams_for)
    problem = Problem([5], [2], dims(2))
    cache, batch = problem.shard(ShardLayout())
    queries, current = problem.queries.split([32, 8], -1), problem.current_keys.split([32, 8], -1)
    inputs = StepInputs(*queries, *current, cache, batch, problem.w_uv)
    for device, expected in (("cuda", ["cuda", "cuda"]), ("cpu", ["cpu"])):
        asked.clear()
        decoder = LatentDecoder(problem.dims, None, Schedule.SERIAL, OnCPU(torch.device(device)))
        with monkeypatch.context() as patched:
            patched.setattr(step, "provider_for", lambda _: cpu)
            patched.setattr(decode, "provider_for", lambda _: cpu)
            for _ in range(2):
                out = decoder.step(inputs)
        assert relative_error(out, problem.answer()[0]) < 1e-5
        assert asked == expected


def test_settings_are_read_and_mistakes_are_named() -> None:
    assert read_settings({}) == Settings(Schedule.AUTO)
    assert read_settings(None) == Settings(Schedule.AUTO)
    assert read_settings({"anabranch": {"schedule": "serial"}}).schedule is Schedule.SERIAL
    assert read_settings({"anabranch": {"schedule": "overlap"}}).schedule is Schedule.OVERLAP
    with pytest.raises(ValueError, match="one of serial, comm_stream, overlap, auto, got 'fast'"):
        read_settings({"anabranch": {"schedule": "fast"}})
    with pytest.raises(ValueError, match="unknown settings: speed"):
        read_settings({"anabranch": {"speed": 2}})
    with pytest.raises(ValueError, match="must be a mapping, got 1"):
        read_settings({"anabranch": 1})


def test_the_side_stream_has_one_thread_where_vllm_forbids_to_set_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a worker `torch.set_num_threads` does nothing: a side team would double the threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    stream, seen = WorkerStream(), []
    stream.run(lambda: seen.append(torch.get_num_threads()))
    stream.synchronize()
    mine = torch.get_num_threads()
    monkeypatch.undo()
    torch.set_num_threads(before)
    assert seen == [1]
    assert mine == 2


def installed(**known: str) -> Callable[[str], str]:
    """Stands for `importlib.metadata.version`, where these are installed and no others."""

    def version(name: str) -> str:
        if name not in known:
            raise PackageNotFoundError(name)
        return known[name]

    return version


def said_by_register(caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level("WARNING", logger="vllm.anabranch"):
        vllm_plugin.register()
    return [record.message for record in caplog.records]


def test_another_vllm_is_left_alone_with_one_message(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "version", installed(vllm="0.31.1+cpu"))
    assert vllm_plugin.platform() is None
    assert said_by_register(caplog) == [
        "The anabranch plugin stays off: it knows vLLM 0.32.0, and 0.31.1 is installed."
    ]


def test_vllm_ascend_is_left_alone_unless_the_environment_asks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ascend = {"vllm": "0.30.0", "vllm-ascend": "0.29.0rc1"}
    monkeypatch.setattr(versions, "version", installed(**ascend))
    monkeypatch.delenv(vllm_plugin.ASCEND_SCHEDULE, raising=False)
    assert vllm_plugin.platform() is None
    assert said_by_register(caplog) == []
    monkeypatch.setenv(vllm_plugin.ASCEND_SCHEDULE, "overlap")
    assert said_by_register(caplog) == [
        "The anabranch plugin stays off: it knows vllm-ascend 0.30.0rc2, and 0.29.0rc1 is "
        "installed."
    ]
