"""OLMo 2: norms after attention and MLP, and over whole queries and keys. OLMo 3: with sliding windows too."""

from functools import partial

import msgspec
from msgspec.structs import replace

from engine.runners.openvino.architectures.family import Family
from engine.runners.openvino.config.config_file import ConfigFile, base_config, every_nth_full, layers_of
from engine.runners.openvino.config.decoder_config import ModelConfig
from engine.runners.openvino.config.rope_config import read_ropes
from engine.runners.openvino.graph.layers import rms_norm
from engine.runners.openvino.graph.self_attention import attention, normed_projections
from engine.runners.openvino.graph.stacks import post_norm


class _Fields3(msgspec.Struct, frozen=True):
    sliding_window: int | None = 4096
    layer_types: list[str] | None = None


def configure_olmo2(file: ConfigFile) -> ModelConfig:
    bias = file.flag("attention_bias")
    return replace(base_config(file.with_defaults(rms_norm_eps=1e-5)), qkv_bias=bias, output_bias=bias)


def configure_olmo3(file: ConfigFile) -> ModelConfig:
    fields = file.read(_Fields3)
    theta = file.fields.get("rope_theta") or 500_000.0
    ropes = read_ropes(file.fields, full_theta=theta, sliding_theta=theta)
    config = configure_olmo2(file.without_ropes())
    kinds = fields.layer_types or every_nth_full(config.num_layers, 4)
    return replace(config, layers=layers_of(config, kinds, fields.sliding_window, ropes))


_decoder = partial(post_norm, attention=partial(attention, project=normed_projections(rms_norm)))
OLMO2 = Family(configure_olmo2, _decoder)
OLMO3 = Family(configure_olmo3, _decoder)
