"""Chunks of documents, and promises that hold for any document."""

import re
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sluice.pipelines.rag.chunker import MAX_TOKEN_CHARS, ChunkOptions, chunk_document
from sluice.pipelines.rag.documents import markdown
from sluice.pipelines.rag.types import DocumentChunk, Heading, ParsedDocument


def chunks_of(source: str, max_tokens: int, overlap_tokens: int = 0) -> list[DocumentChunk]:
    """Cut Markdown into chunks, with each word a token."""
    extract = markdown.read_markdown(source.encode())
    headings = [Heading(*heading) for heading in extract.headings]
    document = ParsedDocument(extract.text, extract.title, headings, extract.breaks)
    starts = [match.start() for match in re.finditer(r"\S+", extract.text)]
    return chunk_document(document, starts, ChunkOptions(max_tokens, overlap_tokens))


def texts(source: str, max_tokens: int, overlap_tokens: int = 0) -> list[str]:
    return [chunk.text for chunk in chunks_of(source, max_tokens, overlap_tokens)]


def words(name: str, num: int) -> str:
    return " ".join(f"{name}{number}" for number in range(num))


def test_a_chunk_does_not_cross_a_heading() -> None:
    source = f"# A\n\n{words('a', 6)}\n\n# B\n\n{words('b', 6)}"
    assert [(chunk.heading, chunk.text.split()[2]) for chunk in chunks_of(source, 16)] == [("A", "a0"), ("B", "b0")]


def test_headings_are_the_path_outermost_first() -> None:
    body = words("x", 9)
    source = f"before {body}\n\n# A\n\n{body}\n\n### B\n\n{body}\n\n## C\n\n{body}\n\n# D\n\n{body}"
    assert [chunk.heading for chunk in chunks_of(source, 12)] == ["", "A", "A > B", "A > C", "D"]


def test_tiny_sections_join_their_siblings_under_the_heading_that_they_share() -> None:
    source = "# A\n\nintro of three\n\n## B\n\none\n\n## C\n\ntwo\n\n## D\n\n" + words("d", 30) + "\n\n# E\n\nend"
    chunks = chunks_of(source, 32)
    assert [(chunk.heading, chunk.text.split()[-1]) for chunk in chunks] == [
        ("A", "two"),
        ("A > D", "d29"),
        ("E", "end"),
    ]


def test_a_tiny_section_does_not_join_what_is_under_another_parent() -> None:
    source = f"# A\n\n{words('a', 12)}\n\n## B\n\ntiny\n\n# C\n\ntiny"
    assert [chunk.heading for chunk in chunks_of(source, 16)] == ["A", "A > B", "C"]


def test_a_heading_without_text_goes_with_its_first_subsection_whatever_its_length() -> None:
    source = f"# A\n\n## B\n\n{words('b', 20)}\n\n## C\n\n{words('c', 5)}"
    chunks = chunks_of(source, 16)
    assert [(chunk.heading, len(chunk.text.split())) for chunk in chunks] == [("A > B", 15), ("A > B", 9), ("A > C", 7)]
    assert chunks[0].text.startswith("# A\n\n## B\n\nb0")


def test_paragraphs_are_kept_whole_where_they_fill_a_chunk_well() -> None:
    source = "\n\n".join(words(name, 7) + "." for name in "abcd")
    assert [text.split()[0] for text in texts(source, 16)] == ["a0", "c0"]


def test_the_end_of_a_paragraph_goes_before_a_later_end_of_a_sentence() -> None:
    source = f"{words('a', 9)}.\n\nShort one. {words('b', 30)}."
    assert texts(source, 16)[0].split()[-1] == "a8."


def test_a_short_paragraph_stands_alone_before_a_sentence_that_would_be_cut() -> None:
    source = f"{words('a', 5)}.\n\n{words('b', 30)}."
    assert texts(source, 16)[0].split()[-1] == "a4."


def test_a_long_paragraph_is_cut_between_sentences() -> None:
    source = " ".join(f"S{number} is a sentence of eight words (yes, e.g. so)." for number in range(8))
    assert all(text.startswith("S") and text.endswith("so).") for text in texts(source, 25))


@pytest.mark.parametrize("end", [". ", "! ", '?" ', "…\n", "。", "！」"])
def test_ends_of_sentences(end: str) -> None:
    sentence = f"W{words('w', 6)}{end}"
    document = ParsedDocument(sentence * 2)
    starts = [match.start() for match in re.finditer(r"\w+", document.text)]
    chunks = chunk_document(document, starts, ChunkOptions(8, 0))
    assert [chunk.text for chunk in chunks] == [sentence.strip()] * 2


def test_code_is_cut_between_lines() -> None:
    code = "\n".join(f"    call({number}, {number})" for number in range(12))
    pieces = texts(f"```\n{code}\n```", 10)
    assert len(pieces) == 3
    assert all(line.strip().startswith(("call(", "```")) for piece in pieces for line in piece.split("\n"))


