"""A client's grammar in the words of TensorRT-LLM's guided decoding backends: xgrammar and llguidance."""

from typing import Any

from sluice.engine.guidance.gbnf import is_gbnf, to_lark
from sluice.engine.guidance.schema import parse_schema
from sluice.engine.guidance.translate import MAX_BYTES, choice_in_lark, parse_choices, translate
from sluice.engine.types import Grammar, GrammarKind
from sluice.errors import invalid

XGRAMMAR = "xgrammar"
LLGUIDANCE = "llguidance"
BACKENDS = (XGRAMMAR, LLGUIDANCE)


def grammar_kinds(backend: str | None) -> tuple[GrammarKind, ...]:
    """Return the languages of constraints that a guided decoding backend (xgrammar, llguidance; None: none) obeys."""
    if backend == LLGUIDANCE:
        return tuple(GrammarKind)
    return tuple(kind for kind in GrammarKind if kind is not GrammarKind.TOOL_CALLS) if backend == XGRAMMAR else ()


def guide(grammar: Grammar, backend: str | None) -> dict[str, Any]:
    """Return arguments of `GuidedDecodingParams`, of which exactly one may be given. Raises INVALID for what is wrong
    with the text itself, and for what the backend cannot do."""
    if backend not in BACKENDS:
        raise invalid(
            "grammar",
            "this model was started without guided decoding, so its output cannot be made to match a "
            f"{grammar.kind.value.replace('_', ' ')}; start it with the setting guided_decoding_backend=xgrammar",
        )
    size, limit = len(grammar.text.encode(errors="surrogatepass")), MAX_BYTES[grammar.kind]
    if size > limit:
        message = f"the grammar is too long: {size} bytes; {grammar.kind.value} may have {limit}"
        raise invalid("grammar", message)
    if grammar.preamble or grammar.kind is GrammarKind.TOOL_CALLS or grammar.whitespace is not None:
        return {"grammar": _llguidance_alone(grammar, backend)}
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            parse_schema(grammar.text)
            return {"json": grammar.text}
        case GrammarKind.JSON_OBJECT:
            return {"json_object": True}
        case GrammarKind.REGEX:
            return {"regex": grammar.text}
        case GrammarKind.CHOICE:
            choices = parse_choices(grammar.text)
            if backend == LLGUIDANCE:
                return {"grammar": choice_in_lark(choices)}
            return {"grammar": "root ::= " + " | ".join(map(_quoted, choices))}
        case GrammarKind.EBNF:
            return {"grammar": _ebnf(grammar.text, backend)}


def _llguidance_alone(grammar: Grammar, backend: str | None) -> str:
    if backend != LLGUIDANCE:
        raise invalid(
            "grammar",
            "the guided decoding backend xgrammar keeps to no grammar of tool calls, to none after reasoning and to no "
            "pattern of white space; start the model with the setting guided_decoding_backend=llguidance",
        )
    return translate(grammar).text


def _quoted(text: str) -> str:
    """Return a string of GBNF. What is not plain ASCII, or has a meaning there, stands as its number."""
    return '"' + "".join(_character(each) for each in text) + '"'


def _character(each: str) -> str:
    if each.isascii() and each.isprintable() and each not in '"\\':
        return each
    return f"\\u{ord(each):04x}" if ord(each) < 0x10000 else f"\\U{ord(each):08x}"


def _ebnf(text: str, backend: str) -> str:
    if is_gbnf(text):
        return text if backend == XGRAMMAR else to_lark(text).text
    if backend == XGRAMMAR:
        raise invalid(
            "grammar",
            "the guided decoding backend xgrammar reads GBNF, where rules are defined by ::=, and this is Lark; write "
            "it in GBNF, or start the model with the setting guided_decoding_backend=llguidance",
        )
    return text
