"""Makes the references within a schema JSON pointers, where it names parts of itself by `$id` and `$anchor`."""

from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urljoin

import msgspec

from sluice.engine.guidance.nodes import escape

_OF_NAMES = frozenset({"$defs", "definitions", "properties", "patternProperties", "dependentSchemas", "dependencies"})
"""Keywords whose members are schemas by name."""
_VALUES = frozenset({"enum", "const", "default", "examples"})
"""Keywords that hold values, in which nothing refers to a schema."""


class _Place(NamedTuple):
    pointer: str
    node: dict[str, Any]
    base: str
    """The URI of the part that the schema belongs to; "" for none."""


def with_pointers(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema in which each reference is a JSON pointer, as far as it leads to a place in the schema."""
    if all(_is_plain(place) for place in _places(schema)):
        return schema
    copy: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(schema))
    places = list(_places(copy))
    parts, anchors = {"": "#"}, {}
    for place in places:
        parts.setdefault(place.base, place.pointer)
        if isinstance(anchor := place.node.get("$anchor", place.node.get("$dynamicAnchor")), str):
            anchors[f"{place.base}#{anchor}"] = place.pointer
    for place in places:
        if isinstance(reference := place.node.get("$ref"), str):
            uri = _join(place.base, reference)
            part, _, fragment = uri.partition("#")
            is_pointer = not fragment or fragment.startswith("/")
            found = f"{parts[part]}{fragment}" if is_pointer and part in parts else anchors.get(uri)
            place.node["$ref"] = reference if found is None else found
    return copy


def _is_plain(place: _Place) -> bool:
    reference = place.node.get("$ref", "#")
    is_pointer = not isinstance(reference, str) or reference == "#" or reference.startswith("#/")
    return is_pointer and (place.pointer == "#" or not isinstance(place.node.get("$id"), str))


def _places(schema: dict[str, Any]) -> Iterator[_Place]:
    """Yield whatever in a schema may be a schema, from the outside in."""
    pending: list[tuple[str, Any, str, bool]] = [("#", schema, "", False)]
    while pending:
        pointer, value, base, has_names = pending.pop()
        if isinstance(value, list):
            pending.extend((f"{pointer}/{index}", child, base, False) for index, child in enumerate(value))
        elif isinstance(value, dict):
            if not has_names:
                if isinstance(own_id := value.get("$id"), str):
                    base = _join(base, own_id).partition("#")[0]
                yield _Place(pointer, value, base)
            pending.extend(
                (f"{pointer}/{escape(key)}", child, base, not has_names and key in _OF_NAMES)
                for key, child in value.items()
                if has_names or key not in _VALUES
            )


def _join(base: str, reference: str) -> str:
    try:
        return f"{base}{reference}" if reference.startswith("#") else urljoin(base, reference)
    except ValueError:  # no URI
        return reference