def test_a_sentence_that_is_too_long_is_cut_between_words() -> None:
    assert texts(words("w", 25), 10) == [
        " ".join(f"w{number}" for number in range(*range_)) for range_ in ((0, 10), (10, 20), (20, 25))
    ]


def test_a_line_without_spaces_is_cut_between_tokens() -> None:
    text = "ab" * 50_000
    document = ParsedDocument(text)
    chunks = chunk_document(document, range(0, len(text), 2), ChunkOptions(100, 20))
    assert {len(chunk.text) for chunk in chunks} == {200}


def test_a_token_that_stands_for_a_whole_line_is_cut_all_the_same() -> None:
    chunks = chunk_document(ParsedDocument("x" * 100_000), [0], ChunkOptions(100, 0))
    assert max(len(chunk.text) for chunk in chunks) == 1600


def test_the_last_chunk_is_no_short_remnant() -> None:
    assert [len(text.split()) for text in texts(words("w", 22), 20)] == [14, 8]


def test_neighbours_share_whole_sentences() -> None:
    source = " ".join(f"Sentence {number} here." for number in range(10))
    pieces = texts(source, 12, 4)
    for before, after in pairwise(pieces):
        assert before.endswith(after.split(". ")[0] + ".")


def test_neighbours_share_the_last_words_of_a_sentence_that_is_cut() -> None:
    first, second = texts(words("w", 18), 12, 3)
    assert first.split()[-3:] == second.split()[:3]


def test_neighbours_share_nothing_of_a_sentence_that_is_too_long_to_share() -> None:
    source = f"A {words('a', 9)}. B {words('b', 9)}."
    assert texts(source, 12, 4) == source.replace(". B", ".\nB").split("\n")


def test_nothing_is_shared_across_headings() -> None:
    source = f"# A\n\nOne. Two. Three. {words('a', 9)}. End.\n\n# B\n\n{words('b', 12)}"
    assert [text.split()[1] for text in texts(source, 16, 8)] == ["A", "B"]


def test_a_document_of_white_space_has_no_chunks() -> None:
    assert chunk_document(ParsedDocument(" \n\t"), [], ChunkOptions()) == []
    assert chunk_document(ParsedDocument(""), [], ChunkOptions()) == []


@pytest.mark.parametrize(("max_tokens", "overlap_tokens"), [(0, 0), (10, 6), (10, -1)])
def test_options_that_cannot_be(max_tokens: int, overlap_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"got max_tokens={max_tokens} and overlap_tokens={overlap_tokens}"):
        ChunkOptions(max_tokens, overlap_tokens)


TEXTS = st.text(st.sampled_from("ab.! \n\t#é漢。\u200b\x1f"), max_size=400)
WORDS = re.compile(r"\w{1,4}|[^\w\s]")


def token_starts(text: str) -> list[int]:
    """Return token starts like those of a WordPiece tokenizer: none for white space."""
    return [match.start() for match in WORDS.finditer(text)]


@st.composite
def documents(draw: st.DrawFn) -> tuple[ParsedDocument, list[int]]:
    text = draw(TEXTS)
    places = st.sets(st.integers(0, max(len(text) - 1, 0)), max_size=40)
    starts_of_headings = st.lists(st.integers(0, len(text)), max_size=20).map(sorted)
    headings = [Heading(start, draw(st.integers(1, 4)), f"h{start}") for start in draw(starts_of_headings)]
    starts = draw(st.one_of(st.just(token_starts(text)), places.map(sorted)))
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
@example((ParsedDocument(" " + MAX_TOKEN_CHARS * "a"), []), ChunkOptions(1, 0))  # it begins within a token
@settings(max_examples=150, deadline=None)
def test_chunks_are_exact_complete_in_order_and_share_no_more_than_the_overlap(
    given_document: tuple[ParsedDocument, list[int]], options: ChunkOptions
) -> None:
    document, starts = given_document
    chunks = chunk_document(document, starts, options)
    check(document, starts, chunks, options)
    for before, after in pairwise(chunks):
        shared = [start for start in starts if after.start <= start < before.end]
        assert len(shared) <= options.overlap_tokens


HUGE = 100_000
"""Characters for which what is quadratic takes many minutes."""


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
def test_any_long_text_takes_linear_time(text: str) -> None:
    breaks = [match.end() for match in re.finditer(r"\n\n", text)]
    document = ParsedDocument(text, headings=[Heading(start, 2, "h") for start in breaks[::7]], breaks=breaks[:-1])
    starts = token_starts(text)
    chunks = chunk_document(document, starts, ChunkOptions())
    assert "".join(chunks[-1].text.split())[-1] == text.split()[-1][-1]
