"""Rotary embedding as nodes of a graph; heads are [num_tokens, num_heads, 1, head_dim] f32."""

from dataclasses import dataclass

import openvino as ov
from openvino import opset13 as ops

from sluice.engine.models.config.rope import Rope, inverse_frequencies
from sluice.engine.runners.openvino.graph.nodes import TO_THE_END, floating, ints64, num_features, part, scaled

_HEAD_AXIS = 3


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of this step's positions, [num_tokens, 1, 1, rotary_dim]."""

    cos: ov.Node
    sin: ov.Node


def rotation(rope: Rope, head_dim: int, max_model_len: int, positions: ov.Node) -> Rotation:
    """Compute the rotation of positions [num_tokens, 1, 1, 1] f32. Component i is paired with i + rotary_dim / 2."""
    frequencies = inverse_frequencies(rope, head_dim, max_model_len).reshape(1, 1, 1, -1)
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
