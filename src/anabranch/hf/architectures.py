"""Which MLA architectures of Transformers are understood, how each differs, and which are refused.

Two safeguards keep this table honest. The names of an attention's weights must be exactly those
expected, and at load one layer is compared with Transformers' own forward (`convert.py`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class RotaryForm(enum.Enum):
    """How an architecture turns its rope columns."""

    CONFIG = "config"  # interleaved pairs or halves, as `config.rope_interleave` says
    INTERLEAVED = "interleaved"
    HALVES = "halves"
    COMPLEX = "complex"
    NONE = "none"


@dataclass(frozen=True)
class Architecture:
    """One attention of Transformers, as it differs from the others.

    - `attention`: name of its class; every module of that class is replaced.
    - `rotary`: form of its rotary embedding.
    - `query_factor`, `latent_factor`: attributes holding a constant that multiplies the query and
      the normalised latent.
    - `position_scale`: the query is scaled by its position, as Llama 4 does.
    - `gate`: name of the projection whose sigmoid scales each head's output.
    - `model`: name of the model class, where `AutoModelForCausalLM` does not know it.
    """

    attention: str
    rotary: RotaryForm = RotaryForm.CONFIG
    query_factor: str | None = None
    latent_factor: str | None = None
    position_scale: bool = False
    gate: str | None = None
    model: str | None = None


_DEEPSEEK_V3 = Architecture("DeepseekV3Attention")

SUPPORTED: dict[str, Architecture] = {
    "axk1": Architecture("AXK1Attention"),
    "bailing_hybrid": Architecture(
        "BailingHybridAttention", rotary=RotaryForm.INTERLEAVED, gate="g_proj"
    ),
    "deepseek_v2": Architecture("DeepseekV2Attention", rotary=RotaryForm.COMPLEX),
    "deepseek_v3": _DEEPSEEK_V3,
    "glm4_moe_lite": Architecture("Glm4MoeLiteAttention"),
    "kimi_linear": Architecture("KimiLinearAttention", rotary=RotaryForm.NONE),
    "longcat_flash": Architecture(
        "LongcatFlashMLA",
        rotary=RotaryForm.INTERLEAVED,
        query_factor="mla_scale_q_lora",
        latent_factor="mla_scale_kv_lora",
    ),
    "minicpm3": Architecture("MiniCPM3Attention", rotary=RotaryForm.HALVES),
    "mistral4": Architecture("Mistral4Attention", position_scale=True, model="Mistral4ForCausalLM"),
    "sarvam_mla": _DEEPSEEK_V3,
    "youtu": Architecture("YoutuAttention"),
}
"""By `model_type`."""

_SPARSE = "its indexer attends to a selection of the history, and only dense attention is sharded"

REFUSED: dict[str, str] = {
    "axk2": _SPARSE,
    "deepseek_v32": _SPARSE,
    "dots3_note_text": "its layers use a sliding window or an indexer, and only dense attention "
    "is sharded",
    "glm5_next_text": _SPARSE,
    "glm_moe_dsa": _SPARSE,
    "hy_v4": _SPARSE,
    "hy_v4_vl_text": _SPARSE,
    "mistral_large4_text": _SPARSE,
}
"""Why, by `model_type`. Multimodal wrappers are refused as such, others as unknown."""
