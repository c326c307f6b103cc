"""vLLM on two nodes, as far as one machine can show: `sudo python tests/vllm/two_nodes.py`.

Of the environment that `make test-vllm` makes. A node is a network namespace, joined to the other
by a pair of virtual interfaces, and has a /dev/shm of its own. The embedded model is served by one
rank on each, under DCP 2; the prompts of the tests are sent at once, and every token is
Transformers' best. It takes two minutes on idle cores, too long for the suite.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import openai

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / folder) for folder in ("tests", "tests/hf", "benchmarks")]

from namespaces import ADDRESSES, INTERFACE, namespace_pair, sent_bytes  # noqa: E402
from reference import Reference  # noqa: E402
from serving import ENVIRONMENT, PROMPTS, assert_greedy, complete_all  # noqa: E402

from anabranch.embedded import embedded_path  # noqa: E402

PORT = 8000
START_SECONDS = 600
SERVE = [
    Path(sys.executable).with_name("vllm"), "serve", embedded_path(),
    "--served-model-name", "embedded", "--dtype", "float32", "--enforce-eager",
    "--tensor-parallel-size", "2", "--decode-context-parallel-size", "2",
    "--max-model-len", "4096", "--kv-cache-memory-bytes", "67108864",
    "--gpu-memory-utilization", "0.1", "--nnodes", "2",
    "--master-addr", ADDRESSES[0], "--master-port", "29501",
]  # fmt: skip
ROLES = [["--node-rank", "0", "--port", str(PORT)], ["--node-rank", "1", "--headless"]]
OWN_SHARED_MEMORY = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs shm /dev/shm; exec "$@"', ""]


def main() -> None:
    nodes: list[subprocess.Popen[bytes]] = []
    with namespace_pair() as pair:
        inside = [["ip", "netns", "exec", name] for name in pair.names]
        try:
            for enter, role, address in zip(inside, ROLES, ADDRESSES, strict=True):
                settings = {"VLLM_HOST_IP": address, "GLOO_SOCKET_IFNAME": INTERFACE}
                nodes.append(
                    subprocess.Popen(
                        [*enter, *OWN_SHARED_MEMORY, *SERVE, *role],
                        env=os.environ | ENVIRONMENT | settings,
                        start_new_session=True,
                    )
                )
            subprocess.run([*inside[0], sys.executable, __file__, "ask"], check=True)
        finally:
            for node in nodes:
                with suppress(ProcessLookupError):
                    os.killpg(node.pid, signal.SIGKILL)
                node.wait()


def ask() -> None:
    """In the first node's namespace: wait for the server, ask, compare."""
    client = openai.OpenAI(
        base_url=f"http://{ADDRESSES[0]}:{PORT}/v1", api_key="none", max_retries=0, timeout=300
    )
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            client.models.list()
            break
        except openai.APIConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)

    before = sent_bytes()
    answers = complete_all(client, PROMPTS)
    sent = sent_bytes() - before
    reference = Reference(embedded_path())
    for chosen, prompt in zip(answers, PROMPTS, strict=True):
        assert_greedy(chosen, prompt, reference)
    print(f"{len(answers)} requests answered as by Transformers; {sent:,} bytes left node 0")


if __name__ == "__main__":
    ask() if sys.argv[1:] == ["ask"] else main()
