"""Bounds the formats of strings that may go on for ever: a small model under a grammar writes on as long as it may."""

from typing import Any

import msgspec

from sluice.engine.guidance.nodes import has_unknown_format, types_of, walk
from sluice.engine.guidance.overlap import compile_error

_FRACTION = r"^[^.]*(?:\.[0-9]{1,9}[^.0-9][^.]*)?$"
BOUNDS = {
    "date-time": _FRACTION,
    "time": _FRACTION,
    "duration": r"^(?:[A-Z]{1,2}[0-9]{1,9}){1,7}[A-Z]$",
    "email": r"^[^@]{1,64}@[^@]{1,189}$",
    "hostname": r"^.{1,253}$",
    "uri": r"^[^:]{1,32}:(?://[^/?#]{0,255})?[^?#]{0,1024}(?:\?[^#]{0,1024})?(?:#.{0,255})?$",
}
"""Patterns that a string of the format matches besides: nanoseconds, numbers of 9 digits, the lengths of RFC 5321 and
RFC 1035, and for a URI, which has no limit, what browsers and servers take."""
_SAID = ("maxLength", "const", "enum")
"""Keywords of a schema that has bounds of its own."""
_SHORTEST = 32
"""A minimum length up to which the bounds are out of the way."""


def bound_formats(schema: dict[str, Any]) -> bool:
    """Give formats an end, and take those that do not constrain out of a schema; return whether it has changed."""
    nodes = [node for _, node in walk(schema) if "format" in node]
    return sum(map(_bound, nodes)) > 0


def _bound(node: dict[str, Any]) -> bool:
    if has_unknown_format(node):
        del node["format"]
        return True
    format, shortest = node["format"], node.get("minLength", 0)
    bound = BOUNDS.get(format) if isinstance(format, str) and "string" in types_of(node) else None
    if bound is None or any(key in node for key in _SAID) or (isinstance(shortest, int) and shortest > _SHORTEST):
        return False
    if "pattern" not in node:
        node["pattern"] = bound
        return True
    part = {"type": "string", "pattern": bound}
    own: dict[str, Any] = {key: node[key] for key in ("format", "pattern", "minLength") if key in node}
    if not isinstance(parts := node.get("allOf", []), list) or _is_too_complex({**own, "allOf": [part]}):
        return False  # the client's own pattern decides
    kind = {"type": node["type"]} if "type" in node else {}
    node["allOf"] = [*parts, {**part, **kind}]
    return True


def _is_too_complex(node: dict[str, Any]) -> bool:
    return bool(compile_error(msgspec.json.encode({"type": "string", **node}).decode()))
