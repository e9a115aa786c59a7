"""Constants, activation functions and small expressions that several layers of a graph share."""

from collections.abc import Callable, Sequence

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op import Constant

TO_THE_END = np.iinfo(np.int64).max
"""The end of a slice that has all from its begin on."""


def floating(value: float) -> ov.Node:
    return ops.constant(np.float32(value))


def ints32(values: Sequence[int]) -> ov.Node:
    return ops.constant(np.array(values, np.int32))


def ints64(values: Sequence[int]) -> ov.Node:
    return ops.constant(np.array(values, np.int64))


def scaled(x: ov.Node, factor: float) -> ov.Node:
    """Return x * factor, without a node if the factor is 1."""
    return x if factor == 1 else ops.multiply(x, floating(factor))


def softcapped(x: ov.Node, cap: float | None) -> ov.Node:
    """Return x squeezed into ± `cap` by a tanh, without a node if there is no cap."""
    return x if cap is None else ops.multiply(ops.tanh(ops.divide(x, floating(cap))), floating(cap))


def part(x: ov.Node, start: int, stop: int, axis: int) -> ov.Node:
    """Return x[start:stop] along one axis."""
    return ops.slice(x, ints64([start]), ints64([stop]), ints64([1]), ints64([axis]))


def num_features(x: ov.Node) -> int:
    """Return the size of the last axis, which is the same in every step."""
    output = x.output(0) if isinstance(x, ov.Node) else x  # paged attention has several outputs
    size: int = output.partial_shape[-1].get_length()
    return size


def values_of(weight: ov.Node) -> np.ndarray:
    """Return a stored vector as f32 values, for computations at build time."""
    node = weight if isinstance(weight, Constant) else weight.input_value(0).get_node()
    values: np.ndarray = node.get_data(dtype=np.float32)
    return values


def largest(x: ov.Node, count: int) -> tuple[ov.Node, ov.Node]:
    """Return the `count` largest values of each row, and their columns."""
    found = ops.topk(x, ops.constant(np.int32(count)), -1, "max", "value", index_element_type="i32")
    values, columns = found.outputs()
    return values, columns


def last_axis(x: ov.Node) -> int:
    output = x.output(0) if isinstance(x, ov.Node) else x
    rank: int = output.partial_shape.rank.get_length()
    return rank - 1


Activation = Callable[[ov.Node], ov.Node]


def _gelu_tanh(x: ov.Node) -> ov.Node:
    return ops.gelu(x, "tanh")


def _relu_squared(x: ov.Node) -> ov.Node:
    positive = ops.relu(x)
    return ops.multiply(positive, positive)


ACTIVATIONS: dict[str, Activation] = {
    "silu": ops.swish,
    "swish": ops.swish,
    "gelu": lambda x: ops.gelu(x, "erf"),
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": ops.relu,
    "relu2": _relu_squared,
}
"""Activation functions by their names in `config.json`."""
