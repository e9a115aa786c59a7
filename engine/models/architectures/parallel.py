"""Families whose attention and MLP read the same stream, in parallel: GPT-NeoX, Phi, Cohere; and GPT-2, whose blocks
GPT-NeoX has otherwise."""

from functools import partial

import msgspec
from msgspec.structs import replace

from sluice.engine.models.config.config_file import (
    SLIDING,
    ConfigFile,
    PositiveInt,
    base_config,
    every_nth_full,
    make_layers,
    unsupported,
)
from sluice.engine.models.config.decoder_config import DecoderConfig
from sluice.engine.models.decoder import (
    Architecture,
    attention,
    fused_projections,
    heads_of_three,
    optionally_normed_heads,
    paired_neighbours,
    parallel,
    pre_norm,
)
from sluice.engine.models.kernels import Context, Tensor
from sluice.engine.models.layers import (
    layer_norm,
    layer_norm_by_head,
    layer_norm_unbiased,
    plain_mlp,
)
from sluice.engine.models.weights.names import TensorNames


def _with_biases(config: DecoderConfig, norm_eps: float) -> DecoderConfig:
    return replace(config, norm_eps=norm_eps, qkv_bias=True, output_bias=True, mlp_bias=True)


# -- GPT-2: embeddings of positions, fused and transposed matrices


class _Gpt2Fields(msgspec.Struct, frozen=True):
    n_positions: PositiveInt = 1024
    n_embd: PositiveInt = 768
    n_layer: PositiveInt = 12
    n_head: PositiveInt = 12
    n_inner: PositiveInt | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False


def configure_gpt2(file: ConfigFile) -> DecoderConfig:
    fields = file.read(_Gpt2Fields)
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if getattr(fields, name):
            raise unsupported(f"{name} true is not supported; supported: false")
    file = file.with_defaults(vocab_size=50_257, tie_word_embeddings=True).with_values(
        hidden_size=fields.n_embd,
        intermediate_size=fields.n_inner or 4 * fields.n_embd,
        num_hidden_layers=fields.n_layer,
        num_attention_heads=fields.n_head,
        num_key_value_heads=None,
        head_dim=None,
        max_position_embeddings=fields.n_positions,
        hidden_act=fields.activation_function,
    )
    config = _with_biases(base_config(file), fields.layer_norm_epsilon)
    return replace(
        config,
        layers=tuple(replace(layer, rope=None) for layer in config.layers),
        has_position_embeddings=True,
        attention_scale=config.attention_scale if fields.scale_attn_weights else 1.0,
    )


_GPT2_NAMES = TensorNames(
    body="transformer.",
    layers="h",
    norm="ln_f",
    parts={
        "embed_tokens": "wte",
        "embed_positions": "wpe",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "self_attn.qkv_proj": "attn.c_attn",
        "self_attn.o_proj": "attn.c_proj",
        "up_proj": "c_fc",
        "down_proj": "c_proj",
    },
)
_fused_attention = partial(attention, project=fused_projections)
_gpt2_decoder = partial(pre_norm, norm=layer_norm, attention=_fused_attention, mlp=plain_mlp)
GPT2 = Architecture(configure_gpt2, _gpt2_decoder, _GPT2_NAMES)


# -- GPT-NeoX: a norm each for attention and MLP, a matrix for the queries, keys and values of each head


class _GptNeoXFields(msgspec.Struct, frozen=True):
    layer_norm_eps: float = 1e-5
    use_parallel_residual: bool = True
    attention_bias: bool = True
    rotary_pct: float = 0.25
    rotary_emb_base: float = 10_000.0


def configure_gpt_neox(file: ConfigFile) -> DecoderConfig:
    fields = file.read(_GptNeoXFields)
    file = file.with_defaults(hidden_act="gelu").with_values(num_key_value_heads=None, head_dim=None)
    config = base_config(file, theta=fields.rotary_emb_base, partial=fields.rotary_pct)
    bias = fields.attention_bias
    config = replace(_with_biases(config, fields.layer_norm_eps), qkv_bias=bias, output_bias=bias)
    return replace(config, is_parallel=fields.use_parallel_residual)


