"""StarCoder2: layer norms, an ungated MLP, biases everywhere, and perhaps a sliding window."""

from functools import partial

import msgspec
from msgspec.structs import replace

from engine.runners.openvino.architectures.family import Family
from engine.runners.openvino.config.config_file import ConfigFile, base_config, with_window
from engine.runners.openvino.config.decoder_config import ModelConfig
from engine.runners.openvino.graph.layers import layer_norm, plain_mlp
from engine.runners.openvino.graph.stacks import pre_norm


class _Fields(msgspec.Struct, frozen=True):
    norm_epsilon: float = 1e-5
    use_bias: bool = True
    sliding_window: int | None = None


def configure(file: ConfigFile) -> ModelConfig:
    fields = file.read(_Fields)
    config = base_config(file.with_defaults(hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True))
    bias = fields.use_bias
    return replace(
        with_window(config, fields.sliding_window),
        norm_eps=fields.norm_epsilon,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


_mlp = partial(plain_mlp, names=("c_fc", "c_proj"))
FAMILY = Family(configure, partial(pre_norm, norm=layer_norm, mlp=_mlp))
