"""Documents read from request bodies: forms, JSON lines, and many at once."""

import asyncio
import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from fastapi import Request

from sluice.errors import invalid
from sluice.gateway.api.rag.documents import UploadBatch, put_all
from sluice.gateway.api.rag.schemas import MAX_DOCUMENTS
from sluice.gateway.api.rag.uploads import UnreadableUpload, read_uploads
from sluice.gateway.options.http import HttpOptions
from sluice.pipelines.rag.types import DocumentFormat, Upload, hash_content
from tests.gateway.api.rag.parts import RagServer, statuses, text_of

TEXT = DocumentFormat.TEXT
REFUNDS = "# Refunds\n\nMoney comes back in 30 days.\n"
PDF_HEAD = b"%PDF-1.7\nthis is all that is left of it"
NUM_DOCUMENTS = 10_000
BODY = orjson.dumps({"documents": [{"id": str(number), "text": "x"} for number in range(NUM_DOCUMENTS)]})


async def _receive() -> dict[str, object]:
    return {"type": "http.request", "body": BODY, "more_body": False}


async def test_many_documents_do_not_hold_the_event_loop() -> None:
    num_turns = 0

    async def take_turns() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    others = asyncio.create_task(take_turns())
    headers = [(b"content-type", b"application/json")]
    request = Request({"type": "http", "method": "POST", "headers": headers, "query_string": b""}, _receive)
    uploads, _ = await read_uploads(request, HttpOptions())
    others.cancel()
    assert len(list(uploads)) == NUM_DOCUMENTS
    assert num_turns > 3


# --- encodings


DOCUMENT = b'{"id": "a", "text": "one"}'
UPLOADS = {
    "json": ("POST", "/docs/documents", "application/json", DOCUMENT),
    "lines": ("POST", "/docs/documents", "application/x-ndjson", DOCUMENT + b"\n"),
    "one": ("PUT", "/docs/documents/a", "text/plain", b"one"),
}


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize(("method", "path", "kind", "body"), UPLOADS.values(), ids=UPLOADS)
def test_documents_may_come_compressed(
    rag: RagServer, method: str, path: str, kind: str, body: bytes, mark: bytes
) -> None:
    headers = {"content-type": kind, "content-encoding": "gzip"}
    answer = rag.ask(method, path, content=gzip.compress(mark + body), headers=headers)
    assert answer.status_code in (200, 201) and rag.ask("GET", "/docs/documents/a").json()["num_chars"] == 3


def test_a_document_in_another_encoding_is_refused(rag: RagServer) -> None:
    answer = rag.ask("PUT", "/docs/documents/a", content=b"x", headers={"content-encoding": "br"})
    assert answer.status_code == 415 and answer.headers["accept-encoding"] == "gzip, deflate"


# --- JSON lines


def post_lines(rag: RagServer, *lines: Any) -> httpx.Response:
    body = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return rag.ask("POST", "/docs/documents", content=body, headers={"content-type": "application/x-ndjson"})


def test_lines(rag: RagServer) -> None:
    answer = post_lines(rag, {"id": "a", "text": "one"}, "", {"id": "b", "text": "two", "metadata": {"n": 1}})
    assert statuses(answer) == {"a": "created", "b": "created"}
    assert answer.json()["data"][1]["metadata"] == {"n": 1}


def test_a_bad_line_does_not_hurt_the_others(rag: RagServer) -> None:
    answer = post_lines(rag, {"id": "a", "text": "one"}, "{nonsense", {"id": "c"})
    assert answer.status_code == 200
    taken, broken, lacking = answer.json()["data"]
    assert taken["status"] == "created"
    assert (broken["status"], lacking["status"]) == ("failed", "failed")
    assert "line 2" in broken["error"]["message"]
    assert "line 3" in lacking["error"]["message"]


def test_no_lines(rag: RagServer) -> None:
    answer = post_lines(rag, "", "")
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400,
        "there is no document in the request's body",
    )


# --- forms


def test_files_of_a_form(rag: RagServer) -> None:
    files = [("file", ("guides/a.md", REFUNDS.encode())), ("file", ("b.txt", b"hello"))]
    answer = rag.ask("POST", "/docs/documents", files=files, data={"metadata": '{"n": 1}'})
    assert statuses(answer) == {"guides/a.md": "created", "b.txt": "created"}
    assert [each["metadata"] for each in answer.json()["data"]] == [{"n": 1}, {"n": 1}]
    assert [each["format"] for each in answer.json()["data"]] == ["markdown", "text"]


def test_a_files_path_has_no_steps_above_its_folder(rag: RagServer) -> None:
    files = [("file", ("../../guides/./a.md", REFUNDS.encode())), ("file", ("/etc/b.txt", b"hello"))]
    assert statuses(rag.ask("POST", "/docs/documents", files=files)) == {
        "guides/a.md": "created",
        "etc/b.txt": "created",
    }


