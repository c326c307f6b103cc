"""What `anabranch info` says of HISTORY on CUDA, for chips and packages that are not there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
from rich.console import Console

from anabranch.attention import peers
from anabranch.cli.info import SHAPES, _cuda_lacks, _history_table, cuda_history

# The module: its package has a function of the same name.
info = sys.modules["anabranch.cli.info"]


@contextmanager
def installed(*packages: str, chips: tuple[tuple[int, int], ...] = ()) -> Iterator[None]:
    """These packages are there, and devices of these capabilities."""
    found = tuple(
        replace(peer, missing=lambda peer=peer: None if peer.name in packages else "not installed")
        for peer in peers.PEERS
    )
    with (
        mock.patch.object(peers, "PEERS", found),
        mock.patch.object(info, "_found", side_effect=packages.__contains__),
        mock.patch.object(torch.cuda, "device_count", return_value=len(chips)),
        mock.patch.object(torch.cuda, "get_device_capability", side_effect=chips.__getitem__),
    ):
        yield


def kernels(chip: str) -> list[str]:
    return [answer.kernel for answer in cuda_history() if answer.chip == chip]


def test_each_shape_has_the_kernel_that_would_run() -> None:
    with installed("triton", "flashmla", "flashinfer"):
        assert kernels("sm_80") == ["triton"] * len(SHAPES)
        hopper, blackwell = kernels("sm_90"), kernels("sm_100")
    peer, ours = "flashmla", "triton"
    assert hopper == [peer, peer, peer, ours, ours, ours, peer, ours]
    peer = "flashinfer"
    assert blackwell == [peer, peer, peer, ours, peer, ours, ours, ours]


def test_only_the_devices_that_are_there_are_shown() -> None:
    with installed("triton", "flashinfer", chips=((9, 0), (9, 0))):
        answers = cuda_history()
        _, absent = _cuda_lacks()
    assert {answer.chip for answer in answers} == {"sm_90"}
    assert {answer.kernel for answer in answers} == {"triton"}
    assert absent[-1] == "not installed; Triton serves its shapes"


def test_without_triton_plain_pytorch_serves_all() -> None:
    with installed("flashmla", "flashinfer"):
        assert {answer.kernel for answer in cuda_history()} == {"reference"}
        assert _cuda_lacks()[1][-1] == "triton: not installed"


def test_the_table_has_a_row_for_each_shape_and_a_column_for_each_chip() -> None:
    with installed("triton", "flashmla", "flashinfer"):
        table = _history_table(cuda_history())
    with (console := Console(width=140)).capture() as captured:
        console.print(table)
    shown = captured.get()
    assert table.row_count == len(SHAPES)
    for word in ("sm_80", "sm_90", "sm_100", "flashmla", "flashinfer", "float8_e4m3fn"):
        assert word in shown
