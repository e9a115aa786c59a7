"""Grammars of random schemas: what the schema permits can be written, and what is written the schema permits."""

import json
from typing import Any

import jsonschema
from hypothesis import given
from hypothesis import strategies as st

from sluice.engine.guidance.closing import rewrite
from sluice.engine.guidance.compiler import GrammarCompiler
from sluice.engine.guidance.matching import CompiledGrammar
from sluice.engine.types import GrammarKind
from sluice.errors import SluiceError
from tests.engine.guidance.walks import grammar, outputs
from tests.engine.guidance.written import can_write
from tests.fuzz.running import fuzzed
from tests.waiting import PATIENCE_S

NAMES = ("a", "b", "c", "kind")
SCALARS: tuple[Any, ...] = (None, True, False, 0, 1, -3, 2.5, "", "a", "bb", "x-1", "ab@cd.ef")

REFUSED = ("nothing can match", "no finite value", "circular references", "not disjoint")
"""Reasons that lie in a schema, or in how its parts with patterns or references to each other go together."""
leaves = st.sampled_from(
    [
        {},
        True,
        {"not": {}},
        *({"type": kind} for kind in ("string", "integer", "number", "boolean", "null", ["string", "null"])),
        {"enum": ["a", 1, None]},
        {"enum": ["a", "bb", 1], "not": {"const": "bb"}},
        {"const": "a"},
        {"type": "string", "minLength": 1, "maxLength": 2},
        {"type": "string", "pattern": "^(?!x)[a-z]+$"},
        {"type": "string", "pattern": r"^(?=.*[0-9])[a-z0-9-]+$"},
        {"type": "string", "pattern": r"\bb"},
        {"type": "integer", "minimum": 0, "maximum": 1.0},
        {"type": ["string", "integer"], "not": {"type": "string"}},
        {"type": "string", "format": "email"},
    ]
)


def compounds(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    members = st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    own = st.fixed_dictionaries(
        {},
        optional={
            "type": st.just("object"),
            "properties": members,
            "required": st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
            "anyOf": st.lists(inner, min_size=1, max_size=3),
            "oneOf": st.lists(inner, min_size=1, max_size=2),
            "allOf": st.lists(inner, min_size=1, max_size=2),
            "$ref": st.sampled_from(("#/$defs/one", "#/$defs/two")),
            "not": inner,
            "if": inner,
            "then": inner,
            "else": inner,
            "additionalProperties": st.one_of(st.just(False), inner),
            "patternProperties": st.dictionaries(st.sampled_from(("^a", "b$", "^(?!k)")), inner, max_size=2),
            "propertyNames": st.sampled_from(({}, {"type": "string"}, {"enum": ["a", "b"]}, {"pattern": "^[ab]$"})),
            "dependentRequired": st.just({"a": ["b"]}),
            "dependentSchemas": st.fixed_dictionaries({"a": inner}),
            "minProperties": st.integers(0, 2),
            "maxProperties": st.integers(1, 3),
            "unevaluatedProperties": st.just(False),
        },
    )
    items = st.fixed_dictionaries(
        {"type": st.just("array")},
        optional={
            "items": inner,
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "minItems": st.integers(0, 1),
            "maxItems": st.integers(1, 2),
            "uniqueItems": st.booleans(),
            "contains": inner,
            "unevaluatedItems": st.just(False),
        },
    )
    return st.one_of(own, own, items)


parts = st.recursive(leaves, compounds, max_leaves=6)


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    schema = draw(compounds(parts))
    return {**schema, "$defs": {"one": draw(parts), "two": draw(parts)}}


@st.composite
def objects(draw: st.DrawFn) -> dict[str, Any]:
    """Objects in parts, each with members."""
    member = st.sampled_from([{"type": "integer"}, {"type": "string"}, {}])
    lists = st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(st.sampled_from(NAMES), member, max_size=2)}
    )
    several = st.lists(st.one_of(lists, st.sampled_from([{"$ref": "#/$defs/one"}, {"type": "null"}])), min_size=1)
    beside = {"anyOf": several, "allOf": several, "if": lists, "then": lists, "$ref": st.just("#/$defs/two")}
    nested = draw(st.fixed_dictionaries({}, optional=dict(beside)))
    inner = {"properties": {"c": draw(lists)}} if draw(st.booleans()) else {}
    return {**draw(lists), **inner, **nested, "$defs": {"one": draw(lists), "two": draw(lists)}}


values = st.recursive(
    st.sampled_from(SCALARS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
        st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    ),
    max_leaves=5,
)


def is_valid(schema: Any, value: Any) -> bool:
    try:
        return bool(jsonschema.Draft202012Validator(schema).is_valid(value))
    except RecursionError:  # of a schema without end
        return False


def compiled_or_none(compiler: GrammarCompiler, schema: Any) -> CompiledGrammar | None:
    """Return the grammar, None where the schema is refused for a reason that lies in it."""
    try:
        return compiler.compile(grammar(GrammarKind.JSON_SCHEMA, schema)).result(timeout=PATIENCE_S)
    except SluiceError as error:
        assert any(words in error.message for words in REFUSED), error.message
        return None


def closed(schema: Any) -> Any:
    """Return the schema with what JSON Schema has for closed objects, wherever it lists members."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    own = {key: closed(value) for key, value in schema.items()}
    return {**own, "unevaluatedProperties": False} if isinstance(own.get("properties"), dict) else own


@fuzzed(60)
@given(schemas(), st.lists(values, min_size=20, max_size=20))
def test_what_a_schema_permits_can_be_written(compiler: GrammarCompiler, schema: Any, candidates: list[Any]) -> None:
    found = [value for value in candidates if is_valid(schema, value)]
    compiled = compiled_or_none(compiler, schema) if found else None
    if compiled is not None:
        assert [value for value in found if not can_write(compiled, value)] == []


@fuzzed(60)
@given(objects(), st.lists(values, min_size=20, max_size=20))
def test_what_a_closed_schema_permits_can_be_written(
    compiler: GrammarCompiler, schema: dict[str, Any], candidates: list[Any]
) -> None:
    found = [value for value in candidates if is_valid(closed(schema), value)]
    compiled = compiled_or_none(compiler, rewrite(schema, is_closed=True).schema) if found else None
    if compiled is not None:
        assert [value for value in found if not can_write(compiled, value)] == []


@fuzzed(30)
@given(schemas(), st.booleans(), st.integers(0, 9))
def test_what_is_written_without_a_warning_matches(
    compiler: GrammarCompiler, schema: dict[str, Any], is_closed: bool, seed: int
) -> None:
    rewritten = rewrite(schema, is_closed=is_closed)
    compiled = None if rewritten.notes else compiled_or_none(compiler, rewritten.schema)
    if compiled is not None:
        for text in outputs(compiler, grammar(GrammarKind.JSON_SCHEMA, rewritten.schema), num_walks=2, seed=seed):
            assert is_valid(schema, json.loads(text)), text
