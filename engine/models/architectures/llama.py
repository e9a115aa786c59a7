"""Llama, and the families that differ from it in a few details of configuration or layers. Llama: pre-norm blocks of
grouped-query attention and SwiGLU, with biases if config.json has them."""

from functools import partial

import msgspec
from msgspec.structs import replace

from sluice.engine.models.config.config_file import (
    FULL,
    SLIDING,
    ConfigFile,
    WindowFields,
    base_config,
    make_layers,
    rope_section,
    unsupported,
    with_window,
)
from sluice.engine.models.config.decoder_config import DecoderConfig, Layer, QueryGrowth
from sluice.engine.models.config.rope import YarnRope
from sluice.engine.models.decoder import (
    Architecture,
    NormedHeads,
    attention,
    fused_projections,
    grown_queries,
    paired_neighbours,
    pre_norm,
)
from sluice.engine.models.layers import (
    fused_gated_mlp,
    layer_norm,
    plain_mlp,
    rms_norm,
)


def configure_llama(file: ConfigFile) -> DecoderConfig:
    bias = file.flag("attention_bias")
    return replace(base_config(file), qkv_bias=bias, output_bias=bias, mlp_bias=file.flag("mlp_bias"))


LLAMA = Architecture(configure_llama, pre_norm)


# -- Arcee: Llama with an ungated MLP, with squared ReLU between its two matrices


def configure_arcee(file: ConfigFile) -> DecoderConfig:
    return configure_llama(file.with_defaults(hidden_act="relu2"))


ARCEE = Architecture(configure_arcee, partial(pre_norm, mlp=plain_mlp))


# -- Granite: Llama with multipliers on embeddings, attention scores, residual updates and logits


class _GraniteFields(msgspec.Struct, frozen=True):
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


def configure_granite(file: ConfigFile) -> DecoderConfig:
    fields = file.read(_GraniteFields)
    return replace(
        configure_llama(file),
        embedding_scale=fields.embedding_multiplier,
        attention_scale=fields.attention_multiplier,
        residual_scale=fields.residual_multiplier,
        logit_scale=1 / fields.logits_scaling,
    )


GRANITE = Architecture(configure_granite, pre_norm)


# -- Seed-OSS: Llama with biases on queries, keys and values, and a separate one for attention's output


def configure_seed_oss(file: ConfigFile) -> DecoderConfig:
    file = file.with_defaults(head_dim=128, attention_bias=True)
    return replace(
        base_config(file),
        qkv_bias=file.flag("attention_bias"),
        output_bias=file.flag("attention_out_bias"),
        mlp_bias=file.flag("mlp_bias"),
    )


SEED_OSS = Architecture(configure_seed_oss, pre_norm)


# -- SmolLM3: Llama in which some layers, by default every fourth, have no rotary embedding


class _SmolLm3Fields(msgspec.Struct, frozen=True):
    no_rope_layers: list[int] | None = None
    """1 for a layer with rotary embedding, 0 for one without."""
    no_rope_layer_interval: int = 4
    use_sliding_window: bool = False
    sliding_window: int | None = None
    layer_types: list[str] | None = None


def configure_smollm3(file: ConfigFile) -> DecoderConfig:
    config = base_config(file.with_defaults(tie_word_embeddings=True), theta=2_000_000.0)
    fields, bias = file.read(_SmolLm3Fields), file.flag("attention_bias")
    window = fields.sliding_window if fields.use_sliding_window else None
    numbers = range(1, config.num_layers + 1)
    has_rope = fields.no_rope_layers or [number % fields.no_rope_layer_interval for number in numbers]
    kinds = fields.layer_types or [SLIDING if window and not has else FULL for has in has_rope]
    layers = tuple(
        Layer(rope=layer.rope if has else None, window=layer.window)
        for layer, has in zip(make_layers(config, kinds, window), has_rope, strict=False)
    )
    return replace(config, layers=layers, qkv_bias=bias, output_bias=bias, mlp_bias=file.flag("mlp_bias"))


SMOLLM3 = Architecture(configure_smollm3, pre_norm)


# -- ERNIE 4.5 and Helium: Llama that rotates neighbouring components of a head; ERNIE has biases everywhere or nowhere


def configure_ernie4_5(file: ConfigFile) -> DecoderConfig:
    file = file.with_defaults(head_dim=128, tie_word_embeddings=True, rms_norm_eps=1e-5)
    bias = file.flag("use_bias")
    return replace(base_config(file, theta=500_000.0), qkv_bias=bias, output_bias=bias, mlp_bias=bias)


