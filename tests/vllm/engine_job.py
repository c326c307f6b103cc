"""One vLLM engine in a process of its own: reads a job from stdin, prints its results last.

A job is JSON: `arguments` of `vllm.LLM`, and `batches`, each a list of requests served at once:
`{"prompt": [token ids], "max_tokens": 64}`. The result holds, for each batch, the tokens of each
request with the logit of each and of its runner-up, and what vLLM counted meanwhile.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from vllm import LLM, SamplingParams

MARK = "RESULT "
COUNTERS = (
    "vllm:prefix_cache_hits",
    "vllm:num_preemptions",
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_accepted_tokens",
)


def serve(engine: LLM, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    outputs = engine.generate(
        [{"prompt_token_ids": request["prompt"]} for request in requests],
        [
            SamplingParams(
                temperature=0,
                max_tokens=request["max_tokens"],
                ignore_eos=True,
                logprobs=2,
                detokenize=False,
            )
            for request in requests
        ],
        use_tqdm=False,
    )
    results = []
    for output in outputs:
        completion = output.outputs[0]
        ranked = [
            sorted((entry.logprob for entry in step.values()), reverse=True)
            for step in completion.logprobs
        ]
        results.append(
            {"tokens": list(completion.token_ids), "margins": [r[0] - r[1] for r in ranked]}
        )
    return results


def counters(engine: LLM) -> dict[str, float]:
    return {metric.name: metric.value for metric in engine.get_metrics() if metric.name in COUNTERS}


def main() -> None:
    job = json.load(sys.stdin)
    engine = LLM(**job["arguments"], disable_log_stats=False)
    batches = [serve(engine, requests) for requests in job["batches"]]
    print(MARK + json.dumps({"batches": batches, "counters": counters(engine)}), flush=True)


if __name__ == "__main__":
    main()
