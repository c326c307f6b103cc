"""Runs one vLLM engine in a process of its own, and reads what it served and said."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from checkpoints import tokens
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
# vLLM's own backend for MLA, of these dimensions and no others, on one rank; without the operator
# that rotates MLA queries wrongly.
UPSTREAM_DIMS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
UPSTREAM: dict[str, Any] = {
    "environment": WITHOUT_PLUGIN,
    "attention_backend": "CPU_MLA",
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
# vLLM reads groups and normalisation also where Transformers' V2 disregards them.
V2_ROUTING = {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}
TWO_RANKS = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
COUNT = 64
# Around the edges of blocks (16) and of stripes over two ranks, then up to 2,000.
LENGTHS = [1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256,
           257, 300, 333, 400, 511, 512, 513, 700, 1000, 1024, 1500, 2000]  # fmt: skip
PROMPTS = [tokens(length, seed=length) for length in LENGTHS]
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


def complete_all(client: openai.OpenAI, prompts: list[list[int]]) -> list[list[int]]:
    """What a server that serves the embedded model answers, all asked at once."""

    def complete(prompt: list[int]) -> list[int]:
        completion = client.completions.create(
            model="embedded", prompt=prompt, max_tokens=COUNT, temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        chosen: list[int] = completion.choices[0].model_extra["token_ids"]
        assert len(chosen) == COUNT
        return chosen

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(complete, prompts))


def assert_greedy(chosen: list[int], prompt: list[int], model: Reference) -> None:
    """Each token is Transformers' best after those before it, or tied with the best.

    One pass over prompt and answer shows for every token what generating them one by one would.
    """
    rows = model.logits([prompt + chosen[:-1]])[0][len(prompt) - 1 :]
    for index, (row, token) in enumerate(zip(rows, chosen, strict=True)):
        assert row.max() - row[token] < TIE, (
            f"prompt of {len(prompt)}, token {index}: {token} has {row[token]:.6f}, "
            f"{int(row.argmax())} has {row.max():.6f}"
        )


def assert_same(ours: Answer, theirs: Answer, prompt: list[int]) -> None:
    """The tokens agree up to the first whose margin over the runner-up is none, for both."""
    for index, (mine, other) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)):
        if mine != other:
            margins = ours.margins[index], theirs.margins[index]
            assert max(margins) < TIE, (
                f"prompt of {len(prompt)}, token {index}: {mine} by {margins[0]:.6f}, "
                f"{other} by {margins[1]:.6f}"
            )
            return
