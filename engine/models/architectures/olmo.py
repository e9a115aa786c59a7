"""OLMo 2: norms after attention and MLP, and over whole queries and keys. OLMo 3: with sliding windows. EXAONE 4: OLMo
2's blocks with normalized heads. If it has sliding windows, only the layers with one have a rotary embedding."""

from functools import partial

import msgspec
from msgspec.structs import replace

from sluice.engine.models.config.config_file import (
    ConfigFile,
    WindowFields,
    base_config,
    every_nth_full,
    make_layers,
    read_ropes,
)
from sluice.engine.models.config.decoder_config import DecoderConfig, Layer
from sluice.engine.models.decoder import Architecture, NormedHeads, attention, normed_projections, post_norm
from sluice.engine.models.layers import rms_norm
from sluice.errors import invalid


def configure_olmo2(file: ConfigFile) -> DecoderConfig:
    bias = file.flag("attention_bias")
    return replace(base_config(file.with_defaults(rms_norm_eps=1e-5)), qkv_bias=bias, output_bias=bias)


def configure_olmo3(file: ConfigFile) -> DecoderConfig:
    fields = file.read(WindowFields)
    theta = file.fields.get("rope_theta") or 500_000.0
    ropes = read_ropes(file.fields, full_theta=theta, sliding_theta=theta)
    config = configure_olmo2(file.without_ropes())
    kinds = fields.layer_types or every_nth_full(config.num_layers, 4)
    return replace(config, layers=make_layers(config, kinds, fields.sliding_window, ropes))


_olmo_decoder = partial(post_norm, attention=partial(attention, project=normed_projections(rms_norm)))
OLMO2 = Architecture(configure_olmo2, _olmo_decoder)
OLMO3 = Architecture(configure_olmo3, _olmo_decoder)


class _Exaone4Fields(msgspec.Struct, frozen=True):
    sliding_window: int | None = 4096
    sliding_window_pattern: int | str | None = 4
    layer_types: list[str] | None = None


def configure_exaone4(file: ConfigFile) -> DecoderConfig:
    config, fields = base_config(file.with_defaults(rms_norm_eps=1e-5)), file.read(_Exaone4Fields)
    if fields.sliding_window is None:
        return config
    layers = make_layers(config, fields.layer_types or _exaone4_kinds(config, fields), fields.sliding_window)
    return replace(
        config, layers=tuple(Layer(rope=layer.rope if layer.window else None, window=layer.window) for layer in layers)
    )


def _exaone4_kinds(config: DecoderConfig, fields: _Exaone4Fields) -> list[str]:
    period = fields.sliding_window_pattern
    if not isinstance(period, int) or period < 1:
        raise invalid("model_path", f"config.json: with sliding_window_pattern {period!r} it must name layer_types")
    return every_nth_full(config.num_layers, period)


_exaone4_attention = partial(attention, heads_step=NormedHeads(rms_norm))
EXAONE4 = Architecture(configure_exaone4, partial(post_norm, attention=_exaone4_attention))
