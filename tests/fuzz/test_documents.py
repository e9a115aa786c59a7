"""Documents of every format, damaged in every way: they are read, or refused as what they are."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.rag.documents.extract import Extract
from sluice.pipelines.rag.documents.jsonl import JsonLines
from sluice.pipelines.rag.documents.parse import ParseLimits, detect_format, parse_document
from sluice.pipelines.rag.documents.sandbox_worker import read_document
from sluice.pipelines.rag.types import DocumentFormat
from tests.fuzz.damage import damaged
from tests.fuzz.running import fuzzed
from tests.paths import DOCS
from tests.pipelines.rag.documents.pdf_writer import Pdf

CODES = {ErrorCode.INVALID, ErrorCode.TOO_LARGE}
MARKDOWN = (DOCS / "faults.md").read_bytes()[:3000]
MARKDOWN_SNIPPETS = (
    *(b"# ", b"\n---\n", b"---\ntitle: x\n---\n", b"```\n", b"> " * 60, b"- " * 60, b"|a|b|\n|-|-|\n", b"<!--", b"-->"),
    *(b"[a](b)", b"[a]: b\n", b"](", b"![", b"<script>", b"</script", b"`", b"&#xD800;", b"&#0;", b"\t"),
    *(b"1. ", b"***"),
)
HTML = b"""<!doctype html><html><head><meta charset="utf-8"><title>A page</title></head><body><nav>menu</nav>
<main><h1>Head</h1><p>One <b>two</b> &amp; &eacute;<br>three</p><ul><li>a<li><ol><li>b</ol></ul>
<table><tr><th>x<td>y</table><table><tr><td><h2>l</h2></table><pre><code>if x:\n  y</code></pre><dl><dt>t<dd>d</dl>
<img alt="picture"><template>t</template><svg><text>s</text></svg></main><footer>legal</footer></body></html>"""
CHARSETS = (
    "undefined",
    "idna",
    "punycode",
    "unicode_escape",
    "utf-7",
    "utf-16",
    "hex",
    "rot13",
    "latin-1",
    "cp037",
    "no",
)
HTML_SNIPPETS = (
    *(b'<meta charset="%s">' % each.encode() for each in CHARSETS),
    *(b"<div>" * 300, b"<table>", b"</table>", b"<pre>", b"<li>", b"<h6>", b"<main>", b"</main>"),
    *(b"<frameset>", b"<!--"),
    *(b"<![CDATA[", b"&#xD800;", b"&#0;", b"&#x110000;", b"&", b"<", b"<script>", b"<plaintext>"),
    *(b"<svg><title>", b"\\ud800"),
)
PDF = Pdf([["One line.", "A cut hy-", "phen", "", "~ more"], ["Page two"]], "A title", [("One", 0, 1), ("Two", 1, 2)])
PDF_SNIPPETS = (
    *(b"%PDF-1.7", b"%%EOF", b"endobj", b"obj", b"stream\n", b"endstream", b"xref", b"trailer", b"startxref"),
    *(b"<<", b">>"),
    *(b"1 0 R", b"99 0 R", b"/Kids", b"/Count", b"/Length", b"/Filter/FlateDecode"),
    *(b"/Filter/LZWDecode", b"/Encrypt 1 0 R"),
    *(b"/Next 1 0 R", b"/First 1 0 R", b"/Dest", b"/ToUnicode", b"BT", b"ET", b"Tj", b"Td", b"<D83D>", b"null"),
)
LINES = b"""{"id": "a", "text": "x", "title": "t", "metadata": {"k": 1}, "n": 2}
{"id": 5, "content": "<p>", "format": "html"}
"""
LINE_SNIPPETS = (
    *(b"null", b"true", b"1.5", b"[]", b"{}", b'"id"', b'"text"', b'"format"', b'"metadata": '),
    *(b'{"a": [1]}', b'"\\ud800"'),
    *(b"NaN", b"[" * 300, b"1" * 400, b'"pdf"', b",", b":", b"\n", b"\xef\xbb\xbf"),
)
SOURCES = {
    DocumentFormat.TEXT: (MARKDOWN, (b"\n\n", b"\r", b"\0", b"\xff\xfe", b"\xfe\xff", b" \n" * 200)),
    DocumentFormat.MARKDOWN: (MARKDOWN, MARKDOWN_SNIPPETS),
    DocumentFormat.HTML: (HTML, HTML_SNIPPETS),
}
LIMITS = ParseLimits(max_bytes=1 << 20, timeout_s=5.0, memory_bytes=256 << 20)


@fuzzed(90)
@given(st.data(), st.sampled_from(list(SOURCES)))
def test_texts_are_read_or_refused(data: st.DataObject, format: DocumentFormat) -> None:
    content = data.draw(damaged(*SOURCES[format]))
    try:
        extract = read_document(format.value, content, LIMITS.max_bytes)
    except SluiceError as error:
        check_refusal(error)
    else:
        check_extract(extract)


@pytest.mark.slow
@fuzzed(3)
@given(damaged(PDF.to_bytes(), PDF_SNIPPETS))
def test_pdfs_are_read_or_refused(content: bytes) -> None:
    try:
        parsed = asyncio.run(parse_document(content or b"%PDF-", DocumentFormat.PDF, LIMITS))
    except SluiceError as error:
        check_refusal(error)
        assert "exit code 1)" not in error.message, "the reader itself has failed"
    else:
        check_structure(parsed.text, [each.start for each in parsed.headings], parsed.breaks)


@fuzzed(60)
@given(damaged(LINES, LINE_SNIPPETS))
def test_json_lines_are_read_or_refused(content: bytes) -> None:
    uploads = JsonLines(content.splitlines(keepends=True))
    while True:
        try:
            upload = next(uploads, None)
        except SluiceError as error:
            check_refusal(error)
            assert error.message.startswith(f"line {uploads.line}")
            continue
        if upload is None:
            return
        assert isinstance(upload.id, str)
        upload.content.decode()


@fuzzed(60)
@given(st.sampled_from((MARKDOWN, HTML, PDF.to_bytes())).flatmap(damaged), st.text(max_size=20), st.text(max_size=20))
def test_formats_are_detected_or_refused(content: bytes, content_type: str, filename: str) -> None:
    try:
        assert detect_format(content_type, filename, content) in DocumentFormat
    except SluiceError as error:
        assert (error.code, error.param) == (ErrorCode.INVALID, "format")
        error.message.encode()


def check_refusal(error: SluiceError) -> None:
    assert error.code in CODES
    assert error.param == "content"
    error.message.encode()


def check_extract(extract: Extract) -> None:
    extract.title.encode()
    for _, level, text in extract.headings:
        assert level >= 1
        text.encode()
    check_structure(extract.text, [start for start, _, _ in extract.headings], extract.breaks)


def check_structure(text: str, headings: Sequence[int], breaks: Sequence[int]) -> None:
    assert text.strip()
    text.encode()

    for each in (headings, breaks):
        assert all(before <= after for before, after in pairwise(each))
        assert all(0 <= place <= len(text) for place in each)
