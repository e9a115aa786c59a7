"""A retriever over a real store, and requests to it."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import numpy as np
import orjson
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.pipelines.encoding.encoder import TextEncoder
from sluice.pipelines.rag.library import DocumentLibrary, LibrarySettings
from sluice.pipelines.rag.retriever import RetrieverBackend, RetrieverModel
from sluice.pipelines.rag.stores.base import DocumentStore
from sluice.serving.backend import BackendContext
from sluice.serving.model import Model, infer_one
from sluice.serving.request import InferRequest, Parameter
from sluice.serving.spec import ModelSource
from sluice.serving.tensors.tensor import Tensor
from tests.pipelines.rag.parts import texts_tensor
from tests.serving.backends.builders import Lookup

DIM = 4
CONFIG = 'name: "retriever" backend: "retriever" max_batch_size: 32 '


class Directions:
    """Encodes a text as the direction that its first letter stands for."""

    async def encode_query(self, text: str) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
        return np.asarray(np.eye(DIM, dtype=np.float32)[ord(text[0].lower()) % DIM], np.float32)


def library_of(store: DocumentStore) -> DocumentLibrary:
    return DocumentLibrary(store, lambda name: cast(TextEncoder, Directions()), LibrarySettings())


def source_of(folder: Path, text: str = "", config: str = CONFIG) -> ModelSource:
    given: ModelConfig = text_format.Parse(config + text, ModelConfig())
    return ModelSource(folder, 1, given)


def context(lookup: Lookup | None = None) -> BackendContext:
    return BackendContext(lookup or Lookup())


async def load(
    folder: Path, library: DocumentLibrary | None, text: str = "", *, lookup: Lookup | None = None, config: str = CONFIG
) -> RetrieverModel:
    backend, backend_context = RetrieverBackend(library), context(lookup)
    complete = await backend.complete(source_of(folder, text, config), backend_context)
    return await backend.load(ModelSource(folder, 1, complete), backend_context)


@asynccontextmanager
async def loaded(
    folder: Path, library: DocumentLibrary | None, text: str = "", *, lookup: Lookup | None = None, config: str = CONFIG
) -> AsyncIterator[RetrieverModel]:
    model = await load(folder, library, text, lookup=lookup, config=config)
    try:
        yield model
    finally:
        await model.close()


def request(
    questions: Sequence[str], vectors: Sequence[Sequence[float]] | None = None, **parameters: Parameter
) -> InferRequest:
    """Build a request with a row for each question."""
    inputs = {"query": texts_tensor("query", [[question] for question in questions])}
    if vectors is not None:
        inputs["query_embeddings"] = Tensor.of("query_embeddings", np.array(vectors, np.float32))
    return InferRequest(inputs, parameters=dict(parameters))


async def ask(
    model: Model, questions: Sequence[str], vectors: Sequence[Sequence[float]] | None = None, **parameters: Parameter
) -> dict[str, list[list[str]]]:
    """Return the rows of each output."""
    response = await infer_one(model, request(questions, vectors, **parameters))
    return {each.name: [[text.decode() for text in row] for row in each.array.tolist()] for each in response.outputs}


def documents(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the documents of sources, without padding."""
    return [[orjson.loads(each)["document"] for each in row if each] for row in rows]
