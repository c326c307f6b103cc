"""The README tells the truth: its examples run, its lists match the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from anabranch.hf.architectures import SUPPORTED

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_there_are_examples():
    assert len(BLOCKS) == 2


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_example_runs(number):
    exec(compile(BLOCKS[number], f"README.md, example {number + 1}", "exec"), {})


def test_supported_architectures():
    listed = README.partition("<!-- architectures -->")[2].partition("<!-- end")[0]
    assert re.findall(r"`(\w+)`", listed) == sorted(SUPPORTED)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", README):
        assert (ROOT / target).exists(), target


def test_makefile_has_the_two_commands():
    makefile = (ROOT / "Makefile").read_text()
    assert re.findall(r"^make (\w+)", README, flags=re.MULTILINE) == ["demo", "test"]
    assert all(f"\n{target}:" in makefile for target in ("demo", "test"))
