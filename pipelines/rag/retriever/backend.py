"""The backend `retriever`: searches the server's collections of documents."""

import asyncio

from tritonclient.grpc.model_config_pb2 import ModelConfig

from pipelines.rag.library import Library
from pipelines.rag.retrieval.pairs import PairTokenizer
from pipelines.rag.retrieval.reranker import ModelReranker
from pipelines.rag.retriever.asked import RetrieverSettings, settings_of
from pipelines.rag.retriever.model import CONTEXT, QUERY, QUERY_EMBEDDINGS, SOURCES, RetrieverModel
from serving.backend import Backend, BackendContext
from serving.config.completion import DeclaredTensor, complete_tensors
from serving.spec import ModelSource
from sluice.errors import ErrorCode, SluiceError

INPUTS = (DeclaredTensor(QUERY, "BYTES"), DeclaredTensor(QUERY_EMBEDDINGS, "FP32", (-1,), is_optional=True))
OUTPUTS = (DeclaredTensor(CONTEXT, "BYTES", (-1,)), DeclaredTensor(SOURCES, "BYTES", (-1,)))


class RetrieverBackend(Backend):
    """Models that it loads serve as long as the server has collections; a store that is down fails their requests."""

    name = "retriever"

    def __init__(self, library: Library | None = None) -> None:
        """`library` holds the server's collections of documents; None: the server has none."""
        self._library = library

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        return complete_tensors(source.config, INPUTS, OUTPUTS)

    async def load(self, source: ModelSource, context: BackendContext) -> RetrieverModel:
        settings = settings_of(source.config)
        if self._library is None:
            message = (
                f"model '{source.name}' searches collections of documents, and this server has none: set --rag-store"
            )
            raise SluiceError(ErrorCode.UNAVAILABLE, message)
        reranker = await _reranker(source, context, settings)
        return RetrieverModel(source.config, source.version, self._library, settings, reranker)


async def _reranker(source: ModelSource, context: BackendContext, settings: RetrieverSettings) -> ModelReranker | None:
    """Its tokenizer's path is relative to the retriever's folder."""
    if not settings.reranker:
        return None
    tokenizer = None
    if settings.reranker_tokenizer:
        tokenizer = await asyncio.to_thread(PairTokenizer, source.folder / settings.reranker_tokenizer)
    return ModelReranker(context.models, settings.reranker, tokenizer)
