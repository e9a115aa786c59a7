"""Text from documents and models, as a terminal may show it."""

_UNSEEN = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}
"""Control characters: a document must not move the cursor of who reads an answer about it."""


def harmless(text: str) -> str:
    """Without control characters but tabs and new lines."""
    return text.translate(_UNSEEN)


def one_line(text: str, num_chars: int) -> str:
    """The beginning, without line breaks."""
    flat = " ".join(harmless(text).split())
    return flat if len(flat) <= num_chars else f"{flat[: num_chars - 1]}…"
