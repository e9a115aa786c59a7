"""DeepSeek V2 and V3 (with R1): latent attention, one expert for every token besides the chosen ones, and groups of
experts. The first layers have no experts. GLM 4.5 has V3's experts under the attention of Llama."""

import math
from functools import partial

import msgspec
from msgspec.structs import replace

from sluice.engine.models.architectures.experts import read_experts, with_experts
from sluice.engine.models.config.config_file import ConfigFile, PositiveInt, base_config, unsupported
from sluice.engine.models.config.decoder_config import DecoderConfig, LatentAttention
from sluice.engine.models.config.rope import YarnRope
from sluice.engine.models.decoder import Architecture, attention, optionally_normed_heads, pre_norm
from sluice.engine.models.experts import experts_mlp, gated_experts, grouped_softmax_router, sigmoid_router
from sluice.engine.models.latent_attention import latent_attention
from sluice.engine.models.layers import rms_norm
from sluice.errors import invalid


class _ExpertFields(msgspec.Struct, frozen=True, kw_only=True):
    moe_intermediate_size: PositiveInt
    first_k_dense_replace: int = 0
    n_shared_experts: PositiveInt = 1
    n_group: PositiveInt | None = None
    topk_group: PositiveInt | None = None
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = False


class _DeepSeekFields(_ExpertFields, frozen=True, kw_only=True):
    moe_layer_freq: int = 1
    q_lora_rank: PositiveInt | None = 1536
    kv_lora_rank: PositiveInt = 512
    qk_nope_head_dim: PositiveInt = 128
    qk_rope_head_dim: PositiveInt = 64
    v_head_dim: PositiveInt = 128
    rope_interleave: bool = True
    topk_method: str | None = None
    scoring_func: str | None = None


def _configure(file: ConfigFile, fields: _DeepSeekFields) -> DecoderConfig:
    """Read what both generations have in common."""
    if fields.moe_layer_freq != 1:
        raise unsupported(f"moe_layer_freq {fields.moe_layer_freq} is not supported; supported: 1")
    bias = file.flag("attention_bias")
    config = base_config(file.with_values(head_dim=fields.qk_rope_head_dim, num_key_value_heads=None))
    latent = LatentAttention(
        query_rank=fields.q_lora_rank,
        kv_rank=fields.kv_lora_rank,
        plain_dim=fields.qk_nope_head_dim,
        value_dim=fields.v_head_dim,
        pairs_neighbours=fields.rope_interleave,
    )
    config = replace(
        config,
        latent=latent,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=file.flag("mlp_bias"),
        attention_scale=_attention_scale(config, latent),
    )
    return _with_grouped_experts(file, config, fields)


def _with_grouped_experts(file: ConfigFile, config: DecoderConfig, fields: _ExpertFields) -> DecoderConfig:
    size = fields.moe_intermediate_size
    experts = replace(
        read_experts(file, size=size, is_normalized=fields.norm_topk_prob),
        shared_size=size * fields.n_shared_experts,
        weight_scale=fields.routed_scaling_factor,
        num_groups=fields.n_group or 1,
        num_chosen_groups=fields.topk_group or fields.n_group or 1,
    )
    if experts.num_experts % experts.num_groups:
        raise invalid(
            "model_path",
            f"config.json: n_routed_experts ({experts.num_experts}) must be a multiple of n_group "
            f"({experts.num_groups})",
        )
    return with_experts(config, experts, [layer >= fields.first_k_dense_replace for layer in range(config.num_layers)])


def _attention_scale(config: DecoderConfig, latent: LatentAttention) -> float:
    """Return the factor of the scores: with YaRN, that of the whole head is squared."""
    rope, scale = config.layers[0].rope, 1 / math.sqrt(latent.plain_dim + config.head_dim)
    if not isinstance(rope, YarnRope) or not rope.mscale_all_dim:
        return scale
    return scale * rope.scale_of_all() ** 2


# -- DeepSeek V2: shares of all experts, of the best groups in the larger models


def configure_deepseek_v2(file: ConfigFile) -> DecoderConfig:
    file = file.with_defaults(moe_intermediate_size=1407, n_shared_experts=2, n_routed_experts=64)
    fields = file.read(_DeepSeekFields)
    methods = ("greedy", "group_limited_greedy")
    method = fields.topk_method or "greedy"
    if method not in methods:
        raise unsupported(f"topk_method {method!r} is not supported; supported: {', '.join(methods)}")
    if (fields.scoring_func or "softmax") != "softmax":
        raise unsupported(f"scoring_func {fields.scoring_func!r} is not supported in this family; supported: softmax")
    groups = {"n_group": None, "topk_group": None} if method == "greedy" else {}
    return _configure(file, replace(fields, **groups))


_softmax_mlp = partial(experts_mlp, router=grouped_softmax_router, body=gated_experts, shared="shared_experts")
DEEPSEEK_V2 = Architecture(configure_deepseek_v2, partial(pre_norm, attention=latent_attention, mlp=_softmax_mlp))


# -- DeepSeek V3: sigmoids with a bias for the choice


def configure_deepseek_v3(file: ConfigFile) -> DecoderConfig:
    file = file.with_defaults(
        moe_intermediate_size=2048,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=3,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    fields = file.read(_DeepSeekFields)
    if (fields.scoring_func or "sigmoid") != "sigmoid":
        raise unsupported(f"scoring_func {fields.scoring_func!r} is not supported in this family; supported: sigmoid")
    return _configure(file, fields)


_sigmoid_mlp = partial(experts_mlp, router=sigmoid_router, body=gated_experts, shared="shared_experts")
DEEPSEEK_V3 = Architecture(configure_deepseek_v3, partial(pre_norm, attention=latent_attention, mlp=_sigmoid_mlp))


# -- GLM 4.5: half of each head is rotated, and may be normalized


def configure_glm4_moe(file: ConfigFile) -> DecoderConfig:
    file = file.with_defaults(
        rms_norm_eps=1e-5,
        moe_intermediate_size=1408,
        n_routed_experts=128,
        num_experts_per_tok=8,
        first_k_dense_replace=1,
        norm_topk_prob=True,
    )
    config = replace(
        base_config(file, partial=0.5),
        qkv_bias=file.flag("attention_bias"),
        has_head_norms=file.flag("use_qk_norm"),
    )
    return _with_grouped_experts(file, config, file.read(_ExpertFields))


_glm4_moe_attention = partial(attention, heads_step=optionally_normed_heads(rms_norm))
GLM4_MOE = Architecture(configure_glm4_moe, partial(pre_norm, attention=_glm4_moe_attention, mlp=_sigmoid_mlp))
