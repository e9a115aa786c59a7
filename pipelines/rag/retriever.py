"""The backend `retriever`: a search in the server's collections as a model, questions in and chunks out."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.pipelines.encoding import Vector
from sluice.pipelines.encoding.reranker import ModelReranker, PairTokenizer
from sluice.pipelines.rag.filters import Filter, parse_filter
from sluice.pipelines.rag.library import DEFAULT_COLLECTION, DocumentLibrary
from sluice.pipelines.rag.search import MAX_CANDIDATES, MAX_TOP_K, SearchOptions, SearchQuery
from sluice.pipelines.rag.types import MAX_KEY_CHARS, Hit, RetrievalMode, build_source, grants_access
from sluice.pipelines.text.citations import EncodingProgress, encode_progress, encode_source
from sluice.pipelines.text.tensor_model import build_text_tensor, read_text_rows
from sluice.pipelines.text.types import OWNER_KEY
from sluice.serving.backend import Backend, BackendContext
from sluice.serving.config.completion import DeclaredTensor, complete_tensors
from sluice.serving.config.parameters import ParameterReader
from sluice.serving.config.validation import complete_and_check
from sluice.serving.request import InferRequest, Parameters
from sluice.serving.spec import ModelSource
from sluice.serving.task_model import MakeOutputs, TaskModel, gather_all
from sluice.serving.tensors.tensor import Tensor

QUERY, QUERY_EMBEDDINGS = "query", "query_embeddings"
CONTEXT, SOURCES, ENCODING = "context", "sources", "encoding"
INPUTS = (DeclaredTensor(QUERY, "BYTES"), DeclaredTensor(QUERY_EMBEDDINGS, "FP32", (-1,), is_optional=True))
OUTPUTS = (
    DeclaredTensor(CONTEXT, "BYTES", (-1,)),
    DeclaredTensor(SOURCES, "BYTES", (-1,)),
    DeclaredTensor(ENCODING, "BYTES"),
)
PARAMETERS = (
    *("collection", "fallback_collection", "top_k", "mode", "num_candidates", "rrf_k", "vector_weight", "text_weight"),
    *("min_similarity", "mmr_lambda", "reranker", "reranker_tokenizer"),
)
"""Parameters that config.pbtxt may set."""
_MAX_NAME_CHARS = 256
_MAX_FILTER_CHARS = 65_536
_MAX_LISTED = 10
"""Most collections that an error lists."""


@dataclass(frozen=True, slots=True)
class RetrieverSettings:
    """A model's defaults for requests.

    `fallback_collection` is searched while `collection` does not exist, for requests that name no collection; "" for
    none. `reranker` "" stands for none; the path of its tokenizer is as written in the configuration.
    """

    collection: str
    fallback_collection: str
    options: SearchOptions
    reranker: str
    reranker_tokenizer: str


@dataclass(frozen=True, slots=True)
class RetrieverRequest:
    """The parameters of one request. `fallback_collection` is "" if the request names a collection itself."""

    collection: str
    fallback_collection: str
    key: str
    options: SearchOptions
    filter: Filter | None


@dataclass(frozen=True, slots=True)
class _Found:
    """The result of one search. `encoding` is None unless documents of its collection were being encoded."""

    hits: Sequence[Hit]
    encoding: EncodingProgress | None


def parse_settings(config: ModelConfig) -> RetrieverSettings:
    """Parse the parameters of a model's configuration. Raises SluiceError INVALID, which names the parameter."""
    given, defaults = ParameterReader.of_config(config, PARAMETERS), SearchOptions()
    has_mmr = bool(given.text("mmr_lambda", ""))
    options = SearchOptions(
        mode=given.choice("mode", defaults.mode),
        top_k=given.integer("top_k", defaults.top_k, 1, MAX_TOP_K),
        num_candidates=given.integer("num_candidates", defaults.num_candidates, 1, MAX_CANDIDATES),
        rrf_k=given.integer("rrf_k", defaults.rrf_k, 1, 10_000),
        vector_weight=given.number("vector_weight", defaults.vector_weight, 0, 100),
        text_weight=given.number("text_weight", defaults.text_weight, 0, 100),
        min_similarity=given.number("min_similarity", defaults.min_similarity, -1, 1),
        mmr_lambda=given.number("mmr_lambda", 1, 0, 1) if has_mmr else None,
    )
    return RetrieverSettings(
        collection=given.text("collection", DEFAULT_COLLECTION, _MAX_NAME_CHARS),
        fallback_collection=given.text("fallback_collection", "", _MAX_NAME_CHARS),
        options=options,
        reranker=given.text("reranker", "", _MAX_NAME_CHARS),
        reranker_tokenizer=given.text("reranker_tokenizer", ""),
    )


