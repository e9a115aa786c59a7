"""The backend `retriever`: searches the server's collections of documents."""

import asyncio

from tritonclient.grpc.model_config_pb2 import ModelConfig

from engine.errors import ErrorCode, SluiceError
from pipelines.backends.base import Backend, BackendContext, ModelSource
from pipelines.backends.declared import Declared, completed
from pipelines.backends.retriever.asked import RetrieverSettings, settings_of
from pipelines.backends.retriever.model import CONTEXT, QUERY, QUERY_EMBEDDINGS, SOURCES, RetrieverModel
from pipelines.rag.retrieval.pairs import PairTokenizer
from pipelines.rag.retrieval.reranker import ModelReranker

INPUTS = (Declared(QUERY, "BYTES"), Declared(QUERY_EMBEDDINGS, "FP32", (-1,), is_optional=True))
OUTPUTS = (Declared(CONTEXT, "BYTES", (-1,)), Declared(SOURCES, "BYTES", (-1,)))


class RetrieverBackend(Backend):
    """Models that it loads serve as long as the server has collections; a store that is down fails their requests."""

    name = "retriever"

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        return completed(source.config, INPUTS, OUTPUTS)

    async def load(self, source: ModelSource, context: BackendContext) -> RetrieverModel:
        settings = settings_of(source.config)
        if context.library is None:
            message = (
                f"model '{source.name}' searches collections of documents, and this server has none: set --rag-store"
            )
            raise SluiceError(ErrorCode.UNAVAILABLE, message)
        reranker = await _reranker(source, context, settings)
        return RetrieverModel(source.config, source.version, context.library, settings, reranker)


async def _reranker(source: ModelSource, context: BackendContext, settings: RetrieverSettings) -> ModelReranker | None:
    """Its tokenizer's path is relative to the retriever's folder."""
    if not settings.reranker:
        return None
    tokenizer = None
    if settings.reranker_tokenizer:
        tokenizer = await asyncio.to_thread(PairTokenizer, source.folder / settings.reranker_tokenizer)
    return ModelReranker(context.models, settings.reranker, tokenizer)
