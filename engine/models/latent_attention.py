"""Attention whose keys and values come from a short vector of each token (MLA, DeepSeek V2 and V3).

The cache has the keys and values of all heads, as any other attention: it is larger than one of the short vectors would
be, but read by the same kernel.
"""

from engine.models.config.decoder_config import LatentAttention
from engine.models.decoder import attend, project_back, tensors_prefix
from engine.models.kernels import Context, Heads, Tensor

_EPS = 1e-6
"""The eps of the short vectors' norms, whatever config.json says of the others."""


def latent_attention(context: Context, x: Tensor, layer: int) -> Tensor:
    """Make queries, keys and values, rotate a part of queries and keys, attend, project back."""
    config, kernels, latent = context.config, context.kernels, _latent_of(context)
    count, size = config.num_heads, latent.plain_dim + config.head_dim
    query = kernels.split_heads(_query(context, x, layer, count * size), size)
    plain_query, turned_query = kernels.part(query, 0, latent.plain_dim), kernels.part(query, latent.plain_dim, size)
    turned_query = _rotated(context, turned_query, layer)
    plain_key, turned_key, value = _key_and_value(context, x, layer)
    turned_key = kernels.repeat_heads(_rotated(context, turned_key, layer), count)
    key = kernels.concat((plain_key, turned_key))
    query = kernels.concat((plain_query, turned_query))
    query, key, value = (kernels.join_heads(each) for each in (query, key, value))
    heads = Heads(count, count, size, latent.value_dim)
    return project_back(context, attend(context, query, key, value, layer, heads), layer)


def _query(context: Context, x: Tensor, layer: int, num_out: int) -> Tensor:
    kernels, name, rank = context.kernels, tensors_prefix(layer), _latent_of(context).query_rank
    if rank is None:
        return kernels.linear(x, f"{name}.q_proj", num_out)
    short = kernels.linear(x, f"{name}.q_a_proj", rank, bias=context.config.qkv_bias)
    return kernels.linear(kernels.rms_norm(short, f"{name}.q_a_layernorm", _EPS), f"{name}.q_b_proj", num_out)


def _key_and_value(context: Context, x: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the plain part of the keys, the part of one head that is to be rotated, and the values."""
    config, kernels, latent, name = context.config, context.kernels, _latent_of(context), tensors_prefix(layer)
    rank, total = latent.kv_rank, latent.kv_rank + config.head_dim
    both = kernels.linear(x, f"{name}.kv_a_proj_with_mqa", total, bias=config.qkv_bias)
    short, turned = kernels.part(both, 0, rank), kernels.part(both, rank, total)
    size = latent.plain_dim + latent.value_dim
    short = kernels.rms_norm(short, f"{name}.kv_a_layernorm", _EPS)
    wide = kernels.split_heads(kernels.linear(short, f"{name}.kv_b_proj", config.num_heads * size), size)
    plain, value = kernels.part(wide, 0, latent.plain_dim), kernels.part(wide, latent.plain_dim, size)
    return plain, kernels.split_heads(turned, config.head_dim), value


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
