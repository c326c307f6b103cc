"""How completions are scored."""

from __future__ import annotations

from decimal import Decimal

import pytest

from anabranch.evaluate import WordProblem, last_number, ledger_problems, word_problems


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so she has 1,234,567 apples.", "1234567"),
        ("3 + 4 = 7\nThe answer is $7.50!", "7.50"),
        ("from 10-3", "3"),
        ("(5)-2", "2"),
        ("it fell to -12 degrees", "-12"),
        ("2, then 3, then 4,", "4"),
        ("none", None),
    ],
)
def test_the_last_number(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("completion", "correct"),
    [
        ("1,000 + 200 = 1,200. The answer is 1200.", True),
        ("1200.00", True),
        ("1200 and not 1201", False),
        ("no idea", False),
    ],
)
def test_a_word_problem(completion, correct):
    problem = WordProblem("How many?", "1,000 + 200 = <<1000+200=1200>>1,200\n#### 1,200")
    assert problem.is_correct(completion) is correct


def test_word_problems_of_a_file(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(
        '{"question": "A?", "answer": "#### 1"}\n\n{"question": "B?", "answer": "#### 2"}\n'
    )
    assert [each.prompt for each in word_problems(path, None).problems] == [
        "Question: A?\nAnswer:",
        "Question: B?\nAnswer:",
    ]
    assert len(word_problems(path, 1).problems) == 1
    for line in ("no JSON", "[1]", '{"question": "C?"}', '{"question": "C?", "answer": "3"}'):
        path.write_text(line)
        with pytest.raises(ValueError, match="line 1 must be JSON"):
            word_problems(path, None)
    path.write_text("")
    with pytest.raises(ValueError, match="at least one problem"):
        word_problems(path, None)


def test_a_ledger_problem():
    [problem] = ledger_problems(1, 60, seed=0).problems
    assert problem.is_correct(problem.problem.answer)
    assert not problem.is_correct("0")
