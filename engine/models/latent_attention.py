"""Attention whose keys and values come from a short vector of each token (MLA, DeepSeek V2 and V3).

What the KV cache has is up to the kernels: the short vectors, or the keys and values of all heads, which take more room
but are read by the same kernel as any other attention's.
"""

from sluice.engine.models.config.decoder_config import LatentAttention
from sluice.engine.models.decoder import project_back, scores_of, tensors_prefix
from sluice.engine.models.kernels import Context, Kernels, LatentHeads, Scores, Tensor

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