def configure_helium(file: ConfigFile) -> DecoderConfig:
    file = file.with_defaults(head_dim=128, rms_norm_eps=1e-8, rope_theta=100_000.0)
    return replace(configure_llama(file), output_bias=False)


_ernie4_5_decoder = partial(pre_norm, attention=partial(attention, heads_step=paired_neighbours))
ERNIE4_5 = Architecture(configure_ernie4_5, _ernie4_5_decoder)
HELIUM = Architecture(configure_helium, _ernie4_5_decoder)


# -- Phi-3 and Phi-4-mini: Llama with fused matrices, partly rotated heads, and LongRoPE


def configure_phi3(file: ConfigFile) -> DecoderConfig:
    file = file.with_defaults(rms_norm_eps=1e-5, original_max_position_embeddings=4096, sliding_window=None)
    return with_window(base_config(file, partial=1.0), file.read(WindowFields).sliding_window)


_phi3_attention = partial(attention, project=fused_projections)
PHI3 = Architecture(configure_phi3, partial(pre_norm, attention=_phi3_attention, mlp=fused_gated_mlp))


# -- Mistral: Llama without biases, with a sliding window in all layers; Ministral: in some layers;
#    Ministral 3: queries are scaled by their position


def configure_mistral(file: ConfigFile) -> DecoderConfig:
    return with_window(base_config(file), file.read(WindowFields).sliding_window)


def configure_ministral(file: ConfigFile) -> DecoderConfig:
    config, fields = base_config(file), file.read(WindowFields)
    default = FULL if fields.sliding_window is None else SLIDING
    kinds = fields.layer_types or [default] * config.num_layers
    return replace(config, layers=make_layers(config, kinds, fields.sliding_window))


def configure_ministral3(file: ConfigFile) -> DecoderConfig:
    file = file.with_defaults(head_dim=128, rms_norm_eps=1e-5, sliding_window=None)
    config = with_window(base_config(file), file.read(WindowFields).sliding_window)
    rope, rate = config.layers[0].rope, rope_section(file.fields).get("llama_4_scaling_beta")
    if not isinstance(rope, YarnRope) or rate is None:
        return config
    return replace(config, query_growth=QueryGrowth(float(rate), rope.original_max_position_embeddings))


_ministral3_attention = partial(attention, heads_step=grown_queries)
MISTRAL = Architecture(configure_mistral, pre_norm)
MINISTRAL = Architecture(configure_ministral, pre_norm)
MINISTRAL3 = Architecture(configure_ministral3, partial(pre_norm, attention=_ministral3_attention))


# -- StableLM: layer norms, partly rotated heads (a quarter by default), biases on queries, keys and values


class _StableLmFields(msgspec.Struct, frozen=True):
    layer_norm_eps: float = 1e-5
    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False


def configure_stablelm(file: ConfigFile) -> DecoderConfig:
    fields = file.read(_StableLmFields)
    if fields.qk_layernorm or fields.use_parallel_residual:
        raise unsupported("qk_layernorm and use_parallel_residual are not supported; supported: both false")
    return replace(base_config(file, partial=0.25), norm_eps=fields.layer_norm_eps, qkv_bias=fields.use_qkv_bias)


STABLELM = Architecture(configure_stablelm, partial(pre_norm, norm=layer_norm))


# -- StarCoder2: layer norms, an ungated MLP, biases everywhere, and an optional sliding window


class _StarCoder2Fields(msgspec.Struct, frozen=True):
    norm_epsilon: float = 1e-5
    use_bias: bool = True
    sliding_window: int | None = None


def configure_starcoder2(file: ConfigFile) -> DecoderConfig:
    fields = file.read(_StarCoder2Fields)
    config = base_config(file.with_defaults(hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True))
    bias = fields.use_bias
    return replace(
        with_window(config, fields.sliding_window),
        norm_eps=fields.norm_epsilon,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


_starcoder2_mlp = partial(plain_mlp, names=("c_fc", "c_proj"))
STARCODER2 = Architecture(configure_starcoder2, partial(pre_norm, norm=layer_norm, mlp=_starcoder2_mlp))


# -- Qwen2: Llama with biases on queries, keys and values; the upper layers may have a sliding window. Qwen3 is Qwen2's
# -- block with an RMS norm on each query and key head, and biases only if config.json has them


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


_qwen3_attention = partial(attention, heads_step=NormedHeads(rms_norm))
QWEN3 = Architecture(configure_qwen3, partial(pre_norm, attention=_qwen3_attention))
