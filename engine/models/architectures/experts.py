"""Families with mixtures of experts in the place of MLPs: Qwen2-MoE, Qwen3-MoE, Mixtral, Granite-MoE,
OLMoE, Phi-MoE and gpt-oss."""

from functools import partial

import msgspec
from msgspec.structs import replace

from sluice.engine.models.architectures.llama import (
    configure_granite,
    configure_mistral,
    configure_qwen2,
    configure_qwen3,
)
from sluice.engine.models.config.config_file import (
    ConfigFile,
    PositiveInt,
    base_config,
    every_nth_full,
    make_layers,
    rope_section,
    unsupported,
    with_window,
)
from sluice.engine.models.config.decoder_config import DecoderConfig, Experts
from sluice.engine.models.decoder import (
    Architecture,
    NormedHeads,
    QueryKeyValue,
    attention,
    normed_projections,
    pre_norm,
)
from sluice.engine.models.experts import (
    clamped_experts,
    experts_mlp,
    gated_experts,
    softmax_router,
    sparse_mixer,
)
from sluice.engine.models.kernels import Context, Tensor
from sluice.engine.models.layers import layer_norm, rms_norm
from sluice.errors import invalid


def with_experts(config: DecoderConfig, experts: Experts, has_experts: list[bool] | None = None) -> DecoderConfig:
    """Return the configuration with experts in the layers that have them, by default all. Raises UNIMPLEMENTED for an
    activation that experts do not have, INVALID if a token has more experts than there are."""
    if config.activation not in ("silu", "swish"):
        raise unsupported(f"hidden_act {config.activation!r} is not supported in experts; supported: silu")
    if experts.num_chosen > experts.num_experts:
        raise invalid(
            "model_path",
            f"config.json: num_experts_per_tok is {experts.num_chosen}, but there are {experts.num_experts} experts",
        )
    kinds = has_experts or [True] * config.num_layers
    layers = tuple(replace(layer, has_experts=each) for layer, each in zip(config.layers, kinds, strict=True))
    return replace(config, layers=layers, experts=experts)


class _CountFields(msgspec.Struct, frozen=True):
    """The number of experts, under the names that it has had in files of the same family, and those of a token."""

    num_experts_per_tok: PositiveInt
    num_experts: PositiveInt | None = None
    num_local_experts: PositiveInt | None = None
    n_routed_experts: PositiveInt | None = None


def read_experts(file: ConfigFile, *, size: int, is_normalized: bool) -> Experts:
    """Read the numbers of experts. Raises INVALID if they are missing."""
    fields = file.read(_CountFields)
    count = fields.num_experts or fields.num_local_experts or fields.n_routed_experts
    if count is None:
        raise invalid("model_path", f"{file.path} has neither num_experts nor num_local_experts nor n_routed_experts")
    return Experts(num_experts=count, num_chosen=fields.num_experts_per_tok, size=size, is_normalized=is_normalized)


# -- Qwen3-MoE: Qwen3 with experts in all layers, or in every nth


class _Qwen3MoeFields(msgspec.Struct, frozen=True):
    moe_intermediate_size: PositiveInt = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: PositiveInt = 1
    mlp_only_layers: list[int] | None = None


def configure_qwen3_moe(file: ConfigFile) -> DecoderConfig:
    file = file.with_defaults(intermediate_size=6144, num_key_value_heads=4, num_experts_per_tok=8)
    fields, config = file.read(_Qwen3MoeFields), configure_qwen3(file)
    experts = read_experts(file, size=fields.moe_intermediate_size, is_normalized=fields.norm_topk_prob)
    return with_experts(config, experts, _sparse_layers(config, fields))


def _sparse_layers(config: DecoderConfig, fields: _Qwen3MoeFields) -> list[bool]:
    dense, step = set(fields.mlp_only_layers or ()), fields.decoder_sparse_step
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(config.num_layers)]


_qwen3_attention = partial(attention, heads_step=NormedHeads(rms_norm))
_gated_mlp = partial(experts_mlp, router=softmax_router, body=gated_experts)
QWEN3_MOE = Architecture(configure_qwen3_moe, partial(pre_norm, attention=_qwen3_attention, mlp=_gated_mlp))


# -- Qwen2-MoE: Qwen2 with experts, and one with a gate for every token


class _Qwen2MoeFields(_Qwen3MoeFields, frozen=True):
    moe_intermediate_size: PositiveInt = 1408
    shared_expert_intermediate_size: PositiveInt = 5632
    qkv_bias: bool = True


def configure_qwen2_moe(file: ConfigFile) -> DecoderConfig:
    file = file.with_defaults(intermediate_size=5632, num_experts_per_tok=4, num_experts=60)
    fields = file.read(_Qwen2MoeFields)
    config = replace(configure_qwen2(file), qkv_bias=fields.qkv_bias)
    experts = read_experts(file, size=fields.moe_intermediate_size, is_normalized=fields.norm_topk_prob)
    experts = replace(experts, shared_size=fields.shared_expert_intermediate_size)
    return with_experts(config, experts, _sparse_layers(config, fields))


_qwen2_mlp = partial(_gated_mlp, shared="shared_expert", has_shared_gate=True)
QWEN2_MOE = Architecture(configure_qwen2_moe, partial(pre_norm, mlp=_qwen2_mlp))


