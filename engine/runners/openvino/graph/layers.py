"""The pieces decoder graphs are made of. Activations are [num_tokens, features] f32 nodes throughout.

They are spelled the way OpenVINO's CPU plugin recognises and fuses: RMS norm, rotation, matmul with
bias and paged attention each become one kernel.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op import Constant

from engine.runners.openvino.config.decoder_config import ModelConfig
from engine.runners.openvino.config.rope import Rope
from engine.runners.openvino.graph.activations import ACTIVATIONS
from engine.runners.openvino.graph.attention import PagedInputs
from engine.runners.openvino.graph.nodes import floating, ints32, num_features, part
from engine.runners.openvino.graph.rotation import Rotation
from engine.runners.openvino.weights.tensors import Tensors


@dataclass(frozen=True, slots=True)
class Context:
    """What every layer of one graph reads."""

    config: ModelConfig
    weights: Tensors
    paged: PagedInputs
    position_ids: ov.Node
    """[num_tokens] i32"""
    rotations: Mapping[Rope, Rotation]
    caches: tuple[tuple[ov.Node, ov.Node], ...]
    """Key and value cache of each layer."""


Norm = Callable[[Context, ov.Node, str], ov.Node]
"""(context, x, name of the weight without its ending) -> x normalised over its last axis."""
Mlp = Callable[[Context, ov.Node, int], ov.Node]
"""(context, x, layer) -> x, through the layer's feed-forward part."""


def linear(context: Context, x: ov.Node, name: str, num_out: int, *, bias: bool = False) -> ov.Node:
    """x @ weight.T (+ bias), with `num_out` features."""
    product = ops.matmul(x, context.weights.constant(f"{name}.weight", (num_out, num_features(x))), False, True)
    if not bias:
        return product
    return ops.add(product, context.weights.constant(f"{name}.bias", (num_out,)))


def rms_norm(context: Context, x: ov.Node, name: str) -> ov.Node:
    """Scale the last axis to a root mean square of 1, then by the weight."""
    return _rms_norm(context, x, context.weights.constant(f"{name}.weight", (num_features(x),)))


def rms_norm_plus_one(context: Context, x: ov.Node, name: str) -> ov.Node:
    """RMS norm whose stored weight is what is added to 1 (Gemma)."""
    weight = _values(context.weights.constant(f"{name}.weight", (num_features(x),)))
    return _rms_norm(context, x, ops.constant(weight + np.float32(1)))


def layer_norm(context: Context, x: ov.Node, name: str) -> ov.Node:
    """Bring the last axis to mean 0 and variance 1, then scale and shift it."""
    shape = (num_features(x),)
    normed = ops.mvn(x, ints32([-1]), True, context.config.norm_eps, "inside_sqrt")
    scaled = ops.multiply(normed, context.weights.constant(f"{name}.weight", shape))
    return ops.add(scaled, context.weights.constant(f"{name}.bias", shape))


def gated_mlp(context: Context, x: ov.Node, layer: int) -> ov.Node:
    """down(activation(gate(x)) * up(x))."""
    config, name = context.config, f"model.layers.{layer}.mlp"
    gate = linear(context, x, f"{name}.gate_proj", config.intermediate_size, bias=config.mlp_bias)
    up = linear(context, x, f"{name}.up_proj", config.intermediate_size, bias=config.mlp_bias)
    wide = ops.multiply(activation(context, gate), up)
    return linear(context, wide, f"{name}.down_proj", config.hidden_size, bias=config.mlp_bias)


def fused_gated_mlp(context: Context, x: ov.Node, layer: int) -> ov.Node:
    """As `gated_mlp`, with gate and up stored as one matrix."""
    config, name = context.config, f"model.layers.{layer}.mlp"
    size = config.intermediate_size
    both = linear(context, x, f"{name}.gate_up_proj", 2 * size, bias=config.mlp_bias)
    wide = ops.multiply(activation(context, part(both, 0, size, 1)), part(both, size, 2 * size, 1))
    return linear(context, wide, f"{name}.down_proj", config.hidden_size, bias=config.mlp_bias)


def plain_mlp(context: Context, x: ov.Node, layer: int, names: tuple[str, str] = ("up_proj", "down_proj")) -> ov.Node:
    """second(activation(first(x)))."""
    config, name = context.config, f"model.layers.{layer}.mlp"
    wide = linear(context, x, f"{name}.{names[0]}", config.intermediate_size, bias=config.mlp_bias)
    return linear(context, activation(context, wide), f"{name}.{names[1]}", config.hidden_size, bias=config.mlp_bias)


def activation(context: Context, x: ov.Node) -> ov.Node:
    """The function that config.json names."""
    return ACTIVATIONS[context.config.activation](x)


def _rms_norm(context: Context, x: ov.Node, weight: ov.Node) -> ov.Node:
    mean_square = ops.reduce_mean(ops.power(x, floating(2)), ints32([-1]), keep_dims=True)
    inverse = ops.divide(floating(1), ops.sqrt(ops.add(mean_square, floating(context.config.norm_eps))))
    return ops.multiply(ops.multiply(x, inverse), weight)


def _values(weight: ov.Node) -> np.ndarray:
    """A stored vector as f32 numbers, for what must be worked out before the graph."""
    node = weight if isinstance(weight, Constant) else weight.input_value(0).get_node()
    values: np.ndarray = node.get_data(dtype=np.float32)
    return values
