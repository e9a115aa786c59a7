"""Markdown of the generated parts of the documentation."""

import re
from collections.abc import Iterable

_CODE_OR_SPECIAL = re.compile(r"`[^`]*`|[*<]")


def table(columns: Iterable[str], rows: Iterable[list[str]]) -> str:
    """Return a table. A cell may hold any inline Markdown; bars are escaped here."""
    titles = list(columns)
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def code(text: str) -> str:
    """Return text as code; nothing for an empty text."""
    return f"`{text}`" if text else ""


def codes(texts: Iterable[str]) -> str:
    """Return texts as code, with commas between; empty ones are left out."""
    return ", ".join(code(text) for text in texts if text)


def plain(text: str) -> str:
    """Return plain text such that Markdown shows it as it is. Text in backticks is code."""
    return _CODE_OR_SPECIAL.sub(lambda found: _ESCAPED.get(found[0], found[0]), text)


_ESCAPED = {"*": r"\*", "<": "&lt;"}
