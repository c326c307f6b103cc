"""One vLLM engine for `serving.py`, stepped on demand: commands on stdin, replies on stdout.

    {"do": "fill", "context": 4096, "batch": 1}    sequences of that length, of random latents
    {"do": "steps", "count": 8, "schedule": null}  seconds and attention's seconds of each step
    {"do": "drop"}                                 forget the sequences

The scheduler runs in this process, so that nothing happens between commands.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm import LLM, SamplingParams

MARK = "REPLY "
WORDS = 200  # tokens that prompts are made of


def main() -> None:
    engine = LLM(**json.loads(sys.stdin.readline()))
    engine.collective_rpc(watch_attention)
    reply("ready")
    commands = {"fill": fill, "steps": steps, "drop": drop}
    for line in sys.stdin:
        command = json.loads(line)
        reply(commands[command.pop("do")](engine, **command))


def reply(value: Any) -> None:
    print(MARK + json.dumps(value), flush=True)


def watch_attention(worker: Any) -> None:
    """On each rank: time what a layer's attention takes, and put random latents into its cache."""
    worker.attention_seconds = [0.0]
    for layer in layers(worker):
        for name in ("forward_mqa", "do_kv_cache_update"):
            timed = partial(_timed, getattr(layer.impl, name), worker.attention_seconds)
            setattr(layer.impl, name, timed)
    for cache in worker.model_runner.kv_caches:
        cache.normal_()


def _timed(run: Callable[..., Any], seconds: list[float], *args: Any, **options: Any) -> Any:
    begin = time.perf_counter()
    result = run(*args, **options)
    seconds[0] += time.perf_counter() - begin
    return result


def leave_out_model(worker: Any, leave_out: bool) -> None:
    """Let steps pass without computing anything, so that a prefill costs nothing.

    It leaves in the cache what is there: random latents, which take a decode as long as others.
    """
    model = worker.model_runner.model
    config = worker.model_runner.model_config

    def nothing(input_ids: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return torch.zeros(len(input_ids), config.get_hidden_size(), dtype=config.dtype)

    if leave_out:
        model.forward = nothing
    else:
        del model.forward


def layers(worker: Any) -> list[Any]:
    context = worker.model_runner.vllm_config.compilation_config.static_forward_context
    return list(context.values())


def attention_seconds(worker: Any) -> float:
    """Since the last call."""
    (seconds,) = worker.attention_seconds
    worker.attention_seconds[0] = 0.0
    return float(seconds)


def use_schedule(worker: Any, name: str) -> None:
    from anabranch import Schedule

    for layer in layers(worker):
        layer.impl.decoder.schedule = Schedule(name)


def fill(engine: LLM, context: int, batch: int) -> int:
    """Steps that it took."""
    engine.collective_rpc(leave_out_model, args=(True,))
    words = random.Random(0)
    for number in range(batch):
        prompt = {"prompt_token_ids": [words.randrange(3, WORDS) for _ in range(context)]}
        greedy = SamplingParams(temperature=0, max_tokens=1 << 20, ignore_eos=True)
        engine.llm_engine.add_request(f"{context} {number}", prompt, greedy)
    generating: set[str] = set()
    count = 0
    while len(generating) < batch:
        generating |= {output.request_id for output in engine.llm_engine.step()}
        count += 1
    engine.collective_rpc(leave_out_model, args=(False,))
    return count


def steps(engine: LLM, count: int, schedule: str | None) -> list[dict[str, float]]:
    if schedule is not None:
        engine.collective_rpc(use_schedule, args=(schedule,))
    engine.llm_engine.step()  # wakes what slept
    engine.collective_rpc(attention_seconds)
    samples = []
    for _ in range(count):
        begin = time.perf_counter()
        engine.llm_engine.step()
        seconds = time.perf_counter() - begin
        samples.append(
            {"step": seconds, "attention": max(engine.collective_rpc(attention_seconds))}
        )
    return samples


def drop(engine: LLM) -> None:
    running = [*engine.llm_engine.output_processor.request_states]
    engine.llm_engine.abort_request(running, internal=True)
    while engine.llm_engine.has_unfinished_requests():
        engine.llm_engine.step()


if __name__ == "__main__":
    main()
