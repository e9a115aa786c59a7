"""What a retriever's configuration and a request say of a search."""

from dataclasses import dataclass, replace

from tritonclient.grpc.model_config_pb2 import ModelConfig

from pipelines.rag import keys
from pipelines.rag.filters import Filter, parse_filter
from pipelines.rag.library import DEFAULT_COLLECTION
from pipelines.rag.retrieval.search import MAX_CANDIDATES, MAX_TOP_K, SearchOptions
from serving.config.parameters import ParameterReader
from serving.request import Parameters

PARAMETERS = (
    "collection",
    "fallback_collection",
    "top_k",
    "mode",
    "num_candidates",
    "rrf_k",
    "vector_weight",
    "text_weight",
    "min_similarity",
    "mmr_lambda",
    "reranker",
    "reranker_tokenizer",
)
"""What config.pbtxt may set."""
_MAX_NAME_CHARS = 256
_MAX_FILTER_CHARS = 65_536


@dataclass(frozen=True, slots=True)
class RetrieverSettings:
    """What holds for requests that do not say. `reranker` "" is none; its tokenizer's path is as it is written.

    `fallback_collection` is searched while there is no `collection` yet, for requests that name none; "" is none.
    """

    collection: str
    fallback_collection: str
    options: SearchOptions
    reranker: str
    reranker_tokenizer: str


@dataclass(frozen=True, slots=True)
class Asked:
    """What one request asks for. `fallback_collection` "" where it names a collection itself."""

    collection: str
    fallback_collection: str
    key: str
    options: SearchOptions
    filter: Filter | None


def settings_of(config: ModelConfig) -> RetrieverSettings:
    """Raises SluiceError INVALID, naming the parameter."""
    given, usual = ParameterReader.of_config(config, PARAMETERS), SearchOptions()
    has_mmr = bool(given.text("mmr_lambda", ""))
    options = SearchOptions(
        mode=given.choice("mode", usual.mode),
        top_k=given.integer("top_k", usual.top_k, 1, MAX_TOP_K),
        num_candidates=given.integer("num_candidates", usual.num_candidates, 1, MAX_CANDIDATES),
        rrf_k=given.integer("rrf_k", usual.rrf_k, 1, 10_000),
        vector_weight=given.number("vector_weight", usual.vector_weight, 0, 100),
        text_weight=given.number("text_weight", usual.text_weight, 0, 100),
        min_similarity=given.number("min_similarity", usual.min_similarity, -1, 1),
        mmr_lambda=given.number("mmr_lambda", 1, 0, 1) if has_mmr else None,
    )
    return RetrieverSettings(
        collection=given.text("collection", DEFAULT_COLLECTION, _MAX_NAME_CHARS),
        fallback_collection=given.text("fallback_collection", "", _MAX_NAME_CHARS),
        options=options,
        reranker=given.text("reranker", "", _MAX_NAME_CHARS),
        reranker_tokenizer=given.text("reranker_tokenizer", ""),
    )


def asked_of(parameters: Parameters, settings: RetrieverSettings) -> Asked:
    """Raises SluiceError INVALID, naming the parameter. Those that are another step's are left alone."""
    given, usual = ParameterReader(parameters), settings.options
    return Asked(
        collection=given.text("collection", settings.collection, _MAX_NAME_CHARS),
        fallback_collection="" if "collection" in parameters else settings.fallback_collection,
        key=given.text(keys.PARAMETER, "", keys.MAX_CHARS),
        options=replace(
            usual,
            mode=given.choice("mode", usual.mode),
            top_k=given.integer("top_k", usual.top_k, 1, MAX_TOP_K),
            num_candidates=given.integer("num_candidates", usual.num_candidates, 1, MAX_CANDIDATES),
            min_similarity=given.number("min_similarity", usual.min_similarity, -1, 1),
            mmr_lambda=given.number("mmr_lambda", 1, 0, 1) if "mmr_lambda" in parameters else usual.mmr_lambda,
        ),
        filter=parse_filter(given.text("filter", "", _MAX_FILTER_CHARS)),
    )
