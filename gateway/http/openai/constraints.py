"""What an answer must match, from any of the fields that can say so."""

import json
from collections.abc import Iterator
from typing import Any

from engine.types import Grammar, GrammarKind
from gateway.http.openai.schemas import GenerationRequest, ResponseFormat, StructuredOutputs
from sluice.errors import invalid

Constraint = tuple[str, Grammar]
"""The path of the client's field, and what it says."""


def constraint_of(fields: GenerationRequest) -> Constraint | None:
    """The constraint on the answer; None where there is none. Raises INVALID for two of them."""
    found = list(_constraints(fields))
    if len(found) > 1:
        (first, _), (second, _) = found[:2]
        raise invalid(second, f"{second} and {first} both say what the answer must match; send one of them")
    return found[0] if found else None


def _constraints(fields: GenerationRequest) -> Iterator[Constraint]:
    if fields.response_format is not None:
        yield from _of_response_format(fields.response_format)
    yield from _given("guided_", fields.guided_json, fields.guided_regex, fields.guided_choice, fields.guided_grammar)
    if fields.structured_outputs is not None:
        yield from _of_structured_outputs(fields.structured_outputs)


def _of_response_format(asked: ResponseFormat) -> Iterator[Constraint]:
    if asked.type == "json_object":
        yield "response_format", Grammar(GrammarKind.JSON_OBJECT)
    if asked.type == "json_schema":
        path = "response_format.json_schema"
        if asked.json_schema is None:
            raise invalid(path, f"{path} is required where response_format.type is json_schema")
        if asked.json_schema.schema_ is None:
            raise invalid(f"{path}.schema", f"{path}.schema is required")
        yield f"{path}.schema", Grammar(GrammarKind.JSON_SCHEMA, _json_text(asked.json_schema.schema_))


def _of_structured_outputs(asked: StructuredOutputs) -> Iterator[Constraint]:
    yield from _given("structured_outputs.", asked.json_, asked.regex, asked.choice, asked.grammar)
    if asked.json_object:
        yield "structured_outputs.json_object", Grammar(GrammarKind.JSON_OBJECT)


def _given(
    prefix: str,
    json_schema: str | dict[str, Any] | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> Iterator[Constraint]:
    """vLLM's four, which it has under two spellings."""
    if json_schema is not None:
        yield f"{prefix}json", Grammar(GrammarKind.JSON_SCHEMA, _json_text(json_schema))
    if regex is not None:
        yield f"{prefix}regex", Grammar(GrammarKind.REGEX, regex)
    if choice is not None:
        yield f"{prefix}choice", Grammar(GrammarKind.CHOICE, _json_text(choice))
    if grammar is not None:
        yield f"{prefix}grammar", Grammar(GrammarKind.EBNF, grammar)


def _json_text(value: str | dict[str, Any] | list[str]) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
