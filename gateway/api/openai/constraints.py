"""Constraints on an answer, in OpenAI's and in vLLM's fields, as grammars."""

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NewType

import msgspec

from sluice.engine.guidance.closing import rewrite
from sluice.engine.guidance.schema import parse_schema
from sluice.engine.types import Grammar, GrammarKind
from sluice.errors import invalid
from sluice.gateway.api.fields import json_text
from sluice.gateway.api.openai.schemas import GenerationRequest, ResponseFormat, StructuredOutputs
from sluice.gateway.front.http.errors import client_names
from sluice.gateway.front.http.parsing import quote_value, schema_notes

CONSTRAINT_FIELDS = frozenset(
    {
        *("response_format", "structured_outputs", "structural_tag"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern"),
    }
)
_JSON_KINDS = (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT)
_SPACE = r"( |\\[ntrs])"
_WHITESPACE = re.compile(rf"({_SPACE}|\[{_SPACE}+\]|[()?*+|]|\{{\d+(,\d*)?\}})*")
"""Patterns that match white space alone."""
StructuralTag = NewType("StructuralTag", str)
"""A structural tag as JSON."""
Constraint = tuple[str, Grammar | StructuralTag]
"""Path of the client's field, and the grammar in it."""


def parse_constraint(fields: GenerationRequest) -> Constraint | None:
    """Return the constraint on the answer; None where there is none. Raises INVALID for two of them."""
    found = list(_read_constraints(fields))
    if len(found) > 1:
        (first, _), (second, _) = found[:2]
        raise invalid(second, f"{second} and {first} both say what the answer must match; send one of them")
    constraint = found[0] if found else None
    whitespace = list(_read_whitespace(fields))
    return _with_whitespace(constraint, whitespace) if whitespace else constraint


def _read_whitespace(fields: GenerationRequest) -> Iterator[tuple[str, str]]:
    """Yield the fields about the white space of JSON: the path of each, and a pattern, "" for none."""
    if fields.guided_whitespace_pattern is not None:
        yield "guided_whitespace_pattern", fields.guided_whitespace_pattern
    sent = fields.structured_outputs
    if sent is not None and sent.whitespace_pattern is not None:
        yield "structured_outputs.whitespace_pattern", sent.whitespace_pattern
    if sent is not None and sent.disable_any_whitespace:
        yield "structured_outputs.disable_any_whitespace", ""


def _with_whitespace(constraint: Constraint | None, sent: list[tuple[str, str]]) -> Constraint:
    (path, pattern), *others = sent
    if others:
        raise invalid(others[0][0], f"{others[0][0]} and {path} both say what white space JSON has; send one of them")
    if constraint is None or not isinstance(constraint[1], Grammar) or constraint[1].kind not in _JSON_KINDS:
        raise invalid(path, f"{path} is of JSON, which nothing in the request asks for; leave it out")
    spelled = pattern.replace("\n", r"\n").replace("\r", r"\r").replace("\t", r"\t")
    with suppress(re.error):
        if _WHITESPACE.fullmatch(spelled) and re.compile(spelled):
            # JSON has fewer characters of white space than regular expressions.
            spelled = spelled.replace(r"\s", r"[ \t\r\n]")
            return constraint[0], msgspec.structs.replace(constraint[1], whitespace=spelled)
    expected = r"a regular expression of spaces, \t, \r and \n alone"
    raise invalid(path, f"{path} must be {expected}, got {quote_value(pattern)}")


def _read_constraints(fields: GenerationRequest) -> Iterator[Constraint]:
    if fields.response_format is not None:
        yield from _read_response_format(fields.response_format)
    yield from _read_guided(
        "guided_", fields.guided_json, fields.guided_regex, fields.guided_choice, fields.guided_grammar
    )
    if fields.structural_tag is not None:
        yield "structural_tag", StructuralTag(json_text(fields.structural_tag))
    if fields.structured_outputs is not None:
        yield from _read_structured_outputs(fields.structured_outputs)


def _read_response_format(sent: ResponseFormat) -> Iterator[Constraint]:
    if sent.type == "json_object":
        yield "response_format", Grammar(GrammarKind.JSON_OBJECT)
    if sent.type == "json_schema":
        path = "response_format.json_schema"
        if sent.json_schema is None:
            raise invalid(path, f"{path} is required where response_format.type is json_schema")
        if sent.json_schema.schema_ is None:
            raise invalid(f"{path}.schema", f"{path}.schema is required")
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json_text(sent.json_schema.schema_))
        if sent.json_schema.strict:
            _check_strict(f"{path}.schema", grammar)
        yield f"{path}.schema", grammar
    if sent.type == "structural_tag":
        parts = {"structures": sent.structures, "triggers": sent.triggers, "format": sent.format}
        given = {name: value for name, value in parts.items() if value is not None}
        yield "response_format", StructuralTag(json_text(given))


def _check_strict(path: str, grammar: Grammar) -> None:
    """Raise INVALID for a schema of which the answer cannot keep to all."""
    note = next((note for note in schema_notes(grammar) if note.is_broken), None)
    if note is not None:
        reason = f"at {note.pointer}: {note.what}, as strict asks; leave it out, or send strict: false"
        raise invalid(path, f"the JSON schema cannot be used: {reason}")


def _read_structured_outputs(sent: StructuredOutputs) -> Iterator[Constraint]:
    schema = sent.json_
    if schema is not None and sent.disable_additional_properties:
        with client_names({"grammar": "structured_outputs.json"}):
            schema = rewrite(parse_schema(json_text(schema)), is_closed=True).schema
    yield from _read_guided("structured_outputs.", schema, sent.regex, sent.choice, sent.grammar)
    if sent.structural_tag is not None:
        yield "structured_outputs.structural_tag", StructuralTag(json_text(sent.structural_tag))
    if sent.json_object:
        yield "structured_outputs.json_object", Grammar(GrammarKind.JSON_OBJECT)


def _read_guided(
    prefix: str,
    json_schema: str | dict[str, Any] | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> Iterator[Constraint]:
    """Read vLLM's four constraints, which it spells in two ways: with a prefix, and as fields of an object."""
    if json_schema is not None:
        yield f"{prefix}json", Grammar(GrammarKind.JSON_SCHEMA, json_text(json_schema))
    if regex is not None:
        yield f"{prefix}regex", Grammar(GrammarKind.REGEX, regex)
    if choice is not None:
        yield f"{prefix}choice", Grammar(GrammarKind.CHOICE, json_text(choice))
    if grammar is not None:
        yield f"{prefix}grammar", Grammar(GrammarKind.EBNF, grammar)
