"""Checkpoints, written once a session, and Transformers' own results on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import make
from reference import Reference


@pytest.fixture(scope="session", autouse=True)
def _quiet_single_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint(case, **settings)`: directory of that checkpoint; see `checkpoints.make`."""
    known: dict[Any, Path] = {}

    def get(case: str, **settings: Any) -> Path:
        key = (case, *sorted(settings.items()))
        if key not in known:
            known[key] = make(case, tmp_path_factory.mktemp(case), **settings)
        return known[key]

    return get


@pytest.fixture(scope="session")
def reference() -> Callable[[Path], Reference]:
    """`reference(path)`: Transformers' own model of a checkpoint."""
    known: dict[Path, Reference] = {}

    def get(path: Path) -> Reference:
        if path not in known:
            known[path] = Reference(path)
        return known[path]

    return get
