"""Rewrites a client's schema as one that its grammar keeps to.

What no grammar can express is left out and noted: the new schema matches more values, never fewer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from sluice.engine.guidance.nodes import (
    ANNOTATIONS,
    are_exclusive,
    escape,
    find,
    has_unknown_format,
    listed_types,
    names_in,
    types_of,
    unescape,
)
from sluice.engine.guidance.overlap import are_disjoint
from sluice.engine.guidance.patterns import translate_pattern
from sluice.engine.guidance.references import with_pointers

_MAX_DEPTH = 100
"""Nesting from which a schema is left as it is: the compiler refuses it."""
_FORGOTTEN = ANNOTATIONS - {"title", "description", "default", "examples", "$schema"}
"""Annotations that a compiled schema does without; definitions are added where they are referred to."""
UNIONS = ("anyOf", "oneOf")
_APPLICATORS = ("$ref", "allOf", *UNIONS)


_LARGEST_BOUND = 10**18


class Note(NamedTuple):
    """Something that a schema says and its grammar does not keep to."""

    what: str
    pointer: str
    is_broken: bool = True
    """Whether a constraint is not kept to that a strict schema relies on."""

    def __str__(self) -> str:
        return f"{self.what} at {self.pointer}"


@dataclass(slots=True)
class SchemaPlace:
    """A schema that is being rewritten."""

    node: dict[str, Any]
    pointer: str
    depth: int
    is_part: bool
    """Whether other schemas hold for the same value."""
    without: str = ""
    """A keyword that is left to the caller."""
    out: dict[str, Any] = field(default_factory=dict)
    parts: list[dict[str, Any]] = field(default_factory=list)
    """Schemas that must match too, each on its own."""
    is_never: bool = False


class Rewriter:
    """Rewrites one schema. Its definitions are rewritten as they are referred to."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.schema = with_pointers(schema)
        self.notes: dict[Note, None] = {}
        self._versions: dict[tuple[str, bool], str] = {("#", True): "#"}
        """References to the rewritten definitions: by the client's reference, and whether it is all of a value's
        schema or one part."""
        self._pending: list[tuple[dict[str, Any], str, str, Any, bool]] = []
        self._definitions: dict[str, dict[str, Any]] = {}

    def run(self) -> dict[str, Any]:
        """Return the schema with the definitions that it refers to."""
        whole = self.whole(self.schema, "#", 0)
        while self._pending:
            container, name, pointer, node, is_whole = self._pending.pop()
            container[name] = self.whole(node, pointer, 0) if is_whole else self.part(node, pointer, 0)
        if whole is False:
            whole = {"enum": []}  # which the compiler refuses
        return {**whole, **self._definitions}

    def whole(self, node: Any, pointer: str, depth: int) -> Any:
        """Return the schema that alone says what a value is."""
        if not isinstance(node, dict):
            return node
        return self.settle(self.open(SchemaPlace(node, pointer, depth, is_part=False)), pointer)

    def part(self, node: Any, pointer: str, depth: int) -> Any:
        """Return the schema that says what a value is beside others."""
        return self.open(SchemaPlace(node, pointer, depth, is_part=True)) if isinstance(node, dict) else node

    def open(self, place: SchemaPlace) -> Any:
        """Return a schema as it is open or closed by itself."""
        if place.depth > _MAX_DEPTH:
            return place.node
        for key, value in place.node.items():
            if key not in _FORGOTTEN and key != place.without:
                _KEYWORDS.get(key, _keep)(self, place, key, value)
        if place.is_never:
            return False
        if place.parts:
            place.out["allOf"] = [*place.out.get("allOf", ()), *place.parts]
        return place.out

    def settle(self, out: Any, pointer: str) -> Any:
        """Leave out what the compiler cannot count of the members of a schema that is complete."""
        if isinstance(out, dict) and ("minProperties" in out or "maxProperties" in out):
            _settle_counts(self, out, pointer)
        return out

    def note(self, place: SchemaPlace, what: str, *, is_broken: bool = True) -> None:
        self.notes[Note(what, place.pointer, is_broken)] = None

    def refer(self, reference: str, *, is_whole: bool) -> str:
        """Return the reference to what another leads to, rewritten."""
        known = self._versions.get((reference, is_whole))
        if known is not None:
            return known
        node = find(self.schema, reference)
        # Where it leads nowhere, the compiler says so.
        return reference if node is None else self.define(reference, node, is_whole=is_whole)

    def define(self, pointer: str, node: Any, *, is_whole: bool) -> str:
        """Return the reference to a definition of a schema, rewritten, which is made once."""
        if (pointer, is_whole) not in self._versions:
            reference, container, name = self._name_definition(pointer)
            container[name] = True  # taken
            self._versions[pointer, is_whole] = reference
            self._pending.append((container, name, pointer, node, is_whole))
        return self._versions[pointer, is_whole]

    def _name_definition(self, reference: str) -> tuple[str, dict[str, Any], str]:
        """Return a reference, and the container and name of what it leads to: the client's own where it has one."""
        _, key, *names = *reference.split("/"), ""
        container = self._definitions.setdefault(key if key in ("$defs", "definitions") else "$defs", {})
        if key in ("$defs", "definitions") and len(names) == 2 and (name := unescape(names[0])) not in container:
            return reference, container, name
        container = self._definitions.setdefault("$defs", {})
        name = self._new_name(container)
        return f"#/$defs/{name}", container, name

    def _new_name(self, container: dict[str, Any]) -> str:
        taken = self.schema.get("$defs")
        taken = taken if isinstance(taken, dict) else {}
        numbers = iter(range(1 << 30))
        return next(name for i in numbers if (name := f"part{len(container) + i}") not in container | taken)


