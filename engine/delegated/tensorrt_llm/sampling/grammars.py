"""A client's grammar in the words of TensorRT-LLM's guided decoding backends: xgrammar and llguidance."""

import json
from collections.abc import Callable
from typing import Any

import msgspec

from engine.guidance.gbnf import is_gbnf, to_lark
from engine.guidance.schema import parse_schema
from engine.guidance.translate import MAX_BYTES
from engine.types import Grammar, GrammarKind
from sluice.errors import SluiceError, invalid

XGRAMMAR = "xgrammar"
LLGUIDANCE = "llguidance"
BACKENDS = (XGRAMMAR, LLGUIDANCE)


def grammar_kinds(backend: str | None) -> tuple[GrammarKind, ...]:
    """Languages of constraints that a guided decoding backend (xgrammar, llguidance; None: none) keeps to."""
    return tuple(GrammarKind) if backend in BACKENDS else ()


def guide(grammar: Grammar, backend: str | None) -> dict[str, Any]:
    """Arguments of `GuidedDecodingParams`, of which exactly one may be given.

    Raises SluiceError INVALID for what is wrong with the text itself, and for what the backend cannot do.
    """
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
    return _GUIDES[grammar.kind](grammar.text, backend)


def _json_schema(text: str, backend: str) -> dict[str, Any]:
    parse_schema(text)
    return {"json": text}


def _json_object(text: str, backend: str) -> dict[str, Any]:
    return {"json_object": True}


def _regex(text: str, backend: str) -> dict[str, Any]:
    return {"regex": text}


def _choice(text: str, backend: str) -> dict[str, Any]:
    try:
        choices = msgspec.json.decode(text, type=list[str])
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid("grammar", f"choice must be a JSON array of strings: {error}") from None
    if not choices:
        raise invalid("grammar", "choice must have at least one string, got an empty array")
    distinct = dict.fromkeys(choices)
    if backend == LLGUIDANCE:
        words = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in distinct)
        return {"grammar": f"start: CHOICE\nCHOICE: {words}\n"}
    return {"grammar": "root ::= " + " | ".join(_quoted(choice) for choice in distinct)}


def _quoted(text: str) -> str:
    """A string of GBNF. What is not plain ASCII, or has a meaning there, stands as its number."""
    return '"' + "".join(_character(each) for each in text) + '"'


def _character(each: str) -> str:
    if each.isascii() and each.isprintable() and each not in '"\\':
        return each
    return f"\\u{ord(each):04x}" if ord(each) < 0x10000 else f"\\U{ord(each):08x}"


def _ebnf(text: str, backend: str) -> dict[str, Any]:
    if is_gbnf(text):
        return {"grammar": text if backend == XGRAMMAR else to_lark(text).text}
    if backend == XGRAMMAR:
        raise _no_lark()
    return {"grammar": text}


def _no_lark() -> SluiceError:
    return invalid(
        "grammar",
        "the guided decoding backend xgrammar reads GBNF, where rules are defined by ::=, and this is Lark; write it "
        "in GBNF, or start the model with the setting guided_decoding_backend=llguidance",
    )


_GUIDES: dict[GrammarKind, Callable[[str, str], dict[str, Any]]] = {
    GrammarKind.JSON_SCHEMA: _json_schema,
    GrammarKind.JSON_OBJECT: _json_object,
    GrammarKind.REGEX: _regex,
    GrammarKind.CHOICE: _choice,
    GrammarKind.EBNF: _ebnf,
}
