"""The routes' bodies for /docs. FastAPI knows nothing of them, as we parse them ourselves."""

from typing import Any

from pydantic import BaseModel


def body_of(schema: type[BaseModel]) -> dict[str, Any]:
    """What an operation's OpenAPI entry says of its body."""
    whole = schema.model_json_schema()
    inlined = _inlined(whole, whole.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined}}}}


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
