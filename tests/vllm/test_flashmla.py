"""The copy of FlashMLA that vLLM brings: the names that are taken from it are there."""

from __future__ import annotations

from importlib import import_module

import vllm  # noqa: F401  (looked for among the modules that are loaded)

from anabranch.attention import flashmla


def test_vllm_has_what_is_called_and_says_that_its_library_is_not_here() -> None:
    module = import_module(flashmla.IN_VLLM)
    for name in ("get_mla_metadata", "flash_mla_with_kvcache", "is_flashmla_dense_supported"):
        assert callable(getattr(module, name))
    flashmla.missing.cache_clear()
    reason = flashmla.missing()
    assert reason is not None
    assert reason.startswith("flash_mla: vllm._flashmla_C is not available")
