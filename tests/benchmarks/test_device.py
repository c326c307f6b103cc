"""The script for a GPU, on CPU at tiny sizes: its logic and its JSON. No time counts."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "device.py"


def test_quick_on_cpu_checks_every_kernel(tmp_path: Path) -> None:
    out = tmp_path / "device.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(out.read_text())
    assert content["failed"] == []
    assert len(content["checks"]) > 30
    assert {timing["section"] for timing in content["timings"]} >= {
        "pack", "merge", "V-up", "history BF16", "history FP8 cache", "step, copy exchange",
    }  # fmt: skip
    for timing in content["timings"]:
        assert timing["seconds"] > 0
        assert timing["floor"] > 0


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_an_npu_that_is_not_there_is_named() -> None:
    command = [sys.executable, str(SCRIPT), "--device", "npu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.endswith("error: torch_npu: not installed\n")
