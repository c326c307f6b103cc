"""What vLLM serves with the plugin is what Transformers, and vLLM without it, answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import tokens
from reference import Reference
from serving import (
    COUNT,
    LENGTHS,
    NGRAM,
    PROMPTS,
    TWO_RANKS,
    UPSTREAM,
    UPSTREAM_DIMS,
    V2_ROUTING,
    Served,
    assert_greedy,
    assert_same,
    request,
    serve,
)

CHUNK = 256


@pytest.fixture(scope="module")
def v3(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("v3", **UPSTREAM_DIMS)


@pytest.fixture(scope="module")
def v3_served(v3: Path) -> Served:
    """All prompts at once, then again one whose beginning the engine has seen."""
    first = [request(prompt, COUNT) for prompt in PROMPTS]
    again = [request(PROMPTS[-1], COUNT)]
    return serve(v3, [first, again], max_num_batched_tokens=CHUNK, **TWO_RANKS)


@pytest.fixture(scope="module")
def v3_upstream(v3: Path) -> Served:
    return serve(v3, [[request(prompt, COUNT) for prompt in PROMPTS]], **UPSTREAM)


def test_tokens_are_those_of_transformers(v3: Path, v3_served: Served) -> None:
    model = Reference(v3)
    for answer, prompt in zip(v3_served.batches[0], PROMPTS, strict=True):
        assert_greedy(answer.tokens, prompt, model)


def test_a_cached_prefix_gives_the_same_tokens(v3_served: Served) -> None:
    assert v3_served.counters["vllm:prefix_cache_hits"] >= LENGTHS[-1] - 64
    assert v3_served.batches[1][0].tokens == v3_served.batches[0][-1].tokens


def test_tokens_are_those_of_vllm_without_the_plugin(
    v3_served: Served, v3_upstream: Served
) -> None:
    assert "anabranch serves MLA" in v3_served.log
    assert "anabranch serves MLA" not in v3_upstream.log
    for ours, theirs, prompt in zip(
        v3_served.batches[0], v3_upstream.batches[0], PROMPTS, strict=True
    ):
        assert_same(ours, theirs, prompt)


def test_two_ranks_hold_twice_the_tokens(v3_served: Served, v3_upstream: Served) -> None:
    # The same bytes on each rank. A block more or less is rounding.
    assert abs(v3_served.cache_tokens - 2 * v3_upstream.cache_tokens) <= 64


def test_interleave_speculation_preemption_and_another_schedule(
    checkpoint: Callable[..., Path],
) -> None:
    """Latents of other widths, stripes of 16, drafts from n-grams, and a cache that is too small.

    A rank alone could not hold the longest request: it is longer than half the cache.
    """
    model = checkpoint("v2_lite", **V2_ROUTING)
    looping = [tokens(7, seed=seed) * 20 for seed in range(4)]
    prompts = [*looping, *PROMPTS[::3], PROMPTS[-1]]
    reference = Reference(model)
    served = serve(
        model,
        [[request(prompt, COUNT) for prompt in prompts]],
        max_num_batched_tokens=CHUNK,
        kv_cache_memory_bytes=400 << 10,
        cp_kv_cache_interleave_size=16,
        speculative_config=NGRAM,
        additional_config={"anabranch": {"schedule": "comm_stream"}},
        **TWO_RANKS,
    )
    assert served.counters["vllm:spec_decode_num_accepted_tokens"] > 0
    assert served.counters["vllm:num_preemptions"] > 0
    assert max(map(len, prompts)) > served.cache_tokens / 2
    for answer, prompt in zip(served.batches[0], prompts, strict=True):
        assert_greedy(answer.tokens, prompt, reference)


def test_an_mtp_layer_drafts(checkpoint: Callable[..., Path]) -> None:
    """Its own latents are sharded like the model's: its drafts are as good as they can be."""
    model = checkpoint("v3", draft=True)
    prompts = PROMPTS[10:20]
    served = serve(
        model,
        [[request(prompt, COUNT // 2) for prompt in prompts]],
        max_model_len=512,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
        **TWO_RANKS,
    )
    accepted = served.counters["vllm:spec_decode_num_accepted_tokens"]
    assert accepted > 0.7 * served.counters["vllm:spec_decode_num_drafts"]
    reference = Reference(model)
    for answer, prompt in zip(served.batches[0], prompts, strict=True):
        assert_greedy(answer.tokens, prompt, reference)


def test_bfloat16_in_a_traced_model(checkpoint: Callable[..., Path]) -> None:
    """In half precision tokens may differ: the first one must be among the best of float32.

    The model is traced as it is for compilation, but compiled to nothing, which saves minutes.
    """
    model = checkpoint("v3_dense")
    prompts = PROMPTS[10:20]
    served = serve(
        model,
        [[request(prompt, 1) for prompt in prompts]],
        dtype="bfloat16",
        enforce_eager=False,
        environment={"VLLM_CPU_CI_ENV": "1"},
        **TWO_RANKS,
    )
    reference = Reference(model)
    for answer, prompt in zip(served.batches[0], prompts, strict=True):
        row = reference.logits([prompt])[0][-1]
        assert row.max() - row[answer.tokens[0]] < 0.05 * row.std()
