"""The layers of decoder graphs: norms, MLPs, rotary embedding. Activations are [num_tokens, features] f32 nodes. They
are written in the forms that OpenVINO's CPU plugin recognizes and fuses: RMS norm, rotation, matmul with bias and paged
attention each become one kernel."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op import Constant

from engine.runners.openvino.config.decoder_config import DecoderConfig
from engine.runners.openvino.config.rope import Rope, inverse_frequencies
from engine.runners.openvino.graph.adapters import AdapterInputs
from engine.runners.openvino.graph.nodes import (
    ACTIVATIONS,
    TO_THE_END,
    floating,
    ints32,
    ints64,
    num_features,
    part,
    scaled,
)
from engine.runners.openvino.graph.paged_attention import PagedInputs
from engine.runners.openvino.weights.text_model import TextModelTensors

_HEAD_AXIS = 3


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of this step's positions, [num_tokens, 1, 1, rotary_dim]."""

    cos: ov.Node
    sin: ov.Node


@dataclass(frozen=True, slots=True)
class Context:
    """The values that all layers of one graph read."""

    config: DecoderConfig
    weights: TextModelTensors
    paged: PagedInputs
    position_ids: ov.Node
    """[num_tokens] i32"""
    rotations: Mapping[Rope, Rotation]
    caches: tuple[tuple[ov.Node, ov.Node], ...]
    """Key and value cache of each layer."""
    adapters: AdapterInputs | None = None


Norm = Callable[[Context, ov.Node, str], ov.Node]
"""(context, x, name of the weight without its suffix) -> x normalized over its last axis."""
Mlp = Callable[[Context, ov.Node, int], ov.Node]
"""(context, x, layer) -> output of the layer's MLP."""


def linear(context: Context, x: ov.Node, name: str, num_out: int, *, bias: bool = False) -> ov.Node:
    """Return x @ weight.T (+ bias), with `num_out` features."""
    product = ops.matmul(x, context.weights.constant(f"{name}.weight", (num_out, num_features(x))), False, True)
    if context.adapters is not None:
        product = context.adapters.add_to(product, x, context.weights.module(name))
    if not bias:
        return product
    return ops.add(product, context.weights.constant(f"{name}.bias", (num_out,)))


# -- norms


def rms_norm(context: Context, x: ov.Node, name: str, eps: float | None = None) -> ov.Node:
    """Scale the last axis to a root mean square of 1, then by the weight. `eps` is the configured one by default."""
    weight = context.weights.constant(f"{name}.weight", (num_features(x),))
    return _rms_norm(x, weight, context.config.norm_eps if eps is None else eps)


def rms_norm_plus_one(context: Context, x: ov.Node, name: str) -> ov.Node:
    """Apply an RMS norm whose weight is stored minus 1 (Gemma)."""
    weight = values_of(context.weights.constant(f"{name}.weight", (num_features(x),)))
    return _rms_norm(x, ops.constant(weight + np.float32(1)), context.config.norm_eps)


def layer_norm(context: Context, x: ov.Node, name: str) -> ov.Node:
    """Normalize the last axis to mean 0 and variance 1, then scale and shift it."""
    return ops.add(layer_norm_unbiased(context, x, name), context.weights.constant(f"{name}.bias", (num_features(x),)))


def layer_norm_unbiased(context: Context, x: ov.Node, name: str) -> ov.Node:
    """Normalize the last axis to mean 0 and variance 1, then scale it."""
    return ops.multiply(_centred(context, x), context.weights.constant(f"{name}.weight", (num_features(x),)))


def layer_norm_by_head(context: Context, x: ov.Node, name: str) -> ov.Node:
    """Normalize heads [num_tokens, num_heads, 1, head_dim], each with a weight of its own."""
    _, num_heads, _, size = (axis.get_length() if axis.is_static else 0 for axis in x.output(0).partial_shape)
    weight = context.weights.constant(f"{name}.weight", (num_heads, size))
    return ops.multiply(_centred(context, x), ops.unsqueeze(weight, ints64([1])))


def _centred(context: Context, x: ov.Node) -> ov.Node:
    return ops.mvn(x, ints32([-1]), True, context.config.norm_eps, "inside_sqrt")


def _rms_norm(x: ov.Node, weight: ov.Node, eps: float) -> ov.Node:
    mean_square = ops.reduce_mean(ops.power(x, floating(2)), ints32([-1]), keep_dims=True)
    inverse = ops.divide(floating(1), ops.sqrt(ops.add(mean_square, floating(eps))))
    return ops.multiply(ops.multiply(x, inverse), weight)


