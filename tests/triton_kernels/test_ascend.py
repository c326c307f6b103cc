"""Pack, merge and the cache write are lowered by Triton-Ascend: `make test-triton-ascend`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from anabranch import triton_kernels

SCRIPT = Path(__file__).with_name("ascend.py")
ASCEND = find_spec("triton.backends.ascend") is not None
only_ascend = pytest.mark.skipif(not ASCEND, reason="triton here is not Triton-Ascend")


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Another process: here the kernels are defined for the interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=SCRIPT.parent, capture_output=True,
        text=True,
    )  # fmt: skip


@only_ascend
def test_every_launch_is_lowered_and_moves_whole_rows() -> None:
    run = script(str(SCRIPT))
    assert run.returncode == 0, run.stderr
    codes = json.loads(run.stdout)
    assert len(codes) == 8
    for name, code in codes.items():
        kernel = name.split()[0]
        assert f"func.func @{kernel}" in code, name
        width = 256 if kernel == "pack" else 512  # 32-bit words, or values
        assert "memref.copy" in code, name
        assert f"memref<{width}x" in code.replace("1x", ""), name


@only_ascend
def test_a_tile_of_scattered_rows_is_why_pack_has_one_row() -> None:
    """The control: with the tile of other devices the adapter fails."""
    run = script("-c", "import ascend; ascend.lowered(dict(ascend.launches(4))['pack BF16'])")
    assert run.returncode != 0
    assert "CalledProcessError" in run.stderr


def test_these_kernels_serve_an_npu_only_where_triton_is_its_own() -> None:
    npu = type("Device", (), {"type": "npu"})()
    assert triton_kernels.serve(npu, 65535) is ASCEND
    assert not triton_kernels.serve(npu, 65536)
    assert not triton_kernels.serve(torch.device("cpu"))
