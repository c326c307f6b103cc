"""Accuracy of a model that a server has: any that speaks OpenAI's API, `vllm serve` among them."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from anabranch.evaluate import Problem, ProblemSet
from anabranch.launch import BadInput

T = TypeVar("T")

WAIT_SECONDS = 3600.0  # of one request: a long prompt on a CPU may take many minutes


@dataclass(frozen=True)
class ServedScore:
    """How one server did. `seconds` is the time of all problems together."""

    server: str
    model: str
    correct: int
    total: int
    seconds: float
    tokens: int
    completions: list[str]

    @property
    def accuracy(self) -> float:
        return self.correct / self.total


class Server:
    """A server by its address, such as `http://127.0.0.1:8000`, and the first model it offers.

    The key in the environment's OPENAI_API_KEY is sent, if there is one. Raises BadInput where
    nothing answers as it should, then and later.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise BadInput(f"--server must be an http or https address, got {url}")
        self.model: str = self._answer("models", None, lambda found: found["data"][0]["id"])

    def complete(self, problem: Problem, problems: ProblemSet, chat: bool) -> tuple[str, int]:
        """The greedy completion of a problem's prompt, and how many tokens it has."""
        request: dict[str, Any] = {
            "model": self.model,
            "max_tokens": problems.max_new_tokens,
            "temperature": 0,
            "stop": list(problems.stop),
        }
        if chat:
            messages = [{"role": "user", "content": problem.prompt}]
            return self._answer(
                "chat/completions",
                request | {"messages": messages},
                lambda found: (
                    str(found["choices"][0]["message"]["content"]),
                    int(found["usage"]["completion_tokens"]),
                ),
            )
        return self._answer(
            "completions",
            request | {"prompt": problem.prompt},
            lambda found: (
                str(found["choices"][0]["text"]),
                int(found["usage"]["completion_tokens"]),
            ),
        )

    def _answer(self, path: str, body: dict[str, Any] | None, read: Callable[[Any], T]) -> T:
        """What `read` makes of the reply to a request; without `body` it is a GET."""
        request = urllib.request.Request(
            f"{self.url}/v1/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Content-Type": "application/json",
                "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}",
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as response:
                return read(json.load(response))
        except urllib.error.HTTPError as error:
            said = " ".join(error.read().decode(errors="replace").split())
            raise BadInput(f"--server {self.url}: {path}: status {error.code}: {said}") from error
        except (OSError, http.client.HTTPException) as error:
            raise BadInput(f"--server {self.url}: {path}: {error}") from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise BadInput(f"--server {self.url}: {path}: not an answer of OpenAI's API") from error


def evaluate(
    server: Server,
    problems: ProblemSet,
    *,
    at_once: int,
    chat: bool,
    report: Callable[[], None],
) -> ServedScore:
    """Ask all problems, so many at once; `report` is called as each is done."""

    def ask(problem: Problem) -> tuple[str, int]:
        answer = server.complete(problem, problems, chat)
        report()
        return answer

    begin = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(ask, problems.problems))
    seconds = time.perf_counter() - begin
    completions = [text for text, _ in answers]
    correct = sum(
        problem.is_correct(completion)
        for problem, completion in zip(problems.problems, completions, strict=True)
    )
    return ServedScore(
        server=server.url,
        model=server.model,
        correct=correct,
        total=len(completions),
        seconds=seconds,
        tokens=sum(count for _, count in answers),
        completions=completions,
    )
