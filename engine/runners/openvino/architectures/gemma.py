"""Gemma: Llama with scaled embeddings, tanh GELU, and norm weights stored as what is added to 1."""

from functools import partial

from msgspec.structs import replace

from engine.runners.openvino.architectures.family import Family
from engine.runners.openvino.config.config_file import ConfigFile, base_config, unsupported
from engine.runners.openvino.config.decoder_config import ModelConfig
from engine.runners.openvino.graph.layers import rms_norm_plus_one
from engine.runners.openvino.graph.stacks import pre_norm

_GELU = "gelu_pytorch_tanh"


def gemma_config(file: ConfigFile) -> ModelConfig:
    """What all generations of Gemma have in common."""
    if file.flag("use_bidirectional_attention"):
        raise unsupported("use_bidirectional_attention true is not supported: Sluice generates from left to right")
    bias = file.flag("attention_bias")
    config = base_config(file.with_defaults(head_dim=256, tie_word_embeddings=True))
    return replace(config, qkv_bias=bias, output_bias=bias, embedding_scale=config.hidden_size**0.5)


def configure(file: ConfigFile) -> ModelConfig:
    act = file.fields.get("hidden_act") or _GELU
    # Early files say "gelu" and mean the tanh approximation.
    return gemma_config(file.with_values(hidden_act=_GELU if act == "gelu" else act))


FAMILY = Family(configure, partial(pre_norm, norm=rms_norm_plus_one))
