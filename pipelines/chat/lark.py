"""Writes grammars of answers in Lark, as llguidance reads them."""

import json
import re
from collections.abc import Mapping
from typing import Any


class LarkWriter:
    """Writes one grammar, rule by rule. Expressions are Lark: join them by a space for a sequence, by ` | ` for a
    choice, put `( ... )?` around what may be left out."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        """Take the ids of the tokens that the tokenizer finds in a text before any other (added tokens), by content:
        the model writes them as such, not by their letters."""
        self._token_ids = token_ids
        names = sorted(token_ids, key=len, reverse=True)
        self._tokens = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None
        self._rules: list[str] = []

    def text(self, text: str) -> str:
        """Return the expression of exactly this text, in which added tokens count as such."""
        pieces = self._tokens.split(text) if self._tokens is not None else [text]
        return " ".join(self._piece(piece) for piece in pieces if piece)

    def json(self, schema: dict[str, Any]) -> str:
        """Return the expression of a JSON value that matches a schema."""
        return self.rule("%json " + json.dumps(schema, ensure_ascii=False))

    def pattern(self, regex: str) -> str:
        """Return the expression of a text that matches a regular expression."""
        return self._terminal(f"/{regex}/")

    def text_without(self, marker: str) -> str:
        """Return the expression of any text, also none, in which `marker` does not occur."""
        escaped = re.sub(r"([^\w\s])", r"\\\1", marker)
        return self._terminal(rf"/(.|\n)*/ & ~/(.|\n)*{escaped}(.|\n)*/")

    def rule(self, expression: str) -> str:
        """Add a rule for an expression and return its name, which stands for it."""
        return self._add(f"r{len(self._rules)}", expression)

    def grammar(self, start: str) -> str:
        """Return the grammar of texts that match the expression `start`."""
        return "\n".join([f"start: {start}", *self._rules, ""])

    def _terminal(self, expression: str) -> str:
        return self._add(f"T{len(self._rules)}", expression)

    def _add(self, name: str, expression: str) -> str:
        self._rules.append(f"{name}: {expression}")
        return name

    def _piece(self, piece: str) -> str:
        token_id = self._token_ids.get(piece)
        return json.dumps(piece, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"
