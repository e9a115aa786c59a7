"""Translates GBNF, llama.cpp's grammar format, to llguidance's Lark. A rule that does not recurse becomes a terminal,
with everything it refers to: one automaton, which is fast and tries all ways to read the text. Rules that recurse stay
rules; between terminals inside them the longest match wins."""

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from sluice.errors import SluiceError, invalid

ROOT = "root"

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\n]*)
    | (?P<define>::=)
    | (?P<name>[A-Za-z0-9][\w-]*)
    | (?P<text>"(?:[^"\\\n]|\\.)*")
    | (?P<chars>\[(?:[^\]\\\n]|\\.)+\])
    | (?P<any>\.)
    | (?P<count>\{\s*\d+\s*(?:,\s*\d*\s*)?\})
    | (?P<sign>[|()*+?])""",
    re.VERBOSE,
)
_CHARACTER = re.compile(r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\(.)|([^\\])", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^", "/": "/"}


@dataclass(frozen=True, slots=True)
class _Token:
    """A token of the grammar's text; `kind` is the group of `_TOKEN` that matched."""

    kind: str
    text: str
    position: int


@dataclass(frozen=True, slots=True)
class LarkGrammar:
    """A translated grammar. Line i of `text` (counted from 1) came from the rule `rule_names[i - 1]`."""

    text: str
    rule_names: tuple[str, ...]


def lark_string(text: str) -> str:
    """Return a text as a string of Lark. llguidance's lexer takes JSON's strings, but for the character DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def is_gbnf(text: str) -> bool:
    """Return whether a line starts with `name ::=`, which defines a rule; Lark writes `name:`."""
    return re.search(r"(?m)^[ \t]*[\w-]+[ \t]*::=", text) is not None


def to_lark(text: str) -> LarkGrammar:
    """Translate a GBNF grammar; time is linear in its size. Raises SluiceError INVALID with line and column."""
    rules = _rules(text)
    if ROOT not in rules:
        raise invalid(
            "grammar", f'the grammar has no rule named {ROOT}, where matching starts; define "{ROOT} ::= ..."'
        )
    terminals = _terminals(text, rules)
    names = {name: f"T{i}" if name in terminals else f"r{i}" for i, name in enumerate(rules)}
    lines = [f"{names[name]}: {_body(text, tokens, names)}" for name, tokens in rules.items()]
    return LarkGrammar("\n".join((*lines, f"start: {names[ROOT]}\n")), (*rules, ROOT))


def _error(text: str, position: int, reason: str) -> SluiceError:
    line, column = text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position)
    return invalid("grammar", f"the grammar is not valid GBNF: line {line}, column {column}: {reason}")


def _tokens(text: str) -> Iterator[_Token]:
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _error(text, position, f"cannot read {text[position : position + 20]!r}")
        if match.lastgroup != "space":
            yield _Token(str(match.lastgroup), match[0], position)
        position = match.end()


def _rules(text: str) -> dict[str, list[_Token]]:
    """Return the tokens of each rule's right side, by its name."""
    tokens = list(_tokens(text))
    rules: dict[str, list[_Token]] = {}
    body: list[_Token] | None = None
    for token, following in zip(tokens, (*tokens[1:], None), strict=True):
        if following is not None and following.kind == "define":
            if token.kind != "name" or token.text in rules:
                raise _error(text, token.position, "expected the name of a new rule before ::=")
            body = rules[token.text] = []
        elif body is None:
            raise _error(text, token.position, "expected a rule, as in: name ::= ...")
        elif token.kind != "define":
            body.append(token)
    return rules


def _terminals(text: str, rules: dict[str, list[_Token]]) -> set[str]:
    """Return the names of the rules that reach no recursion."""
    graph: dict[str, set[str]] = {}
    for name, tokens in rules.items():
        graph[name] = {token.text for token in tokens if token.kind == "name"}
        for token in tokens:
            if token.kind == "name" and token.text not in rules:
                raise _error(text, token.position, f"rule {token.text!r} is not defined")
    sorter = TopologicalSorter(graph)
    with contextlib.suppress(CycleError):  # it still yields everything that leads to no cycle
        sorter.prepare()
    found: set[str] = set()
    while ready := sorter.get_ready():
        found.update(ready)
        sorter.done(*ready)
    return found


def _body(text: str, tokens: list[_Token], names: dict[str, str]) -> str:
    parts: list[str] = []
    previous = "|"
    for token in tokens:
        if previous in ("|", "(") and token.text in ("|", ")"):
            parts.append('""')  # an empty alternative
        parts.append(_part(text, token, names))
        previous = token.text
    if previous == "|":
        parts.append('""')
    return " ".join(parts)


def _part(text: str, token: _Token, names: dict[str, str]) -> str:
    match token.kind:
        case "name":
            return names[token.text]
        case "text":
            return lark_string("".join(_characters(text, token)))
        case "chars":
            return f"/{_character_class(text, token)}/"
        case "any":
            return "/(?s:.)/"
        case "count":
            return re.sub(r"\s", "", token.text)
        case _:
            return token.text


def _characters(text: str, token: _Token) -> Iterator[str]:
    """Yield the characters between a token's delimiters, with escapes resolved."""
    inner = token.text[1:-1]
    position = 0
    while position < len(inner):
        match = _CHARACTER.match(inner, position)
        assert match is not None  # a backslash is always followed by something
        yield _character(text, token.position + 1 + position, match)
        position = match.end()


def _character(text: str, position: int, match: "re.Match[str]") -> str:
    digits = match[1] or match[2] or match[3]
    if digits:
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise _error(text, position, f"{match[0]} is no character")
        return chr(code)
    if match[5]:
        return match[5]
    if match[4] not in _ESCAPES:
        raise _error(text, position, f"there is no escape {match[0]}")
    return _ESCAPES[match[4]]


def _character_class(text: str, token: _Token) -> str:
    """Return the class as a regular expression, with characters as numbers so that none has a special meaning."""
    negated = token.text.startswith("[^")
    inner = _Token(token.kind, "[" + token.text[2:], token.position + 1) if negated else token
    escaped = _escaped_dashes(inner.text)
    codes = [f"\\x{{{ord(character):x}}}" for character in _characters(text, inner)]
    if not codes:
        raise _error(text, token.position, "the character class is empty")
    dashes = [code == "\\x{2d}" for code in codes]
    parts = [
        "-" if dash and not fixed and 0 < i < len(codes) - 1 else code
        for i, (code, dash, fixed) in enumerate(zip(codes, dashes, escaped, strict=True))
    ]
    return f"[{'^' if negated else ''}{''.join(parts)}]"


def _escaped_dashes(class_text: str) -> list[bool]:
    """Return for each character of a class whether it was written as an escape."""
    return [match[0].startswith("\\") for match in _CHARACTER.finditer(class_text[1:-1])]
