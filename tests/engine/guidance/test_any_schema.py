"""Grammars of random schemas: what the schema permits can be written, and what is written the schema permits."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from engine.guidance.compiler import GrammarCompiler
from engine.guidance.matching import CompiledGrammar
from engine.types import GrammarKind
from tests.engine.guidance.walks import TOKENIZER, grammar

NAMES = ("a", "b", "c", "kind")
SCALARS: tuple[Any, ...] = (None, True, False, 0, 1, -3, 2.5, "", "a", "bb", "x-1", "ab@cd.ef")
MAX_ORDERS = 400
SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck))

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


values = st.recursive(
    st.sampled_from(SCALARS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
        st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    ),
    max_leaves=5,
)


def orders(value: Any) -> Iterator[Any]:
    """Yield a value with its members in every order: a grammar has them in that of the schema."""
    if isinstance(value, list):
        yield from map(list, itertools.product(*(list(orders(each)) for each in value)))
    elif isinstance(value, dict):
        for names in itertools.permutations(value):
            for each in itertools.product(*(list(orders(value[name])) for name in names)):
                yield dict(zip(names, each, strict=True))
    else:
        yield value


def can_write(compiled: CompiledGrammar, value: Any) -> bool:
    return any(accepts(compiled, each) for each in itertools.islice(orders(value), MAX_ORDERS))


def accepts(compiled: CompiledGrammar, value: Any) -> bool:
    matcher = compiled._matcher.deep_copy()
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    return bool(matcher.consume_tokens(ids)) and bool(matcher.is_accepting())


def is_valid(schema: Any, value: Any) -> bool:
    try:
        jsonschema.Draft202012Validator(schema).validate(value)
    except jsonschema.ValidationError:
        return False
    except Exception:  # an endless schema
        assume(False)
    return True


def compiled_or_none(compiler: GrammarCompiler, schema: Any) -> CompiledGrammar | None:
    from sluice.errors import SluiceError

    try:
        return compiler.compile(grammar(GrammarKind.JSON_SCHEMA, schema)).result(timeout=20)
    except SluiceError as error:
        assert any(words in error.message for words in REFUSED), error.message
        return None


REFUSED = ("nothing can match", "no finite value", "circular references")
import os

NUM = int(os.environ.get("NUM", "300"))


@settings(SETTINGS, max_examples=NUM)
@given(schema=schemas(), value=values)
def test_what_a_schema_permits_can_be_written(compiler: GrammarCompiler, schema: Any, value: Any) -> None:
    assume(is_valid(schema, value))
    compiled = compiled_or_none(compiler, schema)
    assume(compiled is not None)
    assert can_write(compiled, value)
