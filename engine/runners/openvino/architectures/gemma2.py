"""Gemma 2: a norm before and after attention and MLP, every second layer with a sliding window, softcaps."""

from functools import partial

import msgspec
from msgspec.structs import replace

from engine.runners.openvino.architectures.family import Family
from engine.runners.openvino.architectures.gemma import gemma_config
from engine.runners.openvino.config.config_file import ConfigFile, every_nth_full, layers_of
from engine.runners.openvino.config.decoder_config import ModelConfig
from engine.runners.openvino.graph.layers import rms_norm_plus_one
from engine.runners.openvino.graph.stacks import sandwich_norm


class _Fields(msgspec.Struct, frozen=True):
    hidden_activation: str = "gelu_pytorch_tanh"
    query_pre_attn_scalar: float = 256
    sliding_window: int | None = 4096
    layer_types: list[str] | None = None
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0


def configure(file: ConfigFile) -> ModelConfig:
    fields = file.read(_Fields)
    config = gemma_config(file.with_values(hidden_act=fields.hidden_activation))
    kinds = fields.layer_types or every_nth_full(config.num_layers, 2)
    return replace(
        config,
        layers=layers_of(config, kinds, fields.sliding_window),
        attention_scale=fields.query_pre_attn_scalar**-0.5,
        attention_softcap=fields.attn_logit_softcapping,
        logit_softcap=fields.final_logit_softcapping,
    )


FAMILY = Family(configure, partial(sandwich_norm, norm=rms_norm_plus_one))
