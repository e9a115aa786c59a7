"""Detection of formats, and documents that are read in a thread."""

import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.rag.documents.parse import ParseLimits, detect_format, parse_document
from sluice.pipelines.rag.types import DocumentFormat, Heading

TEXT, MARKDOWN, HTML, PDF = DocumentFormat


@pytest.mark.parametrize(
    ("content_type", "filename", "content", "format"),
    [
        ("text/markdown; charset=utf-8", "", b"# a", MARKDOWN),
        ("TEXT/HTML;charset=x", "a.md", b"<p>", HTML),
        ("application/xhtml+xml", "", b"<p>", HTML),
        ("text/html", "", b"\n%PDF-1.4\n\xe2\xe3\xcf\xd3", PDF),
        ("text/plain", "a.txt", b"%PDF-1.4\n\xe2\xe3\xcf\xd3", PDF),
        ("", "", b"junk\n%PDF-1.4\n\xe2\xe3\xcf\xd3", PDF),
        ("", "", b"junk\n%PDF-1.4\n1 0 obj ... \n%%EOF\n", PDF),
        ("text/markdown", "", b"# Files\n\nA PDF begins with `%PDF-1.7`.\n", MARKDOWN),
        ("", "n.md", b"%PDF-1.4\n...\n%%EOF\n", MARKDOWN),
        ("text/plain", "n.txt", b"The mark %PDF- opens a file.\n", TEXT),
        ("text/plain", "", b"%PDF-1.7 opens a file.\n", TEXT),
        ("", "", b"%PDF-1.7 opens a file.\n", TEXT),
        ("text/html", "n.html", b"<p>Files begin with %PDF-1.4 always</p>", HTML),
        ("text/html", "", b"<meta charset=gbk><p>%PDF-1.4 \xce\xc4", HTML),
        ("", "", b"<html><meta charset=gbk><p>%PDF-1.4 \xce\xc4", HTML),
        ("", "tags.txt", b"<html> is the root element.\n", TEXT),
        ("application/pdf", "", b"broken", PDF),
        ("application/octet-stream", "a/README.MD", b"# a", MARKDOWN),
        ("text/plain", "notes.markdown", b"# a", MARKDOWN),
        ("", "index.htm", b"hi", HTML),
        ("", "a.pdf", b"hi", PDF),
        ("", "guide.rst", b"hi", TEXT),
        ("text/x-python", "a.py", b"x = '<html>'", TEXT),
        ("application/json", "", b"{}", TEXT),
        ("", "", b"hi", TEXT),
        ("", "", b"", TEXT),
        ("", "", "hé".encode("utf-16"), TEXT),
        ("application/octet-stream", "", b"\xef\xbb\xbf <!DOCTYPE HTML><p>", HTML),
        ("", "", b"<html lang=en>", HTML),
    ],
)
def test_the_content_type_decides_then_the_name_then_the_bytes(
    content_type: str, filename: str, content: bytes, format: DocumentFormat
) -> None:
    assert detect_format(content_type, filename, content) is format


@pytest.mark.parametrize(
    ("content_type", "filename", "words"),
    [("image/png", "a.png", ["image/png", "'a.png'"]), ("", "", ["a document without content type and file name"])],
)
def test_binary_junk_is_refused_with_what_is_taken(content_type: str, filename: str, words: list[str]) -> None:
    with pytest.raises(SluiceError) as caught:
        detect_format(content_type, filename, b"\x89PNG\r\n\x1a\n\0\0")
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, "format")
    for word in (*words, "offset 0", "Markdown, HTML, PDF"):
        assert word in caught.value.message


@pytest.mark.parametrize(
    ("format", "content", "text"),
    [(TEXT, b"H\n\nt", "H\n\nt"), (MARKDOWN, b"# H\n\nt", "# H\n\nt"), (HTML, b"<h1>H</h1>t", "# H\n\nt")],
)
async def test_small_documents(format: DocumentFormat, content: bytes, text: str) -> None:
    document = await parse_document(content, format, ParseLimits())
    assert document.text == text
    assert list(document.breaks) == [text.index("t")]
    if format is not TEXT:
        assert (document.title, document.headings) == ("H", (Heading(0, 1, "H"),))


@pytest.mark.parametrize(
    ("content", "format", "code", "words"),
    [
        (b"", TEXT, ErrorCode.INVALID, "empty"),
        (b" \n\t", TEXT, ErrorCode.INVALID, "the text document has no text"),
        (b"<!-- c -->", MARKDOWN, ErrorCode.INVALID, "has no text"),
        (b"<script>x</script>", HTML, ErrorCode.INVALID, "has no text"),
        (b"a\xff", MARKDOWN, ErrorCode.INVALID, "offset 1"),
        (b"x" * 101, PDF, ErrorCode.TOO_LARGE, "101 bytes, and at most 100"),
    ],
)
async def test_documents_that_are_refused(content: bytes, format: DocumentFormat, code: ErrorCode, words: str) -> None:
    with pytest.raises(SluiceError) as caught:
        await parse_document(content, format, ParseLimits(max_bytes=100))
    assert (caught.value.code, caught.value.param) == (code, "content")
    assert words in caught.value.message
