"""A retriever over a real store, and requests to it."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import numpy as np
import orjson
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from pipelines.rag.encoder import TextEncoder
from pipelines.rag.library import Library, LibrarySettings
from pipelines.rag.retriever.backend import RetrieverBackend
from pipelines.rag.retriever.model import RetrieverModel
from pipelines.rag.stores.base import Store
from serving.backend import BackendContext
from serving.model import Model, infer_one
from serving.request import InferRequest, Parameter
from serving.spec import ModelSource
from serving.tensors.tensor import Tensor
from sluice.errors import ErrorCode, SluiceError

DIM = 4
CONFIG = 'name: "retriever" backend: "retriever" max_batch_size: 32 '


class Lookup:
    """Loaded models by name."""

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}

    def find(self, name: str, version: int = -1) -> Model:
        if name not in self.models:
            raise SluiceError(ErrorCode.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        return self.models[name]


class Directions:
    """Encodes a text as the direction that its first letter stands for."""

    async def encode_query(self, text: str) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
        return np.asarray(np.eye(DIM, dtype=np.float32)[ord(text[0].lower()) % DIM], np.float32)


def library_of(store: Store) -> Library:
    return Library(store, lambda name: cast(TextEncoder, Directions()), LibrarySettings())


def source_of(folder: Path, text: str = "", config: str = CONFIG) -> ModelSource:
    given: ModelConfig = text_format.Parse(config + text, ModelConfig())
    return ModelSource(folder, 1, given)


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }} '


def context(lookup: Lookup | None = None) -> BackendContext:
    return BackendContext(lookup or Lookup())


async def load(
    folder: Path, library: Library | None, text: str = "", *, lookup: Lookup | None = None, config: str = CONFIG
) -> RetrieverModel:
    backend, found = RetrieverBackend(library), context(lookup)
    complete = await backend.complete(source_of(folder, text, config), found)
    return await backend.load(ModelSource(folder, 1, complete), found)


@asynccontextmanager
async def loaded(
    folder: Path, library: Library | None, text: str = "", *, lookup: Lookup | None = None, config: str = CONFIG
) -> AsyncIterator[RetrieverModel]:
    model = await load(folder, library, text, lookup=lookup, config=config)
    try:
        yield model
    finally:
        await model.close()


def texts_tensor(name: str, rows: Sequence[Sequence[str]]) -> Tensor:
    return Tensor.of(name, np.array([[text.encode() for text in row] for row in rows], np.object_))


def request(
    questions: Sequence[str], vectors: Sequence[Sequence[float]] | None = None, **parameters: Parameter
) -> InferRequest:
    """A row for each question."""
    inputs = {"query": texts_tensor("query", [[question] for question in questions])}
    if vectors is not None:
        inputs["query_embeddings"] = Tensor.of("query_embeddings", np.array(vectors, np.float32))
    return InferRequest(inputs, parameters=dict(parameters))


async def ask(
    model: Model, questions: Sequence[str], vectors: Sequence[Sequence[float]] | None = None, **parameters: Parameter
) -> dict[str, list[list[str]]]:
    """The rows of each output."""
    response = await infer_one(model, request(questions, vectors, **parameters))
    return {each.name: [[text.decode() for text in row] for row in each.array.tolist()] for each in response.outputs}


def documents(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Of sources, without what fills rows up."""
    return [[orjson.loads(each)["document"] for each in row if each] for row in rows]
