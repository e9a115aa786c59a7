"""The elementary operations of `sluice.engine.models.kernels` as nodes of a graph."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from sluice.engine.runners.openvino.graph.nodes import (
    TO_THE_END,
    floating,
    ints64,
    largest,
    last_axis,
    part,
    softcapped,
)

Operand: TypeAlias = ov.Node | float


class GraphOperations:
    """The elementary operations of `Kernels`. A float becomes a constant, f32."""

    def add(self, x: ov.Node, y: Operand) -> ov.Node:
        return ops.add(x, _node(y))

    def subtract(self, x: ov.Node, y: Operand) -> ov.Node:
        return ops.subtract(x, _node(y))

    def multiply(self, x: ov.Node, y: Operand) -> ov.Node:
        return ops.multiply(x, _node(y))

    def divide(self, x: Operand, y: Operand) -> ov.Node:
        return ops.divide(_node(x), _node(y))

    def minimum(self, x: ov.Node, y: Operand) -> ov.Node:
        return ops.minimum(x, _node(y))

    def maximum(self, x: ov.Node, y: Operand) -> ov.Node:
        return ops.maximum(x, _node(y))

    def clamp(self, x: ov.Node, low: float, high: float) -> ov.Node:
        return ops.clamp(x, low, high)

    def absolute(self, x: ov.Node) -> ov.Node:
        return ops.abs(x)

    def exp(self, x: ov.Node) -> ov.Node:
        return ops.exp(x)

    def log(self, x: ov.Node) -> ov.Node:
        return ops.log(x)

    def floor(self, x: ov.Node) -> ov.Node:
        return ops.floor(x)

    def sigmoid(self, x: ov.Node) -> ov.Node:
        return ops.sigmoid(x)

    def swish(self, x: ov.Node, slope: float) -> ov.Node:
        return ops.swish(x, floating(slope))

    def softcapped(self, x: ov.Node, cap: float | None) -> ov.Node:
        return softcapped(x, cap)

    def softmax(self, x: ov.Node) -> ov.Node:
        return ops.softmax(x, -1)

    def total(self, x: ov.Node) -> ov.Node:
        return ops.reduce_sum(x, ints64([1]), True)

    def greater(self, x: ov.Node, y: Operand) -> ov.Node:
        return ops.greater(x, _node(y))

    def less_equal(self, x: ov.Node, y: Operand) -> ov.Node:
        return ops.less_equal(x, _node(y))

    def select(self, condition: ov.Node, x: Operand, y: Operand) -> ov.Node:
        return ops.select(condition, _node(x), _node(y))

    def part(self, x: ov.Node, start: int, stop: int) -> ov.Node:
        return part(x, start, stop, last_axis(x))

    def every_second(self, x: ov.Node, first: int) -> ov.Node:
        return ops.slice(x, ints64([first]), ints64([TO_THE_END]), ints64([2]), ints64([last_axis(x)]))

    def concat(self, tensors: Sequence[ov.Node]) -> ov.Node:
        return ops.concat(list(tensors), last_axis(tensors[0]))

    def largest(self, x: ov.Node, count: int) -> tuple[ov.Node, ov.Node]:
        return largest(x, count)

    def take(self, x: ov.Node, columns: ov.Node) -> ov.Node:
        return ops.gather_elements(x, columns, 1)

    def is_column(self, column: ov.Node, count: int) -> ov.Node:
        return ops.equal(ops.constant(np.arange(count, dtype=np.int32)[None]), column)


def _node(value: Operand) -> ov.Node:
    return floating(value) if isinstance(value, int | float) else value
