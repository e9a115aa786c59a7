"""Checks JSON schemas before they are compiled, and locates errors in them."""

import re
import time
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import msgspec

from sluice.engine.guidance.nodes import children_of, escape, walk
from sluice.errors import SluiceError, invalid

MAX_PATTERN_CHARS = 4096
MAX_ALL_PATTERNS_CHARS = 32768
"""Most characters of all patterns of a schema. Time and memory grow with the square of a pattern's length."""

MAX_PATTERN_PAIRS = 2048
"""Most pairs of patterns of all objects. Each pair is checked for overlap, in up to a millisecond."""

_SEARCH_S = 0.5
"""Most seconds spent on locating an error in a schema."""

_NO_SCHEMA = "schema must be an object or boolean"  # llguidance's words

SchemaProbe = Callable[[dict[str, Any]], str]
"""Compiles a schema. Returns the error, empty without one."""


def parse_schema(text: str) -> dict[str, Any]:
    """Parse a schema. Raises SluiceError INVALID if it is not a JSON object."""
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid("grammar", f"the JSON schema is not valid JSON: {error}") from None
    if not isinstance(schema, dict):
        raise invalid("grammar", f"the JSON schema must be an object, got {text[:40]}")
    return schema


class SchemaFault(NamedTuple):
    """A part of a schema that cannot be used, by its JSON pointer, and the reason."""

    pointer: str
    reason: str


def check_schema(schema: dict[str, Any]) -> None:
    """Check for schemas that compile but take too long or have no finite value. Raises SluiceError INVALID."""
    if "x-guidance" in schema:
        raise _at(SchemaFault("#", "x-guidance is not taken from a schema; remove it"))
    if (fault := find_fault(schema)) is not None:
        raise _at(fault)


def find_fault(schema: dict[str, Any]) -> SchemaFault | None:
    """Return the first part of a schema that would take too long to compile or has no finite value."""
    nodes = dict(walk(schema))
    return _find_long_patterns(nodes) or _find_endless(nodes)


def locate_error(schema: dict[str, Any], error: str, probe: SchemaProbe) -> SchemaFault:
    """Return the JSON pointer of the innermost subschema at fault, and its own error. A subschema is at fault if it has
    the same error when compiled by itself, or makes its parent unsatisfiable."""
    shared: dict[str, Any] = {key: schema[key] for key in ("$schema", "$defs", "definitions") if key in schema}
    deadline = time.monotonic() + _SEARCH_S
    pointer, node, inner = "#", schema, True
    while inner:
        inner = False
        for child_pointer, child in children_of(pointer, node):
            if time.monotonic() > deadline:
                break
            found = _error_of(child, shared, probe)
            if found and (found == error or _is_blamed(child_pointer, error)):
                pointer, node, error, inner = child_pointer, child, found, True
                break
    return SchemaFault(pointer, error)


def _error_of(node: Any, shared: dict[str, Any], probe: SchemaProbe) -> str:
    if isinstance(node, dict):
        return probe({**shared, **node})
    return "" if isinstance(node, bool) else _NO_SCHEMA


def _is_blamed(pointer: str, error: str) -> bool:
    match = re.fullmatch(r"Unsatisfiable schema: required property '(.*)' is unsatisfiable(?s:.*)", error)
    return match is not None and pointer.endswith(f"/properties/{escape(match[1])}")


def _at(fault: SchemaFault) -> SluiceError:
    return invalid("grammar", f"the JSON schema cannot be used: at {fault.pointer}: {fault.reason}")


def _find_long_patterns(nodes: dict[str, dict[str, Any]]) -> SchemaFault | None:
    num_pairs = num_chars = 0
    for pointer, node in nodes.items():
        keys = node.get("patternProperties")
        keys = list(keys) if isinstance(keys, dict) else []
        patterns = [*keys, pattern] if isinstance(pattern := node.get("pattern"), str) else keys
        num_pairs += len(keys) ** 2 // 2
        num_chars += sum(map(len, patterns))
        if any(len(pattern) > MAX_PATTERN_CHARS for pattern in patterns) or num_chars > MAX_ALL_PATTERNS_CHARS:
            limits = f"one may have {MAX_PATTERN_CHARS} characters, all together {MAX_ALL_PATTERNS_CHARS}"
            return SchemaFault(pointer, f"patterns are too long: {limits}")
        if num_pairs > MAX_PATTERN_PAIRS:
            return SchemaFault(f"{pointer}/patternProperties", "there are too many patterns; merge some into one")
    return None


def _find_endless(nodes: dict[str, dict[str, Any]]) -> SchemaFault | None:
    """Return a schema without a finite value: each of its values would contain another of the same schema."""
    graph = {pointer: list(_required_schemas(pointer, node)) for pointer, node in nodes.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pointer = min(error.args[1], key=lambda found: (found.count("/"), found))
        return SchemaFault(pointer, "no finite value can match, for it always holds another of itself")
    return None


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
        yield from (f"{pointer}/properties/{escape(name)}" for name in names)


def _required_items(pointer: str, node: dict[str, Any]) -> Iterator[str]:
    num_items, first = node.get("minItems", 0), node.get("prefixItems", [])
    if isinstance(num_items, int) and isinstance(first, list):
        yield from (f"{pointer}/prefixItems/{index}" for index in range(min(num_items, len(first))))
        if num_items > len(first) and isinstance(node.get("items"), dict):
            yield f"{pointer}/items"
