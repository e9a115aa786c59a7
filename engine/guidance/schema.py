"""Checks JSON schemas before they are compiled, and locates errors in them."""

import re
import time
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import islice
from typing import Any

import msgspec

from sluice.errors import SluiceError, invalid

MAX_PATTERN_CHARS = 4096
MAX_ALL_PATTERNS_CHARS = 32768
"""Most characters of all patterns of a schema. Time and memory grow with the square of a pattern's length."""

MAX_PATTERN_PAIRS = 2048
"""Most pairs of patterns of all objects. Each pair is checked for overlap, in up to a millisecond."""

_SEARCH_S = 0.5
"""Most seconds spent on locating an error in a schema."""

FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
"""Values of `format` that constrain a string. All others are annotations, as the draft has them by default."""

_NAMED_NODES = 2048
_COMPARED_OPTIONS = 64
"""Most schemas that are searched for what is not enforced, and most options of oneOf that are compared: a request waits
for it, and others with it."""
_TYPES = ("object", "array", "string", "number", "boolean", "null")
_NO_SCHEMA = "schema must be an object or boolean"  # llguidance's words

_MAPS = ("$defs", "definitions", "properties", "patternProperties")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf", "items")
_OTHER_MEMBERS = frozenset({"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"})
"""Keys of an object's schema that may allow further members."""
_SINGLE = ("items", "additionalProperties", "additionalItems")

Probe = Callable[[str], str]
"""Compiles a schema's text. Returns the error, empty without one."""


def parse_schema(text: str) -> dict[str, Any]:
    """Parse a schema. Raises SluiceError INVALID if it is not a JSON object."""
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid("grammar", f"the JSON schema is not valid JSON: {error}") from None
    if not isinstance(schema, dict):
        raise invalid("grammar", f"the JSON schema must be an object, got {text[:40]}")
    return schema


def relaxations(schema: dict[str, Any]) -> Iterator[str]:
    """Yield what a schema says and its grammar does not keep to, each with its place: unknown formats, and options of
    oneOf that one value may match, which are taken as anyOf."""
    nodes = islice(_walk(schema), _NAMED_NODES)
    return (f"{what} at {pointer}" for pointer, node in nodes for what in _relaxed(node))


def _relaxed(node: dict[str, Any]) -> Iterator[str]:
    if _has_unknown_format(node):
        yield f"format {node['format'][:40]!r} is not enforced"
    if isinstance(options := node.get("oneOf"), list) and len(options) > 1 and not _are_exclusive(options):
        yield "oneOf is taken as anyOf"


def _has_unknown_format(node: dict[str, Any]) -> bool:
    return isinstance(format := node.get("format"), str) and format not in FORMATS and "string" in _types(node)


def _are_exclusive(options: list[Any]) -> bool:
    """Whether types, or the values of a required member, show that no value can match two of the options."""
    nodes = [option for option in options if isinstance(option, dict)]
    if len(nodes) < len(options) or len(nodes) > _COMPARED_OPTIONS:
        return False
    if _are_disjoint([_types(node) for node in nodes]) or _are_disjoint([_values(node) for node in nodes]):
        return True
    members = [_fixed_members(node) for node in nodes]
    return any(_are_disjoint([member[name] for member in members]) for name in set.intersection(*map(set, members)))


def _are_disjoint(sets: list[set[str]]) -> bool:
    return all(sets) and len(set.union(*sets)) == sum(map(len, sets))


def _types(node: dict[str, Any]) -> set[str]:
    """Return the types of the values that match, all where none is listed; an integer is a number."""
    return {"number" if name == "integer" else name for name in _listed_types(node) or _TYPES}


def _listed_types(node: dict[str, Any]) -> list[str]:
    sent = node.get("type")
    names = [sent] if isinstance(sent, str) else sent if isinstance(sent, list) else []
    return [name for name in names if isinstance(name, str)]


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


def drop_unknown_formats(schema: dict[str, Any]) -> bool:
    """Take the formats that do not constrain out of a schema; return whether it has changed."""
    nodes = [node for _, node in _walk(schema) if _has_unknown_format(node)]
    for node in nodes:
        del node["format"]
    return bool(nodes)


def close_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects have no other members than those it names, where it does not say so itself. One
    with parts that hold together (allOf) stays as it is: each part would refuse the others' members."""
    closed: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(schema))
    nodes = [node for _, node in _walk(closed)]
    if any(isinstance(parts := node.get("allOf"), list) and len(parts) > 1 for node in nodes):
        return schema
    for node in nodes:
        if "properties" in node and _OTHER_MEMBERS.isdisjoint(node):
            node["additionalProperties"] = False
    return closed


def check_schema(schema: dict[str, Any]) -> None:
    """Check for schemas that compile but take too long or have no finite value. Raises SluiceError INVALID."""
    if "x-guidance" in schema:
        raise _at("#", "x-guidance is not taken from a schema; remove it")
    nodes = dict(_walk(schema))
    _check_patterns(nodes)
    _check_endless(nodes)


