"""Passages as single statements, and the one that a question most likely asks for: what a very small model can read.

Pure functions, and no second search: they choose among the passages that a search has found.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipelines.rag.retrieval.question_words import subject_words

_HEADING = re.compile(r"\s*#{1,6}\s+")
_ITEM = re.compile(r"\s*(?:[-*+•]|\d{1,3}[.)])\s+")
_RULE = re.compile(r"\s*(?:`{3,}|~{3,}).*|(?=.*---)[|:\s-]+")
"""Fences of code, and what parts a table's head from its rows."""
_OPENS, _CLOSES = r"(?:(?<=\s)|(?<=[(\"'])|^)", r"(?=[\s.,;:!?)\"']|$)"
_MARKS = re.compile(rf"{_OPENS}(\*{{1,3}}|`{{1,3}})(?=\S)((?:(?!\1).)*?\S)\1{_CLOSES}")
"""Emphasis and code. Marks within a word stay: without them, what stands beside them could become a control token."""
_QUOTES = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"'})
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|approx|resp|fig|no)\. ", re.IGNORECASE)
_SENTENCE_GAP = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]])) +(?=[A-Z\"(`])")
_HELD = "\x01"
"""Stands for the space after an abbreviation."""
_NAME = re.compile(r"(?:\w+ )?[^\s(]{2,60}(?:\(.*\))?(?<![.!?:;,])")
"""A paragraph that is only a name or a signature belongs to the one below it."""
_WORD = re.compile(r"\w+")
_ENDINGS = ("ing", "ies", "ied", "ed", "es", "s", "e")
_SHORTEST_STEM = 3
_NAME_WEIGHT = 2.0
_WORD_COST = 0.01
"""Measured on held-out questions: without these two, the right statement is chosen a fifth less often."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A sentence on one line. `name` is what it says something about, as far as the line above it tells, else ""."""

    name: str
    text: str


def statements_of(text: str) -> list[Statement]:
    """All that the text says, in order, without what marks it up in Markdown. A heading names what comes next."""
    return list(_statements(text))


def _statements(text: str) -> Iterator[Statement]:
    heading = name = ""
    for paragraph in _paragraphs(text):
        is_heading = _HEADING.match(paragraph) is not None
        if name and (is_heading or _is_name(paragraph, name)):
            yield Statement("", name)
            name = ""
        if is_heading:
            heading = _HEADING.sub("", paragraph)
        elif not name and _is_name(paragraph):
            name = paragraph
        else:
            for sentence in _sentences(paragraph):
                yield Statement(name or heading, sentence)
                heading = name = ""
    if name:
        yield Statement(heading, name)


def _is_name(paragraph: str, previous: str = "") -> bool:
    """What stands below a single word, and has more of them, is said of it, as short as it may be."""
    is_said = bool(previous) and " " not in previous and " " in paragraph
    return not is_said and _NAME.fullmatch(paragraph) is not None


def _paragraphs(text: str) -> Iterator[str]:
    """Each on one line. Headings, items of a list and rows of a table are paragraphs of their own."""
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        is_whole = line.lstrip().startswith("|") or _HEADING.match(line) is not None
        is_rule = _RULE.fullmatch(line) is not None
        begins = is_whole or is_rule or not line.strip() or _ITEM.match(line) is not None
        if begins and lines:
            yield _plain(" ".join(lines))
            lines = []
        if is_rule or not line.strip():
            continue
        if is_whole:
            yield _plain(_row(line) if line.lstrip().startswith("|") else line)
        else:
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


def most_alike(question: str, statements: Sequence[Statement]) -> int:
    """The index of the statement that shares the most, and the rarest, words with the question; of equals the first.

    `statements` come best passage first, and are at least one.
    """
    asked = _asked(question)
    names = [_stems(statement.name) for statement in statements]
    texts = [_stems(statement.text) for statement in statements]
    both = [name | text for name, text in zip(names, texts, strict=True)]
    weights = {stem: _rarity(stem, both) for stem in asked}

    def score(place: int) -> float:
        shared = sum(weights[stem] * (_NAME_WEIGHT if stem in names[place] else 1.0) for stem in asked & both[place])
        return shared / (1 + _WORD_COST * len(texts[place]))

    return max(range(len(statements)), key=score)


def share_named(question: str, text: str) -> float:
    """How much of what the question is about the text has: 1 is every word."""
    asked = _asked(question)
    return len(asked & _stems(text)) / len(asked) if asked else 0.0


def _asked(question: str) -> frozenset[str]:
    return _stems(" ".join(subject_words(question)) or question)


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
