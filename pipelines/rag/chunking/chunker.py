"""Cuts a document where its structure allows, to a number of tokens."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipelines.rag.chunking.borders import Borders, first, last
from pipelines.rag.chunking.sections import groups_of
from pipelines.rag.chunking.tokens import TokenMeasure
from pipelines.rag.types import DocumentChunk, ParsedDocument

_VISIBLE = re.compile(r"\S")
_EVEN_SHARE = 0.6
"""Of what is left when it makes two chunks: the first takes up to this, or the second might be a lonely end."""


@dataclass(frozen=True, slots=True)
class ChunkOptions:
    """In the encoder's tokens. A chunk is never longer than `max_tokens`; neighbours of one section share `overlap`.

    Up to `overlap_tokens` are shared, in whole sentences; at most half of a chunk.
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
    """All of the document's text that is not white space, in order. Pure, and takes time linear in the text.

    `token_starts`: where each token of `document.text` begins, in characters, rising. What they leave out, as
    tokenizers do control characters, is in the chunks all the same; a token of more than 16 characters counts for
    several.
    """
    text = document.text
    tokens = TokenMeasure(token_starts, len(text))
    cutter = _Cutter(text, tokens, Borders(document), options)
    chunks: list[DocumentChunk] = []
    for group in groups_of(document, tokens, options.max_tokens):
        for start, end in cutter.pieces(group.start, group.body, group.end):
            heading = " > ".join(group.path(start, end))
            chunks.append(DocumentChunk(len(chunks), text[start:end], heading, start, end, tokens.count(start, end)))
    return chunks


@dataclass(frozen=True, slots=True)
class _Cutter:
    text: str
    tokens: TokenMeasure
    borders: Borders
    options: ChunkOptions

    def pieces(self, start: int, body: int, end: int) -> Iterator[tuple[int, int]]:
        """Pieces of at most `max_tokens` that cover what is visible from `start` to `end`, and begin and end so.

        None ends before `body`: headings are not parted from the text under them, unless they fill a chunk themselves.
        """
        end = start + len(self.text[start:end].rstrip())
        uncut = body if body < self.tokens.reach(start, self.options.max_tokens) else start
        done = start
        """Up to here all is in a piece."""
        while (visible := _VISIBLE.search(self.text, start, end)) is not None:
            start = visible.start()
            stop = self._stop(start, max(start, done, uncut), end)
            if start < done and not self.text[done:stop].strip():
                start = done  # what is shared left no room for anything but white space
                continue
            yield start, start + len(self.text[start:stop].rstrip())
            if stop == end:
                return
            start, done = self._overlap(start, stop), stop

    def _stop(self, start: int, done: int, end: int) -> int:
        """Where the piece that begins at `start` ends: as late as it can, at the best kind of border."""
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
                if (place := last(places, earliest, latest)) is not None:
                    return place
        for place in (last(borders.lines, half, latest), borders.word(half, latest)):
            if place is not None:
                return place
        return latest

    def _overlap(self, start: int, stop: int) -> int:
        """Where the next piece begins: at the first sentence of those that are shared.

        Where a sentence is cut, its last words go on; a cut between sentences that are too long to share shares none.
        """
        earliest = max(self.tokens.back(stop, self.options.overlap_tokens), start + 1)
        sentence = first(self.borders.sentences, earliest, stop)
        if sentence is not None:
            return sentence
        is_cut = last(self.borders.sentences, stop, stop) is None
        word = self.borders.next_word(earliest, stop) if is_cut else None
        return stop if word is None else word
