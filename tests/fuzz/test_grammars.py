"""Grammars of every kind with anything in them: each is followed or refused, and no other waits for it."""

import json
from collections.abc import Iterator
from concurrent.futures import Future
from time import process_time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.engine.guidance.compiler import GrammarCompiler
from sluice.engine.guidance.matching import CompiledGrammar
from sluice.engine.types import Grammar, GrammarKind
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.chat.formats import parse_tools
from sluice.pipelines.chat.lark import LarkWriter
from sluice.pipelines.chat.registry import tool_formats
from sluice.pipelines.chat.structural_tags import structural_tag_grammar
from tests.engine.guidance.walks import EOS, RILL, VOCAB_SIZE, allowed
from tests.fuzz.damage import damaged
from tests.fuzz.json_bodies import encode
from tests.fuzz.running import fuzzed

PATIENCE_S = 240.0
BOUND_S = 20.0
"""Processor time for a grammar, far beyond what one takes."""
NUM_TOKENS = 12
SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"type": "integer"}},
        "required": ["a"],
    },
    {
        "type": "array",
        "items": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}]},
        "minItems": 1,
        "$defs": {"x": {"enum": [1, "a", None]}},
    },
    {"oneOf": [{"const": {"a": 1}}, {"type": "number", "minimum": 0, "exclusiveMaximum": 10, "multipleOf": 0.5}]},
    {"type": "string", "pattern": "^[a-z]{1,4}$", "format": "date-time"},
    {"allOf": [{"type": "object", "patternProperties": {"^x": {"type": "boolean"}}}, {"additionalProperties": False}]},
)
SCHEMA_SNIPPETS = (
    *(b'"type": "object"', b'"type": ["string", "null"]', b'"$ref": "#"'),
    *(b'"$ref": "#/$defs/x"', b'"$ref": "http://x/"'),
    *(b'"pattern": "(a+)+$"', b'"pattern": "["', b'"minLength": 1000000', b'"maxItems": 100000', b'"minItems": 5000'),
    *(b'"enum": []', b'"const": null', b'"multipleOf": 0', b'"multipleOf": 1e-300'),
    *(b'"minimum": 1e308', b'"required": ["z"]'),
    *(b'"not": {}', b'"if": {}', b'"format": "uuid"', b'"format": 5', b'"x-guidance": {}', b'"dependentRequired": {}'),
    *(b'"$defs": {"x": {"$ref": "#/$defs/x"}}', b'"uniqueItems": true', b'"prefixItems": [{}]'),
    *(b'"items": false', b"{}"),
    *(b"true", b"[]", b'""', b",", b":", b"}", b"]", b"1e999", b'"\\ud800"', b'{"items":' * 60, b'"a": ', b"\xff"),
)
REGEXES = (r"[a-z]+\d{2,3}(\.\w*)?", r"(yes|no|maybe)+", r"\p{L}{1,5}[^x]", r"(?i)a.b", r"\x41\u{1F600}")
REGEX_SNIPPETS = (
    *(b"(", b")", b"[", b"]", b"{", b"}", b"*", b"+", b"?", b"|", b"^", b"$", b".", b"\\", b"\\b", b"(?="),
    *(b"(?<n>", b"\\1"),
    *(b"{1000}", b"{1,1000}", b"{,}", b"[^", b"[a-", b"\\p{", b"\\p{Greek}", b"\\x{110000}", b"(?s-i:", b"/"),
    *(b"\n", b"\xff"),
    *(b"(a|b)*a(a|b){12}", b"(" * 200, b"a?" * 400, b"\\d" * 100, b"[[:alpha:]]", b"&&", b"--", b"~~", b"(?x)", b" "),
)
GRAMMARS = (
    'start: "a" b* | "c"\nb: /[0-9]+/ | NAME\nNAME: /[a-z]/ ","\n',
    'start: %json {"type": "object", "properties": {"a": {"type": "null"}}}\n%ignore / /\n',
    'root ::= item ("," item)*\nitem ::= [a-z]+ | "\\"" [^"]* "\\"" | root2 # note\nroot2 ::= "(" root ")"\n',
)
GRAMMAR_SNIPPETS = (
    *(b"start: ", b"root ::= ", b"%json ", b"%regex ", b"%ignore ", b"%llguidance {}", b"%import common.INT"),
    *(b"%lark {", b"}"),
    *(b"start", b"a: a a | \n", b'"', b"/", b"/(/", b"|", b"*", b"+", b"?", b"(", b")", b"[", b"]", b"{1000000}"),
    *(b"~3", b"@x"),
    *(b"::=", b":", b"\n", b"#", b"<|end|>", b"<[5]>", b"<[999999999]>", b'"\\x"', b'"\\ud800"'),
    *(b'"\\u{110000}"', b"[^]", b"\xff"),
    *(b'[stop="a"]', b"[capture]", b"[max_tokens=3]", b"[temperature=1]", b"[lazy]", b"&", b"~", b"\\p{L}", b"(" * 300),
)
TAGS = (
    {"structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}], "triggers": ["<a"]},
    {
        "format": {
            "type": "sequence",
            "elements": [{"type": "const_string", "value": "x"}, {"type": "regex", "pattern": "a+"}],
        }
    },
    {"format": {"type": "or", "elements": [{"type": "json_schema", "json_schema": {}}, {"type": "any_text"}]}},
    {
        "format": {
            "type": "tags_with_separator",
            "tags": [
                {"type": "tag", "begin": "<", "content": {"type": "grammar", "grammar": 'root ::= "a"'}, "end": ">"}
            ],
            "separator": ",",
            "at_least_one": True,
        }
    },
)
TAG_SNIPPETS = (
    *(b'"type": "tag"', b'"type": "triggered_tags"', b'"triggers": []', b'"triggers": [""]'),
    *(b'"begin": ""', b'"end": [""]'),
    *(b'"elements": []', b'"tags": []', b'"separator": ""', b'"stop_after_first": true'),
    *(b'"pattern": "("', b'"grammar": ""'),
    *SCHEMA_SNIPPETS[:12],
)
schemas = st.sampled_from(SCHEMAS).flatmap(lambda schema: damaged(encode(schema), SCHEMA_SNIPPETS, 3))
grammars = st.one_of(
    st.tuples(st.just(GrammarKind.JSON_SCHEMA), schemas),
    st.tuples(st.just(GrammarKind.JSON_SCHEMA), schemas),
    st.tuples(
        st.just(GrammarKind.REGEX),
        st.sampled_from(REGEXES).flatmap(lambda text: damaged(text.encode(), REGEX_SNIPPETS, 3)),
    ),
    st.tuples(
        st.just(GrammarKind.EBNF),
        st.sampled_from(GRAMMARS).flatmap(lambda text: damaged(text.encode(), GRAMMAR_SNIPPETS, 3)),
    ),
    st.tuples(st.just(GrammarKind.CHOICE), damaged(b'["yes", "no", ""]', SCHEMA_SNIPPETS, 3)),
).map(lambda found: Grammar(found[0], found[1].decode("utf-8", "replace")))
whitespaces = st.sampled_from((None, None, None, "", r"[ \n]?", r"\s*"))


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(RILL, VOCAB_SIZE, (EOS,))
    yield compiler
    compiler.close()


def check(compiler: GrammarCompiler, grammar: Grammar) -> None:
    """Compile a grammar, follow it for some tokens, and compile another meanwhile."""
    began = process_time()
    future = compiler.compile(grammar)
    other = compiler.compile(Grammar(GrammarKind.CHOICE, json.dumps(["yes", grammar.text[:20]])))
    try:
        follow(future)
    except SluiceError as error:
        assert (error.code, error.param) in ((ErrorCode.INVALID, "grammar"), (ErrorCode.INVALID, "tools")), (
            error.message
        )
        error.message.encode()
    assert other.result(timeout=PATIENCE_S).constraint() is not None
    assert process_time() - began < BOUND_S


def follow(future: "Future[CompiledGrammar]") -> None:
    constraint, rng = future.result(timeout=PATIENCE_S).constraint(), np.random.default_rng(0)
    for _ in range(NUM_TOKENS):
        token = int(rng.choice(allowed(constraint)))
        constraint.accept(token)
        if token == EOS:
            return


@fuzzed(40)
@given(grammars, whitespaces)
def test_a_grammar_is_followed_or_refused(compiler: GrammarCompiler, grammar: Grammar, whitespace: str | None) -> None:
    is_json = grammar.kind is GrammarKind.JSON_SCHEMA
    check(compiler, Grammar(grammar.kind, grammar.text, whitespace=whitespace if is_json else None))


@fuzzed(20)
@given(st.sampled_from(TAGS).flatmap(lambda tag: damaged(encode(tag), TAG_SNIPPETS, 3)))
def test_a_structural_tag_is_followed_or_refused(compiler: GrammarCompiler, content: bytes) -> None:
    try:
        grammar = structural_tag_grammar(content.decode("utf-8", "replace"), LarkWriter({}))
    except SluiceError as error:
        assert (error.code, error.param) == (ErrorCode.INVALID, "grammar")
    else:
        check(compiler, grammar)


@fuzzed(20)
@given(st.sampled_from(tool_formats()), schemas, st.booleans(), st.booleans())
def test_tools_are_followed_or_refused(
    compiler: GrammarCompiler, format: Any, schema: bytes, is_required: bool, is_parallel: bool
) -> None:
    try:
        parameters = json.loads(schema)
        schema.decode()
        json.dumps(parameters, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return  # refused where bodies are read
    if not isinstance(parameters, dict):
        return
    lark = LarkWriter({})
    write = format.required_calls if is_required else format.optional_calls
    try:
        tools = parse_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
        grammar = Grammar(GrammarKind.TOOL_CALLS, lark.grammar(write(tools, lark, is_parallel=is_parallel)))
    except SluiceError as error:
        assert error.code is ErrorCode.INVALID
    else:
        check(compiler, grammar)
