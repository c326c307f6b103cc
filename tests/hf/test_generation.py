"""Generation: sampling in lockstep, stops, streams, chat, bounded memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import BEGIN, END, text, tokens
from engines import generations, load
from transformers.generation.streamers import BaseStreamer

from anabranch.hf import Engine, Generation

PROMPTS = [tokens(37, 1), tokens(5, 2), tokens(1, 3)]
SAMPLED: dict[str, Any] = {"max_new_tokens": 16, "temperature": 0.9, "top_p": 0.95, "top_k": 40}


def ids(results):
    return [result.token_ids for result in results]


@pytest.fixture(scope="module")
def engine(checkpoint) -> Engine:
    return Engine.load(checkpoint("v3"))


def test_sampling_is_transformers_own_and_the_same_on_every_rank(ranks, checkpoint, reference):
    path = checkpoint("v3")
    calls = [SAMPLED | {"seed": seed} for seed in (0, 1, 0)]
    first, second = ranks(2).run(generations, path, PROMPTS, calls, {})
    assert first == second
    assert first[0] == first[2]
    assert ids(first[0]) != ids(first[1])

    for prompt, seed in ((PROMPTS[0], 0), (PROMPTS[0], 7)):
        torch.manual_seed(seed)
        [expected] = (
            reference(path)
            .model.generate(
                torch.tensor([prompt]),
                do_sample=True,
                **SAMPLED,
            )[:, len(prompt) :]
            .tolist()
        )
        [ours] = Engine.load(path).generate([prompt], seed=seed, **SAMPLED)
        assert ours.token_ids == expected


def test_sampling_leaves_the_random_state_alone(engine):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    engine.generate(PROMPTS, **SAMPLED)
    assert torch.equal(torch.rand(3), expected)


def _with_another_head(path, call):
    """Generate with weights of the last layer that differ on rank 1."""
    engine = load(path)
    if dist.get_rank() == 1:
        engine.model.lm_head.weight.data.mul_(-3.0)
    return [result.token_ids for result in engine.generate(PROMPTS, **call)]


@pytest.mark.parametrize("call", [SAMPLED, {"max_new_tokens": 8}], ids=["sampled", "greedy"])
def test_ranks_whose_scores_differ_stay_together(ranks, checkpoint, call):
    path = checkpoint("v3")
    first, second = ranks(2).run(_with_another_head, path, call)
    assert first == second
    [[expected], _] = ranks(2).run(generations, path, PROMPTS, [call], {})
    assert first == ids(expected)


def test_stop_tokens_end_each_sequence_alone(ranks, checkpoint, reference):
    path = checkpoint("v3")
    plain = reference(path).generate(PROMPTS, 12, eos_token_id=None)
    stop = plain[1][3]
    call = {"max_new_tokens": 12, "stop_token_ids": [stop]}
    for [results] in ranks(2).run(generations, path, PROMPTS, [call], {}):
        for result, full, prompt in zip(results, plain, PROMPTS, strict=True):
            ends = [index for index, token in enumerate(full) if token in (stop, END)]
            count = ends[0] + 1 if ends else 12
            assert result.token_ids == full[:count]
            assert result.finish_reason == ("stop" if ends else "length")
            assert result.prompt_tokens == len(prompt)
    assert [result.finish_reason for result in results].count("stop") >= 1


def test_stop_strings_are_cut(engine):
    [plain] = engine.generate([PROMPTS[0]], max_new_tokens=12)
    assert plain.text == text(plain.token_ids)
    stop = text(plain.token_ids[2:4])
    count = plain.text.index(stop) + 2
    results = engine.generate(PROMPTS, max_new_tokens=12, stop=[stop, "never"])
    assert results[0] == Generation(37, plain.token_ids[:count], plain.text[: count - 2], "stop")
    for result in results[1:]:
        assert stop not in result.text
        if result.finish_reason == "length":
            assert len(result.token_ids) == 12


def test_stop_strings_count_only_in_what_is_generated(engine):
    prompt = PROMPTS[0]
    [plain] = engine.generate([prompt], max_new_tokens=30)
    across = text([prompt[-1], plain.token_ids[0]])
    assert across not in plain.text
    assert engine.generate([prompt], max_new_tokens=30, stop=[across]) == [plain]
    # A late match, far from the first token and from the prompt.
    end = plain.text[20:24]
    [late] = engine.generate([prompt], max_new_tokens=30, stop=[end])
    assert late.text == plain.text[: plain.text.index(end)]
    assert late.token_ids == plain.token_ids[: plain.text.index(end) + 4]


class Collector(BaseStreamer):
    def __init__(self):
        self.chunks, self.ended = [], False

    def put(self, value):
        self.chunks.append(value.flatten().tolist())

    def end(self):
        self.ended = True


def _stream_on_rank_0(path, prompt):
    streamer = Collector() if dist.get_rank() == 0 else None
    [result] = load(path).generate([prompt], max_new_tokens=6, streamer=streamer)
    return result.token_ids, streamer and streamer.chunks, streamer and streamer.ended


def test_streaming_on_one_rank(ranks, checkpoint):
    prompt = PROMPTS[1]
    first, second = ranks(2).run(_stream_on_rank_0, checkpoint("v3"), prompt)
    assert first == (second[0], [prompt] + [[token] for token in second[0]], True)


def test_text_and_chat(engine):
    prompt = tokens(3)
    assert engine.generate([text(prompt)], max_new_tokens=4) == engine.generate(
        [prompt], max_new_tokens=4
    )
    chat = [BEGIN, *engine.tokenizer("(")["input_ids"], *prompt]
    chat += engine.tokenizer(")")["input_ids"]
    assert engine.generate([text(prompt)], max_new_tokens=4, chat=True) == engine.generate(
        [chat], max_new_tokens=4
    )


def test_statistics(engine):
    assert Engine.load(engine.model.name_or_path).stats is None
    results = engine.generate(PROMPTS, max_new_tokens=6)
    stats = engine.stats
    assert stats.prefill_tokens == sum(map(len, PROMPTS))
    assert stats.decode_tokens == sum(len(result.token_ids) for result in results) - len(PROMPTS)
    assert stats.prefill_seconds > 0
    assert stats.decode_tokens_per_second == stats.decode_tokens / stats.decode_seconds


def test_fixed_capacity_is_reused_and_its_garbage_never_read(checkpoint, engine):
    fixed = Engine.load(checkpoint("v3"), max_tokens=160, block_size=4)
    for latents in fixed._latents.values():
        latents.latent.fill_(float("nan"))
        latents.rope.fill_(float("nan"))
    for prompts in (PROMPTS, PROMPTS[::-1], PROMPTS[:1]):
        expected = engine.generate(prompts, max_new_tokens=8)
        assert fixed.generate(prompts, max_new_tokens=8) == expected


def test_prefill_holds_no_causal_mask_and_no_logits_but_the_last(engine):
    masks, heads = [], []
    attention = engine.model.model.layers[0].self_attn
    hooks = [
        attention.register_forward_pre_hook(
            lambda module, args, kwargs: masks.append(kwargs["attention_mask"].shape),
            with_kwargs=True,
        ),
        engine.model.lm_head.register_forward_pre_hook(
            lambda module, args: heads.append(args[0].shape[:2])
        ),
    ]
    try:
        engine.generate(PROMPTS, max_new_tokens=2, prefill_chunk=16)
    finally:
        for hook in hooks:
            hook.remove()
    assert masks == [(3, 16), (3, 16), (3, 5), (3, 1)]
    assert heads == [(3, 1)] * 4


def test_a_model_runs_only_with_its_cache(engine):
    with pytest.raises(
        TypeError, match=r"cache must be an anabranch.hf.DCPCache, got DynamicCache"
    ):
        engine.model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=2)


def test_generate_of_transformers_itself(engine, reference):
    theirs = reference(Path(engine.model.name_or_path)).model
    ids = torch.tensor([PROMPTS[0]])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "output_logits": True}
    options["return_dict_in_generate"] = True
    ours = engine.model.generate(ids, cache=engine.new_cache([43]), **options)
    expected = theirs.generate(ids, **options)
    assert torch.equal(ours.sequences, expected.sequences)
    assert torch.allclose(torch.stack(ours.logits), torch.stack(expected.logits), atol=1e-4)


def test_cache_errors(engine):
    ids = torch.tensor([PROMPTS[0]])
    with pytest.raises(NotImplementedError, match="beam search and assisted decoding"):
        engine.model.generate(ids, max_new_tokens=4, num_beams=2, cache=engine.new_cache([41] * 2))
    with pytest.raises(ValueError, match="the latent cache is full: a sequence of 37 tokens"):
        engine.model(ids, cache=engine.new_cache([16]))
    mask = torch.zeros(1, 1, 37, 37)
    with pytest.raises(ValueError, match="attention_mask must be the padding of the batch"):
        engine.model(ids, attention_mask=mask, cache=engine.new_cache([37]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"temperature": -1.0}, "temperature must be at least 0, got -1.0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"prefill_chunk": 0}, "prefill_chunk must be at least 1, got 0"),
        ({"stop": "abc"}, "stop must be a sequence of strings that are not empty, got abc"),
        ({"stop": ["a", ""]}, "stop must be a sequence of strings that are not empty"),
        (
            {"max_new_tokens": 121},
            "prompts and max_new_tokens need 406 tokens of cache, 26 blocks of 16; "
            "max_tokens 400 allows 25",
        ),
    ],
)
def test_refused_before_any_work(checkpoint, monkeypatch, call, message):
    engine = Engine.load(checkpoint("v3"), max_tokens=400)
    monkeypatch.setattr(engine.model, "forward", None)
    with pytest.raises(ValueError, match=message):
        engine.generate(PROMPTS, **call)


def test_unusable_prompts_are_refused(engine):
    with pytest.raises(ValueError, match=r"prompts\[1\] must have at least one token, got none"):
        engine.generate(["a", ""])
    with pytest.raises(
        ValueError, match=r"prompts\[0\] must have tokens in \[0, 98\), got 5 to 98"
    ):
        engine.generate([[5, 98, 6]])
    with pytest.raises(ValueError, match="prompts must be a sequence of one or more prompts"):
        engine.generate([])
    with pytest.raises(ValueError, match="prompts must be a sequence of one or more prompts"):
        engine.generate("a")


def test_chat_without_a_template_is_refused(checkpoint):
    engine = Engine.load(checkpoint("v3"))
    engine.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat must be False"):
        engine.generate(["a"], chat=True)
