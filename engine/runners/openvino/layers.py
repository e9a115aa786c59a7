"""The pieces decoder graphs are made of. Activations are [num_tokens, features] f32 nodes throughout.

They are spelled the way OpenVINO's CPU plugin recognises and fuses: RMS norm, rotation, matmul with
bias and paged attention each become one kernel.
"""

from dataclasses import dataclass

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from engine.runners.openvino.attention import Heads, PagedInputs, paged_attention
from engine.runners.openvino.checkpoint import Checkpoint
from engine.runners.openvino.model_config import ModelConfig
from engine.runners.openvino.rope import inverse_frequencies

_TO_THE_END = np.iinfo(np.int64).max
_HEAD_AXIS = 3


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of this step's positions, [num_tokens, 1, 1, head_dim]."""

    cos: ov.Node
    sin: ov.Node


@dataclass(frozen=True, slots=True)
class Context:
    """What every layer of one graph reads."""

    config: ModelConfig
    weights: Checkpoint
    paged: PagedInputs
    rotation: Rotation
    caches: tuple[tuple[ov.Node, ov.Node], ...]
    """Key and value cache of each layer."""


def linear(context: Context, x: ov.Node, name: str, *, sizes: tuple[int, int], bias: bool = False) -> ov.Node:
    """x @ weight.T (+ bias); `sizes` are the features in and out."""
    num_in, num_out = sizes
    product = ops.matmul(x, context.weights.constant(f"{name}.weight", (num_out, num_in)), False, True)
    if not bias:
        return product
    return ops.add(product, context.weights.constant(f"{name}.bias", (num_out,)))


def rms_norm(context: Context, x: ov.Node, name: str, size: int) -> ov.Node:
    """Scale the last axis, which has `size` elements, to a root mean square of 1, then by the weight."""
    mean_square = ops.reduce_mean(ops.power(x, _float(2)), _ints32([-1]), keep_dims=True)
    inverse = ops.divide(_float(1), ops.sqrt(ops.add(mean_square, _float(context.config.rms_norm_eps))))
    return ops.multiply(ops.multiply(x, inverse), context.weights.constant(f"{name}.weight", (size,)))


def rotation(config: ModelConfig, position_ids: ov.Node) -> Rotation:
    """Angles from positions [num_tokens] i32, each component paired with the one half a head further on."""
    frequencies = inverse_frequencies(config.rope, config.head_dim).reshape(1, 1, 1, -1)
    positions = ops.convert(ops.unsqueeze(position_ids, _ints64([1, 2, 3])), "f32")
    half = ops.multiply(positions, ops.constant(frequencies))
    angles = ops.concat([half, half], -1)
    return Rotation(ops.cos(angles), ops.sin(angles))


def rotate(x: ov.Node, rotation: Rotation, head_dim: int) -> ov.Node:
    """Rotary position embedding of heads [num_tokens, num_heads, 1, head_dim]."""
    middle = head_dim // 2
    first, second = _slice(x, 0, middle), _slice(x, middle, _TO_THE_END)
    turned = ops.concat([ops.multiply(second, _float(-1)), first], -1)
    return ops.add(ops.multiply(x, rotation.cos), ops.multiply(turned, rotation.sin))


def attention(context: Context, x: ov.Node, layer: int, *, normed_heads: bool = False) -> ov.Node:
    """Grouped-query self-attention over the paged cache.

    `normed_heads`: each query and key head goes through its own RMS norm before it is rotated.
    """
    config, name = context.config, f"model.layers.{layer}.self_attn"
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def project(part: str, num_in: int, num_out: int, y: ov.Node) -> ov.Node:
        return linear(context, y, f"{name}.{part}_proj", sizes=(num_in, num_out), bias=config.attention_bias)

    def positioned(part: str, size: int) -> ov.Node:
        heads = ops.reshape(project(part, config.hidden_size, size, x), _ints64([0, -1, 1, config.head_dim]), True)
        if normed_heads:
            heads = rms_norm(context, heads, f"{name}.{part}_norm", config.head_dim)
        return _flatten_heads(rotate(heads, context.rotation, config.head_dim))

    attended = paged_attention(
        positioned("q", query_size),
        positioned("k", kv_size),
        project("v", config.hidden_size, kv_size, x),
        context.caches[layer],
        context.paged,
        Heads(config.num_heads, config.num_kv_heads, config.head_dim),
    )
    return project("o", query_size, config.hidden_size, attended)


def mlp(context: Context, x: ov.Node, layer: int) -> ov.Node:
    """SwiGLU: down(silu(gate(x)) * up(x))."""
    config, name = context.config, f"model.layers.{layer}.mlp"
    widen, narrow = (config.hidden_size, config.intermediate_size), (config.intermediate_size, config.hidden_size)
    gate = linear(context, x, f"{name}.gate_proj", sizes=widen, bias=config.mlp_bias)
    up = linear(context, x, f"{name}.up_proj", sizes=widen, bias=config.mlp_bias)
    return linear(context, ops.multiply(ops.swish(gate), up), f"{name}.down_proj", sizes=narrow, bias=config.mlp_bias)


def _flatten_heads(x: ov.Node) -> ov.Node:
    return ops.reshape(x, _ints64([0, -1]), True)


def _slice(x: ov.Node, start: int, stop: int) -> ov.Node:
    return ops.slice(x, _ints64([start]), _ints64([stop]), _ints64([1]), _ints64([_HEAD_AXIS]))


def _float(value: float) -> ov.Node:
    return ops.constant(np.float32(value))


def _ints32(values: list[int]) -> ov.Node:
    return ops.constant(np.array(values, np.int32))


def _ints64(values: list[int]) -> ov.Node:
    return ops.constant(np.array(values, np.int64))