def is_reference(node: Any) -> bool:
    """Whether a schema says nothing but what another does."""
    return isinstance(node, dict) and isinstance(node.get("$ref"), str) and node.keys() - ANNOTATIONS == {"$ref"}


# -- keywords


def _keep(rewriter: Rewriter, place: SchemaPlace, key: str, value: Any) -> None:
    place.out[key] = value


def _forget(rewriter: Rewriter, place: SchemaPlace, key: str, value: Any) -> None:
    """Leave out what says nothing by itself."""


def _leave_out(rewriter: Rewriter, place: SchemaPlace, key: str, value: Any) -> None:
    if value != {} or key == "contains":
        rewriter.note(place, f"{key} is not enforced")


def _conditional(rewriter: Rewriter, place: SchemaPlace, key: str, value: Any) -> None:
    if "then" in place.node or "else" in place.node:
        rewriter.note(place, "if is not enforced")


def _unique(rewriter: Rewriter, place: SchemaPlace, key: str, value: Any) -> None:
    most = place.node.get("maxItems")
    if value is True and not (isinstance(most, int) and most <= 1):
        rewriter.note(place, "uniqueItems is not enforced")


def _count(rewriter: Rewriter, place: SchemaPlace, key: str, value: Any) -> None:
    place.out[key] = int(value) if isinstance(value, float) and value.is_integer() else value


def _bound(rewriter: Rewriter, place: SchemaPlace, key: str, value: Any) -> None:
    """Leave out a bound that the compiler cannot express, such as that of an integer of 64 bits."""
    if isinstance(value, int | float) and abs(value) >= _LARGEST_BOUND:
        rewriter.note(place, f"{key} of 10^18 or more is not enforced", is_broken=False)
    else:
        place.out[key] = value


def _count_members(rewriter: Rewriter, place: SchemaPlace, key: str, value: Any) -> None:
    if not place.is_part and not any(name in place.node for name in _APPLICATORS):
        _count(rewriter, place, key, value)
    elif value != 0 or key == "maxProperties":
        rewriter.note(place, f"{key} is not enforced")


def _required(rewriter: Rewriter, place: SchemaPlace, key: str, value: Any) -> None:
    if isinstance(value, bool):  # as draft 3 had it in the member's own schema
        rewriter.note(place, "required is no array and is not enforced")
    else:
        place.out[key] = value


def _map(rewriter: Rewriter, place: SchemaPlace, key: str, value: Any) -> None:
    if isinstance(value, dict):
        place.out[key] = {
            name: rewriter.whole(child, f"{place.pointer}/{key}/{escape(name)}", place.depth + 1)
            for name, child in value.items()
        }
    else:
        place.out[key] = value


def _single(rewriter: Rewriter, place: SchemaPlace, key: str, value: Any) -> None:
    """Rewrite a schema, or several, that say what a part of the value is."""
    if isinstance(value, list):
        pointers = (f"{place.pointer}/{key}/{index}" for index in range(len(value)))
        place.out[key] = [rewriter.whole(each, to, place.depth + 1) for each, to in zip(value, pointers, strict=True)]
    elif key not in place.out:
        place.out[key] = rewriter.whole(value, f"{place.pointer}/{key}", place.depth + 1)


def note_union(rewriter: Rewriter, place: SchemaPlace, key: str) -> None:
    """Note that a value may match two options of oneOf."""
    if key == "oneOf" and len(place.node[key]) > 1 and not are_exclusive(place.node[key]):
        rewriter.note(place, "oneOf is taken as anyOf", is_broken=False)


