"""Qwen2: Llama with biases on queries, keys and values; the upper layers may have a sliding window."""

import msgspec
from msgspec.structs import replace

from engine.runners.openvino.architectures.family import Family
from engine.runners.openvino.config.config_file import FULL, SLIDING, ConfigFile, base_config, layers_of
from engine.runners.openvino.config.decoder_config import ModelConfig
from engine.runners.openvino.graph.stacks import pre_norm


class _Fields(msgspec.Struct, frozen=True):
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None


def windowed_config(file: ConfigFile) -> ModelConfig:
    """The common fields and the windows, as Qwen2 and Qwen3 have them."""
    config, fields = base_config(file), file.read(_Fields)
    window = fields.sliding_window if fields.use_sliding_window else None
    first = config.num_layers if window is None else fields.max_window_layers
    kinds = [FULL if layer < first else SLIDING for layer in range(config.num_layers)]
    return replace(config, layers=layers_of(config, fields.layer_types or kinds, window))


def configure(file: ConfigFile) -> ModelConfig:
    return replace(windowed_config(file), qkv_bias=True)


FAMILY = Family(configure, pre_norm)
