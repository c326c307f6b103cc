"""The backend on vLLM's CUDA platform, as far as a machine without a GPU can show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import ENVIRONMENT

JOB = Path(__file__).with_name("cuda_job.py")
BACKEND = "anabranch.vllm_plugin.cuda.CudaMLABackend"
DRAFT = "a checkpoint with drafts"
# What is configured, beside the environment, and what is said.
CASES: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "named": ({}, {}, BACKEND),
    "whole graphs": ({"compilation_config": {"splitting_ops": []}}, {}, BACKEND),
    "float32": ({"dtype": "float32"}, {}, "dtype not supported"),
    "fp8": (
        {"kv_cache_dtype": "fp8"},
        {},
        "kv_cache_dtype must be auto or the model's float16, got fp8",
    ),
    "overlap of batches": (
        {"enable_dbo": True, "all2all_backend": "deepep_low_latency"},
        {},
        "dual batch overlap (enable_dbo, ubatch_size)",
    ),
    "speculation": (
        {"model": DRAFT, "speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
        {},
        "speculative method must be one of ngram, got mtp",
    ),
    "partition": (
        {"compilation_config": {"use_inductor_graph_partition": True}},
        {},
        "turn use_inductor_graph_partition off",
    ),
    "breakable graphs": (
        {},
        {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"},
        "set VLLM_USE_BREAKABLE_CUDAGRAPH=0",
    ),
}


@pytest.fixture(scope="module")
def found(checkpoint: Callable[..., Path]) -> dict[str, Any]:
    tests = JOB.parents[1]
    path = tests, tests / "triton_kernels", os.environ.get("PYTHONPATH", "")
    cases = {name: (arguments, environment) for name, (arguments, environment, _) in CASES.items()}
    done = subprocess.run(
        [
            sys.executable,
            str(JOB),
            str(checkpoint("v3")),
            json.dumps(cases).replace(DRAFT, str(checkpoint("v3", draft=True))),
        ],
        capture_output=True,
        text=True,
        env=os.environ
        | ENVIRONMENT
        | {
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "TRITON_INTERPRET": "1",
            "VLLM_PLUGINS": "",
        },
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("case", CASES)
def test_what_the_cuda_platform_takes_and_refuses(found: dict[str, Any], case: str) -> None:
    assert CASES[case][2] in found["said"][case]


def test_an_older_gpu_is_refused(found: dict[str, Any]) -> None:
    assert "compute capability not supported" in found["said"]["older"]


def test_graphs_of_whole_steps_and_pages_of_64(found: dict[str, Any]) -> None:
    assert found["graphs"] == "FULL_AND_PIECEWISE"
    assert found["block_size"] == 64


def test_one_recorded_step_serves_other_lengths_and_tables(found: dict[str, Any]) -> None:
    """Two ranks, from vLLM's builder and cache update to its projection, in FP16."""
    assert len(found["errors"]) == 2
    assert max(found["errors"]) < 1e-3
    assert not found["moved"]


def test_nothing_holds_a_cache_that_vllm_frees(found: dict[str, Any]) -> None:
    assert not found["held"]
