"""Bad input: one line that names the argument, the value and what is allowed; exit status 2."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from checkpoints import make
from processes import Ended, anabranch, torchrun
from transformers import LlamaConfig

PROMPT = ("--prompt", "w")

CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "missing directory": (
        ("generate", "--model", "{folder}/none", *PROMPT),
        "--model must be a directory or 'embedded', got {folder}/none",
    ),
    "no checkpoint": (
        ("generate", "--model", "{folder}", *PROMPT),
        "--model {folder}: {folder} is not a checkpoint: it has no config.json",
    ),
    "no MLA": (
        ("generate", "--model", "{folder}/llama", *PROMPT),
        "--model {folder}/llama: llama has no latent attention: its config has no kv_lora_rank",
    ),
    "heads": (
        ("generate", "--model", "{folder}/mla", "--dcp", "3", *PROMPT),
        "--dcp must divide the 4 attention heads of {folder}/mla, got 3",
    ),
    "dcp zero": (
        ("generate", "--dcp", "0", *PROMPT),
        "Invalid value for '--dcp': must be a whole number of at least 1, got 0",
    ),
    "interleave": (
        ("generate", "--interleave", "3", *PROMPT),
        "--interleave must divide --block-size 16, got 3",
    ),
    "dtype": (
        ("generate", "--dtype", "int8", *PROMPT),
        "Invalid value for '--dtype': must be float32 or bfloat16 or float16, got int8",
    ),
    "device": (
        ("generate", "--device", "tpu", *PROMPT),
        "--device must be cpu or cuda or npu, got tpu",
    ),
    "no device": (
        ("generate", "--device", "npu", "--dcp", "2", *PROMPT),
        f"--device npu: PyTorch {torch.__version__} finds no npu device on this machine",
    ),
    "no device to evaluate on": (
        ("evaluate", "--device", "npu", "--dcp", "1,2"),
        f"--device npu: PyTorch {torch.__version__} finds no npu device on this machine",
    ),
    "schedule": (
        ("generate", "--schedule", "fast", *PROMPT),
        "Invalid value for '--schedule': "
        "must be serial or comm_stream or overlap or auto, got fast",
    ),
    "empty prompt": (
        ("generate", "--prompt", "w", "--prompt", " "),
        "--prompt and --prompt-file must not be empty, got ' ' as prompt 2",
    ),
    "empty input": (
        ("generate", "--prompt-file", "-"),
        "--prompt and --prompt-file must not be empty, got '' as prompt 1",
    ),
    "no prompt": (("generate",), "--prompt or --prompt-file must be given"),
    "missing prompt file": (
        ("generate", "--prompt-file", "{folder}/none"),
        "--prompt-file must be a readable text, got {folder}/none: [Errno 2] No such file or "
        "directory: '{folder}/none'",
    ),
    "negative": (
        ("generate", "--max-new-tokens", "-1", *PROMPT),
        "Invalid value for '--max-new-tokens': must be a whole number of at least 1, got -1",
    ),
    "top-p": (
        ("generate", "--top-p", "0", *PROMPT),
        "Invalid value for '--top-p': must be above 0 and at most 1, got 0",
    ),
    "prompt beyond the cache": (
        ("generate", "--model", "{folder}/mla", "--dcp", "2", "--max-tokens", "32", *PROMPT),
        "prompts and max_new_tokens need 65 tokens of cache, 3 blocks of 32; max_tokens 32 "
        "allows 1",
    ),
    "no such option": (("generate", "--xyzzy"), "No such option: --xyzzy"),
    "evaluate dcp": (
        ("evaluate", "--dcp", "1,x"),
        "each --dcp must be a whole number of at least 1, got x",
    ),
    "evaluate dtype": (
        ("evaluate", "--dtype", "float32,int8"),
        "each --dtype must be float32 or bfloat16 or float16, got int8",
    ),
    "evaluate context": (
        ("evaluate", "--context-tokens", "3"),
        "--context-tokens 3: no ledger fills a context of 3 tokens",
    ),
    "evaluate server": (
        ("evaluate", "--server", "localhost:8000"),
        "--server must be an http or https address, got localhost:8000",
    ),
    "evaluate server and ranks": (
        ("evaluate", "--server", "http://localhost:8000", "--dcp", "2"),
        "--model, --dcp, --dtype and --schedule are the server's with --server",
    ),
    "evaluate data": (
        ("evaluate", "--data", "{folder}/bad.jsonl"),
        "--data {folder}/bad.jsonl: line 2 must be JSON with a question and an answer that ends "
        "in #### and a number",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    make("v3", folder / "mla")
    LlamaConfig().save_pretrained(folder / "llama")
    shutil.copy(folder / "mla" / "model.safetensors", folder / "llama")
    (folder / "bad.jsonl").write_text(
        '{"question": "1 + 1?", "answer": "#### 2"}\n{"question": "1 + 2?", "answer": "3"}\n'
    )
    return folder


@pytest.fixture(scope="module")
def endings(folder) -> dict[str, Ended]:
    """Every case run, two at a time."""

    def run(case: str) -> Ended:
        return anabranch(*(word.format(folder=folder) for word in CASES[case][0]))

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(CASES, pool.map(run, CASES), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_one_line(folder, endings, case):
    message = CASES[case][1].format(folder=folder)
    assert endings[case] == (2, "", f"anabranch: {message}\n")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_more_ranks_than_the_launcher_started(rank):
    """On each rank alike, and before it looks for the others."""
    environment = {"RANK": rank, "WORLD_SIZE": "2"}
    assert anabranch("generate", "--dcp", "4", *PROMPT, environment=environment) == (
        2,
        "",
        "anabranch: --dcp must be the number of ranks that the launcher started, 2, got 4\n",
    )


@pytest.mark.parametrize("case", ["schedule", "no device", "prompt beyond the cache"])
def test_under_a_launcher(folder, case):
    """Found out before the ranks meet, and when all have loaded the weights."""
    words = [word.format(folder=folder) for word in CASES[case][0]]
    ended = torchrun(*words)
    assert (ended.status, ended.out) == (1, "")  # the launcher's own status; each rank's is 2
    assert f"anabranch: {CASES[case][1]}\n" in ended.err
    assert "exitcode  : 2" in ended.err
    assert 'File "' not in ended.err.split("ChildFailedError")[0].split("Traceback")[0]
