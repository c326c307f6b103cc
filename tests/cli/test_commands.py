"""The commands as a user runs them."""

from __future__ import annotations

import json
import os
import pty
import select
from pathlib import Path

import pytest
import typer.main
from checkpoints import END, make
from processes import TIMEOUT, anabranch, start, torchrun

from anabranch.cli import app
from anabranch.embedded import task

LEDGER = Path(__file__).parents[2] / "examples" / "ledger.txt"
LEDGER_SEED = 5


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    """Random weights: long continuations that no rounding may change."""
    return str(make("v3", tmp_path_factory.mktemp("random") / "model"))


@pytest.fixture(scope="module")
def alone(random_model) -> dict:
    """What one rank generates after two unequal prompts."""
    ended = anabranch(
        *("generate", "--model", random_model, "--prompt", "abcd", "--prompt", "some more of it"),
        *("--max-new-tokens", "24", "--json"),
    )
    assert (ended.status, ended.err) == (0, "")
    return json.loads(ended.out)


def test_the_example_is_answered_on_two_ranks():
    """What `make demo` runs."""
    [problem] = task.problems(1, 4000, LEDGER_SEED)
    assert LEDGER.read_text() == problem.prompt + "\n"
    ended = anabranch("generate", "--dcp", "2", "--prompt-file", str(LEDGER))
    assert (ended.status, ended.out) == (0, problem.answer + "\n")
    assert ended.err.startswith("3999 prompt tokens in ")
    assert ended.err.endswith("; 2 ranks, overlap, float32\n")
    assert ended.err.count("\n") == 1


def test_json_describes_a_batch(alone):
    assert (alone["dcp"], alone["schedule"], alone["dtype"]) == (1, "overlap", "float32")
    assert [each["prompt_tokens"] for each in alone["generations"]] == [4, 15]
    for each in alone["generations"]:
        ended = each["token_ids"][-1] == END
        assert each["finish_reason"] == ("stop" if ended else "length")
        assert ended or len(each["token_ids"]) == 24
    tokens = sum(len(each["token_ids"]) for each in alone["generations"])
    assert alone["stats"]["decode_tokens"] == tokens - 2


def test_other_layouts_and_schedules_give_the_same_text(alone, random_model, tmp_path):
    (tmp_path / "prompt.txt").write_text("some more of it\n")
    ended = anabranch(
        *("generate", "--model", random_model, "--prompt", "abcd", "--dcp", "2"),
        *("--prompt-file", str(tmp_path / "prompt.txt"), "--max-new-tokens", "24"),
        *("--schedule", "serial", "--interleave", "4", "--block-size", "8", "--project-first"),
        *("--max-tokens", "96", "--prefill-chunk", "7"),
    )
    first, second = (each["text"] for each in alone["generations"])
    assert (ended.status, ended.out) == (0, f"[1] {first}\n[2] {second}\n")


def test_under_a_launcher_only_the_first_rank_speaks(alone, random_model):
    """Standard input is read once, for all ranks."""
    ended = torchrun(
        *("generate", "--model", random_model, "--prompt-file", "-", "--prompt", "abcd"),
        *("--max-new-tokens", "24", "--json"),
        text="some more of it\n",
    )
    assert ended.status == 0
    answer = json.loads(ended.out)
    assert answer["dcp"] == 2
    assert answer["generations"] == alone["generations"]


def test_text_streams_and_ends_before_the_stop_string(alone, random_model):
    """On a terminal too, where nothing but the text goes to standard output."""
    text = alone["generations"][0]["text"]
    stop = text[10:13]
    master, terminal = pty.openpty()
    process = start(
        *("-m", "anabranch", "generate", "--model", random_model, "--dcp", "2", "--stop", stop),
        *("--prompt", "abcd", "--max-new-tokens", "24"),
        stderr=terminal,
    )
    os.close(terminal)
    shown = b""
    while select.select([master], [], [], TIMEOUT)[0]:
        try:
            shown += os.read(master, 65536)
        except OSError:  # the terminal's last user has gone
            break
    os.close(master)
    assert process.communicate()[0] == text[: text.index(stop)] + "\n"
    assert "loading model on 2 ranks" in shown.decode()


