"""Rotary position embedding as graph nodes. Heads are [num_tokens, num_heads, 1, head_dim] f32."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from engine.runners.openvino.config.rope import Rope, inverse_frequencies
from engine.runners.openvino.graph.nodes import floating, ints64, num_features, part, scaled

_TO_THE_END = np.iinfo(np.int64).max
_HEAD_AXIS = 3


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of this step's positions, [num_tokens, 1, 1, rotary_dim]."""

    cos: ov.Node
    sin: ov.Node


def rotation(rope: Rope, head_dim: int, max_model_len: int, position_ids: ov.Node) -> Rotation:
    """Angles from positions [num_tokens] i32, each component paired with the one half the turned part further on."""
    frequencies = inverse_frequencies(rope, head_dim, max_model_len).reshape(1, 1, 1, -1)
    positions = ops.convert(ops.unsqueeze(position_ids, ints64([1, 2, 3])), "f32")
    half = ops.multiply(positions, ops.constant(frequencies))
    angles = ops.concat([half, half], -1)
    amplitude = rope.amplitude()
    return Rotation(scaled(ops.cos(angles), amplitude), scaled(ops.sin(angles), amplitude))


def rotate(x: ov.Node, rotation: Rotation) -> ov.Node:
    """Turn the first components of every head, as many as the rotation has, and leave the others."""
    rotary_dim = num_features(rotation.cos)
    if rotary_dim == num_features(x):
        return _turn(x, rotation, rotary_dim)
    turned = _turn(part(x, 0, rotary_dim, _HEAD_AXIS), rotation, rotary_dim)
    return ops.concat([turned, part(x, rotary_dim, _TO_THE_END, _HEAD_AXIS)], -1)


def uninterleaved(x: ov.Node) -> ov.Node:
    """Even components first, then the odd ones: for families that pair neighbours.

    Queries and keys are reordered alike, so their products stay what they were.
    """
    size = num_features(x)
    return ops.gather(x, ints64(_evens_first(size)), ints64([_HEAD_AXIS]))


def _evens_first(size: int) -> Sequence[int]:
    return [*range(0, size, 2), *range(1, size, 2)]


def _turn(x: ov.Node, rotation: Rotation, rotary_dim: int) -> ov.Node:
    middle = rotary_dim // 2
    first, second = part(x, 0, middle, _HEAD_AXIS), part(x, middle, _TO_THE_END, _HEAD_AXIS)
    turned = ops.concat([ops.multiply(second, floating(-1)), first], -1)
    return ops.add(ops.multiply(x, rotation.cos), ops.multiply(turned, rotation.sin))
