"""EXAONE 4: OLMo 2's blocks with normed heads; where layers slide, those that do not carry no position."""

from functools import partial

import msgspec
from msgspec.structs import replace

from engine.runners.openvino.architectures.family import Family
from engine.runners.openvino.config.config_file import ConfigFile, base_config, every_nth_full, layers_of
from engine.runners.openvino.config.decoder_config import Layer, ModelConfig
from engine.runners.openvino.graph.layers import rms_norm
from engine.runners.openvino.graph.self_attention import attention, normed_heads
from engine.runners.openvino.graph.stacks import post_norm
from sluice.errors import invalid


class _Fields(msgspec.Struct, frozen=True):
    sliding_window: int | None = 4096
    sliding_window_pattern: int | str | None = 4
    layer_types: list[str] | None = None


def configure(file: ConfigFile) -> ModelConfig:
    config, fields = base_config(file.with_defaults(rms_norm_eps=1e-5)), file.read(_Fields)
    if fields.sliding_window is None:
        return config
    layers = layers_of(config, fields.layer_types or _kinds(config, fields), fields.sliding_window)
    return replace(
        config, layers=tuple(Layer(rope=layer.rope if layer.window else None, window=layer.window) for layer in layers)
    )


def _kinds(config: ModelConfig, fields: _Fields) -> list[str]:
    period = fields.sliding_window_pattern
    if not isinstance(period, int) or period < 1:
        raise invalid("model_path", f"config.json: with sliding_window_pattern {period!r} it must name layer_types")
    return every_nth_full(config.num_layers, period)


FAMILY = Family(configure, partial(post_norm, attention=partial(attention, heads_step=normed_heads(rms_norm))))
