"""LoRA adapters in a graph: each projection adds `B(A(x))`, whose A and B are inputs, so that adapters come and go
without a compilation.

The adapters' matrices are stacked along their ranks: A is [ranks, features in], B is [features out, ranks]. A mask says
which ranks are those of a token's own adapter. Others are replaced by zeros and not multiplied by them, so that no
adapter's infinities reach another's tokens. Where no token has an adapter, the stacks have one rank and cost next to
nothing.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from sluice.engine.runners.openvino.graph.nodes import floating, num_features

MASK = "adapter_mask"


def stack_names(module: str) -> tuple[str, str]:
    """Return the names of the inputs A and B of a projection."""
    return f"lora_a.{module}", f"lora_b.{module}"


def named_parameter(name: str, shape: list[int], kind: ov.Type) -> Any:
    """Return an input of a graph, whose tensor has its name too."""
    parameter = ops.parameter(ov.PartialShape(shape), kind, name=name)
    parameter.output(0).get_tensor().set_names({name})
    return parameter


@dataclass(frozen=True, slots=True)
class AdapterInputs:
    """The inputs of one graph for adapters. `kind` is the type of the matrices: that of the computation, as the plugin
    would convert others in each step."""

    kind: ov.Type
    mask: Any = field(default_factory=lambda: named_parameter(MASK, [-1, -1], ov.Type.boolean))
    """[num_tokens, ranks]"""
    stacks: list[Any] = field(default_factory=list)
    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Features out and in of each projection, by its name."""

    @property
    def parameters(self) -> list[Any]:
        return [self.mask, *self.stacks]

    def add_to(self, product: ov.Node, x: ov.Node, module: str) -> ov.Node:
        """Return the output of a projection of `x` with that of the adapters added."""
        num_out, num_in = num_features(product), num_features(x)
        name_a, name_b = stack_names(module)
        a = named_parameter(name_a, [-1, num_in], self.kind)
        b = named_parameter(name_b, [num_out, -1], self.kind)
        self.stacks.extend((a, b))
        self.shapes[module] = (num_out, num_in)
        narrow = ops.matmul(x, _as_f32(a), False, True)
        own = ops.select(self.mask, narrow, floating(0))
        return ops.add(product, ops.matmul(own, _as_f32(b), False, True))


def _as_f32(node: Any) -> ov.Node:
    return node if node.get_element_type() == ov.Type.f32 else ops.convert(node, np.float32)
