"""Decoding in vLLM with the plugin against vLLM's own backend for MLA on CPU.

    .venv-vllm/bin/python benchmarks/serving.py            (make test-vllm makes that environment)
    .venv-vllm/bin/python benchmarks/serving.py --quick

BF16, the attention of DeepSeek-V2-Lite (16 heads, 512 + 64) between narrow MLPs, random weights,
four layers. `one rank` has all cores; of `two ranks` each has one half. Engines stay up, one is
stepped while the others are stopped, and a sample is the median of some steps: `step` is the whole
step of the engine, scheduler and sampling included, `attention` what all layers' attention takes in
it on the slower rank, the store of the new tokens included. The contexts are random latents: no
prefill is run.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import typer
from measure import (
    OUT,
    OutOption,
    QuickOption,
    Report,
    Samples,
    rotated,
)

LAYERS = 4
CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 512,
    "hidden_size": 2048,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": LAYERS,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
ENGINE = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "enforce_eager": True,
    # vLLM's rotary operator for CPU is wrong for MLA; both sides rotate in PyTorch.
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
    "kv_cache_memory_bytes": 1 << 30,
    "gpu_memory_utilization": 0.2,
    "enable_prefix_caching": False,
    "distributed_executor_backend": "mp",
}
UPSTREAM = {"attention_backend": "CPU_MLA"}
PLUGIN = {"attention_backend": "CUSTOM"}
TWO = {"tensor_parallel_size": 2}
DCP = TWO | {"decode_context_parallel_size": 2}
SCHEDULES = ("serial", "overlap", "auto")
STEPS = 8
MARK = "REPLY "  # as in `serving_engine.py`, which is imported by none: it imports vLLM


class Engine:
    """An engine in a process group of its own, stopped unless it is asked something."""

    def __init__(self, model: Path, log: Path, max_model_len: int, **options: Any) -> None:
        ranks = options.get("tensor_parallel_size", 1)
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // ranks)
        bind = [",".join(map(str, cores[rank * share :][:share])) for rank in range(ranks)]
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(bind),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if options["attention_backend"] == "CPU_MLA":
            environment["VLLM_PLUGINS"] = ""
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("serving_engine.py"))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True,
                env=environment, start_new_session=True,
            )  # fmt: skip
        settings = (
            ENGINE
            | options
            | {
                "model": str(model),
                "max_model_len": max_model_len,
                "max_num_batched_tokens": max_model_len,
            }
        )
        self._send(settings)

    def ask(self, do: str, **command: Any) -> Any:
        os.killpg(self.process.pid, signal.SIGCONT)
        self._send({"do": do} | command)
        answer = self.answer()
        os.killpg(self.process.pid, signal.SIGSTOP)
        return answer

    def answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise RuntimeError(f"an engine ended: {self._log.read_text()[-5000:]}")

    def _send(self, value: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def engines(max_model_len: int, options: dict[str, dict[str, Any]]) -> Iterator[dict[str, Engine]]:
    """All of them, loaded and stopped."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "config.json").write_text(json.dumps(CONFIG))
        started: dict[str, Engine] = {}
        for name, each in options.items():
            engine = Engine(folder, folder / f"{len(started)}.log", max_model_len, **each)
            stack.callback(engine.close)
            engine.answer()
            os.killpg(engine.process.pid, signal.SIGSTOP)
            started[name] = engine
        yield started


def main(quick: QuickOption = False, out: OutOption = OUT) -> None:
    """Measure decode steps over contexts and batches, on one rank and on two."""
    # Stopped engines outlive their parent unless it ends them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    report = Report("serving", quick)
    settings = [(256, 1)] if quick else [(4096, 1), (16384, 1), (4096, 8)]
    rounds = 2 if quick else 5
    longest = max(context for context, _ in settings) + 512
    with engines(longest, {"vllm": UPSTREAM, "anabranch": PLUGIN}) as one:
        contenders = {name: (engine, None) for name, engine in one.items()}
        for context, batch in settings:
            measure(report, "one rank", contenders, context, batch, rounds)
    two = {"vllm TP 2": UPSTREAM | TWO, "TP 2": PLUGIN | TWO, "DCP 2": PLUGIN | DCP}
    with engines(longest, two) as pairs:
        contenders = {name: (pairs[name], None) for name in ("vllm TP 2", "TP 2")}
        contenders |= {f"DCP 2, {each}": (pairs["DCP 2"], each) for each in SCHEDULES}
        for context, batch in settings:
            measure(report, "two ranks", contenders, context, batch, rounds)
    claims(report)
    report.finish(out)


def claims(report: Report) -> None:
    for case in report.section("one rank, attention"):
        if case.setting["batch"] == 1:
            ratio = case.ratios["vllm / anabranch"].median
            report.at_least(f"attention: times vLLM's, {case.setting['context']}", [ratio], 2)


def measure(
    report: Report,
    section: str,
    contenders: dict[str, tuple[Engine, str | None]],
    context: int,
    batch: int,
    rounds: int,
) -> None:
    """Fill all engines, then step one after the other."""
    used = {id(engine): engine for engine, _ in contenders.values()}.values()
    for engine in used:
        engine.ask("fill", context=context, batch=batch)
    parts: dict[str, Samples] = {
        part: {name: [] for name in contenders} for part in ("step", "attention")
    }
    for index in range(rounds):
        for name in rotated(contenders, index):
            engine, schedule = contenders[name]
            samples = engine.ask("steps", count=STEPS, schedule=schedule)
            for part, values in parts.items():
                values[name].append(statistics.median(sample[part] for sample in samples))
    for engine in used:
        engine.ask("drop")
    ratios = [("vllm", "anabranch"), ("vllm TP 2", "TP 2")]
    ratios += [("TP 2", name) for name in contenders if name.startswith("DCP")]
    for part, values in parts.items():
        setting = {"context": context, "batch": batch}
        report.add(f"{section}, {part}", setting, values, ratios)


if __name__ == "__main__":
    typer.run(main)
