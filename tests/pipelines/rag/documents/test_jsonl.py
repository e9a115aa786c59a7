"""Batches of documents as JSON lines."""

import io
from typing import Any

import orjson
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.rag.documents.jsonl import JsonLines, is_jsonl
from sluice.pipelines.rag.types import DocumentFormat, Upload


def one(given: Any) -> Upload:
    return next(JsonLines([orjson.dumps(given)]))


def test_a_line_is_a_document() -> None:
    given = {
        "id": "a/b",
        "content": "# é",
        "format": "markdown",
        "title": "T",
        "metadata": {"year": 2026},
        "lang": "en",
    }
    expected = Upload("a/b", "# é".encode(), DocumentFormat.MARKDOWN, "T", {"year": 2026, "lang": "en"}, "utf-8")
    assert one(given) == expected


def test_what_may_be_left_out() -> None:
    assert one({"id": 7, "text": "x"}) == Upload("7", b"x", DocumentFormat.TEXT, encoding="utf-8")
    assert one({"id": "a", "text": "x", "title": None, "format": None, "metadata": None}).title == ""


def test_scalars_join_the_metadata_whose_own_fields_win() -> None:
    upload = one({"id": "a", "text": "x", "n": 1, "f": 0.5, "b": True, "z": None, "list": [1], "metadata": {"n": 2}})
    assert upload.metadata == {"n": 2, "f": 0.5, "b": True, "z": None}


def test_a_file_with_blank_lines_and_a_byte_order_mark() -> None:
    file = io.BytesIO(b'\xef\xbb\xbf{"id":"a","text":"1"}\r\n\r\n \n{"id":"b","text":"2"}')
    assert [upload.id for upload in JsonLines(file)] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{nope", "is not JSON"),
        (b"\xff\xfe{", "is not JSON"),
        (b'{"id":"a","text":"\\ud800"}', "is not JSON"),
        (b"[1]", "expected an object with id and text, got [1]"),
        (b'{"text":"x"}', "id must be a string, got nothing"),
        (b'{"id":true,"text":"x"}', "id must be a string, got true"),
        (b'{"id":"a"}', "text must be a string, got nothing"),
        (b'{"id":"a","text":5}', "text must be a string, got 5"),
        (b'{"id":"a","text":"x","content":"y"}', "text and content"),
        (b'{"id":"a","text":"x","title":[]}', "title must"),
        (b'{"id":"a","text":"x","format":"pdf"}', 'text, markdown, html, got "pdf"'),
        (b'{"id":"a","text":"x","format":{}}', "format must be one of"),
        (b'{"id":"a","text":"x","metadata":[1]}', "metadata must be an object, got [1]"),
        (b'{"id":"a","text":"x","metadata":{"k":[1]}}', "metadata.k must be"),
    ],
)
def test_a_bad_line_is_named_and_the_others_can_be_read(line: bytes, words: str) -> None:
    lines = JsonLines([b'{"id":"a","text":"1"}', b"", line, b'{"id":"b","text":"2"}'])
    assert next(lines).id == "a"
    with pytest.raises(SluiceError) as caught:
        next(lines)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, "content")
    assert caught.value.message.startswith("line 3")
    assert words in caught.value.message
    assert [upload.id for upload in lines] == ["b"]


@pytest.mark.parametrize(
    ("content_type", "filename", "is_batch"),
    [
        ("application/x-ndjson; charset=utf-8", "", True),
        ("application/octet-stream", "docs.JSONL", True),
        ("", "a.ndjson", True),
        ("application/json", "a.json", False),
        ("", "", False),
    ],
)
def test_what_a_batch_is_known_by(content_type: str, filename: str, is_batch: bool) -> None:
    assert is_jsonl(content_type, filename) is is_batch
