"""The routes' bodies for /docs. FastAPI knows nothing of them, as we parse them ourselves."""

from typing import Any

from pydantic import BaseModel

from gateway.http.scheduling import OPENAPI_PARAMETERS
from pipelines.rag import owner_keys

_COLLECTION_KEY: dict[str, Any] = {
    "name": owner_keys.HEADER,
    "in": "header",
    "schema": {"type": "string"},
    "description": "The owner's key of the collection that a pipeline looks into, where it has one.",
}


def body_of(schema: type[BaseModel]) -> dict[str, Any]:
    """What an operation's OpenAPI entry says of its body and headers."""
    whole = schema.model_json_schema()
    inlined = _inlined(whole, whole.pop("$defs", {}))
    body = {"required": True, "content": {"application/json": {"schema": inlined}}}
    return {"requestBody": body, "parameters": [*OPENAPI_PARAMETERS, _COLLECTION_KEY]}


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    """`node` with every reference replaced by what it refers to; an operation has no place for definitions."""
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        name = node["$ref"].removeprefix("#/$defs/")
        return _inlined(definitions[name], definitions)
    return {key: _inlined(value, definitions) for key, value in node.items()}
