"""A rag_prompt model, and requests to it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.pipelines.rag.rag_prompt.backend import RagPromptBackend, RagPromptModel
from sluice.pipelines.text.citations import Source, encode_source
from sluice.serving.backend import BackendContext
from sluice.serving.model import infer_one
from sluice.serving.request import InferRequest, Parameter
from sluice.serving.spec import ModelSource
from tests.pipelines.rag.parts import texts_tensor
from tests.serving.backends.builders import Lookup

CONFIG = 'name: "rag_prompt" backend: "rag_prompt" max_batch_size: 32 '


async def load(folder: Path, lookup: Lookup, text: str = "", config: str = CONFIG) -> RagPromptModel:
    given: ModelConfig = text_format.Parse(config + text, ModelConfig())
    backend, context = RagPromptBackend(), BackendContext(lookup)
    complete = await backend.complete(ModelSource(folder, 1, given), context)
    return await backend.load(ModelSource(folder, 1, complete), context)


def source(document: str, text: str, *, title: str = "", start: int = 0) -> Source:
    return Source(document=document, title=title, start=start, end=start + len(text), score=1.0, text=text)


def request(
    question: str | Sequence[str], rows: Sequence[Sequence[Source]], *, tenant: str = "", **parameters: Parameter
) -> InferRequest:
    """Build a request with a row for each question. Shorter rows of sources are padded as the retriever does."""
    questions = [question] if isinstance(question, str) else question
    width = max(map(len, rows))
    inputs = {
        "query": texts_tensor("query", [[each] for each in questions]),
        "context": texts_tensor(
            "context", [[*(each.text for each in row), *[""] * (width - len(row))] for row in rows]
        ),
        "sources": texts_tensor("sources", [[*map(encode_source, row), *[""] * (width - len(row))] for row in rows]),
    }
    return InferRequest(inputs, parameters=dict(parameters), tenant=tenant)


async def ask(model: RagPromptModel, infer_request: InferRequest) -> dict[str, list[list[Any]]]:
    """Return the rows of each output, without padding, with JSON parsed."""
    response = await infer_one(model, infer_request)
    return {
        each.name: [[_read(each.name, element) for element in row if element] for row in each.array.tolist()]
        for each in response.outputs
    }


def _read(name: str, element: bytes) -> Any:
    return element.decode() if name == "cache_salt" else orjson.loads(element)
