"""Llama: pre-norm blocks of grouped-query attention and SwiGLU, with biases where config.json has them."""

from msgspec.structs import replace

from engine.runners.openvino.architectures.family import Family
from engine.runners.openvino.config.config_file import ConfigFile, base_config
from engine.runners.openvino.config.decoder_config import ModelConfig
from engine.runners.openvino.graph.stacks import pre_norm


def llama_config(file: ConfigFile) -> ModelConfig:
    bias = file.flag("attention_bias")
    return replace(base_config(file), qkv_bias=bias, output_bias=bias, mlp_bias=file.flag("mlp_bias"))


FAMILY = Family(llama_config, pre_norm)
