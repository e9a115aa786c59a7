"""Seed-OSS: Llama with biases on queries, keys and values, and one of its own for attention's output."""

from msgspec.structs import replace

from engine.runners.openvino.architectures.family import Family
from engine.runners.openvino.config.config_file import ConfigFile, base_config
from engine.runners.openvino.config.decoder_config import ModelConfig
from engine.runners.openvino.graph.stacks import pre_norm


def configure(file: ConfigFile) -> ModelConfig:
    file = file.with_defaults(head_dim=128, attention_bias=True)
    return replace(
        base_config(file),
        qkv_bias=file.flag("attention_bias"),
        output_bias=file.flag("attention_out_bias"),
        mlp_bias=file.flag("mlp_bias"),
    )


FAMILY = Family(configure, pre_norm)