def values_of(weight: ov.Node) -> np.ndarray:
    """Return a stored vector as f32 values, for computations at build time."""
    node = weight if isinstance(weight, Constant) else weight.input_value(0).get_node()
    values: np.ndarray = node.get_data(dtype=np.float32)
    return values


# -- MLPs


def gated_mlp(context: Context, x: ov.Node, layer: int) -> ov.Node:
    """Return down(activation(gate(x)) * up(x))."""
    return named_gated_mlp(context, x, f"model.layers.{layer}.mlp", context.config.intermediate_size)


def named_gated_mlp(context: Context, x: ov.Node, name: str, size: int) -> ov.Node:
    """Return the output of the gated MLP called `name`, which has `size` features between its matrices."""
    config = context.config
    gate = linear(context, x, f"{name}.gate_proj", size, bias=config.mlp_bias)
    up = linear(context, x, f"{name}.up_proj", size, bias=config.mlp_bias)
    wide = ops.multiply(activation(context, gate), up)
    return linear(context, wide, f"{name}.down_proj", config.hidden_size, bias=config.mlp_bias)


def fused_gated_mlp(context: Context, x: ov.Node, layer: int) -> ov.Node:
    """Return down(activation(gate(x)) * up(x)), with gate and up stored as one matrix."""
    config, name = context.config, f"model.layers.{layer}.mlp"
    size = config.intermediate_size
    both = linear(context, x, f"{name}.gate_up_proj", 2 * size, bias=config.mlp_bias)
    wide = ops.multiply(activation(context, part(both, 0, size, 1)), part(both, size, 2 * size, 1))
    return linear(context, wide, f"{name}.down_proj", config.hidden_size, bias=config.mlp_bias)


def plain_mlp(context: Context, x: ov.Node, layer: int, names: tuple[str, str] = ("up_proj", "down_proj")) -> ov.Node:
    """Return second(activation(first(x)))."""
    config, name = context.config, f"model.layers.{layer}.mlp"
    wide = linear(context, x, f"{name}.{names[0]}", config.intermediate_size, bias=config.mlp_bias)
    return linear(context, activation(context, wide), f"{name}.{names[1]}", config.hidden_size, bias=config.mlp_bias)


def activation(context: Context, x: ov.Node) -> ov.Node:
    """Apply the activation function that config.json names."""
    return ACTIVATIONS[context.config.activation](x)


# -- rotary embedding; heads are [num_tokens, num_heads, 1, head_dim] f32


def rotation(rope: Rope, head_dim: int, max_model_len: int, position_ids: ov.Node) -> Rotation:
    """Compute the rotation of positions [num_tokens] i32. Component i is paired with i + rotary_dim / 2."""
    frequencies = inverse_frequencies(rope, head_dim, max_model_len).reshape(1, 1, 1, -1)
    positions = ops.convert(ops.unsqueeze(position_ids, ints64([1, 2, 3])), "f32")
    half = ops.multiply(positions, ops.constant(frequencies))
    angles = ops.concat([half, half], -1)
    amplitude = rope.amplitude(max_model_len)
    return Rotation(scaled(ops.cos(angles), amplitude), scaled(ops.sin(angles), amplitude))


def rotate(x: ov.Node, rotation: Rotation) -> ov.Node:
    """Rotate the first components of each head, as many as the rotation has, and keep the others."""
    rotary_dim = num_features(rotation.cos)
    if rotary_dim == num_features(x):
        return _rotate_components(x, rotation, rotary_dim)
    rotated = _rotate_components(part(x, 0, rotary_dim, _HEAD_AXIS), rotation, rotary_dim)
    return ops.concat([rotated, part(x, rotary_dim, TO_THE_END, _HEAD_AXIS)], -1)


def uninterleaved(x: ov.Node, rotary_dim: int) -> ov.Node:
    """Reorder the first `rotary_dim` components of each head, even ones first."""
    order = [*range(0, rotary_dim, 2), *range(1, rotary_dim, 2), *range(rotary_dim, num_features(x))]
    return ops.gather(x, ints64(order), ints64([_HEAD_AXIS]))


def _rotate_components(x: ov.Node, rotation: Rotation, rotary_dim: int) -> ov.Node:
    middle = rotary_dim // 2
    first, second = part(x, 0, middle, _HEAD_AXIS), part(x, middle, TO_THE_END, _HEAD_AXIS)
    turned = ops.concat([ops.multiply(second, floating(-1)), first], -1)
    return ops.add(ops.multiply(x, rotation.cos), ops.multiply(turned, rotation.sin))
