"""A folder for a PyTorch model, and the backend that loads it. Imports no torch."""

import asyncio
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from engine.config import EngineConfig
from pipelines.llm.services import StreamRecord
from serving.backend import BackendContext
from serving.backends.pytorch.backend import PyTorchBackend
from serving.config.completion import fill_defaults
from serving.model import Model, infer_one
from serving.request import InferRequest
from serving.spec import ModelSource
from serving.tensors.tensor import Array, Tensor
from sluice.errors import ErrorCode, SluiceError

PATIENCE_S = 60.0
X_TO_Y = """
    input { name: "x" data_type: TYPE_FP32 dims: [-1] } output { name: "y" data_type: TYPE_FP32 dims: [-1] }
"""
STRINGS = """
    input { name: "x" data_type: TYPE_STRING dims: [-1] }
    output { name: "loud__0" data_type: TYPE_STRING dims: [-1] }
    output { name: "length__1" data_type: TYPE_INT64 dims: [-1] }
"""


class NoModels:
    def find(self, name: str, version: int = -1) -> Model:
        raise SluiceError(ErrorCode.NOT_FOUND, name)


def _no_engine(_: str) -> EngineConfig:
    raise AssertionError("these models have no engine")


def _no_record(*_: str) -> StreamRecord:
    raise AssertionError("these models are not measured as LLMs")


CONTEXT = BackendContext(NoModels())


def source_of(folder: Path, text: str) -> ModelSource:
    (folder / "1").mkdir(exist_ok=True)
    return ModelSource(folder, 1, text_format.Parse(text, ModelConfig(name="m", backend="pytorch")))


async def load(folder: Path, text: str, backend: PyTorchBackend | None = None) -> Model:
    """The model whose file is there."""
    backend, source = backend or PyTorchBackend(), source_of(folder, text)
    config = await backend.complete(source, CONTEXT)
    fill_defaults(config)
    return await backend.load(ModelSource(folder, 1, config), CONTEXT)


def request(outputs: tuple[str, ...] = (), **inputs: Array) -> InferRequest:
    return InferRequest({name: Tensor.of(name, array) for name, array in inputs.items()}, requested_outputs=outputs)


async def infer(model: Model, given: InferRequest) -> dict[str, Array]:
    async with asyncio.timeout(PATIENCE_S):
        response = await infer_one(model, given)
    return {tensor.name: tensor.array for tensor in response.outputs}


def both(names: tuple[str, str], dims: str = "[4]") -> str:
    inputs = "".join(f'input {{ name: "{name}" data_type: TYPE_FP32 dims: {dims} }}' for name in names)
    return f"max_batch_size: 8 dynamic_batching {{ }} {inputs}"


def outputs(*names: str, dims: str = "[4]") -> str:
    return "".join(f'output {{ name: "{name}" data_type: TYPE_FP32 dims: {dims} }}' for name in names)
