"""Anabranch as a plugin of vLLM: MLA models served under decode context parallelism.

vLLM finds the two functions below by their entry points, in every process it starts:

    vllm.platform_plugins  `platform`  names the platform class, before anything is configured
    vllm.general_plugins   `register`  makes the attention backend known by name, `CUSTOM`

`docs/vllm.md` says how to use it, what is supported and what vLLM itself does around it.
Importing this package imports no vLLM; its modules do.
"""

from __future__ import annotations

import logging
import os

from anabranch.vllm_plugin.distribution import answer_for_vllm
from anabranch.vllm_plugin.versions import (
    ascend_version,
    unsupported_ascend_version,
    unsupported_version,
)

PLATFORM = "anabranch.vllm_plugin.cpu_platform.AnabranchCpuPlatform"
BACKEND = "anabranch.vllm_plugin.backend.MLABackend"
CUDA_BACKEND = "anabranch.vllm_plugin.cuda.CudaMLABackend"
ASCEND_SCHEDULE = "ANABRANCH_ASCEND_SCHEDULE"  # vllm-ascend refuses what it does not know elsewhere
_logger = logging.getLogger("vllm.anabranch")  # vLLM shows what is logged below `vllm`


def platform() -> str | None:
    """Name of the platform class, or None where vLLM's own choice stands.

    Only vLLM's plain CPU platform is extended: on any other, and for versions of vLLM that
    this plugin does not know, it stays out of the way.
    """
    if unsupported_version() is not None:
        return None
    answer_for_vllm()
    from vllm.platforms import cpu_platform_plugin

    return PLATFORM if cpu_platform_plugin() == "vllm.platforms.cpu.CpuPlatform" else None


def register() -> None:
    """Register the attention backend, or say in one warning why it stays off."""
    if ascend_version() is not None:
        _register_on_ascend()
        return
    problem = unsupported_version() or _unsupported_platform()
    if problem is not None:
        _logger.warning("The anabranch plugin stays off: %s", problem)
        return
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    backend = CUDA_BACKEND if current_platform.is_cuda() else BACKEND
    register_backend(AttentionBackendEnum.CUSTOM, backend)


def _register_on_ascend() -> None:
    """Attach to vllm-ascend if the environment asks for it by naming a schedule."""
    if ASCEND_SCHEDULE not in os.environ:
        return
    problem = unsupported_ascend_version()
    if problem is not None:
        _logger.warning("The anabranch plugin stays off: %s", problem)
        return
    from anabranch.vllm_plugin.ascend import attach

    _logger.warning("anabranch serves decode on Ascend: no NPU has run this yet.")
    attach()


def _unsupported_platform() -> str | None:
    from vllm.platforms import current_platform

    name = f"{type(current_platform).__module__}.{type(current_platform).__qualname__}"
    if name == PLATFORM or current_platform.is_cuda():
        return None
    return (
        f"it serves vLLM's CPU and CUDA platforms, and this is {name}. On a CPU, "
        "VLLM_TARGET_DEVICE must not be set (with it vLLM ignores platform plugins), and zentorch "
        "must be absent."
    )
