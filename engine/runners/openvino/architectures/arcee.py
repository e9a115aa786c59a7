"""Arcee: Llama with an ungated MLP, squared ReLU between its two matrices."""

from functools import partial

from engine.runners.openvino.architectures.family import Family
from engine.runners.openvino.architectures.llama import llama_config
from engine.runners.openvino.config.config_file import ConfigFile
from engine.runners.openvino.config.decoder_config import ModelConfig
from engine.runners.openvino.graph.layers import plain_mlp
from engine.runners.openvino.graph.stacks import pre_norm


def configure(file: ConfigFile) -> ModelConfig:
    return llama_config(file.with_defaults(hidden_act="relu2"))


FAMILY = Family(configure, partial(pre_norm, mlp=plain_mlp))
