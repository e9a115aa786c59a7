"""Small OpenVINO models in a repository folder, and the backend that loads them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openvino as ov
from google.protobuf import text_format
from openvino import opset13 as ops
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.serving.backends.openvino.backend import OpenVinoBackend
from sluice.serving.model import Model
from sluice.serving.spec import ModelSource
from tests.serving.backends.builders import CONTEXT

FLOAT = ov.Type.f32
Dims = Sequence[int]


def parameter(name: str, dims: Dims, kind: ov.Type = FLOAT) -> Any:
    node = ops.parameter(list(dims), kind, name=name)
    node.output(0).get_tensor().set_names({name})
    return node


def model_of(parameters: Sequence[Any], **outputs: Any) -> ov.Model:
    results = []
    for name, node in outputs.items():
        result = ops.result(node)
        result.output(0).get_tensor().add_names({name})
        results.append(result)
    return ov.Model(results, list(parameters), "model")


def doubled(dims: Dims = (-1, 2), kind: ov.Type = FLOAT) -> ov.Model:
    """Make a model whose `y` is `x` twice in its last dimension."""
    x = parameter("x", dims, kind)
    return model_of([x], y=ops.concat([x, x], -1))


def add_sub(dims: Dims = (-1, 4)) -> ov.Model:
    a, b = parameter("a", dims), parameter("b", dims)
    return model_of([a, b], sum=ops.add(a, b), difference=ops.subtract(a, b))


def put(folder: Path, model: ov.Model | None, text: str = "") -> ModelSource:
    """Write version 1 of a model."""
    (folder / "1").mkdir(exist_ok=True)
    if model is not None:
        ov.save_model(model, folder / "1" / "model.xml", compress_to_fp16=False)
    given: ModelConfig = text_format.Parse(text, ModelConfig(name="m", backend="openvino"))
    given.default_model_filename = given.default_model_filename or "model.xml"
    return ModelSource(folder, 1, given)


async def complete(folder: Path, model: ov.Model, text: str = "") -> ModelConfig:
    return await OpenVinoBackend().complete(put(folder, model, text), CONTEXT)


async def load(folder: Path, model: ov.Model | None, text: str = "") -> Model:
    backend, source = OpenVinoBackend(), put(folder, model, text)
    config = await backend.complete(source, CONTEXT)
    return await backend.load(ModelSource(folder, 1, config), CONTEXT)
