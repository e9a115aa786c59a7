"""A folder for a PyTorch model, and the backend that loads it. Imports no torch."""

from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.serving.backends.pytorch.backend import PyTorchBackend
from sluice.serving.config.completion import fill_defaults
from sluice.serving.model import Model
from sluice.serving.spec import ModelSource
from tests.serving.backends.builders import CONTEXT

X_TO_Y = """
    input { name: "x" data_type: TYPE_FP32 dims: [-1] } output { name: "y" data_type: TYPE_FP32 dims: [-1] }
"""
STRINGS = """
    input { name: "x" data_type: TYPE_STRING dims: [-1] }
    output { name: "loud__0" data_type: TYPE_STRING dims: [-1] }
    output { name: "length__1" data_type: TYPE_INT64 dims: [-1] }
"""


def source_of(folder: Path, text: str) -> ModelSource:
    (folder / "1").mkdir(exist_ok=True)
    return ModelSource(folder, 1, text_format.Parse(text, ModelConfig(name="m", backend="pytorch")))


async def load(folder: Path, text: str, backend: PyTorchBackend | None = None) -> Model:
    """Load the model whose file is in the folder."""
    backend, source = backend or PyTorchBackend(), source_of(folder, text)
    config = await backend.complete(source, CONTEXT)
    fill_defaults(config)
    return await backend.load(ModelSource(folder, 1, config), CONTEXT)


def both(names: tuple[str, str], dims: str = "[4]") -> str:
    inputs = "".join(f'input {{ name: "{name}" data_type: TYPE_FP32 dims: {dims} }}' for name in names)
    return f"max_batch_size: 8 dynamic_batching {{ }} {inputs}"


def outputs(*names: str, dims: str = "[4]") -> str:
    return "".join(f'output {{ name: "{name}" data_type: TYPE_FP32 dims: {dims} }}' for name in names)
