"""A grammar that cannot be used is rejected with the reason and the place."""

import re
from typing import Any

import pytest

from sluice.engine.guidance.compiler import GrammarCompiler
from sluice.engine.types import GrammarKind
from sluice.errors import ErrorCode, SluiceError
from tests.engine.guidance.walks import grammar
from tests.waiting import PATIENCE_S

DEEP = '{"items":' * 3000 + "{}" + "}" * 3000
SCHEMAS: list[tuple[Any, str]] = [
    ({"type": "strng"}, 'at #: there is no type "strng"'),
    ({"properties": {"a": {"items": {"type": "strng"}}}}, 'at #/properties/a/items: there is no type "strng"'),
    (
        {"type": "integer", "minimum": 5, "maximum": 3},
        r"at #: nothing can match: minimum (5) is greater than maximum (3)",
    ),
    ({"type": "object", "properties": {"a/b": {"enum": []}}, "required": ["a/b"]}, "at #/properties/a~1b: nothing can"),
    (
        {"type": "object", "required": ["z"], "additionalProperties": False},
        "at #: nothing can match: required property",
    ),
    ({"allOf": [{"type": "string"}, {"type": "number"}]}, "at #: nothing can match: incompatible types"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "at #: nothing can match: minItems (3)"),
    ({"properties": {"a": {"$ref": "#/$defs/nope"}}}, 'at #/properties/a: "$ref": "#/$defs/nope" leads nowhere'),
    ({"items": {"$ref": "https://example.com/s"}}, 'at #/items: "$ref": "https://example.com/s" is outside the schema'),
    (
        {"properties": {"a": {"type": "string", "pattern": "a("}}},
        "at #/properties/a: the regular expression is not valid at character 2",
    ),
    ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "strng"}}}, "at #/$defs/x: there is no type"),
    ({"not": {}}, "at #: nothing can match"),
    ({"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}, "at #: nothing can match"),
    ({"properties": {"a": 3}}, "at #/properties/a: schema must be an object or boolean"),
    ({"type": "string", "maxLength": -1}, "at #: Expected positive integer for 'maxLength'"),
    ({"x-guidance": {"lenient": True}, "type": "object"}, "at #: x-guidance is not taken"),
    ({"$ref": "#"}, "at #: no finite value can match"),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "at #: no finite value can match"),
    ({"items": {"type": "array", "items": {"$ref": "#/items"}, "minItems": 1}}, "at #/items: no finite value"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "at #/$defs/a: no finite value"),
    ([], "must be an object, got []"),
    ("true", "must be an object, got true"),
    ('{"type":', "not valid JSON"),
    (DEEP, "not valid JSON"),
    ('{"items":' * 200 + "{}" + "}" * 200, "recursion limit exceeded at line 1"),
]
OTHERS = [
    (GrammarKind.REGEX, "a/b(", "at character 4: unclosed group"),
    (GrammarKind.REGEX, "\n\n[a-", "at character 3: unclosed character class"),
    (GrammarKind.REGEX, "a{3,1}", "at character 2: invalid repetition count range"),
    (GrammarKind.REGEX, r"(a)\1", "at character 4: backreferences are not supported"),
    (GrammarKind.REGEX, r"\bword", "looks around"),
    (GrammarKind.REGEX, r"[^\x00-\x{10FFFF}]", "nothing can match it"),
    (GrammarKind.CHOICE, "[]", "at least one string, got an empty array"),
    (GrammarKind.CHOICE, '["a", 1]', "array of strings: Expected `str`, got `int` - at `$[1]`"),
    (GrammarKind.CHOICE, '{"a": 1}', "array of strings"),
    (GrammarKind.EBNF, 'root ::= "a" other', "line 1, column 14: rule 'other' is not defined"),
    (GrammarKind.EBNF, 'top ::= "a"', "no rule named root"),
    (GrammarKind.EBNF, 'root ::= a\na ::= "x', "line 2, column 7: cannot read"),
    (GrammarKind.EBNF, 'root ::= ("a"', "in rule root: Expected token ')'"),
    (GrammarKind.EBNF, "root ::= a\na ::= [z-a]", "in rule a: the regular expression"),
    (GrammarKind.EBNF, r'root ::= "\q"', r"line 1, column 11: there is no escape \q"),
    (GrammarKind.EBNF, "root ::= root", "nothing can match it"),
    (GrammarKind.EBNF, 'start: "a" other', 'line 1, column 8: unknown name: "other"'),
    (GrammarKind.EBNF, "start: a\na: /x(/", "line 2, column 4: the regular expression is not valid at character 2"),
    (GrammarKind.EBNF, 'begin: "a"', "no start rule found"),
    (GrammarKind.EBNF, 'start: %json {"a"', "%json is not followed by JSON"),
    (GrammarKind.EBNF, "start: <[4095-4100]>", "column 8: Token range end too large: 4100"),
    (GrammarKind.JSON_OBJECT, "{}", "too long: 2 bytes; json_object may have 0"),
    (GrammarKind.REGEX, "a" * 9000, "too long: 9000 bytes; regex may have 8192"),
    (GrammarKind.REGEX, "\ud800", "half a surrogate pair"),
]


def refusal(compiler: GrammarCompiler, kind: GrammarKind, text: Any) -> str:
    with pytest.raises(SluiceError) as caught:
        compiler.compile(grammar(kind, text)).result(timeout=PATIENCE_S)
    assert caught.value.code is ErrorCode.INVALID
    assert caught.value.param == "grammar"
    assert "guidance>" not in caught.value.message and "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(("schema", "words"), SCHEMAS, ids=lambda value: str(value)[:50])
def test_schema(compiler: GrammarCompiler, schema: Any, words: str) -> None:
    assert words in refusal(compiler, GrammarKind.JSON_SCHEMA, schema)


@pytest.mark.parametrize(("kind", "text", "words"), OTHERS, ids=lambda value: ascii(value)[:50])
def test_others(compiler: GrammarCompiler, kind: GrammarKind, text: str, words: str) -> None:
    assert words in refusal(compiler, kind, text)


def test_unused_and_optional_parts_do_not_matter(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": []}}, "$defs": {"unused": {"type": "strng"}}}
    compiler.compile(grammar(GrammarKind.JSON_SCHEMA, schema)).result(timeout=PATIENCE_S)


def test_messages_are_short(compiler: GrammarCompiler) -> None:
    message = refusal(compiler, GrammarKind.EBNF, 'start: "' + "x" * 5000)
    assert len(message) < 300
    assert re.search(r"line 1, column \d+", message)