def _list(rewriter: Rewriter, place: SchemaPlace, key: str, value: Any) -> None:
    """Rewrite schemas that hold for the value itself."""
    if not isinstance(value, list):
        place.out[key] = value
        return
    note_union(rewriter, place, key)
    pointers = (f"{place.pointer}/{key}/{index}" for index in range(len(value)))
    place.out[key] = [rewriter.part(each, to, place.depth + 1) for each, to in zip(value, pointers, strict=True)]


def _reference(rewriter: Rewriter, place: SchemaPlace, key: str, value: Any) -> None:
    is_whole = not place.is_part and is_reference(place.node)
    place.out[key] = rewriter.refer(value, is_whole=is_whole) if isinstance(value, str) else value


def _format(rewriter: Rewriter, place: SchemaPlace, key: str, value: Any) -> None:
    if has_unknown_format(place.node):
        rewriter.note(place, f"format {value[:40]!r} is not enforced", is_broken=False)
    place.out[key] = value


def _pattern(rewriter: Rewriter, place: SchemaPlace, key: str, value: Any) -> None:
    if not isinstance(value, str):
        place.out[key] = value
        return
    pattern = translate_pattern(value)
    if pattern.dropped:
        rewriter.note(place, f"the {pattern.dropped} in the pattern is not enforced")
    place.out[key] = pattern.text
    kind = {"type": place.node["type"]} if "type" in place.node else {}
    place.parts += [{**kind, "pattern": other} for other in pattern.others]


def exact_patterns(node: dict[str, Any]) -> dict[str, Any] | None:
    """Return the patterns of members' names, for the compiler, with the schemas of those; None where it cannot tell
    them from each other, or from other names."""
    sent = node.get("patternProperties")
    translated = {name: translate_pattern(name) for name in sent} if isinstance(sent, dict) else {}
    if any(each.dropped or each.others for each in translated.values()):
        return None
    exact = {translated[name].text: child for name, child in sent.items()} if isinstance(sent, dict) else {}
    return exact if len(exact) == len(translated) and are_disjoint(list(exact)) else None


def _patterns(rewriter: Rewriter, place: SchemaPlace, key: str, value: Any) -> None:
    _map(rewriter, place, key, value)
    if not isinstance(value, dict):
        return
    if exact_patterns(place.node) is not None:
        place.out[key] = {translate_pattern(name).text: child for name, child in place.out[key].items()}
        return
    rewriter.note(place, "patternProperties are not told apart")
    options = list(place.out.pop(key).values())
    more = rewriter.whole(place.node.get("additionalProperties", True), f"{place.pointer}/additionalProperties", 1)
    place.out["additionalProperties"] = True
    if more not in (True, {}):
        place.out["additionalProperties"] = {"anyOf": options if more is False else [*options, more]}


def _property_names(rewriter: Rewriter, place: SchemaPlace, key: str, value: Any) -> None:
    """Make a schema of names one of members, where it lists the names or has a pattern."""
    if is_reference(value):
        value = find(rewriter.schema, value["$ref"])
    if not isinstance(value, dict):
        if value is False:
            place.parts.append({"additionalProperties": False})
        return
    said = value.keys() - ANNOTATIONS - {"type"}
    if not said and "string" in types_of(value):
        return
    names = [value["const"]] if "const" in value else value.get("enum")
    if isinstance(names, list):
        place.parts.append({"properties": dict.fromkeys(names_in(names), True), "additionalProperties": False})
        said -= {"enum", "const"}
    elif isinstance(pattern := value.get("pattern"), str) and not _has_other_patterns(place.node):
        translated = translate_pattern(pattern)
        place.parts.append({"patternProperties": {translated.text: True}, "additionalProperties": False})
        said -= set() if translated.dropped or translated.others else {"pattern"}
    if said or "string" not in types_of(value):
        rewriter.note(place, "propertyNames is not enforced")


def _has_other_patterns(node: dict[str, Any]) -> bool:
    return "patternProperties" in node or any(name in node for name in _APPLICATORS)


def _not(rewriter: Rewriter, place: SchemaPlace, key: str, value: Any) -> None:
    """Keep to what is not to match where it is everything, a type or a listed value."""
    if value is False:
        return
    said = value.keys() - ANNOTATIONS if isinstance(value, dict) else set()
    if not said:
        place.is_never = True
    elif said == {"type"} and "integer" not in (unwanted := listed_types(value)):
        kept = [name for name in listed_types(place.node) or sorted(types_of({})) if not _is_one_of(name, unwanted)]
        place.out["type"], place.is_never = kept, not kept
    elif said in ({"enum"}, {"const"}) and isinstance(place.node.get("enum"), list):
        listed = value["enum"] if "enum" in said else [value["const"]]
        excluded = {_as_text(each) for each in listed} if isinstance(listed, list) else set()
        place.out["enum"] = [each for each in place.node["enum"] if _as_text(each) not in excluded]
    else:
        rewriter.note(place, "not is not enforced")


