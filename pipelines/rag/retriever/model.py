"""A collection as a model: a question in, the chunks that may answer it out."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig

from pipelines.rag import keys
from pipelines.rag.library import Library
from pipelines.rag.retrieval.search import Reranker, SearchQuery
from pipelines.rag.retriever.asked import Asked, RetrieverSettings, asked_of
from pipelines.rag.types import Hit, RetrievalMode, Vector, source_of
from pipelines.text.sources import encoded
from pipelines.text.text_rows import text_rows, text_tensor
from serving.request import InferRequest
from serving.task_model import MakeOutputs, TaskModel, gather_all
from serving.tensors.tensor import Tensor
from sluice.errors import ErrorCode, SluiceError, invalid

QUERY, QUERY_EMBEDDINGS = "query", "query_embeddings"
CONTEXT, SOURCES = "context", "sources"
_MAX_NAMED = 10
"""Collections that an error counts up."""


class RetrieverModel(TaskModel):
    """Searches the server's collections; the rows of a request are searched side by side."""

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        library: Library,
        settings: RetrieverSettings,
        reranker: Reranker | None = None,
    ) -> None:
        super().__init__(config, version)
        self._library = library
        self._settings = settings
        self._reranker = reranker

    def _work(self, request: InferRequest) -> MakeOutputs:
        asked = asked_of(request.parameters, self._settings)
        questions = [row[0] for row in text_rows(request, QUERY, is_batched=self._is_batched)]
        if not all(map(str.strip, questions)):
            raise invalid(QUERY, f"input '{QUERY}' is empty; it must be a question")
        return partial(self._answer, asked, questions, self._vectors(request, asked, len(questions)))

    def _vectors(self, request: InferRequest, asked: Asked, num_rows: int) -> Sequence[Vector | None]:
        """Those of the questions, of length 1; None where none came or none is needed."""
        tensor = request.inputs.get(QUERY_EMBEDDINGS)
        if tensor is None or asked.options.mode is RetrievalMode.BM25:
            return [None] * num_rows
        rows = tensor.array.reshape(num_rows, -1).astype(np.float32)
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        if not (np.isfinite(lengths).all() and (lengths > 0).all()):
            reason = "must be a vector of finite numbers that are not all 0"
            raise invalid(QUERY_EMBEDDINGS, f"input '{QUERY_EMBEDDINGS}' {reason}")
        return list(rows / lengths)

    async def _answer(self, asked: Asked, questions: Sequence[str], vectors: Sequence[Vector | None]) -> list[Tensor]:
        rows = zip(questions, vectors, strict=True)
        return self._tensors(await gather_all([self._search(asked, question, vector) for question, vector in rows]))

    async def _search(self, asked: Asked, question: str, vector: Vector | None) -> list[Hit]:
        query = SearchQuery(question, vector, asked.filter)
        try:
            return await self._library.search(asked.collection, query, asked.options, self._reranker, asked.key)
        except SluiceError as error:
            if error.code is ErrorCode.NOT_FOUND and error.param == "collection":
                if asked.fallback_collection:
                    instead = replace(asked, collection=asked.fallback_collection, fallback_collection="")
                    return await self._search(instead, question, vector)
                raise await self._unknown_collection(asked) from None
            if error.code is ErrorCode.INVALID and vector is not None:
                await self._check_length(asked, vector)
            raise

    async def _unknown_collection(self, asked: Asked) -> SluiceError:
        """With the names of those that the request could have meant."""
        found = await self._library.collections()
        names = [each.spec.name for each in found if keys.opens(each.spec, asked.key)]
        there_are = ", ".join(names[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")
        known = f"there are {there_are}" if names else "there is none yet: documents that are put make one"
        message = f"parameter 'collection': there is no collection '{asked.collection}'; {known}"
        return SluiceError(ErrorCode.NOT_FOUND, message, param="collection")

    async def _check_length(self, asked: Asked, vector: Vector) -> None:
        spec = (await self._library.collection(asked.collection, asked.key)).spec
        if len(vector) == spec.dim:
            return
        raise invalid(
            QUERY_EMBEDDINGS,
            f"input '{QUERY_EMBEDDINGS}' has vectors of {len(vector)} numbers, but collection '{spec.name}' holds "
            f"vectors of {spec.dim}, made by the model '{spec.encoder}'; encode the query with that model",
        )

    def _tensors(self, found: Sequence[Sequence[Hit]]) -> list[Tensor]:
        texts = [[hit.text.encode() for hit in hits] for hits in found]
        sources = [[encoded(source_of(hit)) for hit in hits] for hits in found]
        return [
            text_tensor(CONTEXT, texts, is_batched=self._is_batched),
            text_tensor(SOURCES, sources, is_batched=self._is_batched),
        ]
