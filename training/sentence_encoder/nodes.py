"""Writes the nodes and constants of an ONNX graph, with names that are the same each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

CONTRIB = "com.microsoft"
"""Domain of onnxruntime's own operators, which every build has."""
_OPSET, _CONTRIB_OPSET = 18, 1
_IR_VERSION = 8
"""IR version that the onnxruntime of any tritonserver since 2023 reads."""


class NodeWriter:
    """Collects nodes and constants. Each method adds one and returns the name of its result."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[tuple[bytes, str, tuple[int, ...]], onnx.TensorProto] = {}

    def constant(self, array: NDArray[Any]) -> str:
        """Add a constant. Equal arrays are kept once."""
        key = array.tobytes(), array.dtype.str, array.shape
        if key not in self._constants:
            self._constants[key] = numpy_helper.from_array(array, f"constant_{len(self._constants)}")
        return str(self._constants[key].name)

    def number(self, value: float) -> str:
        """Add a float32 scalar."""
        return self.constant(np.array(value, np.float32))

    def index(self, value: int) -> str:
        """Add an int64 scalar."""
        return self.constant(np.array(value, np.int64))

    def indices(self, *values: int) -> str:
        """Add a list of int64."""
        return self.constant(np.array(values, np.int64))

    def add(self, op: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        name = f"{op}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(op, list(inputs), [f"{name}_out"], name=name, domain=domain, **attributes))
        return f"{name}_out"

    def add_named(self, output: str, op: str, *inputs: str, **attributes: Any) -> None:
        """Add a node whose result has the name `output`: an output of the graph."""
        self._nodes.append(helper.make_node(op, list(inputs), [output], name=output, **attributes))

    def model(
        self, name: str, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto], notice: str
    ) -> onnx.ModelProto:
        """Return the model with `notice` as its description. Raises onnx.checker.ValidationError if it is invalid."""
        graph = helper.make_graph(self._nodes, name, list(inputs), list(outputs), list(self._constants.values()))
        opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(CONTRIB, _CONTRIB_OPSET)]
        model = helper.make_model(graph, producer_name="sluice", doc_string=notice, opset_imports=opsets)
        model.ir_version = _IR_VERSION
        onnx.checker.check_model(model)
        return model
