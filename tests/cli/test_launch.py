"""Rank processes: results, refusals, failures, and that nothing is left behind.

Every case is a program of its own (`jobs.py`): it forks, which a test runner that has already
computed something must not do.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from processes import TIMEOUT, TORCHRUN, finish, start

JOBS = str(Path(__file__).with_name("jobs.py"))


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_first_rank_speaks_for_all(world_size):
    status, out, err = finish(JOBS, "total", str(world_size))
    total = world_size * (world_size + 1) / 2
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // world_size)
    assert (status, err) == (0, "")
    assert out == f"report of rank 0\n({total}, {threads}, 'shared by rank 0')\n"


def test_joins_a_launcher():
    status, out, _ = finish(*TORCHRUN, JOBS, "total", "2")
    assert status == 0
    assert out == "report of rank 0\n(3.0, 1, 'shared by rank 0')\n"


def test_a_refusal_is_told_once():
    assert finish(JOBS, "refuse", "2") == (2, "", "the number must be odd, got 2\n")


@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["started here", "torchrun"])
def test_no_job_begins_before_all_ranks_have_met(launcher):
    """A rank that ended at once would make gloo print an error where one is still connecting."""
    status, out, _ = finish(*launcher, JOBS, "begin", "2")
    assert (status, out) == (0, "True\n")


@pytest.mark.parametrize(
    ("job", "world_size", "message"),
    [
        ("fail_on_last", 1, r"rank 0 of 1 failed: KeyError: 'deliberate\nin two lines' (jobs.py:"),
        ("fail_on_last", 2, r"rank 1 of 2 failed: KeyError: 'deliberate\nin two lines' (jobs.py:"),
        ("die_on_first", 2, "rank 0 of 2 was ended by SIGKILL"),
        ("exit_on_last", 3, "rank 2 of 3 exited with status 7"),
    ],
)
def test_a_failure_names_the_rank_that_caused_it(job, world_size, message):
    status, out, err = finish(JOBS, job, str(world_size))
    assert (status, out) == (1, "")
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_a_failure_under_a_launcher():
    status, _, err = finish(*TORCHRUN, JOBS, "fail_on_last", "2")
    assert status == 1
    assert "rank 1 of 2 failed: KeyError: 'deliberate" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_process_that_started_them(number, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = start(JOBS, "processes", "2")
    assert process.stdout is not None
    ids = [int(word) for word in process.stdout.readline().split()]
    assert len(ids) == 2
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    _, err = process.communicate(timeout=TIMEOUT)
    assert err.count("Traceback") <= 1  # the starter's own KeyboardInterrupt, the ranks' never
    deadline = time.monotonic() + TIMEOUT
    while any(Path(f"/proc/{id_}").exists() for id_ in ids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if number != signal.SIGKILL:
        assert list(tmp_path.glob("anabranch-*")) == []