# -- Mixtral: Mistral with experts in all layers. Granite-MoE: Granite with experts in all layers. OLMoE: normalized
#    queries and keys, which may be clipped


def configure_mixtral(file: ConfigFile) -> DecoderConfig:
    file = file.with_defaults(rms_norm_eps=1e-5, sliding_window=None, num_experts_per_tok=2, num_local_experts=8)
    config = configure_mistral(file)
    return with_experts(config, read_experts(file, size=config.intermediate_size, is_normalized=True))


_block_mlp = partial(_gated_mlp, block="block_sparse_moe")
MIXTRAL = Architecture(configure_mixtral, partial(pre_norm, mlp=_block_mlp))


def configure_granite_moe(file: ConfigFile) -> DecoderConfig:
    file = file.with_defaults(num_experts_per_tok=2, num_local_experts=8)
    config = configure_granite(file)
    return with_experts(config, read_experts(file, size=config.intermediate_size, is_normalized=True))


_granite_router = partial(softmax_router, weight="router.layer")
_granite_mlp = partial(experts_mlp, router=_granite_router, body=gated_experts, block="block_sparse_moe")
GRANITE_MOE = Architecture(configure_granite_moe, partial(pre_norm, mlp=_granite_mlp))


def configure_olmoe(file: ConfigFile) -> DecoderConfig:
    file = file.with_defaults(rms_norm_eps=1e-5, num_experts_per_tok=8, num_experts=64)
    config, bias = base_config(file), file.flag("attention_bias")
    clip = file.read(_OlmoeFields).clip_qkv
    config = replace(config, qkv_bias=bias, output_bias=bias, qkv_clip=clip)
    experts = read_experts(file, size=config.intermediate_size, is_normalized=file.flag("norm_topk_prob"))
    return with_experts(config, experts)


class _OlmoeFields(msgspec.Struct, frozen=True):
    clip_qkv: float | None = None


def _clipped_projections(context: Context, x: Tensor, layer: int) -> QueryKeyValue:
    query, key, value = _normed_projections(context, x, layer)
    clip = context.config.qkv_clip
    if clip is None:
        return query, key, value
    clamp = context.kernels.clamp
    return clamp(query, -clip, clip), clamp(key, -clip, clip), clamp(value, -clip, clip)


_normed_projections = normed_projections(rms_norm)
_olmoe_attention = partial(attention, project=_clipped_projections)
OLMOE = Architecture(configure_olmoe, partial(pre_norm, attention=_olmoe_attention, mlp=_gated_mlp))


# -- Phi-MoE: Mixtral with layer norms, biases, and a router of its own


class _PhiMoeFields(msgspec.Struct, frozen=True):
    router_jitter_noise: float = 0.01
    lm_head_bias: bool = False
    sliding_window: int | None = None


def configure_phimoe(file: ConfigFile) -> DecoderConfig:
    file = file.with_defaults(rms_norm_eps=1e-5, num_experts_per_tok=2, num_local_experts=16)
    fields, bias = file.read(_PhiMoeFields), file.flag("attention_bias")
    config = with_window(base_config(file, theta=1_000_000.0), fields.sliding_window)
    config = replace(config, qkv_bias=bias, output_bias=bias, head_bias=fields.lm_head_bias)
    experts = read_experts(file, size=config.intermediate_size, is_normalized=False)
    if experts.num_chosen != 2:
        raise unsupported(f"num_experts_per_tok {experts.num_chosen} is not supported in this family; supported: 2")
    return with_experts(config, replace(experts, jitter=fields.router_jitter_noise))


_phimoe_mlp = partial(experts_mlp, router=sparse_mixer, body=gated_experts, block="block_sparse_moe")
PHI_MOE = Architecture(configure_phimoe, partial(pre_norm, norm=layer_norm, mlp=_phimoe_mlp))


# -- gpt-oss: sinks in the attention, a sliding window in every second layer, clamped experts with biases


class _GptOssFields(msgspec.Struct, frozen=True):
    sliding_window: int | None = 128
    layer_types: list[str] | None = None
    attention_bias: bool = True
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0


_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def configure_gpt_oss(file: ConfigFile) -> DecoderConfig:
    file = file.with_defaults(head_dim=64, rms_norm_eps=1e-5, num_experts_per_tok=4)
    if not rope_section(file.fields):
        file = file.with_values(rope_scaling=_GPT_OSS_ROPE)
    fields, config = file.read(_GptOssFields), base_config(file, theta=150_000.0)
    kinds = fields.layer_types or every_nth_full(config.num_layers, 2)
    config = replace(
        config,
        layers=make_layers(config, kinds, fields.sliding_window),
        qkv_bias=fields.attention_bias,
        output_bias=fields.attention_bias,
        has_sinks=True,
    )
    experts = read_experts(file, size=config.intermediate_size, is_normalized=True)
    clamped = replace(experts, activation_limit=fields.swiglu_limit, activation_slope=fields.swiglu_alpha)
    return with_experts(config, clamped)


_gpt_oss_router = partial(softmax_router, weight="router", bias=True)
_gpt_oss_mlp = partial(experts_mlp, router=_gpt_oss_router, body=clamped_experts)
GPT_OSS = Architecture(configure_gpt_oss, partial(pre_norm, mlp=_gpt_oss_mlp))
