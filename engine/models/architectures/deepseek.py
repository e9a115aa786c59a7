"""DeepSeek V2 and V3 (with R1): latent attention, one expert for every token besides the chosen ones, and groups of
experts. The first layers have no experts. GLM 4.5 has V3's experts under the attention of Llama.

The keys and values of latent attention (MLA) come from a short vector of each token. What the KV cache has is up to the
kernels: the short vectors, or the keys and values of all heads, which take more room but are read by the same kernel as
any other attention's.
"""

import math
from functools import partial

import msgspec
from msgspec.structs import replace

from sluice.engine.models.architectures.experts import read_experts, with_experts
from sluice.engine.models.config.config_file import ConfigFile, PositiveInt, base_config, unsupported
from sluice.engine.models.config.decoder_config import DecoderConfig, LatentAttention
from sluice.engine.models.config.rope import YarnRope
from sluice.engine.models.decoder import (
    Architecture,
    attention,
    optionally_normed_heads,
    pre_norm,
    project_back,
    scores_of,
    tensors_prefix,
)
from sluice.engine.models.experts import experts_mlp, gated_experts, grouped_softmax_router, sigmoid_router
from sluice.engine.models.kernels import Context, Kernels, LatentHeads, Scores, Tensor
from sluice.engine.models.layers import rms_norm
from sluice.errors import invalid

_EPS = 1e-6
"""The eps of the short vectors' norms, whatever config.json says of the others."""


def latent_attention(context: Context, x: Tensor, layer: int) -> Tensor:
    """Make queries and short vectors, rotate a part of queries and keys, attend, project back."""
    config, kernels, latent = context.config, context.kernels, _latent_of(context)
    heads = LatentHeads(config.num_heads, latent.kv_rank, latent.plain_dim, config.head_dim, latent.value_dim)
    size = heads.plain_dim + heads.turned_dim
    query = kernels.split_heads(_query(context, x, layer, heads.num_heads * size), size)
    plain_query, turned_query = kernels.part(query, 0, heads.plain_dim), kernels.part(query, heads.plain_dim, size)
    query = kernels.concat((plain_query, _rotated(context, turned_query, layer)))
    short, turned = _short_and_turned(context, x, layer)
    name, scores = f"{tensors_prefix(layer)}.kv_b_proj", scores_of(context, layer)
    return project_back(context, kernels.attend_latent(query, short, turned, name, layer, heads, scores), layer)


def attend_with_all_heads(
    kernels: Kernels,
    query: Tensor,
    short: Tensor,
    turned: Tensor,
    name: str,
    layer: int,
    heads: LatentHeads,
    scores: Scores,
) -> Tensor:
    """Attend as `Kernels.attend_latent`, by `Kernels.attend` with the keys and values of all heads."""
    size = heads.plain_dim + heads.value_dim
    wide = kernels.split_heads(kernels.linear(short, name, heads.num_heads * size), size)
    plain, value = kernels.part(wide, 0, heads.plain_dim), kernels.part(wide, heads.plain_dim, size)
    key = kernels.concat((plain, kernels.repeat_heads(turned, heads.num_heads)))
    query, key, value = (kernels.join_heads(each) for each in (query, key, value))
    return kernels.attend(query, key, value, layer, heads.whole, scores)


def _query(context: Context, x: Tensor, layer: int, num_out: int) -> Tensor:
    kernels, name, rank = context.kernels, tensors_prefix(layer), _latent_of(context).query_rank
    if rank is None:
        return kernels.linear(x, f"{name}.q_proj", num_out)
    short = kernels.linear(x, f"{name}.q_a_proj", rank, bias=context.config.qkv_bias)
    return kernels.linear(kernels.rms_norm(short, f"{name}.q_a_layernorm", _EPS), f"{name}.q_b_proj", num_out)


def _short_and_turned(context: Context, x: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Return the short vectors, and the part of keys that is rotated, as one head."""
    config, kernels, name = context.config, context.kernels, tensors_prefix(layer)
    rank = _latent_of(context).kv_rank
    total = rank + config.head_dim
    both = kernels.linear(x, f"{name}.kv_a_proj_with_mqa", total, bias=config.qkv_bias)
    short, turned = kernels.part(both, 0, rank), kernels.part(both, rank, total)
    short = kernels.rms_norm(short, f"{name}.kv_a_layernorm", _EPS)
    return short, _rotated(context, kernels.split_heads(turned, config.head_dim), layer)


def _rotated(context: Context, heads: Tensor, layer: int) -> Tensor:
    rope = context.config.layers[layer].rope
    assert rope is not None, "latent attention has a rope"
    if _latent_of(context).pairs_neighbours:
        heads = context.kernels.uninterleave(heads, context.config.head_dim)
    return context.kernels.rotate(heads, rope)


def _latent_of(context: Context) -> LatentAttention:
    latent = context.config.latent
    assert latent is not None, "the configuration has no latent attention"
    return latent


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
