"""Reads a single schema: its types, its parts, the values and members that it names."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
"""Values of `format` that constrain a string. All others are annotations, as the draft has them by default."""

MAPS = ("$defs", "definitions", "properties", "patternProperties")
LISTS = ("prefixItems", "anyOf", "oneOf", "allOf", "items")
SINGLE = ("items", "additionalProperties", "additionalItems")
"""Keywords of which the schemas inside are compiled: an object of them, an array, or one."""

ANNOTATIONS = frozenset(
    {
        *("$anchor", "$comment", "$defs", "$id", "$schema", "$vocabulary", "$dynamicAnchor", "$recursiveAnchor"),
        *("contentEncoding", "contentMediaType", "contentSchema", "default", "definitions", "deprecated"),
        *("description", "example", "examples", "id", "nullable", "readOnly", "title", "writeOnly"),
    }
)
"""Keywords that say nothing of the values that match."""

_TYPES = ("object", "array", "string", "number", "boolean", "null")
_COMPARED_OPTIONS = 64
"""Most options of oneOf that are compared: a request waits for it, and others with it."""


def has_unknown_format(node: dict[str, Any]) -> bool:
    return isinstance(format := node.get("format"), str) and format not in FORMATS and "string" in types_of(node)


def types_of(node: dict[str, Any]) -> set[str]:
    """Return the types of the values that match, all where none is listed; an integer is a number."""
    return {"number" if name == "integer" else name for name in listed_types(node) or _TYPES}


def listed_types(node: dict[str, Any]) -> list[str]:
    """Return the types that the schema lists, none where it lists none."""
    return names_in([sent] if isinstance(sent := node.get("type"), str) else sent)


def names_in(sent: Any) -> list[str]:
    """Return the strings of an array; none where it is no array."""
    return [name for name in sent if isinstance(name, str)] if isinstance(sent, list) else []


def may_be_object(node: Any) -> bool:
    """Whether an object may match, as far as the schema itself says."""
    if not isinstance(node, dict):
        return node is True
    return "object" in types_of(node) and not _values(node)


def are_exclusive(options: list[Any]) -> bool:
    """Whether types, or the values of a required member, show that no value can match two of the options."""
    nodes = [option for option in options if isinstance(option, dict)]
    if len(nodes) < len(options) or len(nodes) > _COMPARED_OPTIONS:
        return False
    if _are_disjoint([types_of(node) for node in nodes]) or _are_disjoint([_values(node) for node in nodes]):
        return True
    return have_exclusive_members(nodes)


def have_exclusive_members(nodes: list[dict[str, Any]]) -> bool:
    """Whether the values of a member that all require show that no object can match two."""
    members = [_fixed_members(node) for node in nodes]
    return any(_are_disjoint([member[name] for member in members]) for name in set.intersection(*map(set, members)))


def _are_disjoint(sets: list[set[str]]) -> bool:
    return all(sets) and len(set.union(*sets)) == sum(map(len, sets))


def _values(node: Any) -> set[str]:
    """Return the only values that match, as text; an empty set where they are not listed."""
    if not isinstance(node, dict):
        return set()
    listed = [node["const"]] if "const" in node else node.get("enum")
    return {repr(value) for value in listed} if isinstance(listed, list) else set()


def _fixed_members(node: dict[str, Any]) -> dict[str, set[str]]:
    properties, required = node.get("properties"), node.get("required")
    if node.get("type") != "object" or not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    return {name: _values(properties[name]) for name in required if isinstance(name, str) and name in properties}


def children_of(pointer: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly inside a schema, with their JSON pointers."""
    if not isinstance(node, dict):
        return
    for key in MAPS:
        if isinstance(inner := node.get(key), dict):
            yield from ((f"{pointer}/{key}/{escape(name)}", child) for name, child in inner.items())
    for key in LISTS:
        if isinstance(inner := node.get(key), list):
            yield from ((f"{pointer}/{key}/{index}", child) for index, child in enumerate(inner))
    for key in SINGLE:
        if isinstance(inner := node.get(key), dict):
            yield f"{pointer}/{key}", inner


def walk(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every schema object in the schema, itself first. Not recursive, because the client chooses the depth."""
    pending: list[tuple[str, Any]] = [("#", schema)]
    while pending:
        pointer, node = pending.pop()
        if isinstance(node, dict):
            yield pointer, node
            pending.extend(children_of(pointer, node))


def find(schema: dict[str, Any], reference: str) -> Any:
    """Return what a reference inside the schema leads to; None where it leads nowhere or outside."""
    if reference == "#":
        return schema
    if not reference.startswith("#/"):
        return None
    found: Any = schema
    for key in map(unescape, reference[2:].split("/")):
        if isinstance(found, list):
            found = found[int(key)] if key.isascii() and key.isdigit() and int(key) < len(found) else None
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return found


def escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def unescape(part: str) -> str:
    """Return the name that a part of a JSON pointer in a reference stands for."""
    return unquote(part).replace("~1", "/").replace("~0", "~")
