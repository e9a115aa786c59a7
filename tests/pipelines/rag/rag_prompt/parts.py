"""A rag_prompt model, and requests to it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from pipelines.rag.rag_prompt.backend import RagPromptBackend
from pipelines.rag.rag_prompt.model import RagPromptModel
from pipelines.text.sources import Source, encoded
from serving.backend import BackendContext
from serving.model import Model, infer_one
from serving.request import InferRequest, Parameter
from serving.spec import ModelSource
from serving.tensors.tensor import Tensor
from sluice.errors import ErrorCode, SluiceError

CONFIG = 'name: "rag_prompt" backend: "rag_prompt" max_batch_size: 32 '


class Lookup:
    """Loaded models by name."""

    def __init__(self, **models: Model) -> None:
        self.models = models

    def find(self, name: str, version: int = -1) -> Model:
        if name not in self.models:
            raise SluiceError(ErrorCode.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        return self.models[name]


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }} '


def context(lookup: Lookup) -> BackendContext:
    def refuse(*_: str) -> Any:
        raise AssertionError("a prompt runs no engine")

    return BackendContext(lookup)


async def load(folder: Path, lookup: Lookup, text: str = "", config: str = CONFIG) -> RagPromptModel:
    given: ModelConfig = text_format.Parse(config + text, ModelConfig())
    backend, lent = RagPromptBackend(), context(lookup)
    complete = await backend.complete(ModelSource(folder, 1, given), lent)
    return await backend.load(ModelSource(folder, 1, complete), lent)


def source(document: str, text: str, *, title: str = "", start: int = 0) -> Source:
    return Source(document=document, title=title, start=start, end=start + len(text), score=1.0, text=text)


def texts_tensor(name: str, rows: Sequence[Sequence[str | bytes]]) -> Tensor:
    encoded_rows = [[each.encode() if isinstance(each, str) else each for each in row] for row in rows]
    array = np.empty((len(rows), len(rows[0])), np.object_)
    for filled, row in zip(array, encoded_rows, strict=True):
        filled[:] = row
    return Tensor(name, "BYTES", array.shape, array=array)


def request(
    question: str | Sequence[str], rows: Sequence[Sequence[Source]], *, tenant: str = "", **parameters: Parameter
) -> InferRequest:
    """A row for each question; shorter rows of sources are filled up as the retriever does."""
    questions = [question] if isinstance(question, str) else question
    width = max(map(len, rows))
    inputs = {
        "query": texts_tensor("query", [[each] for each in questions]),
        "context": texts_tensor(
            "context", [[*(each.text for each in row), *[""] * (width - len(row))] for row in rows]
        ),
        "sources": texts_tensor("sources", [[*map(encoded, row), *[""] * (width - len(row))] for row in rows]),
    }
    return InferRequest(inputs, parameters=dict(parameters), tenant=tenant)


async def ask(model: RagPromptModel, asked: InferRequest) -> dict[str, list[list[Any]]]:
    """The rows of each output, without what fills them up; JSON read."""
    response = await infer_one(model, asked)
    return {
        each.name: [[_read(each.name, element) for element in row if element] for row in each.array.tolist()]
        for each in response.outputs
    }


def _read(name: str, element: bytes) -> Any:
    return element.decode() if name == "cache_salt" else orjson.loads(element)
