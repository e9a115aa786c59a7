"""Assembles decoders: grouped-query self-attention in the variants of the families, and the stacks of blocks."""

from collections.abc import Callable
from dataclasses import dataclass

import openvino as ov
from openvino import opset13 as ops

from engine.runners.openvino.config.config_file import ConfigFile
from engine.runners.openvino.config.decoder_config import DecoderConfig
from engine.runners.openvino.graph.layers import Context, Mlp, Norm, gated_mlp, linear, rms_norm, rotate, uninterleaved
from engine.runners.openvino.graph.nodes import floating, ints64, part, scaled
from engine.runners.openvino.graph.paged_attention import Heads, Scores, capped_attention, paged_attention
from engine.runners.openvino.weights.text_model import PLAIN_NAMES, TensorNames

QueryKeyValue = tuple[ov.Node, ov.Node, ov.Node]
Projection = Callable[[Context, ov.Node, int], QueryKeyValue]
"""(context, x, layer) -> query, key and value, each [num_tokens, heads * head_dim]."""
HeadStep = Callable[[Context, ov.Node, str], ov.Node]
"""(context, heads [num_tokens, num_heads, 1, head_dim], name of the layer's tensors + `.q` or `.k`) -> heads."""
Attention = Callable[[Context, ov.Node, int], ov.Node]
"""(context, x, layer) -> what is added to x."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The way a model family reads its `config.json`, and the way its decoder is built."""

    configure: Callable[[ConfigFile], DecoderConfig]
    decoder: Callable[[Context, ov.Node], ov.Node]
    """(context, token embeddings [num_tokens, hidden_size]) -> hidden states before the LM head, same shape."""
    names: TensorNames = PLAIN_NAMES


# -- self-attention


def attention(
    context: Context,
    x: ov.Node,
    layer: int,
    *,
    project: Projection | None = None,
    heads_step: HeadStep | None = None,
    last_step: HeadStep | None = None,
) -> ov.Node:
    """Project, rotate queries and keys, attend, project back. `project` replaces the usual three matrices; `heads_step`
    is applied to each query and key head before it is rotated, `last_step` after."""
    query, key, value = (project or projections)(context, x, layer)
    name = tensors_prefix(layer)
    query = _position(context, query, layer, f"{name}.q", heads_step, last_step)
    key = _position(context, key, layer, f"{name}.k", heads_step, last_step)
    heads = Heads(context.config.num_heads, context.config.num_kv_heads, context.config.head_dim)
    return project_back(context, attend(context, query, key, value, layer, heads), layer)


def attend(context: Context, query: ov.Node, key: ov.Node, value: ov.Node, layer: int, heads: Heads) -> ov.Node:
    """Return what each query head sees, [num_tokens, features]."""
    config, paged, caches = context.config, context.paged, context.caches[layer]
    scale, window = config.attention_scale, config.layers[layer].window
    if config.attention_softcap is None:
        sinks = _sinks(context, layer) if config.has_sinks else None
        return paged_attention(query, key, value, caches, paged, heads, scale=scale, window=window, sinks=sinks)
    scores = Scores(scale, config.attention_softcap, window)
    return capped_attention(query, key, value, caches, paged, heads, scores)


def project_back(context: Context, attended: ov.Node, layer: int) -> ov.Node:
    """Apply the output projection of attention."""
    name, config = f"{tensors_prefix(layer)}.o_proj", context.config
    return linear(context, attended, name, config.hidden_size, bias=config.output_bias)


def _sinks(context: Context, layer: int) -> ov.Node:
    stored = context.weights.constant(f"{tensors_prefix(layer)}.sinks", (context.config.num_heads,))
    return ops.reshape(stored, ints64([1, -1, 1, 1]), False)


def tensors_prefix(layer: int) -> str:
    """Return the common prefix of the names of a layer's attention weights."""
    return f"model.layers.{layer}.self_attn"


def projections(context: Context, x: ov.Node, layer: int) -> QueryKeyValue:
    """Project to query, key and value by a matrix each."""
    sizes, bias = _sizes(context), context.config.qkv_bias
    query, key, value = (
        linear(context, x, f"{tensors_prefix(layer)}.{letter}_proj", size, bias=bias)
        for letter, size in zip("qkv", sizes, strict=True)
    )
    return query, key, value


def fused_projections(context: Context, x: ov.Node, layer: int) -> QueryKeyValue:
    """Project to query, key and value by one matrix."""
    query, key, value = _sizes(context)
    total = query + key + value
    fused = linear(context, x, f"{tensors_prefix(layer)}.qkv_proj", total, bias=context.config.qkv_bias)
    return part(fused, 0, query, 1), part(fused, query, query + key, 1), part(fused, query + key, total, 1)


def heads_of_three(context: Context, x: ov.Node, layer: int) -> QueryKeyValue:
    """Project to query, key and value by one matrix, whose rows are those of each head in turn (GPT-NeoX)."""
    config = context.config
    heads, size = config.num_heads, config.head_dim
    fused = linear(context, x, f"{tensors_prefix(layer)}.qkv_proj", 3 * heads * size, bias=config.qkv_bias)
    by_head = ops.reshape(fused, ints64([0, heads, 3, size]), True)
    query, key, value = (ops.reshape(part(by_head, each, each + 1, 2), ints64([0, -1]), True) for each in range(3))
    return query, key, value


