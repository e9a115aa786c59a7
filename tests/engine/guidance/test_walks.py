"""The output matches the grammar, whatever the model prefers."""

import json
import re
from typing import Any

import jsonschema
import pytest

from sluice.engine.guidance.compiler import GrammarCompiler
from sluice.engine.types import GrammarKind
from tests.engine.guidance.walks import grammar, outputs

NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["value", "next"],
    "additionalProperties": False,
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "role": {"enum": ["admin", "reader"]},
        "address": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 9},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "role", "address"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "anything": {},
    "string": {"type": "string"},
    "lengths": {"type": "string", "minLength": 3, "maxLength": 5},
    "one letter": {"type": "string", "maxLength": 1},
    "pattern, anchored": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "pattern, somewhere": {"type": "string", "pattern": "[0-9]{2}", "maxLength": 12},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "email": {"type": "string", "format": "email", "maxLength": 60},
    "integer": {"type": "integer"},
    "bounds": {"type": "integer", "minimum": -7, "maximum": 12},
    "open bounds": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 2.5},
    "multiple": {"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 99},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "types": {"type": ["integer", "null", "boolean"]},
    "const": {"const": {"a": [1, "é", None]}},
    "enum": {"enum": ["red", "grün", 3, None, ["x"]]},
    "unicode names": {
        "type": "object",
        "properties": {"größe": {"type": "integer"}, "名前": {"const": 'é\n"\\'}},
        "required": ["größe", "名前"],
    },
    "array": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"const": "x"}], "items": False, "minItems": 2},
    "nested arrays": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "maxItems": 3,
    },
    "object": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "patterns": {
        "type": "object",
        "patternProperties": {"^s_[a-z]{4}$": {"type": "string"}},
        "additionalProperties": False,
    },
    "person": PERSON,
    "any of": {"anyOf": [PERSON, {"type": "integer"}, {"type": "array", "items": {"const": 1}}]},
    "one of": {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    "unknown formats": {
        "type": "object",
        "properties": {
            "format": {"type": "string", "format": "telephone", "maxLength": 5},
            "count": {"type": ["integer", "null"], "format": "int32"},
            "day": {"type": "string", "format": "date"},
        },
        "required": ["format", "day"],
        "additionalProperties": False,
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "null"}}, "required": ["b"]},
        ]
    },
    "reference": {"type": "array", "items": {"$ref": "#/$defs/p"}, "maxItems": 2, "$defs": {"p": PERSON}},
    "recursion": {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"x": {"type": "boolean"}},
        "type": "array",
        "items": {"$ref": "#/definitions/x"},
        "maxItems": 3,
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_schema(compiler: GrammarCompiler, name: str) -> None:
    schema = SCHEMAS[name]
    for text in outputs(compiler, grammar(GrammarKind.JSON_SCHEMA, schema)):
        jsonschema.validators.validator_for(schema)(schema).validate(json.loads(text))


def test_json_object(compiler: GrammarCompiler) -> None:
    texts = outputs(compiler, grammar(GrammarKind.JSON_OBJECT), num_walks=20)
    assert all(isinstance(json.loads(text), dict) for text in texts)
    assert len(set(texts)) > 10


def test_json_has_no_room_for_white_space(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "required": ["a", "b"]}
    wanted = grammar(GrammarKind.JSON_SCHEMA, {**schema, "additionalProperties": False})
    texts = {text for seed in range(6) for text in outputs(compiler, wanted, seed=seed)}
    assert all(re.fullmatch(r'\{"a": ?1, ?"b": ?2\}', text) for text in texts)
    assert len(texts) > 1


@pytest.mark.parametrize(
    "pattern",
    [
        "[a-z]{3,5}",
        r"\d{3}-\d{4}",
        "(yes|no|maybe)( please)?",
        r"(?i)[abc]+!",
        "[α-ω]{2}|日本",
        r"[^\x00-\x7f]{1,3}",
        r"a/b\\c\n?",
        "^anchored$",
        "[a-z]{1,9}x",
        "",
    ],
)
def test_regex(compiler: GrammarCompiler, pattern: str) -> None:
    for text in outputs(compiler, grammar(GrammarKind.REGEX, pattern), num_walks=10):
        assert re.fullmatch(pattern, text), text


def test_choice(compiler: GrammarCompiler) -> None:
    choices = ["yes", "no", "yes, but", 'quo"te\\', "línea\nnueva", "", "日本", "\x7f", "yes"]
    texts = {text for seed in range(30) for text in outputs(compiler, grammar(GrammarKind.CHOICE, choices), seed=seed)}
    assert texts <= set(choices)
    assert len(texts) > 4


def test_many_choices(compiler: GrammarCompiler) -> None:
    choices = [f"item {number * 7919:07d}" for number in range(10_000)]
    assert set(outputs(compiler, grammar(GrammarKind.CHOICE, choices))) <= set(choices)


GBNF = r"""
# arithmetic
root  ::= expr "\n"
expr  ::= term (ws ("+" | "-") ws term)*
term  ::= [0-9]{1,3} | "(" expr ")"   # recursive
ws    ::= " "?
"""
LARK = """
start: greeting ("," " " NAME)* "!"
greeting: "hello" | "bye"
NAME: /[A-Z][a-z]{1,4}/
"""


def test_gbnf(compiler: GrammarCompiler) -> None:
    for text in outputs(compiler, grammar(GrammarKind.EBNF, GBNF), num_walks=10):
        assert re.fullmatch(r"[0-9()+ -]+\n", text)
        eval(re.sub(r"\b0+(?=[0-9])", "", text))  # Python knows no leading zeros


def test_lark(compiler: GrammarCompiler) -> None:
    for text in outputs(compiler, grammar(GrammarKind.EBNF, LARK), num_walks=10):
        assert re.fullmatch(r"(hello|bye)(, [A-Z][a-z]{1,4})*!", text)


def test_schema_inside_lark(compiler: GrammarCompiler) -> None:
    text = 'start: "call " %json {"type": "array", "items": {"type": "integer"}, "maxItems": 3}'
    for output in outputs(compiler, grammar(GrammarKind.EBNF, text)):
        assert isinstance(json.loads(output.removeprefix("call ")), list)
