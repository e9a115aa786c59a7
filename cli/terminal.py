"""Formats sizes, sources and text for a terminal, and asks there. Documents must not send it control characters."""

import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from sluice.cli.errors import CommandError
from sluice.gateway.options.option import USAGE_ERROR

_CONTROL = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}
"""Translates control characters away: a document must not move the cursor of its reader."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_size(num_bytes: float) -> str:
    """Format a size with a binary unit."""
    power = min(int(math.log2(max(num_bytes, 1)) // 10), len(_UNITS) - 1)
    return f"{num_bytes / (1 << 10 * power):.{min(power, 1)}f} {_UNITS[power]}"


def confirm(question: str, otherwise: str, refused: str) -> None:
    """Ask on the terminal. Raises CommandError with `refused` for any answer but yes, and a usage error without a
    terminal: `otherwise` says what to do there."""
    if not sys.stdin.isatty():
        raise CommandError(f"there is no terminal to ask; {otherwise}", USAGE_ERROR)
    sys.stdout.write(f"{question} [y/N] ")
    sys.stdout.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError(refused)


def strip_control(text: str) -> str:
    """Remove control characters except tabs and new lines."""
    return text.translate(_CONTROL)


def shorten_line(text: str, num_chars: int) -> str:
    """Shorten a text to one line of at most `num_chars` characters."""
    flat = " ".join(strip_control(text).split())
    return flat if len(flat) <= num_chars else f"{flat[: num_chars - 1]}…"


_PLACE_CHARS = 100
_PASSAGE_CHARS = 240


def format_sources(sources: Iterable[Any]) -> Iterator[str]:
    """Format sources as `[1] title > heading (document:start-end)`, with the numbers by which the answer cites them."""
    for source in sources:
        yield f"[{source['id']}] {format_place(source)}"


def format_passages(hits: Iterable[Any]) -> Iterator[str]:
    """Format each hit by rank, with place, score and the beginning of its text."""
    for rank, hit in enumerate(hits, start=1):
        yield f"{rank}. {format_place(hit)}  score {hit['score']:.4g}"
        yield f"   {shorten_line(hit['text'], _PASSAGE_CHARS)}"


def format_place(source: Any) -> str:
    """Format the place of a source: title, headings, and its range in characters of the document's text."""
    title, heading = source.get("title", ""), source.get("heading", "")
    is_repeated = heading == title or heading.startswith(f"{title} > ")  # the title of many documents is a heading
    path = " > ".join(part for part in ("" if is_repeated else title, heading) if part)
    at = f"({shorten_line(source['document'], _PLACE_CHARS)}:{source['start']}-{source['end']})"
    return f"{shorten_line(path, _PLACE_CHARS)} {at}" if path else at
