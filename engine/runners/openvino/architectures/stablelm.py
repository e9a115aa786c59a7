"""StableLM: layer norms, heads that turn in part (a quarter by default), biases on queries, keys and values."""

from functools import partial

import msgspec
from msgspec.structs import replace

from engine.runners.openvino.architectures.family import Family
from engine.runners.openvino.config.config_file import ConfigFile, base_config, unsupported
from engine.runners.openvino.config.decoder_config import ModelConfig
from engine.runners.openvino.graph.layers import layer_norm
from engine.runners.openvino.graph.stacks import pre_norm


class _Fields(msgspec.Struct, frozen=True):
    layer_norm_eps: float = 1e-5
    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False


def configure(file: ConfigFile) -> ModelConfig:
    fields = file.read(_Fields)
    if fields.qk_layernorm or fields.use_parallel_residual:
        raise unsupported("qk_layernorm and use_parallel_residual are not supported; supported: both false")
    return replace(base_config(file, partial=0.25), norm_eps=fields.layer_norm_eps, qkv_bias=fields.use_qkv_bias)


FAMILY = Family(configure, partial(pre_norm, norm=layer_norm))
