"""Writes grammars of answers in Lark, as llguidance reads them."""

import json
import re
from collections.abc import Mapping
from typing import Any

from sluice.engine.guidance.gbnf import lark_string

_SPECIAL, _ESCAPED = re.compile(r"([.^$*+?()\[\]{}|\\/&~])"), r"\\\1"
"""Characters with a meaning in a regular expression between slashes."""
_ANYTHING: tuple[dict[str, Any], ...] = ({}, {"type": "object"})
"""Schemas that say no more than the type."""


def escape(text: str) -> str:
    """Return a regular expression of exactly this text, for use between slashes."""
    return _SPECIAL.sub(_ESCAPED, text)


class LarkWriter:
    """Writes one grammar, rule by rule. Expressions are Lark: join them by a space for a sequence, by ` | ` for a
    choice, put `( ... )?` around what may be left out."""

    def __init__(self, token_ids: Mapping[str, int], end_id: int | None = None) -> None:
        """Take the ids of the tokens that the tokenizer finds in a text before any other (added tokens), by content:
        the model writes them as such, not by their letters. `end_id` is a token that may end a text besides those that
        end every text of the model."""
        self._token_ids = token_ids
        names = sorted(token_ids, key=len, reverse=True)
        self._tokens = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None
        self._end = "" if end_id is None else f" <[{end_id}]>?"
        self._rules: list[str] = []
        self._names: dict[tuple[str, str], str] = {}

    def text(self, text: str) -> str:
        """Return the expression of exactly this text, in which added tokens count as such."""
        pieces = self._tokens.split(text) if self._tokens is not None else [text]
        return " ".join(self._piece(piece) for piece in pieces if piece)

    def json(self, schema: dict[str, Any], tool: str = "") -> str:
        """Return the expression of a JSON value that matches a schema. Errors in the schema name its `tool`."""
        # Those that fit everything are nobody's: many tools may have them.
        owner = "" if schema in _ANYTHING else f"// {json.dumps(tool, ensure_ascii=False)[1:-1]}\n"
        return self._add("r", "%json " + json.dumps(schema, ensure_ascii=False), before=owner)

    def pattern(self, regex: str) -> str:
        """Return the expression of a text that matches a regular expression."""
        return self._terminal(f"/{regex}/")

    def text_without(self, marker: str) -> str:
        """Return the expression of any text, also none, in which `marker` does not occur."""
        return self._terminal(rf"/(.|\n)*/ & ~/(.|\n)*{escape(marker)}(.|\n)*/")

    def text_not_beginning(self, regex: str) -> str:
        """Return the expression of any text, also none, of which no beginning matches a regular expression."""
        return self._terminal(rf"/(.|\n)*/ & ~/({regex})(.|\n)*/")

    def text_before(self, marker: str, regex: str = r"(.|\n)*") -> str:
        """Return the expression of a text up to the first `marker`, which matches a regular expression, and of the
        marker. Any text matches by default, also none."""
        if marker in self._token_ids:
            text = rf"/{regex}/ & ~/(.|\n)*{escape(marker)}(.|\n)*/"
            return f"{self._terminal(text)} {self.text(marker)}"
        # The lexer never goes back: a text that may have the marker's first letters would take them.
        return self._add("t", f"/{regex}/ {self.text(marker)}", "[lazy]")

    def limited_text_before(self, marker: str, max_tokens: int) -> str:
        """Return the expression of a text of at most so many tokens up to the first `marker`, and of the marker; "" for
        a marker that is no added token."""
        if marker not in self._token_ids:
            return ""
        if not max_tokens:  # older versions of llguidance would take one
            return self.text(marker)
        text = rf"/(.|\n)*/ & ~/(.|\n)*{escape(marker)}(.|\n)*/"
        limited = self._add(f"b{len(self._rules)}", self._terminal(text), f"[max_tokens={max_tokens}]")
        return f"{limited} {self.text(marker)}"

    def head_of(self, text: str, beginning: str) -> str:
        """Return the added token with which `text` begins where it is longer than `beginning`, else `beginning`."""
        match = self._tokens.match(text) if self._tokens is not None else None
        return match[0] if match is not None and len(match[0]) > len(beginning) else beginning

    def optional_token(self, token: str) -> str:
        """Return the expression of an added token that may be left out; "" where the tokenizer does not have it."""
        return f"{self.text(token)}?" if token in self._token_ids else ""

    def rule(self, expression: str) -> str:
        """Return the name of a rule for an expression, which stands for it. It is added once."""
        return self._add("r", expression)

    def grammar(self, start: str) -> str:
        """Return the grammar of texts that match the expression `start`."""
        return "\n".join([f"start: {start}{self._end}", *self._rules, ""])

    def _terminal(self, expression: str) -> str:
        return self._add("T", expression)

    def _add(self, kind: str, expression: str, attributes: str = "", before: str = "") -> str:
        key = (kind, before + expression)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"{kind}{len(self._rules)}"
            self._rules.append(f"{before}{name}{attributes}: {expression}")
        return name

    def _piece(self, piece: str) -> str:
        token_id = self._token_ids.get(piece)
        return lark_string(piece) if token_id is None else f"<[{token_id}]>"
