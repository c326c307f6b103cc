"""The parts of the plugin that need no vLLM."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError

import pytest
import torch
import torch.distributed as dist

from anabranch import MLADims, Schedule, ShardLayout, vllm_plugin
from anabranch.step import Buffers, StepInputs
from anabranch.streams.cpu import WorkerStream
from anabranch.vllm_plugin import versions
from anabranch.vllm_plugin.decode import LatentDecoder, decode_batch
from anabranch.vllm_plugin.settings import Settings, read_settings
from problem import Problem, dims, relative_error
from ranks import Ranks, rank_group


def latent_step(problem: Problem, interleave: int) -> list[torch.Tensor]:
    """The step as an engine runs it: all tokens stored before, batch from total lengths."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layout = ShardLayout(size, rank, interleave)
    heads = problem.dims.num_heads // size
    whole = problem.dims
    local = MLADims(
        heads, whole.kv_lora_rank, whole.qk_rope_head_dim, whole.qk_nope_head_dim,
        whole.v_head_dim, whole.scale,
    )  # fmt: skip
    columns = whole.kv_lora_rank
    own = slice(rank * heads, (rank + 1) * heads)
    queries, current = problem.queries[:, own], problem.current_keys
    cache, planned = problem.shard(layout)
    cache.write(current[:, :columns], current[:, columns:], planned.slot_mapping)
    batch = decode_batch(
        layout,
        torch.tensor([past + new for past, new in zip(problem.past, problem.new, strict=True)]),
        torch.tensor([0, *problem.new]).cumsum(0),
        planned.block_table,
    )
    assert torch.equal(batch.seq_lens, planned.seq_lens)
    inputs = StepInputs(
        queries[..., :columns], queries[..., columns:],
        current[:, :columns], current[:, columns:],
        cache, batch, problem.w_uv[own],
    )  # fmt: skip
    buffers = Buffers(torch.device("cpu"))
    return [
        LatentDecoder(local, rank_group(), schedule, buffers).step(inputs) for schedule in Schedule
    ]


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
