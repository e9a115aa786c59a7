"""Rewrites a schema's regular expressions, which are JavaScript's, in the syntax of the compiler.

The compiler has no look-around. Such an assertion is left out: the pattern then matches more, never less. JavaScript's
escapes, and characters that have a meaning in the compiler's syntax alone, are spelled anew.
"""

import re
from typing import NamedTuple

_TOKEN = re.compile(
    r"""
    (?P<look>\(\?<?[=!])
  | (?P<group>\((?:\?(?:P?<[A-Za-z_]\w*>|[a-zA-Z-]*:|>))?)
  | (?P<flags>\(\?[a-zA-Z-]+\))
  | (?P<close>\))
  | (?P<either>\|)
  | (?P<start>\^|\\A)
  | (?P<end>\$|\\[zZ])
  | (?P<boundary>\\[bB])
  | (?P<back>\\(?:[1-9][0-9]*|k<\w+>))
  | (?P<repeat>[*+?]|\{[0-9]+(?:,[0-9]*)?\})
  | (?P<klass>\[)
  | (?P<escape>\\(?:u\{[0-9a-fA-F]+\}|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}
                   |x[0-9a-fA-F]{2}|x\{[0-9a-fA-F]+\}|c[A-Za-z]|[pP](?:\{[^}]*\}|[A-Z])|[^uxcpPkbB1-9]))
  | (?P<other>[^\\])
    """,
    re.VERBOSE | re.DOTALL,
)
_CLASSES = frozenset("dDwWsSpP")
"""Letters behind a backslash that stand for several characters, in both syntaxes."""
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~/")
_ANYTHING, _ANY_CHARACTER, _NOTHING = r"[\s\S]*", r"[\s\S]", r"[^\s\S]"


class Pattern(NamedTuple):
    """A pattern for the compiler."""

    text: str
    others: tuple[str, ...] = ()
    """Patterns that must match too: look-aheads at the beginning of the text."""
    dropped: str = ""
    """The kind of assertion that was left out; "" for none."""


class _Group:
    """A group of a pattern that is being read, or the pattern itself."""

    def __init__(self, first: int, kind: str = "") -> None:
        self.first = first
        """The index of its first piece."""
        self.kind = kind
        """How it looks around: "?=" and the like; "" for a group that matches."""
        self.has_before = False
        """Whether something has been read in the option that is being read."""
        self.starts: list[int] = []
        self.ends: list[int] = []
        """Pieces that are anchors, of all its options; an end only until something follows it."""
        self.option_ends: list[int] = []


def translate_pattern(pattern: str) -> Pattern:
    """Return a pattern for the compiler. What is no pattern is returned as it is, for the compiler to say so."""
    try:
        return _Reader(pattern).read()
    except (ValueError, IndexError, OverflowError):
        return Pattern(pattern)


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._pieces: list[str] = []
        self._groups = [_Group(0)]
        self._others: list[str] = []
        self._has_options = False
        self._dropped = ""
        self._last = ""
        """The kind of the last token; "gone" for an assertion that has been left out."""

    def read(self) -> Pattern:
        place = 0
        while place < len(self._pattern):
            match = _TOKEN.match(self._pattern, place)
            if match is None:
                raise ValueError("not a pattern")
            place = match.end()
            kind, text = match.lastgroup or "", match[0]
            if kind == "klass":
                text, place = _read_class(self._pattern, place)
            self._take(kind, text)
        if len(self._groups) > 1:
            raise ValueError("a group has no end")
        return self._finish()

    def _finish(self) -> Pattern:
        if self._others and self._has_options:
            self._others, self._dropped = [], "look-around"
        return Pattern("".join(self._pieces), tuple(self._others), self._dropped)

    def _take(self, kind: str, text: str) -> None:
        group, last, self._last = self._groups[-1], self._last, kind
        match kind:
            case "look" | "group":
                self._open(kind, text)
            case "close":
                self._close()
            case "either":
                group.ends += group.option_ends
                group.option_ends, group.has_before = [], False
                self._has_options = self._has_options or len(self._groups) == 1
                self._pieces.append("|")
            case "start" | "end":
                self._anchor(kind)
            case "boundary":
                self._drop("word boundary")
                self._last = "gone"
            case "repeat":
                self._repeat(text, last)
            case _:
                self._consume()
                self._pieces.append(self._spell(kind, text))

    def _spell(self, kind: str, text: str) -> str:
        if kind == "back":
            self._drop("back reference")
            return _ANYTHING
        if kind == "escape":
            return _spell_escape(text)
        return f"\\{text}" if kind == "other" and text in "{}]/&~#-" else text

    def _open(self, kind: str, text: str) -> None:
        look = text[1:] if kind == "look" else ""
        if not look:
            self._pieces.append("(?:" if text == "(?>" else text)
        self._groups.append(_Group(len(self._pieces), look))

    def _close(self) -> None:
        if len(self._groups) < 2:
            raise ValueError("a group has no beginning")
        group = self._groups.pop()
        if group.kind:
            content = "".join(self._pieces[group.first :])
            del self._pieces[group.first :]
            self._look(group.kind, content)
            self._last = "gone"
            return
        self._consume()
        self._pieces.append(")")
        parent = self._groups[-1]
        parent.option_ends = [*group.ends, *group.option_ends]
        parent.starts += group.starts

    def _look(self, kind: str, content: str) -> None:
        """Keep a look-ahead behind the beginning of the text as a pattern of its own; leave out any other."""
        if kind == "?=" and len(self._groups) == 1 and self._pieces == ["^"]:
            self._others.append(f"^(?:{content})")
        else:
            self._drop("look-around")

    def _anchor(self, kind: str) -> None:
        """Take an anchor where nothing can be before a beginning; an end stays until something follows it."""
        group, index = self._groups[-1], len(self._pieces)
        is_start = kind == "start"
        inside = next((i for i in reversed(range(len(self._groups))) if self._groups[i].kind), 0)
        if is_start and any(each.has_before for each in self._groups[inside:]):
            self._drop("anchor inside")
            return
        self._pieces.append("^" if is_start else "$")
        (group.starts if is_start else group.option_ends).append(index)

    def _consume(self) -> None:
        group = self._groups[-1]
        self._remove(group.option_ends)
        group.option_ends, group.has_before = [], True

    def _repeat(self, text: str, last: str) -> None:
        group = self._groups[-1]
        if last in ("start", "end", "either", "look", "group", ""):
            raise ValueError("nothing to repeat")
        if last == "gone":
            return
        if last == "close":  # an anchor in what is repeated is inside the text
            self._remove([*group.option_ends, *(i for i in group.starts if i > self._last_opening())])
            group.option_ends = []
        self._pieces.append(text)

    def _last_opening(self) -> int:
        """Return the index of the piece that opens the group that was closed last."""
        depth = 0
        for index in reversed(range(len(self._pieces))):
            piece = self._pieces[index]
            depth += (piece == ")") - (piece.startswith("(") and not piece.endswith(")"))
            if depth == 0:
                return index
        return 0

    def _remove(self, indices: list[int]) -> None:
        for index in indices:
            if index < len(self._pieces):
                self._pieces[index] = ""
                self._drop("anchor inside")

    def _drop(self, what: str) -> None:
        self._dropped = self._dropped or what