def parse_request(parameters: Parameters, settings: RetrieverSettings) -> RetrieverRequest:
    """Parse a request's parameters; those of other ensemble steps are ignored. Raises INVALID, naming the parameter."""
    given, defaults = ParameterReader(parameters), settings.options
    return RetrieverRequest(
        collection=given.text("collection", settings.collection, _MAX_NAME_CHARS),
        fallback_collection="" if "collection" in parameters else settings.fallback_collection,
        key=given.text(OWNER_KEY, "", MAX_KEY_CHARS),
        options=replace(
            defaults,
            mode=given.choice("mode", defaults.mode),
            top_k=given.integer("top_k", defaults.top_k, 1, MAX_TOP_K),
            num_candidates=given.integer("num_candidates", defaults.num_candidates, 1, MAX_CANDIDATES),
            min_similarity=given.number("min_similarity", defaults.min_similarity, -1, 1),
            mmr_lambda=given.number("mmr_lambda", 1, 0, 1) if "mmr_lambda" in parameters else defaults.mmr_lambda,
        ),
        filter=parse_filter(given.text("filter", "", _MAX_FILTER_CHARS)),
    )


class RetrieverModel(TaskModel):
    """Searches the server's collections. The rows of a request are searched concurrently."""

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        library: DocumentLibrary,
        settings: RetrieverSettings,
        reranker: ModelReranker | None = None,
    ) -> None:
        super().__init__(config, version)
        self._library = library
        self._settings = settings
        self._reranker = reranker

    def _work(self, request: InferRequest) -> MakeOutputs:
        parsed = parse_request(request.parameters, self._settings)
        questions = [row[0] for row in read_text_rows(request, QUERY, is_batched=self._is_batched)]
        if not all(map(str.strip, questions)):
            raise invalid(QUERY, f"input '{QUERY}' is empty; it must be a question")
        return partial(self._answer, parsed, questions, self._vectors(request, parsed, len(questions)))

    def _vectors(self, request: InferRequest, parsed: RetrieverRequest, num_rows: int) -> Sequence[Vector | None]:
        """Return the questions' vectors, scaled to length 1; None if the request has none or the mode needs none."""
        tensor = request.inputs.get(QUERY_EMBEDDINGS)
        if tensor is None or parsed.options.mode is RetrievalMode.BM25:
            return [None] * num_rows
        rows = tensor.array.reshape(num_rows, -1).astype(np.float32)
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        if not (np.isfinite(lengths).all() and (lengths > 0).all()):
            reason = "must be a vector of finite numbers that are not all 0"
            raise invalid(QUERY_EMBEDDINGS, f"input '{QUERY_EMBEDDINGS}' {reason}")
        return list(rows / lengths)

    async def _answer(
        self, request: RetrieverRequest, questions: Sequence[str], vectors: Sequence[Vector | None]
    ) -> list[Tensor]:
        rows = zip(questions, vectors, strict=True)
        return self._tensors(await gather_all([self._search(request, question, vector) for question, vector in rows]))

    async def _search(self, request: RetrieverRequest, question: str, vector: Vector | None) -> _Found:
        query = SearchQuery(question, vector, request.filter)
        try:
            # Asked first: what is stored while the search runs is not in its hits.
            encoding = await self._library.encoding_progress(request.collection)
            library, options = self._library, request.options
            hits = await library.search(request.collection, query, options, self._reranker, request.key)
            return _Found(hits, encoding)
        except SluiceError as error:
            if error.code is ErrorCode.NOT_FOUND and error.param == "collection":
                if request.fallback_collection:
                    fallback = replace(request, collection=request.fallback_collection, fallback_collection="")
                    return await self._search(fallback, question, vector)
                raise await self._unknown_collection(request) from None
            if error.code is ErrorCode.INVALID and vector is not None:
                await self._check_length(request, vector)
            raise

    async def _unknown_collection(self, request: RetrieverRequest) -> SluiceError:
        """Return an error that lists the collections to which the request has access."""
        found = await self._library.collections()
        names = [each.spec.name for each in found if grants_access(each.spec, request.key)]
        there_are = ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")
        known = f"there are {there_are}" if names else "there is none yet: documents that are put make one"
        message = f"parameter 'collection': there is no collection '{request.collection}'; {known}"
        return SluiceError(ErrorCode.NOT_FOUND, message, param="collection")

    async def _check_length(self, request: RetrieverRequest, vector: Vector) -> None:
        spec = (await self._library.collection(request.collection, request.key)).spec
        if len(vector) == spec.dim:
            return
        raise invalid(
            QUERY_EMBEDDINGS,
            f"input '{QUERY_EMBEDDINGS}' has vectors of {len(vector)} numbers, but collection '{spec.name}' holds "
            f"vectors of {spec.dim}, made by the model '{spec.encoder}'; encode the query with that model",
        )

    def _tensors(self, found: Sequence[_Found]) -> list[Tensor]:
        columns = {
            CONTEXT: [[hit.text.encode() for hit in each.hits] for each in found],
            SOURCES: [[encode_source(build_source(hit)) for hit in each.hits] for each in found],
            ENCODING: [[encode_progress(each.encoding)] for each in found],
        }
        return [build_text_tensor(name, column, is_batched=self._is_batched) for name, column in columns.items()]


