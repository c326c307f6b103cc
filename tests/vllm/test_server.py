"""`vllm serve` with the embedded model, asked by the real clients; then a worker dies."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import openai
import psutil
import pytest
from reference import Reference
from serving import ENVIRONMENT, PROMPTS, assert_greedy, complete_all
from transformers import AutoTokenizer

from anabranch.embedded import embedded_path, task

START_SECONDS = 600
END_SECONDS = 100  # less than a client waits for an answer
BIN = Path(sys.executable).parent


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def workers(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if "Worker" in " ".join(child.cmdline())]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [
        BIN / "vllm", "serve", str(embedded_path()), "--served-model-name", "embedded",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
        "--tensor-parallel-size", "2", "--decode-context-parallel-size", "2",
        "--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "16",
        "--kv-cache-memory-bytes", str(64 << 20), "--gpu-memory-utilization", "0.1",
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | ENVIRONMENT
        )
    started = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        _wait_until_ready(started)
        yield started
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert server.process.poll() is None, server.log.read_text()[-20000:]
        try:
            server.client.models.list()
            return
        except openai.APIConnectionError:
            time.sleep(1)
    raise AssertionError(server.log.read_text()[-20000:])


def ask(server: Server, prompt: str, count: int) -> str:
    completion = server.client.completions.create(
        model="embedded", prompt=prompt, max_tokens=count, temperature=0
    )
    return completion.choices[0].text


def test_answers_are_right_and_those_of_transformers(server: Server) -> None:
    problems = [task.problems(1, length, seed=length)[0] for length in (60, 200, 600, 1500, 3000)]
    with ThreadPoolExecutor(len(problems)) as pool:
        answers = list(pool.map(lambda p: ask(server, p.prompt, task.ANSWER_TOKENS + 2), problems))
    correct = [task.is_correct(p, answer) for p, answer in zip(problems, answers, strict=True)]
    assert sum(correct) >= len(problems) - 1, list(zip(problems, answers, strict=True))
    tokenizer = AutoTokenizer.from_pretrained(embedded_path())
    reference = Reference(embedded_path())
    for problem, answer in zip(problems[:3], answers, strict=False):
        ids = tokenizer(problem.prompt, return_tensors="pt")["input_ids"]
        output = reference.model.generate(
            ids,
            attention_mask=ids.new_ones(ids.shape),
            max_new_tokens=task.ANSWER_TOKENS + 2,
            do_sample=False,
        )
        expected = output[0, ids.shape[1] :]
        assert answer.strip() == tokenizer.decode(expected, skip_special_tokens=True)


def _requests_running(server: Server) -> bool:
    with urlopen(f"{server.url}/metrics") as page:
        text = page.read().decode()
    return re.search(r"^vllm:num_requests_running\S* [1-9]", text, re.MULTILINE) is not None


def test_many_at_once_get_the_tokens_of_transformers(server: Server) -> None:
    """32 requests of 1 to 2,000 tokens."""
    answers = complete_all(server.client, PROMPTS)
    reference = Reference(embedded_path())
    for chosen, prompt in zip(answers, PROMPTS, strict=True):
        assert_greedy(chosen, prompt, reference)


def test_the_commands_that_measure_a_server(server: Server, tmp_path: Path) -> None:
    """Speed by `vllm bench serve`, accuracy by `anabranch evaluate`."""
    result = tmp_path / "bench.json"
    bench = [
        BIN / "vllm", "bench", "serve", "--base-url", server.url, "--model", "embedded",
        "--tokenizer", str(embedded_path()), "--dataset-name", "random",
        "--random-input-len", "256", "--random-output-len", "8", "--ignore-eos",
        "--num-prompts", "8", "--max-concurrency", "4",
        "--save-result", "--result-filename", str(result),
    ]  # fmt: skip
    evaluate = [
        BIN / "anabranch", "evaluate", "--server", server.url, "--problems", "4",
        "--context-tokens", "300", "--json",
    ]  # fmt: skip
    bench_output, evaluate_output = map(run, (bench, evaluate))
    measured = json.loads(result.read_text())
    assert (measured["completed"], measured["total_output_tokens"]) == (8, 64), bench_output
    (score,) = json.loads(evaluate_output)["scores"]
    assert score["correct"] >= score["total"] - 1 == 3


def run(command: list[str | Path]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | ENVIRONMENT, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_killed_worker_ends_the_server(server: Server) -> None:
    """Requests fail, and the server is gone: nothing waits for the rank that is no more."""
    workers = server.workers()
    assert len(workers) == 2, workers
    with ThreadPoolExecutor(1) as pool:
        prompt = task.problems(1, 600, seed=1)[0].prompt
        pending = pool.submit(
            server.client.completions.create,
            model="embedded", prompt=prompt, max_tokens=3000, temperature=0,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        while not _requests_running(server):
            assert not pending.done()
            time.sleep(0.1)
        killed = time.monotonic()
        random.Random(0).choice(workers).send_signal(signal.SIGKILL)
        with pytest.raises(openai.APIError):
            pending.result(END_SECONDS)
        server.process.wait(END_SECONDS - (time.monotonic() - killed))
    assert "EngineDeadError" in server.log.read_text()
