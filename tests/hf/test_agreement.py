"""Logits and greedy tokens of every architecture agree with Transformers, on 1, 2 and 4 ranks."""

from __future__ import annotations

import pytest
import torch
from checkpoints import CASES, END, tokens
from engines import logits_and_tokens
from reference import Reference, difference, median_difference

from anabranch import Schedule
from anabranch.hf import Engine

TOLERANCE = 1e-4
PROMPTS = [tokens(37, 1), tokens(5, 2), tokens(1, 3)]
COUNT = 64


def until_end(sequence: list[int]) -> list[int]:
    """Generated tokens up to the end token, without what pads the batch after it."""
    return sequence[: sequence.index(END) + 1] if END in sequence else sequence


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_every_architecture(ranks, checkpoint, reference, case, world_size):
    path = checkpoint(case)
    theirs = reference(path)
    results = ranks(world_size).run(
        logits_and_tokens, path, PROMPTS, COUNT, 16, [Schedule.OVERLAP], {}
    )
    expected = theirs.logits(PROMPTS)
    tokens_expected = [until_end(row) for row in theirs.generate(PROMPTS, COUNT)]
    for logits, [generated] in results:
        assert difference(logits, expected) < TOLERANCE
        assert generated == tokens_expected


@pytest.mark.parametrize(
    ("case", "world_size", "settings"),
    [
        ("v3", 2, {"interleave": 1, "block_size": 1}),
        ("v3", 2, {"interleave": 16, "block_size": 16}),
        ("v3", 2, {"interleave": 2, "block_size": 64, "project_first": True}),
        ("v3", 4, {"interleave": 1, "block_size": 16}),
        ("v3", 4, {"interleave": 2, "block_size": 16}),
        ("v3", 4, {"interleave": 16, "block_size": 64, "project_first": True}),
        ("v2_lite", 4, {"interleave": 16, "block_size": 16}),
    ],
)
def test_layouts_and_schedules(ranks, checkpoint, reference, case, world_size, settings):
    path = checkpoint(case)
    theirs = reference(path)
    results = ranks(world_size).run(
        logits_and_tokens, path, PROMPTS, 12, 13, list(Schedule), settings
    )
    expected = theirs.logits(PROMPTS)
    tokens_expected = [until_end(row) for row in theirs.generate(PROMPTS, 12)]
    for logits, by_schedule in results:
        assert difference(logits, expected) < TOLERANCE
        assert by_schedule == [tokens_expected] * len(Schedule)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_long_prompts_in_chunks(ranks, checkpoint, reference, world_size):
    """3,000 tokens beyond the original context of YaRN, beside short ones, in one batch."""
    path = checkpoint("v3")
    theirs = reference(path)
    prompts = [tokens(3000, 4), tokens(1, 5), tokens(130, 6)]
    results = ranks(world_size).run(
        logits_and_tokens, path, prompts, 8, 512, [Schedule.OVERLAP], {"interleave": 2}
    )
    expected = theirs.logits(prompts)
    # Transformers holds a mask of 3,000 x 3,000: each prompt alone.
    tokens_expected = [until_end(theirs.generate([prompt], 8)[0]) for prompt in prompts]
    for logits, [generated] in results:
        assert difference(logits, expected) < TOLERANCE
        assert generated == tokens_expected


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 200])
@pytest.mark.parametrize("prefill_chunk", [1, 16, 512])
def test_prompt_lengths_and_chunks(checkpoint, reference, length, prefill_chunk):
    path = checkpoint("v2_yarn_groups")
    engine = Engine.load(path)
    prompt = tokens(length, length)
    assert (
        difference(
            engine.logits([prompt], prefill_chunk=prefill_chunk), reference(path).logits([prompt])
        )
        < TOLERANCE
    )


def test_sharded_safetensors(checkpoint, reference):
    path = checkpoint("v3", shards=True)
    assert len(list(path.glob("model-*.safetensors"))) > 2
    engine = Engine.load(path)
    assert difference(engine.logits(PROMPTS), reference(path).logits(PROMPTS)) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "case", ["v2_yarn_groups", "v3_dense", "mistral4", "longcat", "bailing_hybrid"]
)
def test_half_precision(checkpoint, reference, case, dtype):
    """As exact as Transformers is in the same dtype."""
    path = checkpoint(case)
    expected = reference(path).logits(PROMPTS)
    theirs = median_difference(Reference(path, dtype).logits(PROMPTS), expected)
    engine = Engine.load(path, dtype=dtype)
    assert engine.model.dtype == dtype
    assert median_difference(engine.logits(PROMPTS), expected) < 1.5 * theirs