def normed_projections(norm: Norm) -> Projection:
    """Return a projection whose query and key are each normalized as a whole, over all heads."""

    def project(context: Context, x: ov.Node, layer: int) -> QueryKeyValue:
        query, key, value = projections(context, x, layer)
        name = tensors_prefix(layer)
        return norm(context, query, f"{name}.q_norm"), norm(context, key, f"{name}.k_norm"), value

    return project


def normed_heads(norm: Norm) -> HeadStep:
    """Return a step that normalizes each query and key head by itself."""
    return lambda context, heads, name: norm(context, heads, f"{name}_norm")


def optionally_normed_heads(norm: Norm) -> HeadStep:
    """Return a step that normalizes each query and key head, if config.json has that option."""
    return lambda context, heads, name: norm(context, heads, f"{name}_norm") if context.config.has_head_norms else heads


def paired_neighbours(context: Context, heads: ov.Node, name: str) -> ov.Node:
    """Reorder the components that are rotated, for families that rotate neighbours. Queries and keys are reordered
    alike, so their products do not change."""
    config = context.config
    rope = next(layer.rope for layer in config.layers if layer.rope is not None)
    return uninterleaved(heads, rope.rotary_dim(config.head_dim))


def grown_queries(context: Context, heads: ov.Node, name: str) -> ov.Node:
    """Scale query heads by their position; key heads do not change."""
    growth = context.config.query_growth
    if growth is None or not name.endswith(".q"):
        return heads
    turns = ops.floor(ops.divide(ops.convert(context.position_ids, "f32"), floating(growth.period)))
    factor = ops.add(ops.multiply(ops.log(ops.add(turns, floating(1))), floating(growth.rate)), floating(1))
    return ops.multiply(heads, ops.unsqueeze(factor, ints64([1, 2, 3])))


def _position(
    context: Context, x: ov.Node, layer: int, name: str, heads_step: HeadStep | None, last_step: HeadStep | None
) -> ov.Node:
    """Split queries or keys into heads, apply `heads_step`, rotate them and apply `last_step`. The shape does not
    change."""
    rope = context.config.layers[layer].rope
    if rope is None and heads_step is None and last_step is None:
        return x
    heads = ops.reshape(x, ints64([0, -1, 1, context.config.head_dim]), True)
    if heads_step is not None:
        heads = heads_step(context, heads, name)
    if rope is not None:
        heads = rotate(heads, context.rotations[rope])
    if last_step is not None:
        heads = last_step(context, heads, name)
    return ops.reshape(heads, ints64([0, -1]), True)


def _sizes(context: Context) -> tuple[int, int, int]:
    config = context.config
    kv_size = config.num_kv_heads * config.head_dim
    return config.num_heads * config.head_dim, kv_size, kv_size


# -- stacks of blocks, which differ in where the norms are


def pre_norm(
    context: Context, x: ov.Node, *, attention: Attention = attention, mlp: Mlp = gated_mlp, norm: Norm = rms_norm
) -> ov.Node:
    """Build Llama's stack: attention and MLP each read a normalized copy of the stream."""
    for layer in range(context.config.num_layers):
        name = f"model.layers.{layer}"
        x = _add(context, x, attention(context, norm(context, x, f"{name}.input_layernorm"), layer))
        x = _add(context, x, mlp(context, norm(context, x, f"{name}.post_attention_layernorm"), layer))
    return norm(context, x, "model.norm")


def post_norm(context: Context, x: ov.Node, *, attention: Attention, norm: Norm = rms_norm) -> ov.Node:
    """Build OLMo 2's stack: the outputs of attention and MLP are normalized before they are added."""
    for layer in range(context.config.num_layers):
        name = f"model.layers.{layer}"
        x = _add(context, x, norm(context, attention(context, x, layer), f"{name}.post_attention_layernorm"))
        x = _add(context, x, norm(context, gated_mlp(context, x, layer), f"{name}.post_feedforward_layernorm"))
    return norm(context, x, "model.norm")


def sandwich_norm(
    context: Context, x: ov.Node, *, norm: Norm, attention: Attention = attention, mlp: Mlp = gated_mlp
) -> ov.Node:
    """Build Gemma 2's stack: a norm before and after both attention and MLP."""
    for layer in range(context.config.num_layers):
        name = f"model.layers.{layer}"
        attended = attention(context, norm(context, x, f"{name}.input_layernorm"), layer)
        x = _add(context, x, norm(context, attended, f"{name}.post_attention_layernorm"))
        widened = mlp(context, norm(context, x, f"{name}.pre_feedforward_layernorm"), layer)
        x = _add(context, x, norm(context, widened, f"{name}.post_feedforward_layernorm"))
    return norm(context, x, "model.norm")


def parallel(
    context: Context,
    x: ov.Node,
    *,
    attention: Attention = attention,
    mlp: Mlp = gated_mlp,
    norm: Norm = rms_norm,
    mlp_norm: str = "input_layernorm",
) -> ov.Node:
    """Build GPT-J's stack: attention and MLP read the same stream, normalized once or each by itself."""
    for layer in range(context.config.num_layers):
        name = f"model.layers.{layer}"
        normed = norm(context, x, f"{name}.input_layernorm")
        read = normed if mlp_norm == "input_layernorm" else norm(context, x, f"{name}.{mlp_norm}")
        updates = ops.add(attention(context, normed, layer), mlp(context, read, layer))
        x = _add(context, x, updates)
    return norm(context, x, "model.norm")


def _add(context: Context, x: ov.Node, update: ov.Node) -> ov.Node:
    return ops.add(x, scaled(update, context.config.residual_scale))
