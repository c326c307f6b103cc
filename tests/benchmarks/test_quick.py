"""The benchmarks run, and write JSON of the structure that readers rely on. No time counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CONTENDERS = {
    "vup": {"v_up", "transposed", "plain torch", "moves"},
    "threads": {"one thread", "two threads"},
}


def run_quick(name: str, out: Path) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    content = json.loads((out / f"{name}.json").read_text())
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize("name", CONTENDERS)
def test_quick_mode_writes_the_documented_json(name: str, tmp_path: Path) -> None:
    content = run_quick(name, tmp_path)
    assert content["benchmark"] == name
    assert content["quick"] is True
    assert f"{name}.py --quick" in content["command"]
    assert {"cpu", "cores", "memory_gib", "load_before"} <= content["machine"].keys()
    assert {"python", "torch", "anabranch"} <= content["versions"].keys()
    assert content["cases"]
    for case in content["cases"]:
        assert case["seconds"].keys() == CONTENDERS[name]
        for spread in (*case["seconds"].values(), *case["ratios"].values()):
            assert 0 < spread["low"] <= spread["median"] <= spread["high"]
    for bar in content["bars"]:
        assert bar.keys() == {"claim", "wanted", "measured", "holds"}
    table = (tmp_path / f"{name}.md").read_text()
    assert table.count("|") > len(content["cases"])


def test_ranks_deliver_a_sample_of_every_schedule_and_operation(tmp_path: Path) -> None:
    """In a process of its own, as the ranks are forked from it."""
    script = (
        "from anabranch import launch; from step import measure_on_rank; import json;"
        "print(json.dumps(launch.run(2, measure_on_rank, [{'context': 64, 'tokens': 2}], 2)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=BENCHMARKS, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    assert result["schedules"].keys() == {"serial", "comm_stream", "overlap", "auto"}
    assert {"history_attention", "current_attention", "exchange_history"} <= set(
        result["operations"]
    )
    assert result["tails"].keys() == {"serial", "overlap"}
    assert all(len(values) == 2 for part in result.values() for values in part.values())
