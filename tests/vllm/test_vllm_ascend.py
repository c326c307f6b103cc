"""The adapter for vllm-ascend, in the sources that its authors published. No NPU runs anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anabranch.vllm_plugin.versions import ASCEND_VERSIONS

JOB = Path(__file__).with_name("ascend_job.py")
# `tests/vllm/install.py` puts them there.
SOURCES = Path(sys.prefix) / f"vllm_ascend-{ASCEND_VERSIONS[-1]}"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(JOB), str(SOURCES)],
        capture_output=True,
        text=True,
        env=os.environ
        | {
            "PYTHONPATH": str(JOB.parents[1]),
            "OMP_NUM_THREADS": "1",
            "VLLM_PLUGINS": "",
            "ANABRANCH_ASCEND_SCHEDULE": "overlap",
        },
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_what_is_overridden_is_there_with_the_same_parameters(found: dict[str, Any]) -> None:
    assert found["parameters"].keys() == {
        "_decode_requires_current_kv",
        "reorg_decode_q",
        "_forward_decode_split_attention",
        "get_cudagraph_support",
    }
    for ours, theirs in found["parameters"].values():
        assert ours == theirs


def test_ASCEND_CLASSES(found: dict[str, Any]) -> None:
    """The backend names the adapter's classes where the cache is sharded, and there alone."""
    assert found["named"] == {
        "True": ["MLADCPImpl", "MLADCPMetadataBuilder"],
        "False": ["AscendMLAImpl", "AscendMLAMetadataBuilder"],
    }


def test_a_step_between_their_preprocessing_and_their_projection_is_right(
    found: dict[str, Any],
) -> None:
    """Two ranks on CPU, every schedule, stripes of 1 and of 4; the operators' stand-ins store."""
    assert len(found["errors"]) == 8
    assert max(found["errors"].values()) < 1e-5