def _is_one_of(name: str, types: list[str]) -> bool:
    return name in types or (name == "integer" and "number" in types)


def _as_text(value: Any) -> bytes:
    return msgspec.json.encode(value, order="sorted")


def _set_once(rewriter: Rewriter, place: SchemaPlace, key: str, value: Any) -> None:
    place.out.setdefault(key, value)


def _other_items(rewriter: Rewriter, place: SchemaPlace, key: str, value: Any) -> None:
    has_applicators = any(name in place.node for name in ("if", "$dynamicRef", "$recursiveRef", *_APPLICATORS))
    if value in (True, {}) or ("items" in place.node and not has_applicators):
        return
    if has_applicators or place.is_part or "contains" in place.node:
        rewriter.note(place, "unevaluatedItems is not enforced")
    else:
        place.out["items"] = rewriter.whole(value, f"{place.pointer}/{key}", place.depth + 1)


def _other_members(rewriter: Rewriter, place: SchemaPlace, key: str, value: Any) -> None:
    if value not in (True, {}, False) or (value is False and place.is_part):
        rewriter.note(place, "unevaluatedProperties is not enforced")


def _settle_counts(rewriter: Rewriter, out: dict[str, Any], pointer: str) -> None:
    required = set(names_in(out.get("required")))
    properties = out.get("properties")
    optional = [name for name in properties if name not in required] if isinstance(properties, dict) else []
    sent: dict[str, Any] = {key: out.pop(key) for key in ("minProperties", "maxProperties") if key in out}
    for dropped in ((), ("maxProperties",), ("minProperties",), tuple(sent)):
        kept = {key: value for key, value in sent.items() if key not in dropped}
        if _can_count(out, kept.get("minProperties"), kept.get("maxProperties"), len(required), len(optional)):
            out |= kept
            for key in sent.keys() - kept:
                if not _is_implied(out, key, sent[key], len(required), len(optional)):
                    rewriter.notes[Note(f"{key} is not enforced", pointer)] = None
            return


def _is_implied(out: dict[str, Any], key: str, value: Any, num_required: int, num_optional: int) -> bool:
    is_closed = out.get("additionalProperties") is False and not out.get("patternProperties")
    return value <= num_required if key == "minProperties" else is_closed and value >= num_required + num_optional


def _can_count(out: dict[str, Any], least: Any, most: Any, num_required: int, num_optional: int) -> bool:
    """Whether the compiler keeps to bounds of the number of members. Where some may be left out, it knows one."""
    if not all(each is None or isinstance(each, int) for each in (least, most)):
        return True  # the compiler says what is wrong
    if any(key in out for key in _APPLICATORS):
        return least is None and most is None
    left = max((least or 0) - num_required, 0)
    if not num_optional or (not left and most is None):
        return True
    is_closed = out.get("additionalProperties") is False and not out.get("patternProperties")
    return is_closed and left <= 1 and (most is None or most - num_required == 1)


_Keyword = Callable[[Rewriter, SchemaPlace, str, Any], None]
_KEYWORDS: dict[str, _Keyword] = {
    "$ref": _reference,
    "$dynamicRef": _leave_out,
    "$recursiveRef": _leave_out,
    "additionalItems": _single,
    "additionalProperties": _single,
    "allOf": _list,
    "anyOf": _list,
    "contains": _leave_out,
    "dependencies": _leave_out,
    "dependentRequired": _leave_out,
    "dependentSchemas": _leave_out,
    "else": _forget,
    "enum": _set_once,
    "format": _format,
    "if": _conditional,
    "items": _single,
    "maxContains": _forget,
    "maxItems": _count,
    "maxLength": _count,
    "maxProperties": _count_members,
    "minContains": _forget,
    "minItems": _count,
    "minLength": _count,
    "minProperties": _count_members,
    "exclusiveMaximum": _bound,
    "exclusiveMinimum": _bound,
    "maximum": _bound,
    "minimum": _bound,
    "not": _not,
    "oneOf": _list,
    "pattern": _pattern,
    "patternProperties": _patterns,
    "prefixItems": _single,
    "properties": _map,
    "propertyNames": _property_names,
    "required": _required,
    "then": _forget,
    "type": _set_once,
    "unevaluatedItems": _other_items,
    "unevaluatedProperties": _other_members,
    "uniqueItems": _unique,
}
