"""Engines are started once a session; tests that need vLLM are skipped where it is absent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import drafts
import pytest
from checkpoints import make

from anabranch.vllm_plugin.versions import installed_version

if installed_version() is None:
    here = Path(__file__).parent
    collect_ignore = [path.name for path in here.glob("test_*.py") if path.stem != "test_plugin"]


# vLLM's CPU kernels for experts want multiples of 32; and how experts are chosen, which
# Transformers takes for granted in V3, vLLM reads from the configuration.
HIDDEN = {"hidden_size": 64}
V3 = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint(case, **settings)`: directory of that checkpoint; see `checkpoints.make`.

    With `draft=True` it has an MTP layer; see `drafts`.
    """
    known: dict[Any, Path] = {}

    def get(case: str, *, draft: bool = False, **settings: Any) -> Path:
        key = (case, draft, *sorted(settings.items()))
        if key not in known:
            folder = tmp_path_factory.mktemp(case)
            routing = V3 if case.startswith("v3") else {}
            layers = drafts.SETTINGS if draft else {}
            known[key] = make(case, folder, **HIDDEN, **routing, **layers, **settings)
            if draft:
                drafts.add_draft_layer(known[key])
        return known[key]

    return get
