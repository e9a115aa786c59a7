"""Small ONNX models in a repository folder, and the backend that loads them."""

from collections.abc import Sequence
from pathlib import Path

import onnx
from google.protobuf import text_format
from onnx import TensorProto, helper
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.serving.backend import BackendContext
from sluice.serving.backends.onnxruntime.backend import OnnxRuntimeBackend
from sluice.serving.model import Model
from sluice.serving.spec import ModelSource
from tests.serving.backends.builders import Lookup

FLOAT, INT64, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING
Dims = Sequence[int | str | None] | None


def value(name: str, dims: Dims, kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, dims)


def graph(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: Sequence[onnx.TensorProto] = (),
) -> onnx.ModelProto:
    body = helper.make_graph(nodes, "graph", inputs, outputs, list(initializers))
    return helper.make_model(body, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])


def one_op(op: str, dims: Dims = ("n", 2), kind: int = FLOAT, **attributes: object) -> onnx.ModelProto:
    """`y = op(x)`."""
    return graph([helper.make_node(op, ["x"], ["y"], **attributes)], [value("x", dims, kind)], [value("y", dims, kind)])


def add_sub() -> onnx.ModelProto:
    nodes = [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Sub", ["a", "b"], ["difference"])]
    inputs = [value("a", ["n", 4]), value("b", ["n", 4])]
    return graph(nodes, inputs, [value("sum", ["n", 4]), value("difference", ["n", 4])])


def context(**options: str) -> BackendContext:
    return BackendContext(Lookup(), backend_options={"onnxruntime": options})


def put(folder: Path, model: onnx.ModelProto | None, text: str = "") -> ModelSource:
    """Write version 1 of a model."""
    (folder / "1").mkdir(exist_ok=True)
    if model is not None:
        onnx.save(model, folder / "1" / "model.onnx")
    given: ModelConfig = text_format.Parse(text, ModelConfig(name="m", backend="onnxruntime"))
    given.default_model_filename = given.default_model_filename or "model.onnx"
    return ModelSource(folder, 1, given)


async def complete(folder: Path, model: onnx.ModelProto, text: str = "", **options: str) -> ModelConfig:
    return await OnnxRuntimeBackend().complete(put(folder, model, text), context(**options))


async def load(
    folder: Path, model: onnx.ModelProto | None, text: str = "", given: BackendContext | None = None
) -> Model:
    backend, source = OnnxRuntimeBackend(), put(folder, model, text)
    config = await backend.complete(source, context())
    return await backend.load(ModelSource(folder, 1, config), given or context())
