"""What cannot be served is refused by name, before anything is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from serving import ENVIRONMENT

CONFIGURE = """
import sys, json
from vllm.engine.arg_utils import EngineArgs
for case in json.loads(sys.argv[1]):
    try:
        config = EngineArgs(**case).create_engine_config()
        print("ACCEPTED", config.attention_config.backend.name, config.cache_config.block_size,
              config.scheduler_config.enable_chunked_prefill,
              config.cache_config.enable_prefix_caching)
    except Exception as error:
        print("REFUSED", str(error).replace("\\n", " "))
"""
MODEL, SMALLER, DRAFT = "the checkpoint", "a smaller one", "one with drafts"
SHARDED = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
CASES = {
    "fp8": ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be auto or the model's float32"),
    "stages": ({"pipeline_parallel_size": 2}, "pipeline_parallel_size must be 1, got 2"),
    "replicated queries": ({"dcp_q_replicate": True}, "dcp_q_replicate must be off"),
    "wrong rotary": (
        {"compilation_config": {"custom_ops": ["+rotary_embedding"]}},
        "+rotary_embedding, which rotates MLA queries wrongly on CPU",
    ),
    "schedule": (
        {"additional_config": {"anabranch": {"schedule": "fast"}}},
        "one of serial, comm_stream, overlap, auto, got 'fast'",
    ),
    "speculation": (
        {
            "speculative_config": {
                "method": "draft_model",
                "model": SMALLER,
                "num_speculative_tokens": 2,
            }
        },
        "speculative method must be one of ngram, mtp, got draft_model",
    ),
    "drafts ahead": (
        {"model": DRAFT, "speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
        "num_speculative_tokens of mtp must be 1 under DCP, got 2",
    ),
    "connector": (
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "kv_transfer_config (KV connectors)",
    ),
}
ACCEPTED = {
    "sharded": {},
    "named": {"attention_backend": "CUSTOM", **dict.fromkeys(SHARDED, 1)},
    "block": {"block_size": 64, "cp_kv_cache_interleave_size": 64},
}


@pytest.fixture(scope="module")
def verdicts(checkpoint: Callable[..., Path]) -> dict[str, str]:
    """What vLLM says to each case, all configured in one process."""
    common = {"model": MODEL, "skip_tokenizer_init": True, "dtype": "float32"}
    cases = {name: options for name, (options, _) in CASES.items()} | ACCEPTED
    arguments = [common | SHARDED | options for options in cases.values()]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            CONFIGURE,
            json.dumps(arguments)
            .replace(MODEL, str(checkpoint("v3")))
            .replace(SMALLER, str(checkpoint("v2_lite")))
            .replace(DRAFT, str(checkpoint("v3", draft=True))),
        ],
        capture_output=True,
        text=True,
        env=os.environ | ENVIRONMENT,
        timeout=600,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ACCEPTED", "REFUSED"))]
    assert len(lines) == len(cases), done.stdout + done.stderr
    return dict(zip(cases, lines, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_refused_by_name(verdicts: dict[str, str], case: str) -> None:
    assert verdicts[case].startswith("REFUSED")
    assert CASES[case][1] in verdicts[case]


def test_what_upstream_switches_off_stays_on(verdicts: dict[str, str]) -> None:
    assert verdicts["sharded"] == "ACCEPTED CUSTOM 16 True True"
    assert verdicts["named"] == "ACCEPTED CUSTOM 16 True True"
    assert verdicts["block"] == "ACCEPTED CUSTOM 64 True True"
