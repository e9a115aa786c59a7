"""Passages as single statements, and the one that a question most likely asks for: all that a very small model can read.

Pure functions, and no second search: they choose among the passages that a search has found.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipelines.rag.retrieval.matching import subjects

_HEADING = re.compile(r"\s*#{1,6}\s")
_ITEM = re.compile(r"\s*(?:[-*+•]|\d{1,3}[.)])\s+")
_RULE = re.compile(r"\s*(?:`{3,}.*|~{3,}.*|[|:\s-]*-{3,}[|:\s-]*)")
"""Fences of code, and what parts a table's head from its rows."""
_OPENS, _CLOSES = r"(?:(?<=\s)|(?<=[(\"'])|^)", r"(?=[\s.,;:!?)\"']|$)"
_MARKS = re.compile(rf"{_OPENS}(\*{{1,3}}|_{{1,3}}|`{{1,3}})(?=\S)((?:(?!\1).)*?\S)\1{_CLOSES}")
"""Emphasis and code. Marks within a word stay: without them, what stands beside them could become a control token."""
_QUOTES = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"'})
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|approx|resp|fig|no)\. ", re.IGNORECASE)
_SENTENCE_GAP = re.compile(r"(?<=[.!?])[\"')\]]* +(?=[A-Z\"(`])")
_HELD = "\x01"
"""Stands for the space after an abbreviation."""
_NAME = re.compile(r"(?:\w+ )?[^\s(]{2,60}(?:\(.*\))?(?<![.!?:;,])")
"""A paragraph that is only a name or a signature belongs to the one below it."""
_WORD = re.compile(r"\w+")
_ENDINGS = ("ing", "ies", "ied", "ed", "es", "s", "e")
_SHORTEST_STEM = 3
_NAME_WEIGHT = 2.0
_WORD_COST = 0.01
"""Measured on held-out questions about Python: without these two, the right statement comes first a fifth less often."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A sentence on one line. `name` is what it says something about, as far as the line above it tells."""

    name: str
    text: str


def statements_of(text: str) -> list[Statement]:
    """All that the text says, in order, without its headings and what marks it up in Markdown."""
    return list(_statements(text))


def _statements(text: str) -> Iterator[Statement]:
    name = ""
    for paragraph in _paragraphs(text):
        if _NAME.fullmatch(paragraph) and (not name or " " in name or " " not in paragraph):
            if name:
                yield Statement("", name)
            name = paragraph
            continue
        for sentence in _sentences(paragraph):
            yield Statement(name, sentence)
            name = ""
    if name:
        yield Statement("", name)


def _paragraphs(text: str) -> Iterator[str]:
    """Each on one line. Items of a list and rows of a table are paragraphs of their own."""
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        is_row = line.lstrip().startswith("|")
        begins = is_row or not line.strip() or _ITEM.match(line) or _HEADING.match(line) or _RULE.fullmatch(line)
        if begins and lines:
            yield _plain(" ".join(lines))
            lines = []
        if is_row and not _RULE.fullmatch(line):
            yield _plain(_row(line))
        elif line.strip() and not is_row and not _HEADING.match(line) and not _RULE.fullmatch(line):
            lines.append(_ITEM.sub("", line, count=1) if begins else line)


def _row(line: str) -> str:
    """The first cell says what the others are about."""
    first, *others = (cell.strip() for cell in line.strip().strip("|").split("|"))
    return f"{first}: {', '.join(others)}" if first and others else " ".join([first, *others])


def _plain(text: str) -> str:
    return _MARKS.sub(r"\2", " ".join(text.split())).translate(_QUOTES)


def _sentences(paragraph: str) -> list[str]:
    held = _ABBREVIATION.sub(rf"\1.{_HELD}", paragraph)
    return [part.replace(_HELD, " ") for part in _SENTENCE_GAP.split(held) if part.strip()]


def most_alike(question: str, statements: Sequence[Statement]) -> Statement:
    """The statement that shares the most, and the rarest, words with the question; of equals the first.

    `statements` come best passage first, and are at least one.
    """
    asked = _stems(" ".join(subjects(question)) or question)
    names = [_stems(statement.name) for statement in statements]
    texts = [_stems(statement.text) for statement in statements]
    weights = {stem: _rarity(stem, [name | text for name, text in zip(names, texts, strict=True)]) for stem in asked}

    def score(place: int) -> float:
        shared = sum(
            weights[stem] * (_NAME_WEIGHT if stem in names[place] else 1.0)
            for stem in asked & (names[place] | texts[place])
        )
        return shared / (1 + _WORD_COST * len(texts[place]))

    return statements[max(range(len(statements)), key=score)]


def _stems(text: str) -> frozenset[str]:
    return frozenset(map(_stem, _WORD.findall(text.casefold())))


def _stem(word: str) -> str:
    """Roughly: closes, closed and closing are one word."""
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= _SHORTEST_STEM:
            return word.removesuffix(ending)
    return word


def _rarity(stem: str, statements: Sequence[frozenset[str]]) -> float:
    return math.log(1 + len(statements) / max(1, sum(stem in words for words in statements)))
