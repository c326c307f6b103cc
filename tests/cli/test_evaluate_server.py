"""`anabranch evaluate --server`, asking a server that speaks OpenAI's API as far as it is used.

`tests/vllm/test_server.py` asks vLLM's.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from processes import anabranch

from anabranch.embedded import task

PROBLEMS = task.problems(3, 60, seed=5)
ANSWERS = {problem.prompt: problem.answer for problem in PROBLEMS}
WRONG = PROBLEMS[1].prompt
TOKENS = 7


class Handler(BaseHTTPRequestHandler):
    """Right answers but for one; `/v1/completions` of `/strict` refuses, `/odd` says nonsense."""

    asked: list[Any]

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "ledger"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, request, self.headers["Authorization"]))
        usage = {"completion_tokens": TOKENS}
        if self.path == "/v1/completions":
            prompt = request["prompt"]
            text = "no idea" if prompt == WRONG else ANSWERS[prompt]
            self._answer(200, {"choices": [{"text": f" {text}"}], "usage": usage})
        elif self.path == "/v1/chat/completions":
            message = {"content": ANSWERS[request["messages"][0]["content"]]}
            self._answer(200, {"choices": [{"message": message}], "usage": usage})
        elif self.path.startswith("/strict"):
            self._answer(400, {"error": {"message": "the prompt is too long"}})
        else:
            self._answer(200, ["odd"])

    def _answer(self, status: int, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    Handler.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as started:
        threading.Thread(target=started.serve_forever, daemon=True).start()
        yield started
        started.shutdown()


OPTIONS = ("--problems", "3", "--context-tokens", "60", "--seed", "5")


def test_each_server_is_scored(server: ThreadingHTTPServer) -> None:
    url = f"http://127.0.0.1:{server.server_port}"
    ended = anabranch(
        "evaluate", "--server", f"{url},{url}/v1/", *OPTIONS, "--json",
        environment={"OPENAI_API_KEY": "secret"},
    )  # fmt: skip
    assert (ended.status, ended.err) == (0, "")
    answer = json.loads(ended.out)
    assert (answer["model"], answer["problems"]) == (None, 3)
    assert [score["server"] for score in answer["scores"]] == [url, url]
    for score in answer["scores"]:
        assert (score["model"], score["correct"], score["total"]) == ("ledger", 2, 3)
        assert score["tokens"] == 3 * TOKENS
        assert score["completions"][1] == " no idea"
    assert len(Handler.asked) == 6
    for path, request, key in Handler.asked:
        assert path == "/v1/completions"
        assert (request["model"], request["temperature"]) == ("ledger", 0)
        assert key == "Bearer secret"


def test_chat_asks_by_messages_and_the_table_counts(server: ThreadingHTTPServer) -> None:
    url = f"http://127.0.0.1:{server.server_port}"
    ended = anabranch(
        "evaluate", "--server", url, *OPTIONS, "--chat", environment={"COLUMNS": "120"}
    )
    assert (ended.status, ended.err) == (0, "")
    row = [line for line in ended.out.splitlines() if "ledger" in line]
    assert [cell.strip() for cell in row[0].split("│")[1:5]] == [url, "ledger", "3/3", "3/3"]
    assert {path for path, *_ in Handler.asked} == {"/v1/chat/completions"}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/strict", 'completions: status 400: {"error": {"message": "the prompt is too long"}}'),
        ("/odd", "completions: not an answer of OpenAI's API"),
    ],
)
def test_what_a_server_refuses_is_said(
    server: ThreadingHTTPServer, path: str, message: str
) -> None:
    url = f"http://127.0.0.1:{server.server_port}{path}"
    assert anabranch("evaluate", "--server", url, *OPTIONS) == (
        2,
        "",
        f"anabranch: --server {url}: {message}\n",
    )


def test_a_server_that_is_not_there(server: ThreadingHTTPServer) -> None:
    url = f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    ended = anabranch("evaluate", "--server", url, *OPTIONS)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith(f"anabranch: --server {url}: models: ")
    assert ended.err.count("\n") == 1
