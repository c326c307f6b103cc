"""`anabranch info`: what this machine offers, and what it lacks."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from anabranch import native, triton_kernels
from anabranch.attention import npu, peers, provider_for, reference
from anabranch.attention.peer import RANK, ROPE, Shape
from anabranch.cli.options import JSONOption
from anabranch.launch import threads_per_rank

DISTRIBUTIONS = ("anabranch", "torch", "transformers", "numpy")
CPU_FLAGS = Path("/proc/cpuinfo")
BF16_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}
TARGETS = ((8, 0), (9, 0), (10, 0))  # shown where there is no CUDA device
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
# Dtype, dtype of the cache, tokens of a page, heads, tokens of a sequence: one for each case.
SHAPES = (
    (BF16, BF16, 64, 128, 1), (BF16, BF16, 64, 128, 2), (BF16, BF16, 64, 16, 1),
    (BF16, BF16, 64, 16, 2), (BF16, BF16, 32, 128, 1), (BF16, BF16, 16, 128, 1),
    (FP16, FP16, 64, 128, 1), (BF16, FP8, 64, 128, 1),
)  # fmt: skip


@dataclass(frozen=True)
class Device:
    """A kind of device. `attention` names the provider that serves it, if PyTorch knows it."""

    kind: str
    available: bool
    attention: str | None
    lacks: list[str]


@dataclass(frozen=True)
class History:
    """What serves HISTORY of one shape on one kind of chip, at the widths of DeepSeek-V3."""

    chip: str
    dtype: str
    cache: str
    block_size: int
    heads: int
    tokens_each: int
    kernel: str


def info(as_json: JSONOption = False) -> None:
    """Show devices, the providers that serve them, what each lacks, and versions.

    Examples:
      anabranch info
      anabranch info --json
    """
    versions = {"python": platform.python_version()}
    versions |= {name: version(name) for name in DISTRIBUTIONS}
    devices = [
        _device(kind, absent)
        for kind, absent in (("cpu", _cpu_lacks), ("cuda", _cuda_lacks), ("npu", _npu_lacks))
    ]
    if as_json:
        cores = threads_per_rank(1)
        described: dict[str, object] = {
            "versions": versions, "platform": platform.platform(), "cores": cores,
        }  # fmt: skip
        described["devices"] = [asdict(each) for each in devices]
        described["cuda_history"] = [asdict(each) for each in cuda_history()]
        print(json.dumps(described, indent=2))
        return
    console = Console()
    console.print(
        ", ".join(f"{name} {number}" for name, number in versions.items()), highlight=False
    )
    console.print(f"{platform.platform()}, {threads_per_rank(1)} cores", highlight=False)
    table = Table()
    for title in ("device", "available", "attention", "lacks"):
        table.add_column(title)
    for device in devices:
        available = "yes" if device.available else "no"
        table.add_row(
            device.kind, available, device.attention or "none", "\n".join(device.lacks) or "nothing"
        )
    console.print(table)
    if torch.cuda.is_available() or _found("triton"):
        console.print(_history_table(cuda_history()))


def cuda_history() -> list[History]:
    """For each case that the choice distinguishes, on the CUDA devices here, or on `TARGETS`."""
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    others = "triton" if _found("triton") else "reference"
    answers = []
    for chip in sorted(found) or TARGETS:
        for dtype, cache, block_size, heads, each in SHAPES:
            shape = Shape(chip, heads, RANK, ROPE, dtype, cache, block_size, each, 1)
            # Without Triton plain PyTorch serves all of CUDA.
            peer = peers.serving(shape) if others == "triton" else None
            kernel = others if peer is None else peer.name
            name, stored = (str(each_dtype).removeprefix("torch.") for each_dtype in (dtype, cache))
            target = f"sm_{chip[0]}{chip[1]}"
            answers.append(History(target, name, stored, block_size, heads, each, kernel))
    return answers


def _history_table(answers: list[History]) -> Table:
    """A row for each shape, a column for each chip."""
    table = Table(title=f"HISTORY on CUDA, L {RANK}, R {ROPE}, with what is installed here")
    chips = list(dict.fromkeys(answer.chip for answer in answers))
    for title in ("dtype", "cache", "page", "heads", "tokens each", *chips):
        table.add_column(title)
    rows: dict[tuple[str, ...], list[str]] = {}
    for answer in answers:
        _, *case, kernel = map(str, asdict(answer).values())
        rows.setdefault(tuple(case), []).append(kernel)
    for shape, kernels in rows.items():
        table.add_row(*shape, *kernels)
    return table


def _device(kind: str, lacks: Callable[[], tuple[bool, list[str]]]) -> Device:
    available, absent = lacks()
    try:
        torch.device(kind)
    except RuntimeError:  # a type that an extension of PyTorch brings
        return Device(kind, available, None, absent)
    provider = provider_for(kind)
    if provider is reference:
        absent.append("attention of its own: plain PyTorch serves it")
    return Device(kind, available, getattr(provider, "__name__", "").rpartition(".")[2], absent)


def _cpu_lacks() -> tuple[bool, list[str]]:
    absent = []
    if native.missing():
        absent.append(f"compiled kernels: {native.missing()}; PyTorch's serve, more slowly")
    if not dist.is_gloo_available():
        absent.append("collectives: gloo is not in this build of torch")
    if CPU_FLAGS.is_file() and not BF16_FLAGS & set(CPU_FLAGS.read_text().split()):
        absent.append("BF16 matrix units: BF16 is computed by way of FP32")
    return True, absent


def _cuda_lacks() -> tuple[bool, list[str]]:
    absent = []
    if torch.version.cuda is None:
        absent.append("CUDA: not in this build of torch")
    elif not torch.cuda.is_available():
        absent.append("a CUDA device or its driver")
    if not dist.is_nccl_available():
        absent.append("collectives: NCCL is not in this build of torch")
    if not _found("triton"):
        absent.append("triton: not installed")
        return torch.cuda.is_available(), absent
    chips = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    for peer in peers.PEERS:
        reason = peer.missing() if not chips or chips & set(peer.capabilities) else None
        if reason is not None:
            absent.append(f"{reason}; Triton serves its shapes")
    return torch.cuda.is_available(), absent


def _npu_lacks() -> tuple[bool, list[str]]:
    reason = npu.missing()
    if reason is not None:
        return False, [reason]
    absent = []
    available = torch.npu.is_available()  # type: ignore[attr-defined]
    if not available:
        absent.append("an NPU, its driver or CANN")
    if not triton_kernels.serve(torch.device("npu")):
        absent.append("Triton-Ascend: plain PyTorch packs, merges and writes the cache")
    return available, absent


def _found(module: str) -> bool:
    return module in sys.modules or find_spec(module) is not None
