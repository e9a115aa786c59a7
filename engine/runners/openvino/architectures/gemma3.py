"""Gemma 3, its text part: Gemma 2's blocks with normed heads, and a rope for each kind of layer."""

from functools import partial

import msgspec
from msgspec.structs import replace

from engine.runners.openvino.architectures.family import Family
from engine.runners.openvino.architectures.gemma import gemma_config
from engine.runners.openvino.config.config_file import ConfigFile, every_nth_full, layers_of
from engine.runners.openvino.config.decoder_config import ModelConfig
from engine.runners.openvino.config.rope_config import read_ropes
from engine.runners.openvino.graph.layers import rms_norm_plus_one
from engine.runners.openvino.graph.self_attention import attention, normed_heads
from engine.runners.openvino.graph.stacks import sandwich_norm


class _Fields(msgspec.Struct, frozen=True):
    """`attn_logit_softcapping` is not among them: the model does not use it."""

    hidden_activation: str = "gelu_pytorch_tanh"
    query_pre_attn_scalar: float = 256
    sliding_window: int | None = 4096
    sliding_window_pattern: int = 6
    layer_types: list[str] | None = None
    final_logit_softcapping: float | None = None
    rope_local_base_freq: float = 10_000.0


_SHAPE = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
"""What the published checkpoints of text and images leave out."""


def configure(file: ConfigFile) -> ModelConfig:
    file, fields = file.with_defaults(**_SHAPE), file.read(_Fields)
    ropes = read_ropes(file.fields, full_theta=1_000_000.0, sliding_theta=fields.rope_local_base_freq)
    config = gemma_config(file.without_ropes().with_values(hidden_act=fields.hidden_activation))
    kinds = fields.layer_types or every_nth_full(config.num_layers, fields.sliding_window_pattern)
    return replace(
        config,
        layers=layers_of(config, kinds, fields.sliding_window, ropes),
        attention_scale=fields.query_pre_attn_scalar**-0.5,
        logit_softcap=fields.final_logit_softcapping,
    )


_attention = partial(attention, heads_step=normed_heads(rms_norm_plus_one))
FAMILY = Family(configure, partial(sandwich_norm, norm=rms_norm_plus_one, attention=_attention))
