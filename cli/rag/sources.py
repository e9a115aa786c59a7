"""Sources of an answer as lines of text."""

from collections.abc import Iterable, Iterator
from typing import Any

from cli.rag.terminal import one_line

_PLACE_CHARS = 100
_PASSAGE_CHARS = 240


def source_lines(sources: Iterable[Any]) -> Iterator[str]:
    """`[1] title > heading (document:start-end)`, under the numbers that the answer calls them by."""
    for source in sources:
        yield f"[{source['id']}] {place(source)}"


def passage_lines(hits: Iterable[Any]) -> Iterator[str]:
    """The same with score and text, by rank."""
    for rank, hit in enumerate(hits, start=1):
        yield f"{rank}. {place(hit)}  score {hit['score']:.4g}"
        yield f"   {one_line(hit['text'], _PASSAGE_CHARS)}"


def place(source: Any) -> str:
    """Where a source stands; the range counts characters of the document's text."""
    title, heading = source.get("title", ""), source.get("heading", "")
    is_told = heading == title or heading.startswith(f"{title} > ")  # the title is a heading of many documents
    path = " > ".join(part for part in ("" if is_told else title, heading) if part)
    at = f"({one_line(source['document'], _PLACE_CHARS)}:{source['start']}-{source['end']})"
    return f"{one_line(path, _PLACE_CHARS)} {at}" if path else at
