"""Translates clients' grammars for llguidance, and llguidance's errors back for clients. Formats of strings that may go
on for ever are bounded: a small model under a grammar writes on as long as it may."""

import bisect
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from sluice.engine.guidance.closing import rewrite
from sluice.engine.guidance.gbnf import LarkGrammar, is_gbnf, lark_string, to_lark
from sluice.engine.guidance.nodes import has_unknown_format, types_of, walk
from sluice.engine.guidance.overlap import compile_error
from sluice.engine.guidance.schema import check_schema, locate_error, parse_schema
from sluice.engine.types import Grammar, GrammarKind
from sluice.errors import SluiceError, invalid

_FRACTION = r"^[^.]*(?:\.[0-9]{1,9}[^.0-9][^.]*)?$"
BOUNDS = {
    "date-time": _FRACTION,
    "time": _FRACTION,
    "duration": r"^(?:[A-Z]{1,2}[0-9]{1,9}){1,7}[A-Z]$",
    "email": r"^[^@]{1,64}@[^@]{1,189}$",
    "hostname": r"^.{1,253}$",
    "uri": r"^[^:]{1,32}:(?://[^/?#]{0,255})?[^?#]{0,1024}(?:\?[^#]{0,1024})?(?:#.{0,255})?$",
}
"""Patterns that a string of the format matches besides: nanoseconds, numbers of 9 digits, the lengths of RFC 5321 and
RFC 1035, and for a URI, which has no limit, what browsers and servers take."""
_SAID = ("maxLength", "const", "enum")
"""Keywords of a schema that has bounds of its own."""
_SHORTEST = 32
"""A minimum length up to which the bounds are out of the way."""


def bound_formats(schema: dict[str, Any]) -> bool:
    """Give formats an end, and take those that do not constrain out of a schema; return whether it has changed."""
    nodes = [node for _, node in walk(schema) if "format" in node]
    return sum(map(_bound, nodes)) > 0


def _bound(node: dict[str, Any]) -> bool:
    if has_unknown_format(node):
        del node["format"]
        return True
    format, shortest = node["format"], node.get("minLength", 0)
    bound = BOUNDS.get(format) if isinstance(format, str) and "string" in types_of(node) else None
    if bound is None or any(key in node for key in _SAID) or (isinstance(shortest, int) and shortest > _SHORTEST):
        return False
    if "pattern" not in node:
        node["pattern"] = bound
        return True
    part = {"type": "string", "pattern": bound}
    own: dict[str, Any] = {key: node[key] for key in ("format", "pattern", "minLength") if key in node}
    if not isinstance(parts := node.get("allOf", []), list) or _is_too_complex({**own, "allOf": [part]}):
        return False  # the client's own pattern decides
    kind = {"type": node["type"]} if "type" in node else {}
    node["allOf"] = [*parts, {**part, **kind}]
    return True


def _is_too_complex(node: dict[str, Any]) -> bool:
    return bool(compile_error(msgspec.json.encode({"type": "string", **node}).decode()))


if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Probe = Callable[[str], str]
"""Compiles a grammar's text. Returns the error, empty without one."""

MAX_BYTES = {
    GrammarKind.JSON_SCHEMA: 256 << 10,
    GrammarKind.JSON_OBJECT: 0,
    GrammarKind.REGEX: 8 << 10,
    GrammarKind.CHOICE: 256 << 10,
    GrammarKind.EBNF: 64 << 10,
    GrammarKind.TOOL_CALLS: 2 << 20,
}
"""Most bytes of a grammar's text in UTF-8. The compiler's stack and time grow with it."""

FUEL = 500_000
_REGEX_FUEL = 20_000
"""Limit on the size of all expressions of a grammar, about two a character. Sets of strings are cheap; otherwise time
and memory grow with the square of a regular expression's size (a thousand optional letters: 10 MB)."""

_JSON_STYLE: "JsonCompileOptions" = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": True,
}
"""Style of generated JSON: at most one space, and only after a comma or colon. Most models write it that way, and small
ones that may write white space anywhere often write nothing else."""

