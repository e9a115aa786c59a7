"""What a request says of retrieval, and what an answer tells of it: Sluice's own fields in OpenAI's API."""

from typing import Any

from gateway.http.openai.schemas import GenerationRequest, RagOptions
from gateway.http.retrieval import step_parameters
from pipelines.rag.filters import parse_filter
from sluice.errors import SluiceError

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


def _check_filter(filter: dict[str, Any] | None) -> None:
    try:
        parse_filter(filter)
    except SluiceError as error:
        error.param = _PARAM_NAMES["filter"]
        raise
