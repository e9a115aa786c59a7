"""Cuts a document into chunks where its structure allows, to a number of tokens."""

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import chain, groupby, pairwise

from sluice.pipelines.rag.types import DocumentChunk, ParsedDocument

MAX_TOKEN_CHARS = 16
"""Most characters that one token counts for.

A tokenizer may make a single token of a word of a hundred letters or more, and none of white space: without this bound
a chunk could be of any length.
"""
_EVEN_SHARE = 0.6
"""Share of the remaining text that the first of its last two chunks takes: else the second might be a short remnant."""
_TINY_FRACTION = 4
"""A section is tiny if it is shorter than this fraction of a chunk."""
_VISIBLE = re.compile(r"\S")
_SENTENCE_END = re.compile(r"[.!?…][\"'’”)\]]*+\s++(?![a-z])|[。！？।][」』”’）]*+\s*+")
_LINE_END = re.compile(r"\n")
_HEADING_LINE = re.compile(r"\s*+[^\n]*+(?:\n[=-]++[^\S\n]*+(?=\n|\Z))?\s*+")
"""Matches a heading with the line that may underline it in Markdown."""


@dataclass(frozen=True, slots=True)
class ChunkOptions:
    """Sizes of chunks in the encoder's tokens. No chunk is longer than `max_tokens`.

    Neighbouring chunks of one section share up to `overlap_tokens`, in whole sentences, at most half of a chunk.
    """

    max_tokens: int = 160
    overlap_tokens: int = 24

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or not 0 <= self.overlap_tokens <= self.max_tokens // 2:
            raise ValueError(
                f"a chunk has at least 1 token and shares at most half of them, got max_tokens={self.max_tokens} "
                f"and overlap_tokens={self.overlap_tokens}"
            )


def chunk_document(document: ParsedDocument, token_starts: Sequence[int], options: ChunkOptions) -> list[DocumentChunk]:
    """Cut all visible text of the document into chunks, in order. Pure; takes time linear in the text.

    `token_starts` are the offsets in characters, ascending, at which tokens of `document.text` begin. Text that no
    token covers, such as control characters, is in the chunks all the same. A token of more than MAX_TOKEN_CHARS
    characters counts for several.
    """
    text = document.text
    tokens = _TokenMeasure(token_starts, len(text))
    cutter = _Cutter(text, tokens, _Borders(document), options)
    chunks: list[DocumentChunk] = []
    for group in _group_sections(document, tokens, options.max_tokens):
        for start, end in cutter.cut(group.start, group.body, group.end):
            heading = " > ".join(group.path(start, end))
            chunks.append(DocumentChunk(len(chunks), text[start:end], heading, start, end, tokens.count(start, end)))
    return chunks