def test_a_part_of_a_form_has_a_charset_of_its_own(rag: RagServer) -> None:
    files = [
        ("file", ("a.txt", b"caf\xe9", "text/plain; charset=windows-1252")),
        ("file", ("b.txt", b"x", "text/plain; charset=klingon")),
        ("file", ("c.txt", b"caf\xc3\xa9")),
    ]
    answer = rag.ask("POST", "/docs/documents", files=files)
    assert statuses(answer) == {"a.txt": "created", "b.txt": "failed", "c.txt": "created"}
    assert (text_of(rag, "a.txt"), text_of(rag, "c.txt")) == ("café", "café")


def test_lines_in_a_form(rag: RagServer) -> None:
    lines = b'{"id": "a", "text": "one"}\n{"id": "b", "text": "two"}\n'
    answer = rag.ask("POST", "/docs/documents", files=[("file", ("faq.jsonl", lines)), ("file", ("c.txt", b"three"))])
    assert statuses(answer) == {"a": "created", "b": "created", "c.txt": "created"}


def test_a_form_with_one_file(rag: RagServer) -> None:
    large = b"word" + b" " * (1 << 20) + b"word"
    answer = rag.ask("POST", "/docs/documents", files={"file": ("b.txt", large)}, data={"id": "x", "title": "T"})
    [taken] = answer.json()["data"]
    assert (taken["id"], taken["title"], taken["content_hash"]) == (
        "x",
        "T",
        hash_content(Upload("x", large, TEXT, "T")),
    )


def test_more_documents_than_a_request_may_bring(rag: RagServer) -> None:
    lines, headers = b"x\n" * (MAX_DOCUMENTS + 1), {"content-type": "application/x-ndjson"}
    halves = [("file", (name, lines[: MAX_DOCUMENTS + 2])) for name in ("a.jsonl", "b.jsonl")]
    for refused in (
        rag.ask("POST", "/docs/documents", content=lines, headers=headers),
        rag.ask("POST", "/docs/documents", json={"documents": [{"id": "a", "text": "x"}] * (MAX_DOCUMENTS + 1)}),
        rag.ask("POST", "/docs/documents", files=halves),
    ):
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "documents"
        assert f"at most {MAX_DOCUMENTS}" in refused.json()["error"]["message"]
        assert "data" not in refused.json()
    assert rag.documents("docs") == {}


async def test_bad_lines_do_not_hold_the_event_loop(rag: RagServer) -> None:
    """Other requests are served while a form is parsed."""
    uploads = iter([UnreadableUpload(f"line {number}", invalid("content", "bad")) for number in range(100)])
    batch = UploadBatch(rag.library, "docs", "", False, "r")
    putting = asyncio.create_task(put_all(batch, uploads))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not putting.done()
    assert len(await putting) == 100


def test_a_form_needs_no_temporary_files(rag: RagServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    answer = rag.ask("POST", "/docs/documents", files={"file": ("b.txt", b"word" + b"\n" * (1 << 20))})
    assert statuses(answer) == {"b.txt": "created"}


def test_a_bad_file_does_not_hurt_the_others(rag: RagServer) -> None:
    files = [("file", ("a.pdf", PDF_HEAD)), ("file", ("b.txt", b"hello")), ("file", ("c.bin", b"\xff\x00\xfe"))]
    answer = rag.ask("POST", "/docs/documents", files=files)
    assert statuses(answer) == {"a.pdf": "failed", "b.txt": "created", "c.bin": "failed"}


@pytest.mark.parametrize(
    ("files", "data", "param", "message"),
    [
        ([("x", (None, b"1"))], {}, "file", "the form has no file; with curl: -F file=@handbook.pdf"),
        ([("f", ("a", b"x")), ("f", ("b", b"x"))], {"id": "c"}, "id", "id is for a form with one file"),
        ([("f", ("a", b"x"))], {"metadata": "5"}, "metadata", "metadata must be"),
    ],
)
def test_bad_forms(rag: RagServer, files: Any, data: dict[str, str], param: str, message: str) -> None:
    refused = rag.ask("POST", "/docs/documents", files=files, data=data)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert refused.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize("content_type", ["multipart/form-data", "multipart/form-data; boundary=x"])
def test_what_is_no_form(rag: RagServer, content_type: str) -> None:
    refused = rag.ask("POST", "/docs/documents", content=b"--y\r\n\r\n", headers={"content-type": content_type})
    assert refused.status_code == 400


@pytest.mark.parametrize("separator", [b",", b"\n"])
def test_long_bodies_are_read_in_pieces(rag: RagServer, separator: bytes) -> None:
    is_json = separator == b","
    documents = separator.join(b'{"id": "%d", "text": "%d %s"}' % (n, n, b"word " * 4000) for n in range(3))
    body = b'{"documents": [' + documents + b"]}" if is_json else documents
    headers = {"content-type": "application/json" if is_json else "application/x-ndjson"}
    answer = rag.ask("POST", "/docs/documents", content=body, headers=headers)
    assert [each["status"] for each in answer.json()["data"]] == ["created"] * 3
    broken = body.replace(b'"2 word', b'"2 \\x word')
    refused = rag.ask("POST", "/docs/documents", content=broken, headers=headers)
    if is_json:
        assert refused.status_code == 400 and "is not valid JSON" in refused.json()["error"]["message"]
    else:
        assert [each["status"] for each in refused.json()["data"]] == ["unchanged", "unchanged", "failed"]
