"""Which parts of a document belong together: what stands under one heading, and small neighbours."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipelines.rag.chunking.tokens import TokenMeasure
from pipelines.rag.types import ParsedDocument

_HEADING_LINE = re.compile(r"\s*+[^\n]*+(?:\n[=-]++[^\S\n]*+(?=\n|\Z))?\s*+")
"""Markdown may underline it."""
_TINY_PART = 4
"""A section is tiny below this part of a chunk."""


@dataclass(frozen=True, slots=True)
class Section:
    """The text from a heading to the next one. `path`: the headings above it, outermost first, and its own.

    `body` is where the text under the heading starts; `level` 0 is the text before the first heading.
    """

    start: int
    body: int
    end: int
    level: int
    path: tuple[str, ...]

    @property
    def is_bare(self) -> bool:
        """Whether it is nothing but its heading."""
        return self.body == self.end


@dataclass(frozen=True, slots=True)
class Group:
    """Sections that follow each other, and that chunks may span."""

    sections: Sequence[Section]

    @property
    def start(self) -> int:
        return self.sections[0].start

    @property
    def end(self) -> int:
        return self.sections[-1].end

    @property
    def body(self) -> int:
        """Where the first text starts that is no heading."""
        return next((section.body for section in self.sections if not section.is_bare), self.end)

    def path(self, start: int, end: int) -> tuple[str, ...]:
        """The headings above all that lies from `start` to `end`; a bare section has nothing to be above of."""
        paths = [s.path for s in self.sections if s.start < end and s.end > start and not s.is_bare]
        if not paths:
            return self.sections[0].path
        shared = 0
        for level in zip(*paths, strict=False):
            if len(set(level)) > 1:
                break
            shared += 1
        return paths[0][:shared]


def groups_of(document: ParsedDocument, tokens: TokenMeasure, max_tokens: int) -> list[Group]:
    """The document's sections as chunks may take them.

    A chunk is about one thing where it keeps to one section. But a heading without text of its own belongs to
    its first subsection, and tiny sections, whose vectors would say little, join their siblings while all of
    them fit into one chunk. Nothing joins what is under another parent.
    """
    groups: list[list[Section]] = []
    for sections in _with_bare_headings(_sections(document)):
        if groups and _fit(groups[-1], sections, tokens, max_tokens):
            groups[-1] += sections
        else:
            groups.append(sections)
    return [Group(sections) for sections in groups]


def _fit(before: list[Section], sections: list[Section], tokens: TokenMeasure, max_tokens: int) -> bool:
    if sections[0].level < before[0].level:
        return False
    is_tiny = any(tokens.count(each[0].start, each[-1].end) * _TINY_PART < max_tokens for each in (before, sections))
    return is_tiny and tokens.count(before[0].start, sections[-1].end) <= max_tokens


def _with_bare_headings(sections: Iterator[Section]) -> Iterator[list[Section]]:
    bare: list[Section] = []
    for section in sections:
        if bare and section.level <= bare[-1].level:
            yield bare
            bare = []
        bare = [*bare, section]
        if not section.is_bare:
            yield bare
            bare = []
    if bare:
        yield bare


def _sections(document: ParsedDocument) -> Iterator[Section]:
    text = document.text
    above: list[tuple[int, str]] = []
    starts = [heading.start for heading in document.headings]
    if not starts or text[: starts[0]].strip():
        yield Section(0, 0, starts[0] if starts else len(text), 0, ())
    for heading, (start, end) in zip(document.headings, pairwise([*starts, len(text)]), strict=True):
        while above and above[-1][0] >= heading.level:
            above.pop()
        above.append((heading.level, heading.text))
        yield Section(start, _body(text, start, end), end, heading.level, tuple(text for _, text in above))


def _body(text: str, start: int, end: int) -> int:
    line = _HEADING_LINE.match(text, start, end)
    return line.end() if line else start
