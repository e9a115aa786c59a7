"""What a request says of retrieval, and what an answer tells of it: Sluice's own fields in OpenAI's API."""

from typing import Any

import orjson

from engine.errors import SluiceError
from gateway.http.openai.schemas import GenerationRequest, RagOptions
from pipelines.rag import keys
from pipelines.rag.filters import parse_filter
from pipelines.rag.sources import as_objects
from pipelines.text.types import TextDetail, TextEvent

_PARAM_NAMES = {"parameters": "rag", **{name: f"rag.{name}" for name in ("collection", "filter", "mode")}}


def retrieval_param_names(fields: GenerationRequest) -> dict[str, str]:
    """The client's names of what a retrieving step names in its errors. A language model has a `top_k` as well."""
    is_retrieval = fields.rag is not None and fields.rag.top_k is not None and fields.top_k is None
    return {**_PARAM_NAMES, **({"top_k": "rag.top_k"} if is_retrieval else {})}


def retrieval_parameters(asked: RagOptions | None, collection_key: str) -> dict[str, str | int | float | bool]:
    """The request parameters of a retrieving step. Raises INVALID for a filter that is none."""
    if asked is None:
        return step_parameters(None, None, None, None, collection_key)
    _check_filter(asked.filter)
    return step_parameters(asked.collection, asked.top_k, asked.mode, asked.filter, collection_key)


def step_parameters(
    collection: str | None, top_k: int | None, mode: str | None, filter: dict[str, Any] | None, collection_key: str
) -> dict[str, str | int | float | bool]:
    """What was given, under the names of a retrieving step. `filter` has been checked; an empty key is none."""
    sent = {
        "collection": collection,
        "top_k": top_k,
        "mode": mode,
        "filter": orjson.dumps(filter).decode() if filter else None,
        keys.PARAMETER: collection_key or None,
    }
    return {name: value for name, value in sent.items() if value is not None}


def _check_filter(filter: dict[str, Any] | None) -> None:
    try:
        parse_filter(filter)
    except SluiceError as error:
        error.param = _PARAM_NAMES["filter"]
        raise


def sources_of(detail: TextDetail | None) -> dict[str, Any]:
    """The field `sources` of an answer, where anything was looked for."""
    found = detail.retrieval if detail is not None else None
    return {} if found is None else {"sources": as_objects(found.sources)}


def citations_of(end: TextEvent) -> dict[str, Any]:
    """The field `citations` of a choice, where anything was looked for."""
    found = end.detail.retrieval if end.detail is not None else None
    return {} if found is None else {"citations": as_objects(found.citations)}
