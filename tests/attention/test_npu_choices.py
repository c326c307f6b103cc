"""What the NPU provider decides from sizes and versions alone. `tests/npu` runs its operators."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from unittest import mock

import pytest
import torch

from anabranch import LatentCache, ShardLayout, cache
from anabranch.attention import npu, provider_for, reference
from problem import dims


def test_what_plain_pytorch_serves_is_told() -> None:
    batch = ShardLayout().plan_batch([3], [1], [[0]], 16)
    cache = LatentCache(1, 16, dims(1, 512, 64), torch.bfloat16)  # one buffer, as on other devices
    cases = {
        "dtype must be bfloat16 or float16": (1, 512, 64, torch.float32, batch),
        "kv_lora_rank must be 512, got 256": (1, 256, 64, torch.float16, batch),
        "qk_rope_head_dim must be 64, got 32": (1, 512, 32, torch.float16, batch),
        "heads must be a power of two up to 128, got 20": (20, 512, 64, torch.float16, batch),
        "cache must be two contiguous buffers": (1, 512, 64, torch.bfloat16, batch, cache),
        "cache dtype must be that of the query": (1, 512, 64, torch.float16, batch, cache),
    }
    for message, sizes in cases.items():
        reason = npu.refusal(*sizes)  # type: ignore[arg-type]
        assert reason is not None
        assert reason.startswith(message)
    assert npu.refusal(1, 512, 64, torch.bfloat16, batch) is None
    queries = torch.zeros(1, 1, 33), torch.zeros(1, 1, 5), torch.zeros(1, 33), torch.zeros(1, 5)
    results = torch.empty(1, 1, 33), torch.empty(1, 1)
    with pytest.warns(UserWarning, match="plain PyTorch serves attention on this NPU: dtype"):
        npu.current(*queries, batch, 1.0, *results, None)


def test_lengths_that_are_not_on_the_host_are_refused() -> None:
    batch = ShardLayout().plan_batch([3], [1], [[0]], 16)
    cache = LatentCache(1, 16, dims(1, 512, 64), torch.bfloat16)
    on_device = batch.seq_lens.to("meta")
    moved = type(batch)(on_device, batch.query_lens, batch.block_table, batch.slot_mapping)
    with pytest.raises(ValueError, match=r"batch.seq_lens must be on the CPU, .* got meta"):
        npu.refusal(1, 512, 64, torch.bfloat16, moved, cache)


@pytest.mark.parametrize(
    ("version", "allowed"),
    [("", False), ("8.5.0", False), ("9.0.1", False), ("9.1.0", True), ("9.1.RC1", True),
     ("10.0", True), ("unknown", False)],
)  # fmt: skip
def test_the_calls_of_the_source_are_for_a_cann_that_runs_them(version: str, allowed: bool) -> None:
    assert npu.as_the_source(version) is allowed


@pytest.mark.parametrize(
    ("tokens", "queries", "each"),
    [
        (3, [1, 1, 1], 1), (3, [1, 1, 0], 1), (3, [0, 0, 0], 1), (3, [1, 0, 1], 0),
        (4, [2, 2], 2), (4, [3, 1], 0), (5, [2, 2], 0), (4, [2, 0], 0), (32, [16, 16], 16),
        (34, [17, 17], 0), (2, [], 0), (0, [0, 0], 0),
    ],
)  # fmt: skip
def test_the_form_of_a_step(tokens: int, queries: list[int], each: int) -> None:
    batch = ShardLayout().plan_batch([0] * len(queries), queries, [[0] * 4] * len(queries), 16)
    padding = torch.full((tokens - sum(queries),), -1)
    batch = replace(batch, slot_mapping=torch.cat([batch.slot_mapping, padding]))
    assert npu.tokens_each(batch) == each


def test_lengths_of_an_npu_stay_on_the_host() -> None:
    with mock.patch.object(cache, "_is_npu", return_value=True):
        batch = ShardLayout().plan_batch([3], [1], [[0]], 16, device="meta")
    assert (batch.seq_lens.device.type, batch.query_lens.device.type) == ("cpu", "cpu")
    assert (batch.block_table.device.type, batch.slot_mapping.device.type) == ("meta", "meta")


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_without_torch_npu_plain_pytorch_serves_and_the_reason_is_named() -> None:
    assert npu.missing() == "torch_npu: not installed"
    assert provider_for("npu:0") is reference