def locate_error(schema: dict[str, Any], error: str, probe: Probe) -> tuple[str, str]:
    """Return the JSON pointer of the innermost subschema at fault, and its own error. A subschema is at fault if it has
    the same error when compiled by itself, or makes its parent unsatisfiable."""
    shared: dict[str, Any] = {key: schema[key] for key in ("$schema", "$defs", "definitions") if key in schema}
    deadline = time.monotonic() + _SEARCH_S
    pointer, node, inner = "#", schema, True
    while inner:
        inner = False
        for child_pointer, child in _children(pointer, node):
            if time.monotonic() > deadline:
                break
            found = _error_of(child, shared, probe)
            if found and (found == error or _is_blamed(child_pointer, error)):
                pointer, node, error, inner = child_pointer, child, found, True
                break
    return pointer, error


def _error_of(node: Any, shared: dict[str, Any], probe: Probe) -> str:
    if isinstance(node, dict):
        return probe(msgspec.json.encode({**shared, **node}).decode())
    return "" if isinstance(node, bool) else _NO_SCHEMA


def _is_blamed(pointer: str, error: str) -> bool:
    match = re.fullmatch(r"Unsatisfiable schema: required property '(.*)' is unsatisfiable(?s:.*)", error)
    return match is not None and pointer.endswith(f"/properties/{_escape(match[1])}")


def _at(pointer: str, reason: str) -> SluiceError:
    return invalid("grammar", f"the JSON schema cannot be used: at {pointer}: {reason}")


def _children(pointer: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly inside a schema, with their JSON pointers."""
    if not isinstance(node, dict):
        return
    for key in _MAPS:
        if isinstance(inner := node.get(key), dict):
            yield from ((f"{pointer}/{key}/{_escape(name)}", child) for name, child in inner.items())
    for key in _LISTS:
        if isinstance(inner := node.get(key), list):
            yield from ((f"{pointer}/{key}/{index}", child) for index, child in enumerate(inner))
    for key in _SINGLE:
        if isinstance(inner := node.get(key), dict):
            yield f"{pointer}/{key}", inner


def _walk(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every schema object in the schema, itself first. Not recursive, because the client chooses the depth."""
    pending: list[tuple[str, Any]] = [("#", schema)]
    while pending:
        pointer, node = pending.pop()
        if isinstance(node, dict):
            yield pointer, node
            pending.extend(_children(pointer, node))


def _check_patterns(nodes: dict[str, dict[str, Any]]) -> None:
    num_pairs = num_chars = 0
    for pointer, node in nodes.items():
        keys = node.get("patternProperties")
        keys = list(keys) if isinstance(keys, dict) else []
        patterns = [*keys, pattern] if isinstance(pattern := node.get("pattern"), str) else keys
        num_pairs += len(keys) ** 2 // 2
        num_chars += sum(map(len, patterns))
        if any(len(pattern) > MAX_PATTERN_CHARS for pattern in patterns) or num_chars > MAX_ALL_PATTERNS_CHARS:
            limits = f"one may have {MAX_PATTERN_CHARS} characters, all together {MAX_ALL_PATTERNS_CHARS}"
            raise _at(pointer, f"patterns are too long: {limits}")
        if num_pairs > MAX_PATTERN_PAIRS:
            raise _at(f"{pointer}/patternProperties", "there are too many patterns; merge some into one")


def _check_endless(nodes: dict[str, dict[str, Any]]) -> None:
    """Reject schemas without a finite value: each of their values would contain another of the same schema."""
    graph = {pointer: list(_required_schemas(pointer, node)) for pointer, node in nodes.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pointer = min(error.args[1], key=lambda found: (found.count("/"), found))
        raise _at(pointer, "no finite value can match, for it always holds another of itself") from None


def _required_schemas(pointer: str, node: dict[str, Any]) -> Iterator[str]:
    """Yield pointers of the schemas that each value of this one must match, as a whole or in a part."""
    if "const" in node or "enum" in node:
        return
    if isinstance(reference := node.get("$ref"), str) and reference.startswith("#"):
        yield reference
    for key in ("allOf", "anyOf", "oneOf"):
        options = node.get(key)
        if isinstance(options, list) and (key == "allOf" or len(options) == 1):
            yield from (f"{pointer}/{key}/{index}" for index in range(len(options)))
    if node.get("type") == "object":
        yield from _required_members(pointer, node)
    if node.get("type") == "array":
        yield from _required_items(pointer, node)


def _required_members(pointer: str, node: dict[str, Any]) -> Iterator[str]:
    properties, required = node.get("properties"), node.get("required")
    if isinstance(properties, dict) and isinstance(required, list):
        names = (name for name in required if isinstance(name, str) and name in properties)
        yield from (f"{pointer}/properties/{_escape(name)}" for name in names)


def _required_items(pointer: str, node: dict[str, Any]) -> Iterator[str]:
    num_items, first = node.get("minItems", 0), node.get("prefixItems", [])
    if isinstance(num_items, int) and isinstance(first, list):
        yield from (f"{pointer}/prefixItems/{index}" for index in range(min(num_items, len(first))))
        if num_items > len(first) and isinstance(node.get("items"), dict):
            yield f"{pointer}/items"


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