class RetrieverBackend(Backend):
    """Loads retrievers. They stay loaded while the store is down; only their requests fail."""

    name = "retriever"
    is_stateless = True
    finds_models = True

    def __init__(self, library: DocumentLibrary | None = None) -> None:
        """`library` holds the server's collections; None if the server has none."""
        self._library = library

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        return complete_tensors(source.config, INPUTS, OUTPUTS)

    def check(self, source: ModelSource) -> None:
        complete_and_check(complete_tensors(source.config, INPUTS, OUTPUTS))
        _read_reranker_tokenizer(source, parse_settings(source.config))

    async def load(self, source: ModelSource, context: BackendContext) -> RetrieverModel:
        settings = parse_settings(source.config)
        if self._library is None:
            message = (
                f"model '{source.name}' searches collections of documents, and this server has none: set --rag-store"
            )
            raise SluiceError(ErrorCode.UNAVAILABLE, message)
        reranker = await _load_reranker(source, context, settings)
        return RetrieverModel(source.config, source.version, self._library, settings, reranker)


async def _load_reranker(
    source: ModelSource, context: BackendContext, settings: RetrieverSettings
) -> ModelReranker | None:
    """Load the reranker with its tokenizer."""
    if not settings.reranker:
        return None
    tokenizer = await asyncio.to_thread(_read_reranker_tokenizer, source, settings)
    return ModelReranker(context.models, settings.reranker, tokenizer)


def _read_reranker_tokenizer(source: ModelSource, settings: RetrieverSettings) -> PairTokenizer | None:
    """Read the reranker's tokenizer, if any, whose path is relative to the retriever's folder. For a thread."""
    if not settings.reranker or not settings.reranker_tokenizer:
        return None
    return PairTokenizer.load(source.folder / settings.reranker_tokenizer)
