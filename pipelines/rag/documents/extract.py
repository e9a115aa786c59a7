"""What a format's reader makes of a document's bytes.

Light to import: readers also run in processes that live for one document.
"""

import msgspec

MAX_HEADING_CHARS = 200


class Extract(msgspec.Struct, frozen=True):
    """`ParsedDocument` as it crosses processes; `headings` are (start, level, text)."""

    text: str
    title: str = ""
    headings: list[tuple[int, int, str]] = []
    breaks: list[int] = []


def as_label(text: str) -> str:
    """As one line that is fit for a title or a path of headings."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_HEADING_CHARS else line[: MAX_HEADING_CHARS - 1].rstrip() + "…"
