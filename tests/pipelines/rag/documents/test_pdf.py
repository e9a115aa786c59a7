"""Text and structure read from PDFs. They are read in this process, since they are our own."""

import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.rag.documents import pdf
from sluice.pipelines.rag.documents.extract import Extract
from tests.pipelines.rag.documents.pdf_writer import ASTRAL, Pdf

ENOUGH = 1_000_000
# Standard security handler, revision 2: the keys are those of no password that anybody knows.
ENCRYPTED = f"/Encrypt<</Filter/Standard/V 1/R 2/O<{'41' * 32}>/U<{'42' * 32}>/P -4>>/ID[<00><00>]"


def read(*pages: list[str], **fields: object) -> Extract:
    return pdf.read_pdf(Pdf(pages, **fields).to_bytes(), ENOUGH)  # type: ignore[arg-type]


def at(extract: Extract, places: list[int]) -> list[str]:
    return [extract.text[place:].partition("\n")[0] for place in places]


def fault_of(content: bytes, max_chars: int = ENOUGH) -> SluiceError:
    with pytest.raises(SluiceError) as caught:
        pdf.read_pdf(content, max_chars)
    assert caught.value.param == "content"
    return caught.value


def test_lines_stay_and_gaps_part_paragraphs() -> None:
    extract = read(["First line", "second line", "third.", "", "New paragraph", "goes on."], ["Next page."])
    assert extract.text == "First line\nsecond line\nthird.\n\nNew paragraph\ngoes on.\n\nNext page."
    assert at(extract, extract.breaks) == ["First line", "New paragraph", "Next page."]


def test_characters_that_are_two_in_utf_16() -> None:
    extract = read([f"{ASTRAL}{ASTRAL} one", "two", "three", "", f"{ASTRAL} New", "on"])
    assert extract.text == "😀😀 one\ntwo\nthree\n\n😀 New\non"


def test_words_cut_at_the_end_of_a_line_are_joined() -> None:
    assert read(["An exam-", "ple of hyphen-", "ated words."]).text == "An example of hyphenated words."


def test_a_hyphen_stays_that_the_document_writes_elsewhere() -> None:
    extract = read(["The well-", "known fact and the Jean-", "Paul of it."], ["A well-known fact."])
    assert extract.text.startswith("The well-known fact and the Jean-Paul of it.")


def test_pages_are_the_headings_where_there_is_no_outline() -> None:
    extract = read(["one"], [], ["three"])
    assert extract.headings == [(0, 1, "Page 1"), (5, 1, "Page 3")]


def test_bookmarks_are_the_headings_where_there_is_an_outline() -> None:
    outline = [("Getting started", 0, 1), ("Installing", 1, 2), ("Not written on its page", 1, 2), ("Limits", 1, 1)]
    extract = read(
        ["1 Getting started", "", "Text of it."],
        ["Still of it.", "", "1.1 Installing", "Text.", "Limits", "None."],
        outline=outline,
    )
    assert [(level, text) for _, level, text in extract.headings] == [
        (1, "Getting started"),
        (2, "Not written on its page"),
        (2, "Installing"),
        (1, "Limits"),
    ]
    starts = [start for start, _, _ in extract.headings]
    assert at(extract, starts) == ["1 Getting started", "Still of it.", "1.1 Installing", "Limits"]


@pytest.mark.parametrize(
    ("given", "title"),
    [("A guide", "A guide"), ("Microsoft Word - a.doc", ""), ("report_v3.pdf", ""), ("Untitled 2", ""), ("", "")],
)
def test_the_title_is_what_an_author_wrote(given: str, title: str) -> None:
    assert read(["text"], title=given).title == title


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (Pdf([[], []]).to_bytes(), "no text layer"),
        (Pdf([]).to_bytes(), "no pages"),
        (b"%PDF-1.7 junk", "broken or truncated"),
        (b"no PDF at all", "broken or truncated"),
        (Pdf([["text"]]).to_bytes()[:200], "broken or truncated"),
        (Pdf([["secret"]], trailer=ENCRYPTED).to_bytes(), "encrypted"),
    ],
)
def test_what_cannot_be_read_is_refused(content: bytes, said: str) -> None:
    assert said in fault_of(content).message


def test_more_text_than_the_limit_is_refused() -> None:
    error = fault_of(Pdf([["ten chars."]] * 3).to_bytes(), max_chars=25)
    assert error.code is ErrorCode.TOO_LARGE
    assert "25 characters" in error.message
