"""Checkpoints that cannot be loaded are refused by one error that says why."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from checkpoints import config_of, make
from engines import refusal
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from anabranch import ShardLayout
from anabranch.hf import CheckpointError, Engine, check_checkpoint
from anabranch.hf.architectures import SUPPORTED, Architecture


def directory(tmp_path, config: PretrainedConfig):
    config.save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def editable(checkpoint, tmp_path):
    """A copy of a checkpoint that a test may spoil."""
    return shutil.copytree(checkpoint("v3"), tmp_path / "copy")


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("axk2", "its indexer attends to a selection of the history"),
        ("deepseek_v32", "its indexer attends to a selection of the history"),
        ("dots3_note", "it is multimodal"),
        ("dots3_note_text", "its layers use a sliding window or an indexer"),
        ("glm5_next", "it is multimodal"),
        ("glm_moe_dsa", "its indexer attends to a selection of the history"),
        ("hy_v4", "its indexer attends to a selection of the history"),
        ("hy_v4_vl", "it is multimodal"),
        ("kimi_k25", "it is multimodal"),
        ("mistral_large4", "it is multimodal"),
    ],
)
def test_architectures_that_are_not_supported(tmp_path, model_type, reason):
    path = directory(tmp_path, AutoConfig.for_model(model_type))
    with pytest.raises(CheckpointError, match=rf"^{model_type} is not supported: {reason}"):
        check_checkpoint(path, 1)


def test_every_mla_architecture_of_transformers_is_known(tmp_path):
    """A release of Transformers with another one fails here, and is refused until then."""
    for model_type in CONFIG_MAPPING:
        try:
            config = AutoConfig.for_model(model_type)
            latent = config.get_text_config(decoder=True).to_dict().get("kv_lora_rank")
        except (AttributeError, ImportError, TypeError, ValueError, StrictDataclassError):
            continue  # a config that cannot be built from nothing
        if latent is None:
            continue
        folder = tmp_path / model_type
        folder.mkdir()
        directory(folder, config)
        if model_type in SUPPORTED:
            assert check_checkpoint(folder, 1).model_type == model_type
        else:
            with pytest.raises(CheckpointError, match=r"is not supported: (its|it is)"):
                check_checkpoint(folder, 1)


class NovelConfig(PretrainedConfig):
    model_type = "novel_mla"
    kv_lora_rank: int = 512


def test_an_unknown_mla_architecture(tmp_path):
    AutoConfig.register("novel_mla", NovelConfig, exist_ok=True)
    path = directory(tmp_path, NovelConfig())
    with pytest.raises(CheckpointError, match="novel_mla is not supported: an unknown MLA"):
        check_checkpoint(path, 1)


def test_no_latent_attention(tmp_path):
    path = directory(tmp_path, AutoConfig.for_model("llama"))
    with pytest.raises(CheckpointError, match="llama has no latent attention"):
        check_checkpoint(path, 1)


def test_not_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere is not a checkpoint: it has no config"):
        check_checkpoint(tmp_path / "nowhere", 1)
    config_of("v3").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds no weights: no \*\.safetensors"):
        check_checkpoint(tmp_path, 1)
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(CheckpointError, match="no_such_model"):
        check_checkpoint(tmp_path, 1)
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3", "hidden_size": "wide"}')
    with pytest.raises(CheckpointError, match="hidden_size"):
        check_checkpoint(tmp_path, 1)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        check_checkpoint(tmp_path, 1)


def test_heads_that_do_not_divide(ranks, checkpoint):
    path = checkpoint("v3")
    assert check_checkpoint(path, 4).num_attention_heads == 4
    message = "4 attention heads cannot be divided over 3 ranks"
    with pytest.raises(CheckpointError, match=message):
        check_checkpoint(path, 3)


def test_quantised_weights(editable):
    config = json.loads((editable / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (editable / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="quantised by fp8"):
        check_checkpoint(editable, 1)


def test_missing_weights(editable):
    weights = load_file(editable / "model.safetensors")
    del weights["model.layers.1.self_attn.kv_b_proj.weight"]
    save_file(weights, editable / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 weights.*layers\.1\.self_attn\.kv_b_proj"):
        Engine.load(editable)


def test_weights_of_another_shape(editable):
    weights = load_file(editable / "model.safetensors")
    weights["model.layers.1.self_attn.kv_b_proj.weight"] = torch.zeros(4, 4)
    save_file(weights, editable / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        Engine.load(editable)


def test_truncated_weights(editable):
    whole = (editable / "model.safetensors").read_bytes()
    (editable / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        Engine.load(editable)


def test_a_missing_shard(checkpoint, tmp_path):
    path = shutil.copytree(checkpoint("v3", shards=True), tmp_path / "copy")
    next(iter(sorted(path.glob("model-*.safetensors")))).unlink()
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        Engine.load(path)


def test_no_tokenizer(editable):
    for file in editable.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="has no usable tokenizer"):
        Engine.load(editable)


def test_an_attention_that_computes_something_else(checkpoint, monkeypatch):
    """As a later Transformers might: the forward changes, names and shapes do not."""
    forward = modeling_deepseek_v3.DeepseekV3Attention.forward

    def changed(self, hidden_states, *args, **kwargs):
        return forward(self, hidden_states * 1.01, *args, **kwargs)

    monkeypatch.setattr(modeling_deepseek_v3.DeepseekV3Attention, "forward", changed)
    with pytest.raises(CheckpointError, match="DeepseekV3Attention computes something else"):
        Engine.load(checkpoint("v3"))


def test_an_attention_with_another_weight(tmp_path, monkeypatch):
    initialise = modeling_deepseek_v3.DeepseekV3Attention.__init__

    def changed(self, config, layer_idx):
        initialise(self, config, layer_idx)
        self.register_buffer("sinks", torch.zeros(4))

    monkeypatch.setattr(modeling_deepseek_v3.DeepseekV3Attention, "__init__", changed)
    with pytest.raises(CheckpointError, match=r"not understood: missing \[\], unknown \['sinks'\]"):
        Engine.load(make("v3", tmp_path))


def test_an_attention_of_another_name(checkpoint, monkeypatch):
    monkeypatch.setitem(SUPPORTED, "deepseek_v3", Architecture("NovelAttention"))
    with pytest.raises(CheckpointError, match="DeepseekV3ForCausalLM has no NovelAttention"):
        Engine.load(checkpoint("v3"))


def test_arguments_of_load(ranks, checkpoint):
    path = checkpoint("v3")
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        Engine.load(path, max_tokens=0)
    with pytest.raises(ValueError, match="interleave must divide block_size"):
        Engine.load(path, layout=ShardLayout(1, 0, 16), block_size=24)
    with pytest.raises(ValueError, match="layout must have world_size 1 and rank 0"):
        Engine.load(path, layout=ShardLayout(2, 1))
    message = "interleave must divide block_size, got interleave 2 with block_size 5"
    assert (
        ranks(2).run(refusal, path, {"interleave": 2, "block_size": 5})
        == [f"ValueError: {message}"] * 2
    )
