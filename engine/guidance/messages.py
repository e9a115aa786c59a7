"""llguidance's errors in words for the client."""

import re

_REWORDED = (
    (r"Unimplemented keys: \[(.*)\]", r"\1 is not supported here; remove it"),
    (r"Invalid type: (.*)", r'there is no type "\1"'),
    (r"Unknown format: (.*)", r'format "\1" is not supported; remove it or use pattern'),
    (r"Unsatisfiable schema: (.*)", r"nothing can match: \1"),
    (r"Pointer '(.*)' does not exist", r'"$ref": "#\1" leads nowhere'),
    (r"Resource '(.*)' is not present.*", r'"$ref": "\1" is outside the schema; copy it into $defs'),
    (r"oneOf constraints are not supported.*", "oneOf is supported only where no two options can match; use anyOf"),
    (r"invalid regex .*lookarounds not supported.*", "the regular expression looks around (\\\\b, ^ or $ inside)"),
    (r"NoExtension.*", "nothing can match it"),
)
_TOO_COMPLEX = re.compile(r"fuel|schema too large|too (big|many|complex|deeply)|limit|row has", re.IGNORECASE)
_REGEX_ERROR = re.compile(r"regex parse error:\n(?P<shown>.*\n)(?P<carets>\s*\^+)\nerror: (?P<reason>.*)")
_POSITION = re.compile(r"\s*(?:at )?(?P<line>\d+)\((?P<column>\d+)\): ")
_INDENT = 4
_MAX_CHARS = 240


def readable(raw: str) -> str:
    """One line that says what is wrong; llguidance's own words where there are no better."""
    raw = raw.removesuffix("\n<non-verbose/>")
    words = _readable(_POSITION.sub("", raw, count=1))
    return words if len(words) <= _MAX_CHARS else f"{words[:_MAX_CHARS]} ..."


def _readable(text: str) -> str:
    if fault := regex_fault(text):
        offset, reason = fault
        return f"the regular expression is not valid at character {offset + 1}: {reason}"
    for pattern, words in _REWORDED:
        if re.match(pattern, text):
            return re.sub(f"(?s){pattern}", words, text.split("\n")[0])
    first_line = text.split("\n")[0]
    return f"it is too complex: {first_line}" if _TOO_COMPLEX.search(first_line) else first_line


def regex_fault(raw: str) -> tuple[int, str] | None:
    """Where in a regular expression of one line an error lies (from 0), and what it is."""
    match = _REGEX_ERROR.search(raw)
    if match is None:
        return None
    return match["carets"].index("^") - _INDENT, match["reason"]


def position(raw: str) -> tuple[int, int] | None:
    """Line and column (from 1) that an error about a Lark grammar begins with."""
    match = _POSITION.match(raw)
    return (int(match["line"]), int(match["column"])) if match else None
