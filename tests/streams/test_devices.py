"""Devices for ranks, where there is none: PyTorch's answers are replaced by those of a machine."""

from __future__ import annotations

import pytest
import torch

from anabranch.streams import DEVICES, lacking, may_fork, take_device

KIND = DEVICES[1]


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with two; returns which were made current."""
    current: list[int] = []
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device(KIND)
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    return current


def test_what_a_machine_lacks(two_devices: list[int]) -> None:
    assert lacking(KIND, 2) is None
    assert lacking(KIND, 3) == "this machine has 2 for 3 ranks"
    assert lacking(DEVICES[2], 1) is not None
    assert lacking("cpu", 1000) is None


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_a_machine_without_any() -> None:
    for kind in DEVICES[1:]:
        assert f"no {kind} device on this machine" in (lacking(kind, 1) or "")


def test_each_rank_takes_its_own(two_devices: list[int]) -> None:
    assert [take_device(KIND, index) for index in (0, 1)] == [
        torch.device(KIND, 0),
        torch.device(KIND, 1),
    ]
    assert two_devices == [0, 1]


def test_processes_share_the_cpu(two_devices: list[int]) -> None:
    assert take_device("cpu", 3) == torch.device("cpu")
    assert two_devices == []
    assert may_fork("cpu")
    assert not may_fork(KIND)
