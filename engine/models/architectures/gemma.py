"""Gemma: Llama with scaled embeddings, tanh GELU, and norm weights stored minus 1. Gemma 2: a norm before and after
attention and MLP, a sliding window in every second layer, softcaps. Gemma 3, its text part: Gemma 2's blocks with
normalized heads, and a rope for each kind of layer."""

from functools import partial

import msgspec
from msgspec.structs import replace

from sluice.engine.models.config.config_file import (
    ConfigFile,
    base_config,
    every_nth_full,
    make_layers,
    read_ropes,
    unsupported,
)
from sluice.engine.models.config.decoder_config import DecoderConfig
from sluice.engine.models.decoder import Architecture, NormedHeads, attention, pre_norm, sandwich_norm
from sluice.engine.models.layers import rms_norm_plus_one

_GELU = "gelu_pytorch_tanh"


def gemma_config(file: ConfigFile) -> DecoderConfig:
    """Read the fields that all generations of Gemma share."""
    if file.flag("use_bidirectional_attention"):
        raise unsupported("use_bidirectional_attention true is not supported: Sluice generates from left to right")
    bias = file.flag("attention_bias")
    config = base_config(file.with_defaults(head_dim=256, tie_word_embeddings=True))
    return replace(config, qkv_bias=bias, output_bias=bias, embedding_scale=config.hidden_size**0.5)


def configure_gemma(file: ConfigFile) -> DecoderConfig:
    act = file.fields.get("hidden_act") or _GELU
    # Early files say "gelu" but mean the tanh approximation.
    return gemma_config(file.with_values(hidden_act=_GELU if act == "gelu" else act))


GEMMA = Architecture(configure_gemma, partial(pre_norm, norm=rms_norm_plus_one))


class _Gemma2Fields(msgspec.Struct, frozen=True):
    hidden_activation: str = "gelu_pytorch_tanh"
    query_pre_attn_scalar: float = 256
    sliding_window: int | None = 4096
    layer_types: list[str] | None = None
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0


def configure_gemma2(file: ConfigFile) -> DecoderConfig:
    fields = file.read(_Gemma2Fields)
    config = gemma_config(file.with_values(hidden_act=fields.hidden_activation))
    kinds = fields.layer_types or every_nth_full(config.num_layers, 2)
    return replace(
        config,
        layers=make_layers(config, kinds, fields.sliding_window),
        attention_scale=fields.query_pre_attn_scalar**-0.5,
        attention_softcap=fields.attn_logit_softcapping,
        logit_softcap=fields.final_logit_softcapping,
    )


GEMMA2 = Architecture(configure_gemma2, partial(sandwich_norm, norm=rms_norm_plus_one))


class _Gemma3Fields(msgspec.Struct, frozen=True):
    """The fields of Gemma 3. `attn_logit_softcapping` is missing because the model does not use it."""

    hidden_activation: str = "gelu_pytorch_tanh"
    query_pre_attn_scalar: float = 256
    sliding_window: int | None = 4096
    sliding_window_pattern: int = 6
    layer_types: list[str] | None = None
    final_logit_softcapping: float | None = None
    rope_local_base_freq: float = 10_000.0


_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
"""Values of fields that the published checkpoints of text and images omit."""


def configure_gemma3(file: ConfigFile) -> DecoderConfig:
    file, fields = file.with_defaults(**_GEMMA3_DEFAULTS), file.read(_Gemma3Fields)
    ropes = read_ropes(file.fields, full_theta=1_000_000.0, sliding_theta=fields.rope_local_base_freq)
    config = gemma_config(file.without_ropes().with_values(hidden_act=fields.hidden_activation))
    kinds = fields.layer_types or every_nth_full(config.num_layers, fields.sliding_window_pattern)
    return replace(
        config,
        layers=make_layers(config, kinds, fields.sliding_window, ropes),
        attention_scale=fields.query_pre_attn_scalar**-0.5,
        logit_softcap=fields.final_logit_softcapping,
    )


_gemma3_attention = partial(attention, heads_step=NormedHeads(rms_norm_plus_one))
GEMMA3 = Architecture(configure_gemma3, partial(sandwich_norm, norm=rms_norm_plus_one, attention=_gemma3_attention))