@dataclass(frozen=True, slots=True)
class _Cutter:
    text: str
    tokens: "_TokenMeasure"
    borders: "_Borders"
    options: ChunkOptions

    def cut(self, start: int, body: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield pieces of at most `max_tokens` that cover, and begin and end with, the visible text of `start`-`end`.

        No piece ends before `body`, which keeps headings with the text below them, unless they fill a chunk themselves.
        """
        end = start + len(self.text[start:end].rstrip())
        uncut = body if body < self.tokens.reach(start, self.options.max_tokens) else start
        done = start  # all text before it is in a piece
        while (visible := _VISIBLE.search(self.text, start, end)) is not None:
            start = visible.start()
            stop = self._find_stop(start, max(start, done, uncut), end)
            if start < done and not self.text[done:stop].strip():
                start = done  # the overlap left room for white space only
                continue
            yield start, start + len(self.text[start:stop].rstrip())
            if stop == end:
                return
            start, done = self._find_overlap(start, stop), stop

    def _find_stop(self, start: int, done: int, end: int) -> int:
        """Return where the piece from `start` ends: as late as possible, at the best kind of border."""
        max_tokens = self.options.max_tokens
        num_left = self.tokens.count(start, end)
        if num_left <= max_tokens:
            return end
        if num_left < 2 * max_tokens:
            max_tokens = min(max_tokens, int(_EVEN_SHARE * num_left) + 1)
        latest = self.tokens.reach(start, max_tokens)
        half, quarter = (max(self.tokens.reach(start, max_tokens // part), done + 1) for part in (2, 4))
        borders = self.borders
        for earliest in (half, quarter):
            for places in (borders.breaks, borders.sentences):
                if (place := _find_last(places, earliest, latest)) is not None:
                    return place
        for place in (_find_last(borders.lines, half, latest), borders.last_word(half, latest)):
            if place is not None:
                return place
        return latest

    def _find_overlap(self, start: int, stop: int) -> int:
        """Return where the next piece begins: at the first sentence that the overlap covers.

        If a sentence was cut, its last words are repeated. A cut after a sentence too long to share repeats nothing.
        """
        earliest = max(self.tokens.back(stop, self.options.overlap_tokens), start + 1)
        sentence = _find_first(self.borders.sentences, earliest, stop)
        if sentence is not None:
            return sentence
        is_cut = _find_last(self.borders.sentences, stop, stop) is None
        word = self.borders.first_word(earliest, stop) if is_cut else None
        return stop if word is None else word


class _Borders:
    """Offsets at which a document may be cut, ascending: `breaks`, `sentences` (which include them) and `lines`.

    A long document has millions. Arrays are made step by step and freed at once, where lists and sorting would keep the
    interpreter's lock."""

    def __init__(self, document: ParsedDocument) -> None:
        self._text = document.text
        self.breaks = array("Q", document.breaks)
        ends = (match.end() for match in _SENTENCE_END.finditer(self._text))
        self.sentences = array("Q", (place for place, _ in groupby(merge(ends, self.breaks))))
        self.lines = array("Q", (match.end() for match in _LINE_END.finditer(self._text)))

    def last_word(self, earliest: int, latest: int) -> int | None:
        """Return the last offset from `earliest` to `latest` that follows white space."""
        text = self._text
        return next((place for place in range(latest, max(earliest, 1) - 1, -1) if text[place - 1].isspace()), None)

    def first_word(self, earliest: int, before: int) -> int | None:
        """Return the first offset from `earliest` on, before `before`, at which a word starts."""
        text = self._text
        places = range(max(earliest, 1), before)
        return next((place for place in places if text[place - 1].isspace() and not text[place].isspace()), None)


def _find_last(places: Sequence[int], earliest: int, latest: int) -> int | None:
    """Return the last of the ascending places from `earliest` to `latest`."""
    index = bisect_right(places, latest) - 1
    return places[index] if index >= 0 and places[index] >= earliest else None


def _find_first(places: Sequence[int], earliest: int, before: int) -> int | None:
    """Return the first of the ascending places from `earliest` on that lies before `before`."""
    index = bisect_left(places, earliest)
    return places[index] if index < len(places) and places[index] < before else None


@dataclass(frozen=True, slots=True)
class _Section:
    """The text from one heading to the next. `path` holds the headings above it, outermost first, and its own.

    `body` is where the text below the heading starts. The text before the first heading has `level` 0.
    """

    start: int
    body: int
    end: int
    level: int
    path: tuple[str, ...]

    @property
    def is_bare(self) -> bool:
        return self.body == self.end


@dataclass(frozen=True, slots=True)
class _SectionGroup:
    """Consecutive sections that one chunk may span."""

    sections: Sequence[_Section]

    @property
    def start(self) -> int:
        return self.sections[0].start

    @property
    def end(self) -> int:
        return self.sections[-1].end

    @property
    def body(self) -> int:
        """The start of the first text that is no heading."""
        return next((section.body for section in self.sections if not section.is_bare), self.end)

    def path(self, start: int, end: int) -> tuple[str, ...]:
        """Return the headings that all text from `start` to `end` shares. Bare sections do not count."""
        paths = [s.path for s in self.sections if s.start < end and s.end > start and not s.is_bare]
        if not paths:
            return self.sections[0].path
        num_shared = 0
        for level in zip(*paths, strict=False):
            if len(set(level)) > 1:
                break
            num_shared += 1
        return paths[0][:num_shared]


def _group_sections(document: ParsedDocument, tokens: "_TokenMeasure", max_tokens: int) -> list[_SectionGroup]:
    """Group the document's sections into the spans that chunks stay within.

    A chunk that keeps to one section is about one thing. But a heading without text of its own belongs to its first
    subsection, and tiny sections, whose vectors would say little, join their siblings while all of them fit into one
    chunk. Nothing joins a section under another parent.
    """
    groups: list[list[_Section]] = []
    for sections in _attach_bare_headings(_sections(document)):
        if groups and _can_join(groups[-1], sections, tokens, max_tokens):
            groups[-1] += sections
        else:
            groups.append(sections)
    return [_SectionGroup(sections) for sections in groups]


def _can_join(before: list[_Section], sections: list[_Section], tokens: "_TokenMeasure", max_tokens: int) -> bool:
    if sections[0].level < before[0].level:
        return False
    lengths = (tokens.count(each[0].start, each[-1].end) for each in (before, sections))
    is_tiny = any(length * _TINY_FRACTION < max_tokens for length in lengths)
    return is_tiny and tokens.count(before[0].start, sections[-1].end) <= max_tokens


def _attach_bare_headings(sections: Iterator[_Section]) -> Iterator[list[_Section]]:
    """Yield each section with text, together with the bare headings above it."""
    bare: list[_Section] = []
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


def _sections(document: ParsedDocument) -> Iterator[_Section]:
    text = document.text
    above: list[tuple[int, str]] = []
    starts = [heading.start for heading in document.headings]
    if not starts or text[: starts[0]].strip():
        yield _Section(0, 0, starts[0] if starts else len(text), 0, ())
    for heading, (start, end) in zip(document.headings, pairwise([*starts, len(text)]), strict=True):
        while above and above[-1][0] >= heading.level:
            above.pop()
        above.append((heading.level, heading.text))
        line = _HEADING_LINE.match(text, start, end)
        body = line.end() if line else start
        yield _Section(start, body, end, heading.level, tuple(text for _, text in above))


class _TokenMeasure:
    """Counts the tokens of any piece of a text in logarithmic time."""

    def __init__(self, starts: Sequence[int], num_chars: int) -> None:
        self._starts = _fill_gaps(starts, num_chars)
        self._num_chars = num_chars

    def count(self, start: int, end: int) -> int:
        """Count the tokens that begin in the piece, and the one that `start` may lie within. 0 for an empty piece."""
        if start >= end:
            return 0
        first = bisect_left(self._starts, start)
        return bisect_left(self._starts, end) - first + self._is_within(first, start)

    def reach(self, start: int, num_tokens: int) -> int:
        """Return the latest end of a piece of at most `num_tokens`, always after `start`."""
        first = bisect_left(self._starts, start)
        end = self._start_at(first + num_tokens - self._is_within(first, start))
        return end if end > start else self._start_at(bisect_right(self._starts, start))

    def back(self, end: int, num_tokens: int) -> int:
        """Return the earliest token start of a piece of at most `num_tokens` that ends at `end`."""
        if num_tokens == 0:
            return end
        return self._starts[max(bisect_left(self._starts, end) - num_tokens, 0)]

    def _start_at(self, index: int) -> int:
        return self._starts[index] if index < len(self._starts) else self._num_chars

    def _is_within(self, first: int, start: int) -> bool:
        """Whether `start` lies within a token; `first` is the index of the first token start from there on."""
        return first == len(self._starts) or self._starts[first] != start


def _fill_gaps(starts: Sequence[int], num_chars: int) -> "array[int]":
    """Add a start at 0, and starts within tokens of more than MAX_TOKEN_CHARS."""
    filled = array("Q", [0])
    for start in chain(starts, [num_chars]):
        if start - filled[-1] > MAX_TOKEN_CHARS:
            filled.extend(range(filled[-1] + MAX_TOKEN_CHARS, start, MAX_TOKEN_CHARS))
        if 0 < start < num_chars:
            filled.append(start)
    return filled
