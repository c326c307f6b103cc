"""Small random checkpoints of every supported architecture, with every feature it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    Mistral4ForCausalLM,
    PreTrainedTokenizerFast,
)

SPECIAL = ["<pad>", "<s>", "</s>"]
PAD, BEGIN, END = range(3)
CHARACTERS = [chr(code) for code in range(32, 127)]
VOCABULARY = len(SPECIAL) + len(CHARACTERS)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.8,
    "mscale_all_dim": 0.7,
}

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "max_position_embeddings": 4096,
    "pad_token_id": PAD,
    "bos_token_id": BEGIN,
    "eos_token_id": END,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
}
_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2_lite": ("deepseek_v2", _MOE | {"q_lora_rank": None, "topk_method": "greedy"}),
    "v2_yarn_groups": (
        "deepseek_v2",
        _MOE | {"rope_parameters": YARN, "topk_method": "group_limited_greedy"},
    ),
    "v3": ("deepseek_v3", _MOE | {"rope_parameters": YARN}),
    "v3_no_lora_halves_bias": (
        "deepseek_v3",
        _MOE
        | {
            "q_lora_rank": None,
            "rope_interleave": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "v3_dense": ("deepseek_v3", _MOE | {"first_k_dense_replace": 2}),
    "sarvam": ("sarvam_mla", _MOE | {"q_lora_rank": None}),
    "axk1": ("axk1", _MOE | {"rope_parameters": YARN}),
    "glm4_moe_lite": ("glm4_moe_lite", _MOE),
    "youtu": ("youtu", {"rope_parameters": YARN}),
    "minicpm3": ("minicpm3", {"scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 16}),
    "mistral4": (
        "mistral4",
        _MOE
        | {
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": YARN
            | {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 16},
        },
    ),
    "longcat": (
        "longcat_flash",
        {
            "num_layers": 2,
            "head_dim": 8,
            "qk_head_dim": 20,
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 16,
            "moe_topk": 3,
            "n_routed_experts": 8,
            "zero_expert_num": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "kimi_linear": ("kimi_linear", _HYBRID | _MOE | {"n_group": 1, "topk_group": 1}),
    "bailing_hybrid": ("bailing_hybrid", _HYBRID | _MOE),
}
"""`(model_type, what differs from the common config)` by name."""


def config_of(case: str, **overrides: Any) -> Any:
    model_type, special = CASES[case]
    settings = _COMMON | special | overrides
    if model_type == "longcat_flash":
        for absent in ("num_hidden_layers", "intermediate_size"):
            settings.pop(absent)
    return AutoConfig.for_model(model_type, **settings)


def model_class(model_type: str) -> Any:
    config_class = CONFIG_MAPPING[model_type]
    if config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    return Mistral4ForCausalLM


def make(case: str, folder: Path, *, seed: int = 0, shards: bool = False, **overrides: Any) -> Path:
    """Write the checkpoint of a case, with a tokenizer, to `folder`; return it."""
    torch.manual_seed(seed)
    model = model_class(CASES[case][0])._from_config(config_of(case, **overrides))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("A_log", "dt_bias")):
                continue  # the decay of a linear attention: initialised by Transformers
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:  # norms and biases
                parameter += 0.1 * noise
            else:
                parameter.copy_(1.3 * noise / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer += 0.1 * torch.randn(buffer.shape, generator=generator)
    model.save_pretrained(folder, max_shard_size="60KB" if shards else "5GB")
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """One printable character per token."""
    vocabulary = {text: index for index, text in enumerate(SPECIAL + CHARACTERS)}
    inner = Tokenizer(models.BPE(vocabulary, merges=[]))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template="{% for m in messages %}<s>({{ m.content }}){% endfor %}",
    )


def text(token_ids: list[int]) -> str:
    """What the tokenizer makes of ordinary tokens."""
    return "".join(CHARACTERS[token - len(SPECIAL)] for token in token_ids if token > END)


def tokens(length: int, seed: int = 0) -> list[int]:
    """A random prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(SPECIAL), VOCABULARY, (length,), generator=generator).tolist()
