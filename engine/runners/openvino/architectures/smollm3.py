"""SmolLM3: Llama in which some layers, by default every fourth, carry no position."""

import msgspec
from msgspec.structs import replace

from engine.runners.openvino.architectures.family import Family
from engine.runners.openvino.config.config_file import FULL, SLIDING, ConfigFile, base_config, layers_of
from engine.runners.openvino.config.decoder_config import Layer, ModelConfig
from engine.runners.openvino.graph.stacks import pre_norm


class _Fields(msgspec.Struct, frozen=True):
    no_rope_layers: list[int] | None = None
    """1 for a layer that turns its heads, 0 for one that does not."""
    no_rope_layer_interval: int = 4
    use_sliding_window: bool = False
    sliding_window: int | None = None
    layer_types: list[str] | None = None


def configure(file: ConfigFile) -> ModelConfig:
    config = base_config(file.with_defaults(tie_word_embeddings=True), theta=2_000_000.0)
    fields, bias = file.read(_Fields), file.flag("attention_bias")
    window = fields.sliding_window if fields.use_sliding_window else None
    numbers = range(1, config.num_layers + 1)
    turned = fields.no_rope_layers or [number % fields.no_rope_layer_interval for number in numbers]
    kinds = fields.layer_types or [SLIDING if window and not turns else FULL for turns in turned]
    layers = tuple(
        Layer(rope=layer.rope if turns else None, window=layer.window)
        for layer, turns in zip(layers_of(config, kinds, window), turned, strict=False)
    )
    return replace(config, layers=layers, qkv_bias=bias, output_bias=bias, mlp_bias=file.flag("mlp_bias"))


FAMILY = Family(configure, pre_norm)
