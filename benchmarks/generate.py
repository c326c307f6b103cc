"""Decoding with the embedded checkpoint against Transformers' own model and cache.

    python benchmarks/generate.py
    python benchmarks/generate.py --quick

Both sides run the same `model.generate` on one rank, from the same random prompt; what differs is
the attention and its cache. A sample is the time between the first generated token and the last,
over the tokens between them, so that the prefill does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import typer
from measure import (
    OUT,
    OutOption,
    QuickOption,
    Report,
    Samples,
    lines_of,
    plot_lines,
    rotated,
    slope,
)
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    logging,
)

from anabranch import Schedule
from anabranch.embedded import embedded_path
from anabranch.hf import Engine

PREFILL_CHUNK = 512
RATIOS = [(peer, own) for own in ("auto", "overlap") for peer in ("sdpa", "eager")]

Decode = Callable[[torch.Tensor], float]


def main(quick: QuickOption = False, out: OutOption = OUT) -> None:
    """Measure seconds per token while decoding, over the context."""
    report = Report("generate", quick)
    contexts = [128, 512] if quick else [512, 1024, 2048, 4096, 8192]
    new_tokens, rounds = (9, 2) if quick else (65, 7)
    logging.disable_progress_bar()
    torch.set_grad_enabled(False)
    contenders = load(max(contexts) + new_tokens, new_tokens)
    for context in contexts:
        samples = measure(contenders, context, rounds)
        report.add("per token", {"context": context}, samples, RATIOS)
    claims(report, contexts)
    report.finish(out)
    panels = lines_of(report.section("per token"), "context", ())
    plot_lines(out / "generate.png", panels, "context", "seconds per token")


def claims(report: Report, contexts: list[int]) -> None:
    cases = report.section("per token")
    first = min(4096, contexts[-1])
    at = [case for case in cases if case.setting["context"] >= first]
    for peer in ("sdpa", "eager"):
        for schedule in ("auto", "overlap"):
            ratios = [case.ratios[f"{peer} / {schedule}"].median for case in at]
            report.at_least(f"{schedule}: times Transformers' {peer}, from {first} on", ratios, 1.0)

    def growth(name: str) -> float:
        return slope(contexts, [case.seconds[name].median for case in cases])

    for peer in ("sdpa", "eager"):
        ratio = growth("auto") / growth(peer)
        report.at_most(f"growth with the context over that of {peer}", [ratio], 1.0)


def load(max_tokens: int, new_tokens: int) -> dict[str, Decode]:
    """The engine under two schedules; Transformers with two kinds of attention."""
    path = embedded_path()
    engine = Engine.load(path, max_tokens=max_tokens)
    contenders: dict[str, Decode] = {}

    def engine_decode(schedule: Schedule) -> Decode:
        def run(prompt: torch.Tensor) -> float:
            engine.schedule = schedule
            cache = engine.new_cache([prompt.shape[1] + new_tokens])
            return decode(engine.model, cache, prompt, new_tokens)

        return run

    def peer_decode(attention: str) -> Decode:
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, attn_implementation=attention, dtype=torch.float32, local_files_only=True
        )

        def run(prompt: torch.Tensor) -> float:
            cache = DynamicCache(config=model.config)
            return decode(model.eval(), cache, prompt, new_tokens)

        return run

    contenders["auto"] = engine_decode(Schedule.AUTO)
    contenders["overlap"] = engine_decode(Schedule.OVERLAP)
    for attention in ("sdpa", "eager"):
        contenders[attention] = peer_decode(attention)
    return contenders


class FirstToken:
    """A logits processor that notes when it was first called."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.at is None:
            self.at = time.perf_counter()
        return scores


def decode(model: Any, cache: Any, prompt: torch.Tensor, new_tokens: int) -> float:
    """Seconds for each token after the first."""
    first = FirstToken()
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        generation_config=GenerationConfig(
            max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False,
            pad_token_id=0, eos_token_id=None, prefill_chunk_size=PREFILL_CHUNK,
        ),
        cache=cache,
        logits_processor=LogitsProcessorList([first]),
    )  # fmt: skip
    assert first.at is not None
    return (time.perf_counter() - first.at) / (new_tokens - 1)


def measure(contenders: dict[str, Decode], context: int, rounds: int) -> Samples:
    samples: Samples = {name: [] for name in contenders}
    prompt = torch.randint(3, 200, (1, context), generator=torch.Generator().manual_seed(context))
    for run in contenders.values():
        run(prompt[:, :64])
    for index in range(rounds):
        for name in rotated(contenders, index):
            samples[name].append(contenders[name](prompt))
    return samples


if __name__ == "__main__":
    typer.run(main)