_SCHEMA_RULE = re.compile(r"^// (?P<owner>.*)\n(?P<head>r\d+: %json )(?P<schema>.*)$", re.MULTILINE)
"""A rule of a grammar of tool calls that is a JSON schema, after a comment that names its tool."""

_JSON_OBJECT = r"""
start: object
object: OPEN (member (COMMA member)*)? CLOSE
member: STRING COLON value
array: START (value (COMMA value)*)? END
value: object | array | STRING | NUMBER | "true" | "false" | "null"
STRING: /"(?:[^"\\\x00-\x1F\x7F]|\\(?:["\\bfnrt]|u(?:00[01][0-9a-fA-F]|007[fF])))*"/
NUMBER: /-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?/
"""
"""Any JSON object. Its strings have no bound but `max_tokens`: one below it would cut what a client wants, and the
answer would look complete."""
_SEPARATORS = {"COMMA": "W,W", "COLON": "W:W", "OPEN": r"\{W", "CLOSE": r"W\}", "START": r"\[W", "END": r"W\]"}
"""Tokens of JSON, with the places of white space as W."""
_OUR_SEPARATORS = {"COMMA": ", ?", "COLON": ": ?", "OPEN": r"\{", "CLOSE": r"\}", "START": r"\[", "END": r"\]"}


@dataclass(frozen=True, slots=True)
class Translation:
    """A grammar for llguidance: its text, and in `fuel` what compiling it may cost. `explain` turns llguidance's error
    into one for the client; it may compile parts of the grammar by the probe."""

    text: str
    explain: Callable[[str, Probe], SluiceError]
    fuel: int = FUEL


def translate(grammar: Grammar) -> Translation:
    """Translate a grammar. Raises SluiceError INVALID if its text is too long or not valid."""
    try:
        size, limit = len(grammar.text.encode()), MAX_BYTES[grammar.kind]
    except UnicodeEncodeError:
        raise invalid("grammar", "the grammar is not valid Unicode text: it has half a surrogate pair") from None
    if size > limit:
        message = f"the grammar is too long: {size} bytes; {grammar.kind.value} may have {limit}"
        raise invalid("grammar", message)
    translation = _translate(grammar)
    return _after(grammar.preamble, translation) if grammar.preamble else translation


def _translate(grammar: Grammar) -> Translation:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return _json_schema(grammar.text, grammar.whitespace)
        case GrammarKind.JSON_OBJECT:
            return _ebnf(_json_object(grammar.whitespace))
        case GrammarKind.REGEX:
            return _regex(grammar.text)
        case GrammarKind.CHOICE:
            return _choice(grammar.text)
        case GrammarKind.EBNF:
            return _ebnf(grammar.text)
        case GrammarKind.TOOL_CALLS:
            return _tool_calls(grammar.text)


def _after(preamble: str, answer: Translation) -> Translation:
    """Return the grammar of an answer after a preamble, which refers to it as `@answer`."""
    first, *others = json.loads(answer.text)["grammars"]
    grammars = [{"lark_grammar": preamble}, {**first, "name": "answer"}, *others]
    return replace(answer, text=json.dumps({"grammars": grammars}))


def _json_object(whitespace: str | None) -> str:
    """Return the Lark grammar of any JSON object: with a white space between any tokens, or in our own style."""
    separators = _OUR_SEPARATORS
    if whitespace is not None:
        separators = {name: regex.replace("W", f"({whitespace})?") for name, regex in _SEPARATORS.items()}
    return "\n".join([_JSON_OBJECT, *(f"{name}: /{regex}/" for name, regex in separators.items()), ""])


def _json_style(whitespace: str | None) -> "JsonCompileOptions":
    if whitespace is None:
        return _JSON_STYLE
    plain: JsonCompileOptions = {**_JSON_STYLE, "item_separator": ",", "key_separator": ":"}
    return {**plain, "whitespace_flexible": True, "whitespace_pattern": whitespace} if whitespace else plain


