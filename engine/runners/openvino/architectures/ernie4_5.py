"""ERNIE 4.5: Llama whose heads turn neighbouring components, with biases everywhere or nowhere. Helium: likewise."""

from functools import partial

import openvino as ov
from msgspec.structs import replace

from engine.runners.openvino.architectures.family import Family
from engine.runners.openvino.architectures.llama import llama_config
from engine.runners.openvino.config.config_file import ConfigFile, base_config
from engine.runners.openvino.config.decoder_config import ModelConfig
from engine.runners.openvino.graph.layers import Context
from engine.runners.openvino.graph.rotation import uninterleaved
from engine.runners.openvino.graph.self_attention import attention
from engine.runners.openvino.graph.stacks import pre_norm


def configure_ernie4_5(file: ConfigFile) -> ModelConfig:
    file = file.with_defaults(head_dim=128, tie_word_embeddings=True, rms_norm_eps=1e-5)
    bias = file.flag("use_bias")
    return replace(base_config(file, theta=500_000.0), qkv_bias=bias, output_bias=bias, mlp_bias=bias)


def configure_helium(file: ConfigFile) -> ModelConfig:
    file = file.with_defaults(head_dim=128, rms_norm_eps=1e-8, rope_theta=100_000.0)
    return replace(llama_config(file), output_bias=False)


def _pair_neighbours(context: Context, heads: ov.Node, name: str) -> ov.Node:
    return uninterleaved(heads)


_decoder = partial(pre_norm, attention=partial(attention, heads_step=_pair_neighbours))
ERNIE4_5 = Family(configure_ernie4_5, _decoder)
HELIUM = Family(configure_helium, _decoder)
