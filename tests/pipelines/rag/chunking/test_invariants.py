"""Promises of the chunker that hold for any document."""

import re
import time
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipelines.rag.chunker import MAX_TOKEN_CHARS, ChunkOptions, chunk_document
from pipelines.rag.types import DocumentChunk, Heading, ParsedDocument

TEXTS = st.text(st.sampled_from("ab.! \n\t#é漢。\u200b\x1f"), max_size=400)
WORDS = re.compile(r"\w{1,4}|[^\w\s]")


def words(text: str) -> list[int]:
    """Token starts as a WordPiece tokenizer's: none for white space."""
    return [match.start() for match in WORDS.finditer(text)]


@st.composite
def documents(draw: st.DrawFn) -> tuple[ParsedDocument, list[int]]:
    text = draw(TEXTS)
    places = st.sets(st.integers(0, max(len(text) - 1, 0)), max_size=40)
    starts_of_headings = st.lists(st.integers(0, len(text)), max_size=20).map(sorted)
    headings = [Heading(start, draw(st.integers(1, 4)), f"h{start}") for start in draw(starts_of_headings)]
    starts = draw(st.one_of(st.just(words(text)), places.map(sorted)))
    return ParsedDocument(text, headings=headings, breaks=sorted(draw(places))), starts


@st.composite
def options(draw: st.DrawFn) -> ChunkOptions:
    max_tokens = draw(st.integers(1, 40))
    return ChunkOptions(max_tokens, draw(st.integers(0, max_tokens // 2)))


def check(document: ParsedDocument, starts: list[int], chunks: list[DocumentChunk], options: ChunkOptions) -> None:
    text = document.text
    covered: set[int] = set()
    for index, chunk in enumerate(chunks):
        assert chunk.index == index
        assert text[chunk.start : chunk.end] == chunk.text
        assert chunk.text and chunk.text == chunk.text.strip()
        num_tokens = sum(chunk.start <= start < chunk.end for start in starts)
        assert num_tokens <= chunk.num_tokens <= options.max_tokens
        assert len(chunk.text) <= options.max_tokens * MAX_TOKEN_CHARS
        covered.update(range(chunk.start, chunk.end))
    assert {place for place, char in enumerate(text) if not char.isspace()} <= covered
    for before, after in pairwise(chunks):
        assert before.start < after.start and before.end < after.end


@given(documents(), options())
@example((ParsedDocument("aa a", breaks=[0, 1, 2]), [0, 1, 2, 3]), ChunkOptions(2, 1))  # a token of white space
@settings(max_examples=500, deadline=None)
def test_chunks_are_exact_complete_in_order_and_never_too_long(
    given_document: tuple[ParsedDocument, list[int]], options: ChunkOptions
) -> None:
    document, starts = given_document
    check(document, starts, chunk_document(document, starts, options), options)


@given(documents(), options())
@settings(max_examples=200, deadline=None)
def test_neighbours_share_no_more_than_the_overlap(
    given_document: tuple[ParsedDocument, list[int]], options: ChunkOptions
) -> None:
    document, starts = given_document
    chunks = chunk_document(document, starts, options)
    for before, after in pairwise(chunks):
        shared = [start for start in starts if after.start <= start < before.end]
        assert len(shared) <= options.overlap_tokens


HUGE = 1_000_000


@pytest.mark.parametrize(
    "text",
    [
        "x" * HUGE,
        "word " * (HUGE // 5),
        "A sentence that ends. " * (HUGE // 22),
        ("Line of a list.\n\n") * (HUGE // 17),
        "." * HUGE,
        " " * HUGE + "end",
        "漢" * HUGE,
        "\u200b" * HUGE,
        ("." + '"' * 500) * (HUGE // 501),
    ],
    ids=["one word", "words", "sentences", "paragraphs", "dots", "spaces", "han", "dropped", "quotes"],
)
def test_a_megabyte_takes_linear_time(text: str) -> None:
    breaks = [match.end() for match in re.finditer(r"\n\n", text)]
    document = ParsedDocument(text, headings=[Heading(start, 2, "h") for start in breaks[::7]], breaks=breaks[:-1])
    starts = words(text)
    began_s = time.process_time()
    chunks = chunk_document(document, starts, ChunkOptions())
    assert time.process_time() - began_s < 5.0, "quadratic: linear takes half a second here"
    assert "".join(chunks[-1].text.split())[-1] == text.split()[-1][-1]
