"""Let CPU tensors be served as those of an NPU are."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from contract import Contract, contract

import anabranch.attention
import anabranch.step
from anabranch import cache, vup
from anabranch.attention import npu
from problem import kernels


@contextmanager
def on_npu(cann: str = "8.5.0") -> Iterator[Contract]:
    """Everything that asks for the device is told an NPU with that version of CANN.

    Pack and merge are plain PyTorch, as on an NPU without Triton-Ascend.
    """
    with ExitStack() as stack:
        for target, name, value in (
            (anabranch.attention, "provider_for", lambda device: npu),
            (anabranch.step, "provider_for", lambda device: npu),
            (npu, "cann_version", lambda: cann),
            (cache, "_is_npu", lambda device: True),
            (vup, "_kind", lambda device: "npu"),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(kernels("pytorch"))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="plain PyTorch serves attention")
        npu._asked.clear()
        npu._largest.clear()
        yield stack.enter_context(contract(cann))
