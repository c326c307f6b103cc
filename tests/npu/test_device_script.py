"""The checks that the first person with an NPU runs, on the contract: `benchmarks/device.py`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from contract import BMM
from miniature import miniature
from on_npu import on_npu
from test_step import FIA

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import device as script


def test_every_check_passes_eager_and_captured() -> None:
    size = replace(script.QUICK, rank=512, rope=64, v=128, heads=(16,))
    bench = script.Bench(torch.device("cpu"), size)
    bench.block, bench.dtypes = 128, bench.dtypes[:2]  # as they are for an NPU
    with on_npu() as seen, miniature(), torch.no_grad():
        script.check_attention(bench)
        script.check_step(bench)
    assert bench.failed == []
    assert len(bench.checks) == 2 * 2 * 2 + 1 + 2 * 4
    assert {FIA, BMM} <= set(seen.names)
