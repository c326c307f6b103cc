"""The script for a GPU, on CPU at tiny sizes: its logic and its JSON. No time counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "device.py"


def test_the_page_has_the_floors_that_the_script_computes() -> None:
    command = [sys.executable, str(SCRIPT), "--floors"]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert table.count("\n") > 25
    assert table in (SCRIPT.parents[1] / "docs" / "cuda.md").read_text()


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
