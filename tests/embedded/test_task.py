"""The task is deterministic, fits its context, and can be answered from its prompt alone."""

import operator
import re
from dataclasses import FrozenInstanceError

import pytest

from anabranch.embedded import embedded_path, task
from anabranch.embedded.task import Problem

CONTEXTS = [64, 1000, 4000, 16000]


def solve(prompt: str) -> str:
    """Answer a prompt with a plain parser."""
    *lines, question = prompt.split("\n")
    values = {key: int(value) for key, value in (line.rsplit(" ", 1) for line in lines)}
    asked = re.fullmatch(r"ask (\S+ \S+) ([+-]) (\d) :", question)
    assert asked is not None
    key, sign, step = asked.groups()
    result = {"+": operator.add, "-": operator.sub}[sign](values[key], int(step))
    return f"{key} {values[key]} {sign} {step} = {result}"


def test_problems_depend_on_the_seed_alone() -> None:
    assert task.problems(3, 500, seed=7) == task.problems(3, 500, seed=7)
    assert task.problems(3, 500, seed=7) == task.problems(5, 500, seed=7)[:3]
    assert task.problems(3, 500, seed=7) != task.problems(3, 500, seed=8)


@pytest.mark.parametrize("context_tokens", CONTEXTS)
def test_keys_are_unique_and_the_answer_follows_from_the_prompt(context_tokens: int) -> None:
    for problem in task.problems(5, context_tokens, seed=1):
        keys = [line.rsplit(" ", 1)[0] for line in problem.prompt.split("\n")[:-1]]
        assert len(set(keys)) == len(keys)
        assert solve(problem.prompt) == problem.answer
        assert problem.answer.endswith(f"= {problem.result}")
        assert problem.result in task.VALUES


def test_the_key_asked_is_spread_over_the_context() -> None:
    places = []
    for problem in task.problems(400, 500, seed=2):
        lines = problem.prompt.split("\n")[:-1]
        line = f"{' '.join(problem.key)} {problem.value}"
        places.append(lines.index(line) / len(lines))
    quarters = [sum(low <= place < low + 0.25 for place in places) for low in (0, 0.25, 0.5, 0.75)]
    assert sum(quarters) == 400
    assert min(quarters) > 60


def test_words_of_keys_are_shared() -> None:
    (problem,) = task.problems(1, 4000, seed=3)
    lines = [line.split() for line in problem.prompt.split("\n")[:-1]]
    adjective, noun = problem.key
    assert sum(line[0] == adjective for line in lines) > 4
    assert sum(line[1] == noun for line in lines) > 4


@pytest.mark.parametrize("context_tokens", [5, 20000])
def test_a_context_that_no_ledger_fills_is_refused(context_tokens: int) -> None:
    with pytest.raises(ValueError, match=str(context_tokens)):
        task.problems(1, context_tokens, seed=0)


def test_is_correct() -> None:
    problem = Problem("", "able ant 3 + 4 = 7", ("able", "ant"), 3, 7)
    assert task.is_correct(problem, "able ant 3 + 4 = 7")
    assert task.is_correct(problem, " able ant 3 + 4 = 7\n")
    assert not task.is_correct(problem, "able ant 3 + 4 = 8")
    assert not task.is_correct(problem, "able ant 3 + 4 = 7 7")
    assert not task.is_correct(problem, "")


def test_problems_are_frozen() -> None:
    (problem,) = task.problems(1, 64, seed=0)
    with pytest.raises(FrozenInstanceError):
        problem.answer = ""  # type: ignore[misc]


@pytest.mark.parametrize("context_tokens", CONTEXTS)
def test_prompts_fit_their_context_and_survive_the_tokenizer(context_tokens: int) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(embedded_path())
    for problem in task.problems(2, context_tokens, seed=4):
        ids = tokenizer(problem.prompt)["input_ids"]
        assert context_tokens - task.RECORD_TOKENS < len(ids) <= context_tokens
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == problem.prompt
        whole = tokenizer(f"{problem.prompt} {problem.answer}")["input_ids"]
        assert whole[: len(ids)] == ids
        assert tokenizer.decode(whole[len(ids) :]) == problem.answer


def test_the_checkpoint_is_small() -> None:
    assert sum(file.stat().st_size for file in embedded_path().iterdir()) <= 4_000_000
