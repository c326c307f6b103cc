"""Every kernel compiles for every target, keeps its values in registers and fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compiled import SHARED_LIMIT

SCRIPT = Path(__file__).with_name("compiled.py")


@pytest.mark.parametrize("target", list(SHARED_LIMIT))
def test_no_spills_and_shared_memory_within_the_limit(target: int, tmp_path: Path) -> None:
    # Another process: here the kernels are defined for the interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run(
        [sys.executable, str(SCRIPT), str(target)],
        env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    reports = json.loads(run.stdout)
    assert len(reports) == 33
    for name, report in reports.items():
        # FP32 products are three of TF32: exact and slow, and they do spill.
        assert report["spilled_bytes"] == 0 or "fp32" in name, name
        assert 0 <= report["shared"] <= SHARED_LIMIT[target], name
