"""All combinations of which `test_served.py` takes two: `python tests/vllm/combinations.py`.

Of the environment that `make test-vllm` makes. Small random V2 and V3 checkpoints at the latent
width of vLLM's own backend, 32 requests at once, 64 tokens each, in chunks of 256, prefix caching
on: TP 2 with DCP 2 under interleave 1 and 16, with and without n-gram drafts. Each must give the
tokens of vLLM without the plugin on one rank, and Transformers' best. Ten engines, too long for the
suite.
"""

from __future__ import annotations

import sys
import tempfile
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / folder) for folder in ("tests", "tests/hf")]

from checkpoints import make  # noqa: E402
from reference import Reference  # noqa: E402
from serving import (  # noqa: E402
    COUNT,
    NGRAM,
    PROMPTS,
    TWO_RANKS,
    UPSTREAM,
    UPSTREAM_DIMS,
    V2_ROUTING,
    assert_greedy,
    assert_same,
    request,
    serve,
)

from conftest import HIDDEN, V3  # noqa: E402

ROUTING = {"v2_lite": V2_ROUTING, "v3": V3}


def main() -> None:
    requests = [[request(prompt, COUNT) for prompt in PROMPTS]]
    for case, routing in ROUTING.items():
        with tempfile.TemporaryDirectory() as folder:
            model = make(case, Path(folder), **HIDDEN, **routing, **UPSTREAM_DIMS)
            reference = Reference(model)
            (stock,) = serve(model, requests, **UPSTREAM).batches
            for interleave, drafts in product((1, 16), ({}, {"speculative_config": NGRAM})):
                served = serve(
                    model, requests, max_num_batched_tokens=256,
                    cp_kv_cache_interleave_size=interleave, **drafts, **TWO_RANKS,
                )  # fmt: skip
                (answers,) = served.batches
                for ours, theirs, prompt in zip(answers, stock, PROMPTS, strict=True):
                    assert_same(ours, theirs, prompt)
                    assert_greedy(ours.tokens, prompt, reference)
                equal = sum(a.tokens == b.tokens for a, b in zip(answers, stock, strict=True))
                accepted = served.counters.get("vllm:spec_decode_num_accepted_tokens", 0)
                print(
                    f"{case}, interleave {interleave}, n-gram {'on' if drafts else 'off'}: "
                    f"{equal} of {len(PROMPTS)} requests identical to vLLM at TP 1, the others up "
                    f"to a tie; drafts accepted: {accepted:.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
