"""Attention whose keys and values come from a short vector of each token (MLA, DeepSeek V2 and V3).

The cache has the keys and values of all heads, as any other attention: it is larger than one of the short vectors would
be, but read by the same kernel.
"""

import openvino as ov
from openvino import opset13 as ops

from engine.runners.openvino.config.decoder_config import LatentAttention
from engine.runners.openvino.graph.decoder import attend, project_back, tensors_prefix
from engine.runners.openvino.graph.layers import Context, linear, rms_norm, rotate, uninterleaved
from engine.runners.openvino.graph.nodes import TO_THE_END, floating, ints64, part
from engine.runners.openvino.graph.paged_attention import Heads

_EPS = 1e-6
"""Of the norms of the short vectors, whatever config.json says of the others."""
_COMPONENTS = 3
"""The axis of a head's components."""


def latent_attention(context: Context, x: ov.Node, layer: int) -> ov.Node:
    """Make queries, keys and values, rotate a part of queries and keys, attend, project back."""
    config, latent = context.config, _latent_of(context)
    count, size = config.num_heads, latent.plain_dim + config.head_dim
    query = _split_heads(_query(context, x, layer, count * size), size)
    plain_query, turned_query = _parts(query, latent.plain_dim)
    turned_query = _rotated(context, turned_query, layer)
    plain_key, turned_key, value = _key_and_value(context, x, layer)
    turned_key = ops.tile(_rotated(context, turned_key, layer), ints64([1, count, 1, 1]))
    key = ops.concat([plain_key, turned_key], _COMPONENTS)
    query = ops.concat([plain_query, turned_query], _COMPONENTS)
    value_dim = latent.value_dim
    if latent.pads_values:
        value, value_dim = _padded(value, size - value_dim), size
    heads = Heads(count, count, size, value_dim)
    attended = attend(context, _joined(query), _joined(key), _joined(value), layer, heads)
    if latent.pads_values:
        attended = _joined(part(_split_heads(attended, size), 0, latent.value_dim, _COMPONENTS))
    return project_back(context, attended, layer)


def _padded(heads: ov.Node, added: int) -> ov.Node:
    """Append zeros to each head."""
    return ops.pad(heads, ints64([0, 0, 0, 0]), ints64([0, 0, 0, added]), "constant", floating(0))


def _query(context: Context, x: ov.Node, layer: int, num_out: int) -> ov.Node:
    name, rank = tensors_prefix(layer), _latent_of(context).query_rank
    if rank is None:
        return linear(context, x, f"{name}.q_proj", num_out)
    short = linear(context, x, f"{name}.q_a_proj", rank, bias=context.config.qkv_bias)
    return linear(context, rms_norm(context, short, f"{name}.q_a_layernorm", _EPS), f"{name}.q_b_proj", num_out)


def _key_and_value(context: Context, x: ov.Node, layer: int) -> tuple[ov.Node, ov.Node, ov.Node]:
    """Return the plain part of the keys, the part of one head that is to be rotated, and the values."""
    config, latent, name = context.config, _latent_of(context), tensors_prefix(layer)
    both = linear(context, x, f"{name}.kv_a_proj_with_mqa", latent.kv_rank + config.head_dim, bias=config.qkv_bias)
    short, turned = part(both, 0, latent.kv_rank, 1), part(both, latent.kv_rank, TO_THE_END, 1)
    size = latent.plain_dim + latent.value_dim
    short = rms_norm(context, short, f"{name}.kv_a_layernorm", _EPS)
    wide = _split_heads(linear(context, short, f"{name}.kv_b_proj", config.num_heads * size), size)
    plain, value = _parts(wide, latent.plain_dim)
    return plain, _split_heads(turned, config.head_dim), value


def _rotated(context: Context, heads: ov.Node, layer: int) -> ov.Node:
    rope = context.config.layers[layer].rope
    assert rope is not None, "latent attention has a rope"
    if _latent_of(context).pairs_neighbours:
        heads = uninterleaved(heads, context.config.head_dim)
    return rotate(heads, context.rotations[rope])


def _split_heads(x: ov.Node, size: int) -> ov.Node:
    """Return [num_tokens, num_heads, 1, size]."""
    return ops.reshape(x, ints64([0, -1, 1, size]), True)


def _parts(heads: ov.Node, first: int) -> tuple[ov.Node, ov.Node]:
    return part(heads, 0, first, _COMPONENTS), part(heads, first, TO_THE_END, _COMPONENTS)


def _joined(heads: ov.Node) -> ov.Node:
    return ops.reshape(heads, ints64([0, -1]), True)


def _latent_of(context: Context) -> LatentAttention:
    latent = context.config.latent
    assert latent is not None, "the configuration has no latent attention"
    return latent
