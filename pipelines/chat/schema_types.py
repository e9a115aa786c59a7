"""What types of values a JSON schema allows, for formats that write text as it is and all else as JSON."""

from collections.abc import Mapping
from typing import Any

TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_MAX_REFERENCES = 16
_TYPE_NAMES: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object",
}  # fmt: skip


def type_name(value: object) -> str:
    """Return the name of a JSON value's type."""
    return _TYPE_NAMES[type(value)]


def resolve(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema, or what its reference into `root` leads to. What is no object allows all values."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        pointer = schema.get("$ref")
        if not isinstance(pointer, str) or not pointer.startswith("#/"):
            return schema
        schema = root
        for key in pointer[2:].split("/"):
            key = key.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return {}


def types_of(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the types that a schema, part of `root`, allows; perhaps too many."""
    return _types_of(schema, root, _MAX_REFERENCES)


def _types_of(schema: object, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    resolved = resolve(schema, root)
    names = resolved.get("type", TYPES)
    types = frozenset([names] if isinstance(names, str) else names) & TYPES
    if "const" in resolved or isinstance(resolved.get("enum"), list):
        types &= {type_name(value) for value in resolved.get("enum", [resolved.get("const")])}
    for key in ("anyOf", "oneOf"):
        if depth and isinstance(parts := resolved.get(key), list) and parts:
            types &= frozenset[str]().union(*(_types_of(part, root, depth - 1) for part in parts))
    return types