def _json_schema(text: str, whitespace: str | None) -> Translation:
    sent = parse_schema(text)
    check_schema(sent)
    schema = rewrite(sent).schema
    bound_formats(schema)
    compiled = schema_grammar(schema, _json_style(whitespace))

    def explain(raw: str, probe: Probe) -> SluiceError:
        return _schema_error(schema, raw, probe)

    return Translation(compiled, explain)


def _schema_error(schema: dict[str, Any], raw: str, probe: Probe) -> SluiceError:
    pointer, error = locate_error(schema, raw, lambda part: probe(schema_grammar(part)))
    return invalid("grammar", f"the JSON schema cannot be used: at {pointer}: {reword_error(error)}")


def schema_grammar(schema: dict[str, Any], style: "JsonCompileOptions" = _JSON_STYLE) -> str:
    """Return llguidance's grammar of a JSON schema."""
    # llguidance's own function would parse the text once more, and hold the interpreter's lock for it.
    return msgspec.json.encode({"grammars": [{"json_schema": {**schema, "x-guidance": style}}]}).decode()


def _regex(text: str) -> Translation:
    def explain(raw: str, probe: Probe) -> SluiceError:
        fault = parse_regex_error(raw)
        where = f" at character {_original_offset(text, fault[0]) + 1}" if fault else ""
        reason = fault[1] if fault else reword_error(raw)
        return invalid("grammar", f"the regular expression cannot be used{where}: {reason}")

    return Translation(_lark_grammar(f"start: /{_regex_in_lark(text)}/"), explain, _REGEX_FUEL)


def _regex_in_lark(text: str) -> str:
    """Return a regular expression for use between slashes. \\d matches only ASCII digits, not those of all scripts."""
    from llguidance import regex_to_lark

    return regex_to_lark(text, use_ascii="d")


def _original_offset(text: str, offset: int) -> int:
    """Return the place in a regular expression that `_regex_in_lark` has moved to `offset`."""
    return bisect.bisect_left(range(len(text)), offset, key=lambda length: len(_regex_in_lark(text[:length])))


def parse_choices(text: str) -> list[str]:
    """Return the distinct strings of a choice. Raises INVALID for text that is not a JSON array with some."""
    try:
        choices = msgspec.json.decode(text, type=list[str])
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid("grammar", f"choice must be a JSON array of strings: {error}") from None
    if not choices:
        raise invalid("grammar", "choice must have at least one string, got an empty array")
    return list(dict.fromkeys(choices))


def choice_in_lark(choices: list[str]) -> str:
    words = " | ".join(map(lark_string, choices))
    return f"start: CHOICE\nCHOICE: {words}\n"


def _choice(text: str) -> Translation:
    def explain(raw: str, probe: Probe) -> SluiceError:
        return invalid("grammar", f"the choice cannot be used: {reword_error(raw)}")

    return Translation(_lark_grammar(choice_in_lark(parse_choices(text))), explain)


def _ebnf(text: str) -> Translation:
    if is_gbnf(text):
        return _gbnf(to_lark(text))
    for match in re.finditer(r"%json\s*", text):
        check_schema(_inline_schema(text, match.end()))

    def explain(raw: str, probe: Probe) -> SluiceError:
        place = parse_position(raw)
        where = f"line {place[0]}, column {place[1]}: " if place else ""
        return invalid("grammar", f"the Lark grammar cannot be used: {where}{reword_error(raw)}")

    return Translation(_lark_grammar(text), explain, _REGEX_FUEL)


def _gbnf(grammar: LarkGrammar) -> Translation:
    def explain(raw: str, probe: Probe) -> SluiceError:
        place = parse_position(raw)
        where = f"in rule {grammar.rule_names[place[0] - 1]}: " if place else ""
        return invalid("grammar", f"the GBNF grammar cannot be used: {where}{reword_error(raw)}")

    return Translation(_lark_grammar(grammar.text), explain, _REGEX_FUEL)


