"""Qwen2: Llama with biases on queries, keys and values; the upper layers may have a sliding window.

Qwen3: Qwen2's block with an RMS norm on each query and key head, and biases only if config.json has them.
"""

from functools import partial

import msgspec
from msgspec.structs import replace

from engine.runners.openvino.config.config_file import FULL, SLIDING, ConfigFile, base_config, make_layers
from engine.runners.openvino.config.decoder_config import DecoderConfig
from engine.runners.openvino.graph.decoder import Architecture, attention, normed_heads, pre_norm
from engine.runners.openvino.graph.layers import rms_norm


class _Qwen2Fields(msgspec.Struct, frozen=True):
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None


def _windowed_config(file: ConfigFile) -> DecoderConfig:
    """Read the common fields and the windows, which Qwen2 and Qwen3 share."""
    config, fields = base_config(file), file.read(_Qwen2Fields)
    window = fields.sliding_window if fields.use_sliding_window else None
    first = config.num_layers if window is None else fields.max_window_layers
    kinds = [FULL if layer < first else SLIDING for layer in range(config.num_layers)]
    return replace(config, layers=make_layers(config, fields.layer_types or kinds, window))


def configure_qwen2(file: ConfigFile) -> DecoderConfig:
    return replace(_windowed_config(file), qkv_bias=True)


QWEN2 = Architecture(configure_qwen2, pre_norm)


def configure_qwen3(file: ConfigFile) -> DecoderConfig:
    bias = file.flag("attention_bias")
    return replace(_windowed_config(file.with_defaults(head_dim=128)), qkv_bias=bias, output_bias=bias)


_qwen3_attention = partial(attention, heads_step=normed_heads(rms_norm))
QWEN3 = Architecture(configure_qwen3, partial(pre_norm, attention=_qwen3_attention))
