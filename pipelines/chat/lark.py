"""Writes grammars of answers in Lark, as llguidance reads them."""

import json
import re
from collections.abc import Mapping
from typing import Any

from sluice.engine.guidance.gbnf import lark_string

_SPECIAL, _ESCAPED = re.compile(r"([.^$*+?()\[\]{}|\\/&~])"), r"\\\1"
"""Characters with a meaning in a regular expression between slashes."""


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

    def text(self, text: str) -> str:
        """Return the expression of exactly this text, in which added tokens count as such."""
        pieces = self._tokens.split(text) if self._tokens is not None else [text]
        return " ".join(self._piece(piece) for piece in pieces if piece)

    def json(self, schema: dict[str, Any], tool: str = "") -> str:
        """Return the expression of a JSON value that matches a schema. Errors in the schema name its `tool`."""
        name = self.rule("%json " + json.dumps(schema, ensure_ascii=False))
        self._rules[-1] = f"// {json.dumps(tool, ensure_ascii=False)[1:-1]}\n{self._rules[-1]}"
        return name

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
        return self._add(f"t{len(self._rules)}", f"/{regex}/ {self.text(marker)}", "[lazy]")

    def head_of(self, text: str, beginning: str) -> str:
        """Return the added token with which `text` begins where it is longer than `beginning`, else `beginning`."""
        match = self._tokens.match(text) if self._tokens is not None else None
        return match[0] if match is not None and len(match[0]) > len(beginning) else beginning

    def optional_token(self, token: str) -> str:
        """Return the expression of an added token that may be left out; "" where the tokenizer does not have it."""
        return f"{self.text(token)}?" if token in self._token_ids else ""

    def rule(self, expression: str) -> str:
        """Add a rule for an expression and return its name, which stands for it."""
        return self._add(f"r{len(self._rules)}", expression)

    def grammar(self, start: str) -> str:
        """Return the grammar of texts that match the expression `start`."""
        return "\n".join([f"start: {start}{self._end}", *self._rules, ""])

    def _terminal(self, expression: str) -> str:
        return self._add(f"T{len(self._rules)}", expression)

    def _add(self, name: str, expression: str, attributes: str = "") -> str:
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def _piece(self, piece: str) -> str:
        token_id = self._token_ids.get(piece)
        return lark_string(piece) if token_id is None else f"<[{token_id}]>"
