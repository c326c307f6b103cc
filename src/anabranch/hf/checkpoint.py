"""Checks of a checkpoint directory that need nothing but its config and file names."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from anabranch.hf.architectures import REFUSED, SUPPORTED


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded, and why."""


def check_checkpoint(path: str | Path, world_size: int) -> PretrainedConfig:
    """Check that the checkpoint in directory `path` can run on `world_size` ranks; load nothing.

    Raises CheckpointError for a directory without config or safetensors weights, an architecture
    without MLA, one that is refused or unknown (saying why), quantised weights, or a number of
    heads that does not divide by `world_size`.
    """
    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} is not a checkpoint: it has no config.json")
    if not any(directory.glob("*.safetensors")):
        raise CheckpointError(f"{directory} holds no weights: no *.safetensors file")
    try:
        config = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except (ValueError, KeyError, OSError, StrictDataclassError) as error:
        raise CheckpointError(f"{directory}: {error}") from error
    assert isinstance(config, PretrainedConfig)

    text = config.get_text_config(decoder=True)
    kind = config.model_type
    # As a dictionary: a config whose layers differ refuses the attribute.
    if text.to_dict().get("kv_lora_rank") is None:
        raise CheckpointError(f"{kind} has no latent attention: its config has no kv_lora_rank")
    if text is not config:
        raise CheckpointError(
            f"{kind} is not supported: it is multimodal, and only text models are loaded"
        )
    if kind in REFUSED:
        raise CheckpointError(f"{kind} is not supported: {REFUSED[kind]}")
    if kind not in SUPPORTED:
        raise CheckpointError(
            f"{kind} is not supported: an unknown MLA architecture, known are "
            f"{', '.join(sorted(SUPPORTED))}"
        )
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        # Their scales belong to blocks of weights that the division over ranks would cut.
        method = dict(quantization).get("quant_method", "an unknown method")
        raise CheckpointError(
            f"{directory} is quantised by {method}: only unquantised weights are supported"
        )
    if config.num_attention_heads % world_size:
        raise CheckpointError(
            f"{config.num_attention_heads} attention heads cannot be divided over {world_size} "
            "ranks"
        )
    return config
