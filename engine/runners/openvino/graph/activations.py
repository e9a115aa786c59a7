"""Activation functions, by their names in `config.json`."""

from collections.abc import Callable

import openvino as ov
from openvino import opset13 as ops

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
