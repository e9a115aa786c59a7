"""Models written where a test needs them, and their requests."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.serving.backend import BackendContext
from sluice.serving.backends.python.backend import PythonBackend
from sluice.serving.config.completion import fill_defaults
from sluice.serving.model import Model, infer_one
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import ModelSource
from sluice.serving.tensors.tensor import Array, Tensor
from tests import paths
from tests.serving.backends.builders import Lookup, infer_stream

REFERENCE_MODELS = paths.DATA / "triton" / "models"

TEXT = """
input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
"""
"""One string in and one string out."""
DECOUPLED = "model_transaction_policy { decoupled: true }" + TEXT
ARRAY = """
input { name: "X" data_type: TYPE_FP32 dims: [ -1, -1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1, -1 ] }
"""
PRELUDE = """
import json, os, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

def text_of(request):
    return pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().flatten()[0].decode()

def text(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", np.array([str(value)], np.object_))])

"""


def write_model(folder: Path, code: str, config: str = TEXT, prelude: str = PRELUDE) -> ModelSource:
    """Write version 1 of a model that has the name of its folder."""
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "1" / "model.py").write_text(prelude + dedent(code))
    return source_of(folder, f'backend: "python"\n{config}')


def source_of(folder: Path, config_text: str | None = None) -> ModelSource:
    text = config_text if config_text is not None else (folder / "config.pbtxt").read_text()
    config = text_format.Parse(text, ModelConfig())
    config.name = folder.name
    config.default_model_filename = config.default_model_filename or "model.py"
    fill_defaults(config)
    return ModelSource(folder, 1, config)


def context(lookup: Lookup | None = None, **options: Any) -> BackendContext:
    """Make a context; `options` are its fields."""

    return BackendContext(lookup or Lookup(), **options)


@asynccontextmanager
async def loaded(source: ModelSource, lookup: Lookup | None = None, **options: Any) -> AsyncIterator[Model]:
    """Load a model in a context with `options`, and close it at the end."""
    model = await PythonBackend().load(source, context(lookup, **options))
    if lookup is not None:
        lookup.models[model.name] = model
    try:
        yield model
    finally:
        await model.close()


def text_request(text: str, **options: object) -> InferRequest:
    return InferRequest({"TEXT": Tensor.of("TEXT", np.array([text.encode()], np.object_))}, **options)  # type: ignore[arg-type]


def array_request(array: Array) -> InferRequest:
    return InferRequest({"X": Tensor.of("X", array)})


async def ask(model: Model, text: str) -> str:
    """Return the text of the model's response."""
    return text_of(await infer_one(model, text_request(text)))


def text_of(response: InferResponse) -> str:
    element: bytes = response.outputs[0].array.flatten()[0]
    return element.decode()


async def stream(model: Model, text: str) -> list[str]:
    """Return every response of a decoupled model: its text, or its error's message in brackets."""
    said = []
    async for response in infer_stream(model, text_request(text)):
        if response.error is not None:
            said.append(f"<{response.error.message}>")
        elif response.outputs:
            said.append(text_of(response))
    return said


def is_alive(pid: int) -> bool:
    """Return whether the process runs and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children() -> set[int]:
    """Return the workers that this process has started. Servers of other tests may be its children too."""
    started = {int(pid) for task in os.listdir("/proc/self/task") for pid in _children_of(task)}
    return {pid for pid in started if _is_worker(pid)}


def _is_worker(pid: int) -> bool:
    try:
        return b"backends/python/worker/start.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False


def _children_of(task: str) -> list[str]:
    try:
        return Path(f"/proc/self/task/{task}/children").read_text().split()
    except FileNotFoundError:
        return []
