"""Schemas of tools that cannot be compiled become ones that can, with a note of what is left out."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.engine.guidance.closing import rewrite
from sluice.engine.guidance.compiler import GrammarCompiler
from sluice.engine.guidance.relaxing import ANY_OBJECT, grammar_share, is_plain, relax
from sluice.engine.types import GrammarKind
from sluice.pipelines.chat.formats import Tool, parse_tools
from tests.engine.guidance.test_any_schema import is_valid, schemas, values
from tests.engine.guidance.walks import grammar
from tests.engine.guidance.written import can_write
from tests.fuzz.running import fuzzed
from tests.waiting import PATIENCE_S


def tool(parameters: dict[str, Any], **fields: Any) -> Tool:
    [found] = parse_tools([{"type": "function", "function": {"name": "f", "parameters": parameters, **fields}}])
    return found


def compiles(compiler: GrammarCompiler, schema: dict[str, Any]) -> Any:
    return compiler.compile(grammar(GrammarKind.JSON_SCHEMA, schema)).result(timeout=PATIENCE_S)


def argument(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": schema}, **more}


KEPT: dict[str, tuple[dict[str, Any], str, Any]] = {
    # the schema, the note, what is kept of the argument
    "a type that is none": (argument({"type": "strng"}), 'there is no type "strng" at #/properties/x', {}),
    "a pattern that is none": (
        argument({"type": "string", "pattern": "a("}),
        "pattern is not enforced: the regular expression is not valid",
        {"type": "string"},
    ),
    "a length that is none": (argument({"type": "string", "maxLength": -1}), "maxLength is not", {"type": "string"}),
    "bounds that contradict": (
        argument({"type": "integer", "minimum": 5, "maximum": 3}),
        "maximum is not enforced",
        {"type": "integer", "minimum": 5},
    ),
    "a reference to nothing": (argument({"$ref": "#/$defs/no"}), '"#/$defs/no" leads nowhere at #/properties/x', {}),
    "a reference to elsewhere": (argument({"$ref": "https://a.b/c"}), "is outside the schema", {}),
    "a schema that is none": (argument(3), "must be an object or boolean at #/properties/x", {}),
    "a required member that cannot be": (
        argument({"enum": []}, required=["x"]),
        "enum is not enforced: nothing can match",
        {},
    ),
    "an endless value": (
        argument({"type": "object", "properties": {"y": {"$ref": "#/properties/x"}}, "required": ["y"]}),
        "required is not enforced: no finite value can match",
        ...,
    ),
    "too many members": (
        argument({"type": "object", "properties": {f"m{i}": {} for i in range(500)}}),
        "properties is not enforced: 500 members may be left out; a grammar can have 400",
        {"type": "object"},
    ),
    "a draft that is none": (argument({"$schema": "http://a.b/c", "type": "null"}), "$schema is not", {"type": "null"}),
    "an odd keyword of the compiler": ({**argument({}), "x-guidance": {}}, "x-guidance is not enforced", {}),
}


@pytest.mark.parametrize("name", KEPT)
def test_only_the_part_at_fault_is_left_out(compiler: GrammarCompiler, name: str) -> None:
    schema, words, expected = KEPT[name]
    found = tool(schema)
    assert len(found.relaxed) == 1 and words in found.relaxed[0]
    assert expected is ... or found.parameters["properties"]["x"] == expected
    compiles(compiler, found.parameters)


ANYTHING: list[tuple[dict[str, Any], str]] = [
    ({"type": "array"}, "type 'array', which is no object's, is not enforced at #"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}}, "type 'string', which is no object's"),
    ({"type": "object", "not": {}}, "nothing can match"),
    ({"enum": ["a"]}, "enum is not enforced: nothing can match"),
    ({"type": "object", "properties": {f"p{i}": {"type": f"t{i}"} for i in range(9)}}, "too much of it cannot be used"),
]


@pytest.mark.parametrize(("schema", "words"), ANYTHING)
def test_a_schema_of_no_object_becomes_that_of_any(schema: dict[str, Any], words: str) -> None:
    found = tool(schema)
    assert found.parameters == ANY_OBJECT and words in found.relaxed[-1]


def test_what_refers_to_the_whole_schema_is_kept(compiler: GrammarCompiler) -> None:
    found = tool({"type": "object", "properties": {"next": {"$ref": "#"}, "n": {"type": "integer"}}})
    compiled = compiles(compiler, found.parameters)
    assert not found.relaxed and can_write(compiled, {"next": {"n": 1}}) and not can_write(compiled, {"next": 1})


def test_schemas_that_are_too_much_together_are_left_out_from_the_largest() -> None:
    sizes = [50, 2500, 3000, 2000]
    functions: list[dict[str, Any]] = [
        {"name": f"f{size}", "parameters": argument({"anyOf": [{"minLength": i} for i in range(size)]})}
        for size in sizes
    ]
    functions[2]["strict"] = True
    found = parse_tools([{"type": "function", "function": each} for each in functions])
    assert [each.parameters == ANY_OBJECT for each in found] == [False, True, False, False]
    assert "those of all tools are too much for one grammar" in found[1].relaxed[0]
    assert sum(grammar_share(each.parameters) for each in found) <= 1


odd: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([None, True, 3, -1, "a(", "strng", "object", [], ["a"], {}]),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("ab"), inner, max_size=2)),
    max_leaves=4,
)


@st.composite
def odd_schemas(draw: st.DrawFn) -> dict[str, Any]:
    """Schemas of which some keywords have any value."""
    schema: dict[str, Any] = json.loads(json.dumps(draw(schemas())))
    nodes = [schema, *(each for each in schema.get("properties", {}).values() if isinstance(each, dict))]
    for key in draw(st.lists(st.sampled_from(KEYWORDS), max_size=3)):
        draw(st.sampled_from(nodes))[key] = draw(odd)
    return schema


KEYWORDS = (
    "type",
    "properties",
    "required",
    "items",
    "enum",
    "anyOf",
    "allOf",
    "pattern",
    "$ref",
    "minLength",
    "$defs",
)


@fuzzed(80)
@given(odd_schemas(), st.booleans())
def test_any_schema_of_a_tool_compiles(compiler: GrammarCompiler, schema: dict[str, Any], is_closed: bool) -> None:
    found = tool(schema, strict=None if is_closed else False)
    assert found.parameters.get("type") == "object" or "$ref" in found.parameters
    compiles(compiler, found.parameters)


@fuzzed(60)
@given(schemas(), st.lists(values, min_size=20, max_size=20))
def test_what_a_schema_permits_can_be_written_without_its_faults(
    compiler: GrammarCompiler, schema: dict[str, Any], candidates: list[Any]
) -> None:
    objects = [value for value in candidates if isinstance(value, dict) and is_valid(schema, value)]
    compiled = compiles(compiler, relax(rewrite({**schema, "type": "object"})).schema) if objects else None
    assert compiled is None or [value for value in objects if not can_write(compiled, value)] == []


@fuzzed(80)
@given(st.one_of(schemas(), odd_schemas()), st.booleans())
def test_a_plain_schema_compiles(compiler: GrammarCompiler, schema: dict[str, Any], is_closed: bool) -> None:
    try:
        rewritten = rewrite(schema, is_closed=is_closed).schema
    except Exception:  # keywords of types that no draft has
        return
    for part in (rewritten, *rewritten.get("properties", {}).values()) if is_plain(rewritten) else ():
        compiles(compiler, part if isinstance(part, dict) else {})


NOT_PLAIN: list[Any] = [
    False,
    {"type": "strng"},
    {"type": "string", "minLength": 5, "maxLength": 3},
    {"type": "integer", "minimum": 5, "maximum": 3},
    {"enum": []},
    {"type": "integer", "enum": ["a"]},
    {"type": "string", "anyOf": [{"type": "integer"}]},
    {"type": "string", "pattern": "a"},
    {"type": "object", "required": ["y"], "additionalProperties": False},
    {"$schema": "http://a.b/c"},
    {"anyOf": [{"type": "null"}, {"type": "strng"}]},
]


@pytest.mark.parametrize("schema", NOT_PLAIN, ids=str)
def test_a_schema_that_may_contradict_itself_is_not_plain(schema: Any) -> None:
    assert is_plain(argument({"type": ["string", "null"], "maxLength": 9})) and not is_plain(argument(schema))
