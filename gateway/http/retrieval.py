"""TODO."""

from typing import Any

import orjson

from pipelines.rag import owner_keys
from pipelines.text.citations import to_json_objects
from pipelines.text.types import TextDetail, TextEvent


def step_parameters(
    collection: str | None, top_k: int | None, mode: str | None, filter: dict[str, Any] | None, collection_key: str
) -> dict[str, str | int | float | bool]:
    """What was given, under the names of a retrieving step. `filter` has been checked; an empty key is none."""
    sent = {
        "collection": collection,
        "top_k": top_k,
        "mode": mode,
        "filter": orjson.dumps(filter).decode() if filter else None,
        owner_keys.PARAMETER: collection_key or None,
    }
    return {name: value for name, value in sent.items() if value is not None}


def sources_of(detail: TextDetail | None) -> dict[str, Any]:
    """The field `sources` of an answer, where anything was looked for."""
    found = detail.retrieval if detail is not None else None
    return {} if found is None else {"sources": to_json_objects(found.sources)}


def citations_of(end: TextEvent) -> dict[str, Any]:
    """The field `citations` of a choice, where anything was looked for."""
    found = end.detail.retrieval if end.detail is not None else None
    return {} if found is None else {"citations": to_json_objects(found.citations)}