def _tool_calls(text: str) -> Translation:
    schemas: list[tuple[str, dict[str, Any]]] = []

    def rewrite(match: re.Match[str]) -> str:
        with _blamed_on(match["owner"]):
            schema = parse_schema(match["schema"])
            check_schema(schema)
            bound_formats(schema)
        schemas.append((match["owner"], schema))
        return match["head"] + json.dumps({**schema, "x-guidance": _JSON_STYLE})

    def explain(raw: str, probe: Probe) -> SluiceError:
        for owner, schema in schemas:
            error = probe(schema_grammar(schema))
            if error:
                explained = _schema_error(schema, error, probe)
                _blame(explained, owner)
                return explained
        what = "tools" if any(owner for owner, _ in schemas) else "grammar"
        return invalid(what, f"the {what} cannot be used: {reword_error(raw)}")

    return Translation(_lark_grammar(_SCHEMA_RULE.sub(rewrite, text)), explain)


@contextmanager
def _blamed_on(tool: str) -> Iterator[None]:
    """Make errors in a JSON schema say which tool's it is, none for the schema of the answer's text."""
    try:
        yield
    except SluiceError as error:
        _blame(error, tool)
        raise


def _blame(error: SluiceError, tool: str) -> None:
    if tool:
        error.param = "tools"
        error.template = error.template.replace("the JSON schema", f"the JSON schema of the tool {tool}", 1)


def _inline_schema(text: str, start: int) -> dict[str, Any]:
    try:
        schema, _ = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise invalid("grammar", f"the Lark grammar cannot be used: %json is not followed by JSON: {error}") from None
    return schema if isinstance(schema, dict) else {}


def _lark_grammar(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


_REWORDED = (
    (r"Unimplemented keys: \[(.*)\]", r"\1 is not supported here; remove it"),
    (r"Invalid type: (.*)", r'there is no type "\1"'),
    (r"Unsatisfiable schema: (.*)", r"nothing can match: \1"),
    (r"Pointer '(.*)' does not exist", r'"$ref": "#\1" leads nowhere'),
    (r"Resource '(.*)' is not present.*", r'"$ref": "\1" is outside the schema; copy it into $defs'),
    (r"invalid regex .*lookarounds not supported.*", "the regular expression looks around (\\\\b, ^ or $ inside)"),
    (r"NoExtension.*", "nothing can match it"),
)
_TOO_COMPLEX = re.compile(r"fuel|schema too large|too (big|many|complex|deeply)|limit|row has", re.IGNORECASE)
_REGEX_ERROR = re.compile(r"regex parse error:\n(?P<shown>.*\n)(?P<carets>\s*\^+)\nerror: (?P<reason>.*)")
_POSITION = re.compile(r"\s*(?:at )?(?P<line>\d+)\((?P<column>\d+)\): ")
_INDENT = 4
_MAX_CHARS = 240


def reword_error(raw: str) -> str:
    """Return one line that says what is wrong, in llguidance's own words if there are none better."""
    raw = raw.removesuffix("\n<non-verbose/>")
    words = _reword(_POSITION.sub("", raw, count=1))
    return words if len(words) <= _MAX_CHARS else f"{words[:_MAX_CHARS]} ..."


def _reword(text: str) -> str:
    if fault := parse_regex_error(text):
        offset, reason = fault
        return f"the regular expression is not valid at character {offset + 1}: {reason}"
    for pattern, words in _REWORDED:
        if re.match(pattern, text):
            return re.sub(f"(?s){pattern}", words, text.split("\n")[0])
    first_line = text.split("\n")[0]
    return f"it is too complex: {first_line}" if _TOO_COMPLEX.search(first_line) else first_line


def parse_regex_error(raw: str) -> tuple[int, str] | None:
    """Return the offset (from 0) of an error in a regular expression of one line, and the reason."""
    match = _REGEX_ERROR.search(raw)
    if match is None:
        return None
    return match["carets"].index("^") - _INDENT, match["reason"]


def parse_position(raw: str) -> tuple[int, int] | None:
    """Return the line and column (from 1) at the beginning of an error about a Lark grammar."""
    match = _POSITION.match(raw)
    return (int(match["line"]), int(match["column"])) if match else None