def _gpt_neox_decoder(context: Context, x: Tensor) -> Tensor:
    if context.config.is_parallel:
        norm = "post_attention_layernorm"
        return parallel(context, x, attention=_neox_attention, mlp=plain_mlp, norm=layer_norm, mlp_norm=norm)
    return pre_norm(context, x, attention=_neox_attention, mlp=plain_mlp, norm=layer_norm)


_neox_attention = partial(attention, project=heads_of_three)


_GPT_NEOX_NAMES = TensorNames(
    body="gpt_neox.",
    head="embed_out.",
    norm="final_layer_norm",
    parts={
        "embed_tokens": "embed_in",
        "self_attn.heads_qkv_proj": "attention.query_key_value",
        "self_attn.o_proj": "attention.dense",
        "up_proj": "dense_h_to_4h",
        "down_proj": "dense_4h_to_h",
    },
)
GPT_NEOX = Architecture(configure_gpt_neox, _gpt_neox_decoder, _GPT_NEOX_NAMES)


# -- Phi 1 to 2: one norm for attention and MLP, biases everywhere, partly rotated heads


class _PhiFields(msgspec.Struct, frozen=True):
    layer_norm_eps: float = 1e-5
    qk_layernorm: bool = False


def configure_phi(file: ConfigFile) -> DecoderConfig:
    fields = file.read(_PhiFields)
    config = base_config(file.with_defaults(hidden_act="gelu_new"), partial=0.5)
    config = _with_biases(config, fields.layer_norm_eps)
    return replace(config, head_bias=True, has_head_norms=fields.qk_layernorm)


_PHI_NAMES = TensorNames(
    norm="final_layernorm",
    parts={
        "self_attn.o_proj": "self_attn.dense",
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
        "up_proj": "fc1",
        "down_proj": "fc2",
    },
)
_phi_attention = partial(attention, heads_step=optionally_normed_heads(layer_norm))
_phi_decoder = partial(parallel, norm=layer_norm, attention=_phi_attention, mlp=plain_mlp)
PHI = Architecture(configure_phi, _phi_decoder, _PHI_NAMES)


# -- Cohere: one norm without bias, neighbours rotated, scaled logits. Cohere 2: only layers with a window rotate


class _CohereFields(msgspec.Struct, frozen=True):
    layer_norm_eps: float = 1e-5
    logit_scale: float = 0.0625
    use_qk_norm: bool = False
    sliding_window: int | None = 4096
    sliding_window_pattern: PositiveInt = 4
    layer_types: list[str] | None = None


def configure_cohere(file: ConfigFile) -> DecoderConfig:
    fields, bias = file.read(_CohereFields), file.flag("attention_bias")
    return replace(
        base_config(file.with_defaults(tie_word_embeddings=True)),
        norm_eps=fields.layer_norm_eps,
        logit_scale=fields.logit_scale,
        qkv_bias=bias,
        output_bias=bias,
        has_head_norms=fields.use_qk_norm,
    )


def configure_cohere2(file: ConfigFile) -> DecoderConfig:
    config, fields = configure_cohere(file), file.read(_CohereFields)
    kinds = fields.layer_types or every_nth_full(config.num_layers, fields.sliding_window_pattern)
    layers = make_layers(config, kinds, fields.sliding_window)
    return replace(
        config,
        layers=tuple(
            layer if kind == SLIDING else replace(layer, rope=None) for layer, kind in zip(layers, kinds, strict=False)
        ),
    )


_norm_cohere_heads = optionally_normed_heads(layer_norm_by_head)


def _cohere_heads(context: Context, heads: Tensor, name: str) -> Tensor:
    return paired_neighbours(context, _norm_cohere_heads(context, heads, name), name)


_cohere_attention = partial(attention, heads_step=_cohere_heads)
_cohere_decoder = partial(parallel, norm=layer_norm_unbiased, attention=_cohere_attention)
COHERE = Architecture(configure_cohere, _cohere_decoder)
COHERE2 = Architecture(configure_cohere2, _cohere_decoder)
