"""A checkpoint with an MTP layer whose drafts are mostly right.

The second layer of the model adds nothing, and the MTP layer is a copy of the first that takes the
embedding of the last token and leaves the hidden state: it computes what the model does, but for
the token at the very beginning, which MTP layers do not see. Rows of the embedding have unit mean
square, which the norm before an MTP layer leaves as they are.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

DRAFT_LAYER = 2
# Of dense layers only, so that the copy is of the kind that vLLM makes of the third layer.
SETTINGS = {"num_hidden_layers": DRAFT_LAYER, "first_k_dense_replace": DRAFT_LAYER + 1}


def add_draft_layer(checkpoint: Path) -> None:
    """Change a checkpoint of `deepseek_v3`, made with `SETTINGS`, in place."""
    path, draft = checkpoint / "model.safetensors", f"model.layers.{DRAFT_LAYER}."
    weights = load_file(path)
    embedding = weights["model.embed_tokens.weight"]
    embedding /= embedding.pow(2).mean(1, keepdim=True).sqrt()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.{DRAFT_LAYER - 1}.{name}.weight"].zero_()
    for name, weight in list(weights.items()):
        if name.startswith("model.layers.0."):
            weights[name.replace("model.layers.0.", draft)] = weight.clone()
    width = embedding.shape[1]
    for norm in ("enorm", "hnorm"):
        weights[f"{draft}{norm}.weight"] = torch.ones(width)
    taken, left = torch.eye(width), torch.zeros(width, width)
    weights[f"{draft}eh_proj.weight"] = torch.cat([taken, left], dim=1)
    weights[f"{draft}embed_tokens.weight"] = embedding.clone()
    weights[f"{draft}shared_head.norm.weight"] = weights["model.norm.weight"].clone()
    weights[f"{draft}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, path, metadata={"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (checkpoint / "config.json").write_text(json.dumps(config))
