"""The ledger task: look a two-word key up in a long context, then do one step of arithmetic.

A ledger is a list of records, one a line, each a distinct key (an adjective and a noun) with a
number from 0 to 99.  Every word of a key is shared with many other records, so that only the pair
finds the right line.  The question names a key and a step, and the answer works it out::

    amber crab 37
    teal fox 12
    ...
    ask amber crab + 5 : amber crab 37 + 5 = 42

The prompt ends at the colon.  The rest is the completion: it copies the key, looks its number up,
copies the step and works the result out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

ADJECTIVES = tuple(
    """
    able amber bald blue bold brave brief bright calm cheap clean cold crisp curly damp dark
    deep dry dull eager early faint fair fast fine firm flat fresh glad gold grand gray green
    happy harsh icy jolly keen kind large late lean light long loud lucky mild neat noble odd
    pale plain proud pure quick quiet rare red rich rough royal rusty teal warm
    """.split()  # noqa: SIM905
)
NOUNS = tuple(
    """
    ant ape bass bat bear bee bird boar bug calf carp cat clam cod colt cow crab crow deer dog
    dove duck eel elk emu ewe finch fish flea fly fox frog goat goose gull hare hawk hen hog
    ibis jay kid koi lamb lark lion lynx mole moth mouse mule newt otter owl pig pony ram rat
    seal shark sheep slug swan wolf
    """.split()  # noqa: SIM905
)
VALUES = range(100)
STEPS = range(1, 10)
RECORD_TOKENS = 4
"""An adjective, a noun, a number and a newline."""
QUESTION_TOKENS = 6
"""`ask`, a key, an operator, a step and a colon."""
ANSWER_TOKENS = 8
"""A key, its number, an operator, a step, `=`, the result and the end of the sequence."""


@dataclass(frozen=True)
class Record:
    """One line of a ledger."""

    key: tuple[str, str]
    value: int

    def __str__(self) -> str:
        return f"{self.key[0]} {self.key[1]} {self.value}\n"


@dataclass(frozen=True)
class Problem:
    """A prompt that ends in a question, and the completion that is right for it."""

    prompt: str
    answer: str
    key: tuple[str, str]
    value: int
    result: int


def ledger(rng: random.Random, records: int, adjectives: int, nouns: int) -> list[Record]:
    """Draw a ledger whose keys are distinct pairs from so many adjectives and so many nouns."""
    first, second = rng.sample(ADJECTIVES, adjectives), rng.sample(NOUNS, nouns)
    pairs = rng.sample(range(adjectives * nouns), records)
    return [Record((first[p // nouns], second[p % nouns]), rng.choice(VALUES)) for p in pairs]


def exchange(rng: random.Random, record: Record) -> tuple[str, str, int]:
    """Draw a question about a record: the question, its answer and the number that results."""
    step = rng.choice(STEPS)
    operators = [
        (sign, result)
        for sign, result in (("+", record.value + step), ("-", record.value - step))
        if result in VALUES
    ]
    sign, result = rng.choice(operators)
    key = " ".join(record.key)
    return f"ask {key} {sign} {step} :", f"{key} {record.value} {sign} {step} = {result}", result


def problems(count: int, context_tokens: int, seed: int) -> list[Problem]:
    """Draw problems whose prompts encode to at most `context_tokens` tokens, and close to it.

    The record asked about stands anywhere in the ledger with the same probability.  No seed given
    here draws the same random numbers as any seed given to the training.
    """
    return list(_problems(random.Random(f"problems {seed}"), count, context_tokens))


def _problems(rng: random.Random, count: int, context_tokens: int) -> Iterator[Problem]:
    beginning = 1
    records = (context_tokens - beginning - QUESTION_TOKENS) // RECORD_TOKENS
    if not 1 <= records <= len(ADJECTIVES) * len(NOUNS):
        raise ValueError(f"no ledger fills a context of {context_tokens} tokens")
    for _ in range(count):
        lines = ledger(rng, records, len(ADJECTIVES), len(NOUNS))
        asked = rng.choice(lines)
        question, answer, result = exchange(rng, asked)
        prompt = "".join(map(str, lines)) + question
        yield Problem(prompt, answer, asked.key, asked.value, result)


def is_correct(problem: Problem, completion: str) -> bool:
    """Whether a completion (without its special tokens) is the answer, blanks at its ends aside."""
    return completion.strip() == problem.answer
