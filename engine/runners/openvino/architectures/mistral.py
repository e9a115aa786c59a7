"""Mistral: Llama without biases, attention within a sliding window; Ministral: in some layers only.

Ministral 3: queries grow with their position.
"""

from functools import partial

import msgspec
from msgspec.structs import replace

from engine.runners.openvino.config.config_file import FULL, SLIDING, ConfigFile, base_config, layers_of, with_window
from engine.runners.openvino.config.decoder_config import ModelConfig, QueryGrowth
from engine.runners.openvino.config.rope import YarnRope, rope_section
from engine.runners.openvino.graph.decoder import Architecture, attention, grown_queries, pre_norm


class _MistralFields(msgspec.Struct, frozen=True):
    sliding_window: int | None = 4096
    layer_types: list[str] | None = None


def configure_mistral(file: ConfigFile) -> ModelConfig:
    return with_window(base_config(file), file.read(_MistralFields).sliding_window)


def configure_ministral(file: ConfigFile) -> ModelConfig:
    config, fields = base_config(file), file.read(_MistralFields)
    default = FULL if fields.sliding_window is None else SLIDING
    kinds = fields.layer_types or [default] * config.num_layers
    return replace(config, layers=layers_of(config, kinds, fields.sliding_window))


def configure_ministral3(file: ConfigFile) -> ModelConfig:
    file = file.with_defaults(head_dim=128, rms_norm_eps=1e-5, sliding_window=None)
    config = with_window(base_config(file), file.read(_MistralFields).sliding_window)
    rope, rate = config.layers[0].rope, rope_section(file.fields).get("llama_4_scaling_beta")
    if not isinstance(rope, YarnRope) or rate is None:
        return config
    return replace(config, query_growth=QueryGrowth(float(rate), rope.original_max_position_embeddings))


MISTRAL = Architecture(configure_mistral, pre_norm)
MINISTRAL = Architecture(configure_ministral, pre_norm)
MINISTRAL3 = Architecture(
    configure_ministral3, partial(pre_norm, attention=partial(attention, heads_step=grown_queries))
)
