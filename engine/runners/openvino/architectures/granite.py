"""Granite: Llama with multipliers on embeddings, attention scores, residual updates and logits."""

import msgspec
from msgspec.structs import replace

from engine.runners.openvino.architectures.family import Family
from engine.runners.openvino.architectures.llama import llama_config
from engine.runners.openvino.config.config_file import ConfigFile
from engine.runners.openvino.config.decoder_config import ModelConfig
from engine.runners.openvino.graph.stacks import pre_norm


class _Fields(msgspec.Struct, frozen=True):
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


def configure(file: ConfigFile) -> ModelConfig:
    fields = file.read(_Fields)
    return replace(
        llama_config(file),
        embedding_scale=fields.embedding_multiplier,
        attention_scale=fields.attention_multiplier,
        residual_scale=fields.residual_multiplier,
        logit_scale=1 / fields.logits_scaling,
    )


FAMILY = Family(configure, pre_norm)
