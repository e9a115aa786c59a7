"""Fields that the RAG routes accept, with types as strict as those of the OpenAI routes.

`sluice.engine.validation` checks the ranges of sampling fields, as for every protocol.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from sluice.engine.sampling_fields import SAMPLING_FIELDS, FieldKind
from sluice.gateway.api.fields import build_sampling_schema
from sluice.gateway.front.http.parsing import Message, RequestObject, StopStrings
from sluice.pipelines.rag.search import MAX_CANDIDATES, MAX_TOP_K

MAX_METADATA_KEYS = 64
MAX_DOCUMENTS = 10_000
"""Most documents of one request: the outcome of each takes time and memory, however short the document is."""
QUERY_SAMPLING = (
    "seed",
    *(each.name for each in SAMPLING_FIELDS.values() if each.kind is FieldKind.FLOAT and not each.is_optional),
)
"""Sampling fields of a query. There is no `top_k` among them: a query's is its number of chunks."""
_INT64 = range(-(2**63), 2**63)
"""Integers that stores and JSON readers keep exactly."""


def _scalar(value: Any) -> Any:
    """Check that filters can match the value. Raises PydanticCustomError."""
    if value is None or isinstance(value, str | bool):
        return value
    if (isinstance(value, int) and value in _INT64) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise PydanticCustomError("expected", "Input should be a string, a 64-bit number, a boolean or null")


MetadataValue = Annotated[
    Any,
    AfterValidator(_scalar),
    WithJsonSchema({"anyOf": [{"type": kind} for kind in ("string", "number", "boolean", "null")]}),
]
Metadata = Annotated[
    dict[str, MetadataValue],
    Field(max_length=MAX_METADATA_KEYS, description="Attributes for filters: names with strings, numbers or booleans."),
]
FormatName = Literal["text", "markdown", "html"]
ModeName = Literal["vector", "bm25", "hybrid"]


class MetadataObject(RequestObject):
    """The metadata of a query parameter or a form field."""

    metadata: Metadata


class CollectionRequest(RequestObject):
    """`POST /v1/rag/collections`."""

    example = '{"name": "manuals"}'
    name: str = Field(description="1 to 63 letters, digits, '.', '_' or '-'.")
    encoder: str | None = Field(None, description="The model that makes its embeddings. Default: the server's.")


class _DocumentFields(RequestObject):
    """The fields of a document besides id and text."""

    format: FormatName | None = Field(None, description="Default: detected from the id's ending and the text.")
    title: str | None = Field(None, description="Default: the document's own, else its id.")
    metadata: Metadata | None = None


class DocumentItem(_DocumentFields):
    """One document of several."""

    id: str
    text: str


class DocumentsRequest(_DocumentFields):
    """`POST /v1/rag/{collection}/documents` as JSON: one document, or several under `documents`."""

    example = '{"id": "pump.md", "text": "# Pumps\\n\\nCheck the oil weekly."}'
    documents: list[DocumentItem] | None = Field(None, min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True)
    id: str | None = None
    text: str | None = None


class _RetrievalFields(RequestObject):
    """The question, and where to search for its answer."""

    question: str = Field(min_length=1)
    top_k: int | None = Field(None, ge=1, le=MAX_TOP_K, description="Number of chunks.")
    filter: dict[str, Any] | None = Field(
        None, description='Conditions on metadata, all of which hold: {"product": "x", "year": {"gte": 2025}}.'
    )
    mode: ModeName | None = Field(None, description="By meaning (vector), by words (bm25), or by both (hybrid).")


class SearchRequest(_RetrievalFields):
    """`POST /v1/rag/{collection}/search`."""

    example = '{"question": "How is KV memory shared?", "top_k": 3}'
    num_candidates: int | None = Field(
        None, ge=1, le=MAX_CANDIDATES, description="Chunks of each ranking that are fused."
    )
    min_similarity: float | None = Field(
        None, ge=-1, le=1, description="Chunks below it that share no word with the question are left out."
    )
    mmr_lambda: float | None = Field(
        None, ge=0, le=1, description="Maximal marginal relevance: 1 is relevance alone, 0 diversity alone."
    )


_SamplingFields: Any = build_sampling_schema(SAMPLING_FIELDS[name] for name in QUERY_SAMPLING)


class QueryRequest(_RetrievalFields, _SamplingFields):  # type: ignore[misc]  # its sampling fields are a table's rows
    """`POST /v1/rag/{collection}/query`."""

    example = '{"question": "How is KV memory shared?", "max_tokens": 100}'
    model: str | None = Field(None, description="The pipeline that answers.")
    stream: bool | None = None
    history: list[Message] | None = Field(None, fail_fast=True, description="Earlier turns of the conversation.")
    max_tokens: int | None = Field(None, ge=1, description="Longest answer, in tokens.")
    stop: StopStrings | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="Lower runs earlier.")
    cache_salt: str | None = Field(
        None, max_length=256, description="Prompts are reused only between requests of one salt."
    )
