"""Runs one vLLM engine in a process of its own, and reads what it served and said."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from reference import Reference

JOB = Path(__file__).with_name("engine_job.py")
MARK = "RESULT "
# Two ranks on a machine of few cores: one thread each, wherever the system puts them.
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}
WITHOUT_PLUGIN = {"VLLM_PLUGINS": ""}
ARGUMENTS = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2304,
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 32 << 20,
    "gpu_memory_utilization": 0.1,
}
TWO_RANKS = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
# Between logits of one float32 model computed in two orders: a margin below it is a tie.
TIE = 1e-3


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, and by how much (in log probability) each beat the runner-up."""

    tokens: list[int]
    margins: list[float]


@dataclass(frozen=True)
class Served:
    """What an engine did: answers by batch, its counters, its log."""

    batches: list[list[Answer]]
    counters: dict[str, float]
    log: str

    @property
    def cache_tokens(self) -> int:
        """The size of the KV cache as vLLM reports it."""
        found = re.search(r"KV cache size: ([\d,]+) tokens", self.log)
        assert found, self.log
        return int(found[1].replace(",", ""))


def request(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens}


def serve(
    model: Path,
    batches: list[list[dict[str, Any]]],
    *,
    environment: dict[str, str] | None = None,
    **arguments: Any,
) -> Served:
    """Start an engine, serve the batches one after the other, end it."""
    job = {"arguments": ARGUMENTS | {"model": str(model)} | arguments, "batches": batches}
    done = subprocess.run(
        [sys.executable, str(JOB)],
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | ENVIRONMENT | (environment or {}),
        timeout=1200,
    )
    results = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert done.returncode == 0, done.stdout[-20000:]
    assert results, done.stdout[-20000:]
    result = json.loads(results[-1].removeprefix(MARK))
    answers = [[Answer(**answer) for answer in batch] for batch in result["batches"]]
    return Served(answers, result["counters"], done.stdout)


def assert_same(ours: Answer, theirs: list[int], logits: Reference, prompt: list[int]) -> None:
    """The tokens agree, up to a tie of Transformers' own logits; after one, nothing follows."""
    for index, (mine, other) in enumerate(zip(ours.tokens, theirs, strict=True)):
        if mine != other:
            row = logits.logits([prompt + theirs[:index]])[0][-1]
            difference = (row[mine] - row[other]).abs().item()
            assert difference < TIE, (
                f"prompt of {len(prompt)}, token {index}: {mine} for {other}, logits "
                f"{row[mine]:.6f} and {row[other]:.6f}, our margin {ours.margins[index]:.6f}"
            )
            return


def greedy(model: Reference, prompt: list[int], count: int) -> list[int]:
    """Transformers' greedy tokens, the end of the sequence being a token like any other."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        output = model.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()
