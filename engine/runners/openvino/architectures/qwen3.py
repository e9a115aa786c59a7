"""Qwen3: Qwen2's block with an RMS norm on every query and key head; biases are a matter of config.json."""

from functools import partial

from msgspec.structs import replace

from engine.runners.openvino.architectures.family import Family
from engine.runners.openvino.architectures.qwen2 import windowed_config
from engine.runners.openvino.config.config_file import ConfigFile
from engine.runners.openvino.config.decoder_config import ModelConfig
from engine.runners.openvino.graph.layers import rms_norm
from engine.runners.openvino.graph.self_attention import attention, normed_heads
from engine.runners.openvino.graph.stacks import pre_norm


def configure(file: ConfigFile) -> ModelConfig:
    bias = file.flag("attention_bias")
    return replace(windowed_config(file.with_defaults(head_dim=128)), qkv_bias=bias, output_bias=bias)


FAMILY = Family(configure, partial(pre_norm, attention=partial(attention, heads_step=normed_heads(rms_norm))))
