"""Closes the objects of a schema: they have no members that it does not name.

A member is named by `properties`, `patternProperties` or `required`, of the schema or of a part of it: what it refers
to, allOf, a condition, and the option of anyOf or oneOf that the object takes. The parts hold together, so the whole is
closed, not each part. Where one object may take two options, it may have the members of both. A schema that names no
member stays open, and so does one that says itself what other members are (`additionalProperties`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from sluice.engine.guidance.nodes import escape, find, have_exclusive_members, may_be_object, names_in
from sluice.engine.guidance.rewriting import (
    UNIONS,
    Note,
    Rewriter,
    SchemaPlace,
    exact_patterns,
    is_reference,
    note_union,
)

_CONDITIONS = ("if", "then", "else")
_OPENING = ("additionalProperties", "unevaluatedProperties", "$dynamicRef", "$recursiveRef")
"""Keywords of a schema that may allow members without naming them, unless they are false."""
_MAX_STEPS = 50_000
"""Most schemas that are looked at to find the members of all objects; then objects stay open. It takes a tenth of a
second."""
_MAX_COPIES = 512
"""Most definitions that are copied because an object that refers to them has further members."""
_MAX_OPTIONS = 64
_MAX_REFERENCES = 16
_MAX_SHARED = 16
_PARTLY_COUNTED = {"minProperties", "maxProperties", "unevaluatedProperties", "unevaluatedItems"}
"""Keywords that a schema beside others does not keep to."""


class Rewritten(NamedTuple):
    """A schema for the compiler."""

    schema: dict[str, Any]
    notes: tuple[Note, ...]


def rewrite(schema: dict[str, Any], *, is_closed: bool = False) -> Rewritten:
    """Return the schema that a grammar keeps to, and what it leaves out. A closed one has no other members than those
    that it names, where it does not say so itself."""
    closer = ObjectCloser(schema, is_closed=is_closed)
    return Rewritten(closer.run(), tuple(closer.notes))


@dataclass(slots=True)
class Members:
    """The members that a schema and its parts name."""

    names: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)
    """Each with its schemas and their pointers."""
    patterns: dict[str, Literal[True]] = field(default_factory=dict)
    is_named: bool = False
    """Whether the schema lists members, perhaps none."""
    is_open: bool = False
    """Whether there may be others, as the schema says itself."""


class Others(NamedTuple):
    """Members of an object that schemas beside its own name: with their schemas, and by patterns."""

    names: Mapping[str, Any] = MappingProxyType({})
    patterns: Mapping[str, Literal[True]] = MappingProxyType({})

    def __bool__(self) -> bool:
        return bool(self.names or self.patterns)


class ObjectCloser(Rewriter):
    """Rewrites a schema, and closes its objects where that is wanted."""

    def __init__(self, schema: dict[str, Any], *, is_closed: bool) -> None:
        super().__init__(schema)
        self._is_closed = is_closed
        self._num_steps = self._num_copies = 0
        self._copied: list[str] = []
        """References to the definitions that are being copied, each within the one before."""

    def whole(self, node: Any, pointer: str, depth: int) -> Any:
        if isinstance(node, dict) and (self._is_closed or node.get("unevaluatedProperties") is False):
            return self.settle(self._close(SchemaPlace(node, pointer, depth, is_part=False), Others()), pointer)
        return super().whole(node, pointer, depth)

    def define(self, pointer: str, node: Any, *, is_whole: bool) -> str:
        # One version does where nothing depends on whether others hold for the same value.
        is_same = not self._is_closed and not (isinstance(node, dict) and _PARTLY_COUNTED & node.keys())
        return super().define(pointer, node, is_whole=is_whole or is_same or not may_be_object(node))

    def _close(self, place: SchemaPlace, others: Others) -> Any:
        """Return a schema that has no members but its own and the others. A place that has others is a part."""
        node = place.node
        if is_reference(node):
            return self._close_copy(place, others) if others else self.open(place)
        if not may_be_object(node) or "additionalProperties" in node:
            return self.open(place)
        unions = [key for key in UNIONS if isinstance(node.get(key), list)]
        if len(unions) == 1 and len(node[unions[0]]) <= _MAX_OPTIONS:
            return self._close_options(place, others, unions[0])
        return self._close_as_one(place, others)

    def _close_copy(self, place: SchemaPlace, others: Others) -> Any:
        """Return a copy of what a reference leads to, closed: elsewhere it has no others."""
        reference, node = place.node["$ref"], find(self.schema, place.node["$ref"])
        if not isinstance(node, dict) or reference in self._copied or self._num_copies >= _MAX_COPIES:
            return self.open(place)
        self._num_copies += 1
        self._copied.append(reference)
        closed = self._close(SchemaPlace(node, reference, place.depth + 1, is_part=True), others)
        self._copied.pop()
        return closed

    def _close_as_one(self, place: SchemaPlace, others: Others) -> Any:
        """Close a schema whose parts stay open."""
        members = self._members(place.node, place.pointer)
        out = self.open(place)
        if not isinstance(out, dict) or members.is_open or not (members.is_named or others):
            return out
        patterns = {**others.patterns, **members.patterns, **out.get("patternProperties", {})}
        if exact_patterns({"patternProperties": patterns}) is None:
            return out
        if patterns:
            out["patternProperties"] = patterns
        own = out.get("properties", {})
        missing = {**others.names, **dict.fromkeys(members.names, True)}
        out["properties"] = {**own, **{name: missing[name] for name in missing if name not in own}}
        out["additionalProperties"] = False
        return out

    def _close_options(self, place: SchemaPlace, others: Others, union: str) -> Any:
        """Close each option of a schema, which has the members beside it too."""
        base = self._members(place.node, place.pointer, without=union)
        options = [(f"{place.pointer}/{union}/{i}", each) for i, each in enumerate(place.node[union])]
        found = {to: self._members(each, to) for to, each in options if self._may_be_object(each)}
        is_named = base.is_named or bool(others)
        if base.is_open or any(each.is_open or not (each.is_named or is_named) for each in found.values()):
            return self.open(place)
        place.without = union
        out = self.open(place)
        if not isinstance(out, dict):
            return out
        note_union(self, place, union)
        shared = self._shared_names([(to, each) for to, each in options if to in found], found)
        patterns = {**others.patterns, **base.patterns}
        for each in found.values() if shared else ():
            patterns |= each.patterns
        beside = {**others.names, **dict.fromkeys(base.names, True)}
        out[union] = [
            self._close_option(each, to, place.depth + 1, Others({**shared.get(to, {}), **beside}, patterns))
            if to in found
            else self.part(each, to, place.depth + 1)
            for to, each in options
        ]
        return out

    def _close_option(self, node: Any, pointer: str, depth: int, others: Others) -> Any:
        if not isinstance(node, dict):
            return node
        closed = self._close(SchemaPlace(node, pointer, depth, is_part=bool(others)), others)
        return closed if others else self.settle(closed, pointer)

    def _shared_names(self, options: list[tuple[str, Any]], found: dict[str, Members]) -> dict[str, dict[str, Any]]:
        """Return for each option the members of the others that an object may have too; none where no object can take
        two options."""
        nodes = [self._resolve(each) for _, each in options]
        if len(nodes) < 2 or have_exclusive_members([node for node in nodes if isinstance(node, dict)]):
            return {}
        schemas: dict[str, list[tuple[str, Any]]] = {}
        for members in found.values():
            for name, listed in members.names.items():
                schemas.setdefault(name, []).extend(listed)
        num_naming = Counter(name for members in found.values() for name in members.names)
        merged = {
            name: self._any_of(listed) for name, listed in schemas.items() if num_naming[name] < len(found)
        }  # fmt: skip
        return {
            to: {name: merged[name] for name in merged if name not in members.names} for to, members in found.items()
        }

    def _any_of(self, listed: list[tuple[str, Any]]) -> Any:
        """Return a schema of a member that matches one of several."""
        if len(listed) > _MAX_SHARED or not all(isinstance(each, dict) for _, each in listed):
            return True
        known = {each["$ref"] if is_reference(each) else to: (to, each) for to, each in listed}
        if len(known) == 1 or not known:
            return next((self._share(*each) for each in known.values()), True)
        return {"anyOf": [self._share(*each) for each in known.values()]}

    def _share(self, pointer: str, node: dict[str, Any]) -> dict[str, Any]:
        if is_reference(node):
            return {"$ref": self.refer(node["$ref"], is_whole=True)}
        return {"$ref": self.define(pointer, node, is_whole=True)}

    def _resolve(self, node: Any) -> Any:
        for _ in range(_MAX_REFERENCES):
            if not is_reference(node):
                break
            node = find(self.schema, node["$ref"])
        return node

    def _may_be_object(self, option: Any) -> bool:
        return may_be_object(self._resolve(option))

    def _members(self, node: Any, pointer: str, without: str = "") -> Members:
        """Return the members that a schema and its parts name, all options included."""
        members, seen, pending = Members(), set(), [(pointer, node, without)]
        while pending:
            to, part, skipped = pending.pop()
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            self._num_steps += 1 + len(part.get("properties") or ())
            if self._num_steps > _MAX_STEPS:
                members.is_open = True
                break
            self._add_own(members, to, part)
            if isinstance(reference := part.get("$ref"), str):
                target = find(self.schema, reference)
                members.is_open = members.is_open or target is None
                pending.append((reference, target, ""))
            pending.extend((to, each, "") for to, each in _parts_of(to, part, skipped))
        return members

    def _add_own(self, members: Members, pointer: str, node: dict[str, Any]) -> None:
        properties, patterns = node.get("properties"), exact_patterns(node)
        if any(node.get(key, False) is not False for key in _OPENING):
            members.is_open = True
        if patterns is None:
            members.is_open = True
        elif patterns:
            members.is_named = True
            members.patterns |= dict.fromkeys(patterns, True)
        if isinstance(properties, dict):
            members.is_named = True
            for name, child in properties.items():
                members.names.setdefault(name, []).append((f"{pointer}/properties/{escape(name)}", child))
        for name in names_in(node.get("required")):
            members.names.setdefault(name, [])


def _parts_of(pointer: str, node: dict[str, Any], skipped: str) -> Iterator[tuple[str, Any]]:
    """Yield the schemas that say more of the same value, but those of one keyword."""
    for key in ("allOf", *UNIONS):
        if key != skipped and isinstance(listed := node.get(key), list):
            yield from ((f"{pointer}/{key}/{index}", each) for index, each in enumerate(listed))
    for key in _CONDITIONS:
        if key in node:
            yield f"{pointer}/{key}", node[key]
    for key in ("dependentSchemas", "dependencies"):
        if isinstance(listed := node.get(key), dict):
            yield from ((f"{pointer}/{key}/{escape(name)}", each) for name, each in listed.items())
