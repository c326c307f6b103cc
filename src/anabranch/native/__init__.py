"""The CPU kernels: C compiled on first use, for the machine it runs on.

`kernels.c` is built once per machine with the system's C compiler and kept in the user's cache
folder. Without a compiler, or without a BLAS that PyTorch exports, `library()` is None and
callers use their PyTorch form, which gives the same results more slowly. Calls release the GIL.

A kernel that is worth several threads is called once for each share of its work (`in_shares`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3}


class Attention(ctypes.Structure):
    """`Attention` of kernels.c, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q_nope", "q_pe")),
        *(
            (name, ctypes.c_int64)
            for name in ("q_nope_token", "q_nope_head", "q_pe_token", "q_pe_head")
        ),
        *((name, ctypes.c_void_p) for name in ("latent", "rope")),
        *(
            (name, ctypes.c_int64)
            for name in ("latent_block", "latent_entry", "rope_block", "rope_entry")
        ),
        ("table", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("table_row", "num_blocks", "block_size")),
        *((name, ctypes.c_void_p) for name in ("key_lens", "query_lens", "out", "lse")),
        *(
            (name, ctypes.c_int64)
            for name in (
                "batch", "tokens", "heads", "rank", "rope_width", "row_tile", "key_tile", "work",
            )
        ),
        *((name, ctypes.c_float) for name in ("scale", "cache_scale")),
        *((name, ctypes.c_int32) for name in ("dtype", "cache_dtype", "shares")),
        *((name, ctypes.c_void_p) for name in ("workspace", "sgemm", "bf16gemm", "limit")),
    )  # fmt: skip


class Library(NamedTuple):
    """The compiled kernels, and the products of PyTorch's own BLAS that they call."""

    kernels: ctypes.CDLL
    sgemm: int
    bf16gemm: int  # 0: this CPU multiplies BF16 in FP32
    limit: int  # MKL's limit on threads; 0: the BLAS is another


def in_shares(run: Callable[[int], object], shares: int) -> None:
    """Call `run(0)` to `run(shares - 1)`, once each, on this thread and idle helpers.

    A share that no helper has begun by the time this thread is free, this thread runs: where
    another process keeps a core busy, its share comes late, not never, and nobody spins for it.
    """
    others = [_helpers().submit(run, share) for share in range(1, shares)]
    run(0)
    for share, other in reversed(list(enumerate(others, 1))):
        if other.cancel():
            run(share)
    for other in others:
        if not other.cancelled():
            other.result()


@cache
def _helpers() -> ThreadPoolExecutor:
    """Started on first use, as many as are asked for at once."""
    cores = _cores()
    return ThreadPoolExecutor(len(cores), "anabranch", lambda: os.sched_setaffinity(0, cores))


def _cores() -> set[int]:
    """Where helpers may run: where this thread may, or where its siblings are, each on one core.

    An engine that binds every thread of a rank to a core of its own, as vLLM does, binds its main
    thread too, and a helper would inherit that core.
    """
    mine = os.sched_getaffinity(0)
    if len(mine) > 1:
        return mine
    bound = set(mine)
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended
            cores = os.sched_getaffinity(int(task.name))
            bound |= cores if len(cores) == 1 else set()
    return bound


@cache
def library() -> Library | None:
    """The kernels, built if need be; None where they cannot be. `missing()` says why."""
    return None if missing() else _load()


@cache
def missing() -> str:
    """Why there are no native kernels; empty when there are."""
    if _compiler() is None:
        return "no C compiler found"
    if blas("sgemm_") == 0:
        return "PyTorch exports no sgemm_"
    try:
        _load()
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        return f"building the kernels failed: {detail.strip().splitlines()[-1]}"
    return ""


@cache
def _load() -> Library:
    kernels = ctypes.CDLL(str(_build()))
    integer, pointer = ctypes.c_int64, ctypes.c_void_p
    kernels.anabranch_workspace_bytes.restype = integer
    kernels.anabranch_workspace_bytes.argtypes = [integer] * 5
    task = ctypes.POINTER(Attention)
    kernels.anabranch_attention_begin.restype = integer
    kernels.anabranch_attention_begin.argtypes = [task]
    kernels.anabranch_attention_share.restype = None
    kernels.anabranch_attention_share.argtypes = [task, integer]
    kernels.anabranch_attention_end.restype = None
    kernels.anabranch_attention_end.argtypes = [task]
    kernels.anabranch_pack.restype = None
    kernels.anabranch_pack.argtypes = [pointer] * 3 + [integer] * 4
    kernels.anabranch_store.restype = integer
    rows, pages = (pointer, integer), (pointer, integer, integer, integer)
    kernels.anabranch_store.argtypes = [
        *rows, *rows, pointer, integer, integer, integer, *pages, *pages
    ]  # fmt: skip
    kernels.anabranch_merge.restype = None
    kernels.anabranch_merge.argtypes = (
        [pointer] * 5 + [integer] * 2 + [pointer, ctypes.c_int32, pointer, integer, integer]
    )
    kernels.anabranch_v_up_bytes.restype = integer
    kernels.anabranch_v_up_bytes.argtypes = [integer] * 3
    kernels.anabranch_v_up.restype = None
    strided = (pointer, integer, integer)
    kernels.anabranch_v_up.argtypes = [
        *strided * 3, *[integer] * 4, ctypes.c_int32, *[pointer] * 3, integer, integer
    ]  # fmt: skip
    multiplies_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    bf16gemm = blas("cblas_gemm_bf16bf16f32") if multiplies_bf16 else 0
    return Library(kernels, blas("sgemm_"), bf16gemm, blas("MKL_Set_Num_Threads_Local"))


def _build() -> Path:
    """Path of the shared library, compiled unless it is in the cache already.

    The name carries all that the result depends on. Ranks that build at once each write their
    own file and rename it into place.
    """
    compiler = _compiler()
    assert compiler is not None
    described = "\n".join((SOURCE.read_text(), compiler, *FLAGS, _cpu()))
    name = f"kernels-{hashlib.sha256(described.encode()).hexdigest()[:16]}.so"
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    target = Path(cache_home) / "anabranch" / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            built = Path(folder) / name
            command = [compiler, *FLAGS, "-shared", "-fPIC", "-o", str(built), str(SOURCE), "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True)
            built.replace(target)
    return target


def _compiler() -> str | None:
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _cpu() -> str:
    """What `-march=native` depends on: the home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def blas(symbol: str) -> int:
    """Address of a BLAS function that PyTorch carries; 0 where it exports none."""
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(torch_cpu[symbol], ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0
