"""What `anabranch info` says of an NPU."""

from __future__ import annotations

from unittest import mock

import torch

from anabranch.attention import npu
from anabranch.cli.info import _device, _npu_lacks


def test_torch_npu_without_a_device_names_the_provider_and_what_is_absent() -> None:
    device = _device("npu", _npu_lacks)
    assert (device.available, device.attention) == (False, "npu")
    lacking = " ".join(device.lacks)
    assert "an NPU, its driver or CANN" in lacking
    assert "Triton-Ascend: plain PyTorch packs" in lacking


def test_with_a_device_the_provider_lacks_nothing_of_it() -> None:
    with mock.patch.object(torch.npu, "is_available", return_value=True):
        device = _device("npu", _npu_lacks)
    assert (device.available, device.attention) == (True, "npu")
    assert all("CANN" not in each for each in device.lacks)


def test_the_reason_that_torch_npu_cannot_be_imported_is_passed_on() -> None:
    reason = "torch_npu: cannot be imported: libhccl.so: cannot open shared object file"
    with mock.patch.object(npu, "missing", return_value=reason):
        assert _npu_lacks() == (False, [reason])
