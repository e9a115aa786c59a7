"""Objects that have no other members than those that their schemas name."""

import json
from typing import Any

import pytest

from sluice.engine.guidance.closing import rewrite
from sluice.engine.guidance.compiler import GrammarCompiler
from sluice.engine.types import GrammarKind
from tests.engine.guidance.walks import grammar
from tests.engine.guidance.written import can_write
from tests.waiting import PATIENCE_S


def has(**members: Any) -> dict[str, Any]:
    return {"type": "object", "properties": members}


NUMBER, TEXT = {"type": "integer"}, {"type": "string"}
BASE = {"$ref": "#/$defs/base"}
TREE = has(value=NUMBER, next={"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]})
KIND = {"type": "object", "required": ["kind"]}
CASES: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "anyOf beside properties": (
        {**has(a=NUMBER), "anyOf": [has(b=TEXT), has(c=TEXT)]},
        [{}, {"a": 1}, {"a": 1, "b": "x"}, {"a": 1, "b": "x", "c": "x"}],
        [{"z": 1}, {"b": 1, "c": 1}],
    ),
    "allOf of one reference": (
        {"allOf": [BASE], **has(a=NUMBER), "$defs": {"base": has(b=TEXT)}},
        [{"a": 1}, {"a": 1, "b": "x"}],
        [{"z": 1}],
    ),
    "an optional member beside allOf": ({"allOf": [has(b=TEXT), has(c=TEXT)], **has(a=NUMBER)}, [{"a": 1}], [{"z": 1}]),
    "required names an unlisted member": ({**has(a=NUMBER), "required": ["q"]}, [{"a": 1, "q": [2]}], [{"a": 1}]),
    "a definition alone and as a part": (
        {**has(x=BASE, y={"allOf": [BASE], **has(c=TEXT)}), "$defs": {"base": has(b=TEXT)}},
        [{"x": {"b": "t"}, "y": {"b": "t", "c": "t"}}],
        [{"x": {"c": "t"}}, {"y": {"z": 1}}],
    ),
    "options that exclude each other": (
        {"oneOf": [{**KIND, **has(kind={"const": 1}, a=TEXT)}, {**KIND, **has(kind={"const": 2}, b=TEXT)}]},
        [{"kind": 1, "a": "x"}, {"kind": 2, "b": "x"}],
        [{"kind": 1, "b": "x"}],
    ),
    "an object or null": ({"anyOf": [has(a=TEXT), {"type": "null"}]}, [None, {"a": "x"}], [{"z": 1}]),
    "recursion": ({"$ref": "#/$defs/tree", "$defs": {"tree": TREE}}, [{"next": {"value": 1}}], [{"next": {"z": 1}}]),
    "recursive options": (
        {**has(e={"$ref": "#/$defs/e"}), "$defs": {"e": {"anyOf": [has(left={"$ref": "#/$defs/e"}), has(v=NUMBER)]}}},
        [{"e": {"left": {"v": 1}}}],
        [{"e": {"left": {"z": 1}}}],
    ),
    "a map": (has(m={"type": "object", "additionalProperties": NUMBER}), [{"m": {"z": 1}}], [{"m": {"z": "x"}}]),
    "an object that lists nothing": (has(m={"type": "object"}), [{"m": {"z": 1}}], [{"n": 1}]),
    "a condition's members": (
        {**has(a=TEXT), "if": has(a={"const": "x"}), "then": has(b=TEXT)},
        [{"b": "t"}],
        [{"z": 1}],
    ),
    "names that are listed": (
        {"type": "object", "additionalProperties": NUMBER, "propertyNames": {"enum": ["a", "b"]}},
        [{"a": 1}, {}],
        [{"z": 1}, {"a": "x"}],
    ),
    "never": ({**has(a=NUMBER, b={"not": {}})}, [{"a": 1}], [{"b": 1}]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_closed_object_has_the_members_that_its_schema_names(compiler: GrammarCompiler, name: str) -> None:
    schema, written, refused = CASES[name]
    rewritten = json.dumps(rewrite(schema, is_closed=True).schema)
    compiled = compiler.compile(grammar(GrammarKind.JSON_SCHEMA, rewritten)).result(timeout=PATIENCE_S)
    assert [value for value in written if not can_write(compiled, value)] == []
    assert [value for value in refused if can_write(compiled, value)] == []


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "array", "uniqueItems": True}, ["uniqueItems is not enforced at #"]),
        ({"type": "array", "uniqueItems": False}, []),
        ({"type": "object", "propertyNames": {"type": "string"}}, []),
        ({"type": "object", "propertyNames": {"minLength": 3}}, ["propertyNames is not enforced at #"]),
        ({"type": ["string", "null"], "not": {"type": "null"}}, []),
        ({"not": {"required": ["a"]}}, ["not is not enforced at #"]),
        ({"if": {}, "then": {"type": "null"}}, ["if is not enforced at #"]),
        ({"if": {}}, []),
        (
            {"properties": {"a": {"pattern": "(?!x)"}}},
            ["the look-around in the pattern is not enforced at #/properties/a"],
        ),
        ({"dependencies": {"a": ["b"]}}, ["dependencies is not enforced at #"]),
        ({**has(a={}), "minProperties": 1}, ["minProperties is not enforced at #"]),
        ({"type": "integer", "maximum": 2**63 - 1}, ["maximum of 10^18 or more is not enforced at #"]),
        ({"$defs": {"unused": {"uniqueItems": True}}}, []),
    ],
)
def test_what_is_left_out_is_named(schema: dict[str, Any], expected: list[str]) -> None:
    assert [str(note) for note in rewrite(schema).notes] == expected