def _spell_escape(text: str) -> str:
    letter = text[1]
    if letter in _CLASSES:
        return text
    if letter == "u" and text.count("u") == 2:
        return _spell_character(bytes.fromhex(text[2:6] + text[8:12]).decode("utf-16-be"))
    if letter in "ux" and len(text) > 2:
        number = int(text[2:].strip("{}"), 16)
        return f"\\x{{{number:X}}}" if not 0xD800 <= number < 0xE000 else _NOTHING
    if letter == "c" and len(text) > 2:
        return f"\\x{{{ord(text[2]) % 32:X}}}"
    if letter.isascii() and letter.isalnum() and letter not in _CONTROLS:
        raise ValueError(f"there is no escape \\{letter}")
    return _spell_character(_CONTROLS.get(letter, letter))


def _spell_character(character: str) -> str:
    if character in _SPECIAL:
        return f"\\{character}"
    return character if character.isprintable() else f"\\x{{{ord(character):X}}}"


def _read_class(pattern: str, place: int) -> tuple[str, int]:
    """Return a class for the compiler, and the place behind it. `place` is behind its opening bracket."""
    negated = pattern.startswith("^", place)
    place += negated
    parts: list[str] = []
    while pattern[place] != "]":
        if pattern[place] == "-":
            part, length = "-", 1
        elif pattern[place] != "\\":
            part, length = _spell_character(pattern[place]), 1
        elif pattern[place + 1] == "b":
            part, length = r"\x{8}", 2
        else:
            match = _TOKEN.match(pattern, place)
            if match is None or match.lastgroup != "escape":
                raise ValueError("not an escape in a class")
            part, length = _spell_escape(match[0]), len(match[0])
        parts.append(part)
        place += length
    if not parts:
        return (_ANY_CHARACTER if negated else _NOTHING), place + 1
    return f"[{'^' if negated else ''}{''.join(_with_ranges(parts))}]", place + 1


def _with_ranges(parts: list[str]) -> list[str]:
    """Return the parts of a class in which a hyphen that is no range's is escaped."""
    spelled, index = [], 0
    while index < len(parts):
        is_range = index + 2 < len(parts) and parts[index + 1] == "-"
        first, last = parts[index], parts[index + 2] if is_range else ""
        if is_range and not _is_several(first) and not _is_several(last):
            spelled.append(f"{_hyphen(first)}-{_hyphen(last)}")
            index += 3
        else:
            spelled.append(_hyphen(first))
            index += 1
    return spelled


def _hyphen(part: str) -> str:
    return r"\-" if part == "-" else part


def _is_several(part: str) -> bool:
    return (len(part) > 1 and part[1] in _CLASSES) or part == _NOTHING