def test_sampling_is_the_same_on_any_number_of_ranks(alone, random_model):
    def sample(dcp: str) -> dict:
        ended = anabranch(
            *("generate", "--model", random_model, "--prompt", "abcd", "--chat"),
            *("--temperature", "1.5", "--top-k", "50", "--top-p", "0.95", "--seed", "1"),
            *("--max-new-tokens", "24", "--dcp", dcp, "--json"),
        )
        return json.loads(ended.out)["generations"][0]

    sampled = sample("2")
    assert sampled == sample("1")
    assert sampled["token_ids"] != alone["generations"][0]["token_ids"]
    assert sampled["prompt_tokens"] == len("(abcd)") + 1  # the chat template


def test_evaluate_scores_a_grid(tmp_path):
    out = tmp_path / "scores.json"
    ended = anabranch(
        *("evaluate", "--dcp", "1,2", "--dtype", "float32,bfloat16"),
        *("--schedule", "serial,overlap", "--problems", "6", "--context-tokens", "200"),
        *("--batch-size", "4", "--json", "--out", str(out)),
    )
    assert (ended.status, ended.err) == (0, "")
    answer = json.loads(ended.out)
    assert json.loads(out.read_text()) == answer
    configurations = [
        (score["world_size"], score["dtype"], score["schedule"]) for score in answer["scores"]
    ]
    assert configurations == [
        (n, dtype, schedule)
        for n in (1, 2)
        for dtype in ("float32", "bfloat16")
        for schedule in ("serial", "overlap")
    ]
    assert {score["correct"] for score in answer["scores"]} == {6}
    assert {score["total"] for score in answer["scores"]} == {6}


def test_evaluate_reads_word_problems(random_model, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "1 + 1?", "answer": "1 + 1 = 2\\n#### 2"}\n' * 3)
    ended = anabranch("evaluate", "--model", random_model, "--data", str(data), "--problems", "2")
    assert (ended.status, ended.err) == (0, "")
    assert "0/2" in ended.out or "1/2" in ended.out or "2/2" in ended.out


def test_info_names_what_is_lacking():
    ended = anabranch("info", "--json")
    assert (ended.status, ended.err) == (0, "")
    answer = json.loads(ended.out)
    assert answer["versions"]["anabranch"] == "0.1.0"
    kinds = {device["kind"]: device for device in answer["devices"]}
    assert kinds["cpu"]["available"]
    assert kinds["cpu"]["attention"] == "cpu"
    assert all(kinds[kind]["lacks"] for kind in kinds if not kinds[kind]["available"])


STEP = """
import torch

one, other = torch.zeros(8), torch.zeros(8)

def write():
    one.add_(1)

def read():
    other.copy_(one)

def racing(streams):
    streams.main.run(write)
    streams.side.run(read)

def ordered(streams):
    streams.side.wait_event(streams.main.record_event("begun"))
    streams.side.run(read)
    streams.main.wait_event(streams.side.record_event("read"))
"""


def test_check_finds_what_no_event_orders(tmp_path):
    (tmp_path / "steps.py").write_text(STEP)
    environment = {"PYTHONPATH": str(tmp_path)}
    ended = anabranch("check", "steps:racing", environment=environment)
    assert ended.status == 1
    assert "race on data" in ended.out
    ended = anabranch("check", "steps:ordered", "--json", environment=environment)
    assert ended.status == 0
    assert [each["findings"] for each in json.loads(ended.out)] == [[]]


def test_check_passes_the_schedules():
    ended = anabranch("check", "--batches", "4", "--json")
    assert ended.status == 0
    answer = json.loads(ended.out)
    assert [each["name"] for each in answer] == ["serial", "comm_stream", "overlap", "auto"]
    assert [each["findings"] for each in answer] == [[], [], [], []]


@pytest.mark.parametrize("command", ["generate", "evaluate", "info", "check"])
def test_help_has_examples(command, capsys):
    typer.main.get_command(app)([command, "--help"], standalone_mode=False)
    assert f"anabranch {command}" in capsys.readouterr().out.partition("Examples:")[2]
