"""Reads of a JSON schema which values it allows, for formats that write some of them otherwise than JSON does."""

from collections.abc import Mapping
from typing import Any

TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_DEFINITIONS = ("$defs", "definitions")
_ANNOTATIONS = frozenset({"anyOf", "oneOf", "title", "description", "default", "examples"})
"""Keys beside which the parts of a choice say all of a value."""
_INTEGER = "-?(0|[1-9][0-9]{0,18})"
_NUMBERS = {"integer": _INTEGER, "number": rf"{_INTEGER}(\.[0-9]{{1,20}})?([eE][+-]?[0-9]{{1,3}})?"}
_MAX_REFERENCES = 16
_MAX_DEPTH = 64
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


def number_regex(schema: Mapping[str, Any]) -> str:
    """Return the regular expression of a number of as many digits as doubles and integers of 64 bits need, where the
    schema says no more than that it is one; else ""."""
    name = schema.get("type")
    return _NUMBERS.get(name, "") if isinstance(name, str) and _ANNOTATIONS.issuperset(schema.keys() - {"type"}) else ""


def alone(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of a schema as one of its own, with the definitions that it may refer to."""
    return {**{key: root[key] for key in root if key in _DEFINITIONS}, **schema}


def choices_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the only values that a schema allows; None where it does not name them."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    return choices if isinstance(choices, list) else None


def parts_of(schema: Mapping[str, Any]) -> list[object]:
    """Return the schemas of which a value must match any, where the schema says nothing else of it; else none."""
    parts = next((schema[key] for key in ("anyOf", "oneOf") if key in schema), None)
    return parts if isinstance(parts, list) and _ANNOTATIONS.issuperset(schema) else []


def arguments_of(schema: Mapping[str, Any]) -> tuple[dict[str, object], frozenset[str]]:
    """Return the schemas of a function's arguments by name, those of its resolved schema's root, and which of them a
    call must have."""
    root = resolve(schema, schema)
    properties, required = root.get("properties"), root.get("required")
    names = frozenset(each for each in required if isinstance(each, str)) if isinstance(required, list) else frozenset()
    return dict(properties) if isinstance(properties, Mapping) else {}, names


def takes_any_argument(schema: Mapping[str, Any]) -> bool:
    """Whether a function's schema names no arguments and allows all."""
    root = resolve(schema, schema)
    return not root.get("properties") and root.get("additionalProperties") is not False


def types_of(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the types that a schema, part of `root`, allows; perhaps too many."""
    return _types_of(schema, root, {}, _MAX_DEPTH)


def _types_of(schema: object, root: Mapping[str, Any], known: dict[int, frozenset[str]], depth: int) -> frozenset[str]:
    resolved = resolve(schema, root)
    if id(resolved) in known:
        return known[id(resolved)]
    known[id(resolved)] = frozenset()  # what refers to itself adds nothing
    names = resolved.get("type", sorted(TYPES))
    names = names if isinstance(names, list) else [names]
    types = TYPES.intersection(each for each in names if isinstance(each, str))
    if (choices := choices_of(resolved)) is not None:
        types &= {type_name(value) for value in choices}
    for key in ("anyOf", "oneOf"):
        if depth and isinstance(parts := resolved.get(key), list) and parts:
            types &= frozenset[str]().union(*(_types_of(part, root, known, depth - 1) for part in parts))
    known[id(resolved)] = types
    return types
