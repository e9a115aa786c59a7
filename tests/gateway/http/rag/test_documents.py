"""Documents in every form that a body can have, and what becomes of each."""

import asyncio
import hashlib
import json
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.http.rag.json_uploads import Unreadable
from gateway.http.rag.putting import Batch, put_all
from gateway.http.rag.schemas import MAX_DOCUMENTS
from gateway.options.config import ServeConfig
from gateway.options.http import HttpOptions
from pipelines.rag.keys import HEADER
from pipelines.rag.types import DocumentFormat
from pipelines.rag.upload import Upload, content_hash_of
from sluice.errors import invalid
from tests.gateway.http.rag.parts import PATIENCE_S, RagServer, rag_server

TEXT = DocumentFormat.TEXT
REFUNDS = "# Refunds\n\nMoney comes back in 30 days.\n"
PDF_HEAD = b"%PDF-1.7\nthis is all that is left of it"


def statuses(answer: httpx.Response) -> dict[str, str]:
    return {each["id"]: each["status"] for each in answer.json()["data"]}


def text_of(rag: RagServer, document_id: str, collection: str = "docs") -> str:
    text: str = rag.ask("GET", f"/{collection}/documents/{document_id}").json()["text"]
    return text


# --- JSON


def test_several_documents(rag: RagServer) -> None:
    answer = rag.add(
        "docs",
        {"id": "refunds.md", "text": REFUNDS, "metadata": {"year": 2025, "draft": False, "owner": None, "x": 0.5}},
        {"id": "note", "text": "hello there", "title": "Note", "format": "text"},
    )
    assert answer.status_code == 200
    refunds, note = answer.json()["data"]
    assert refunds == {
        "id": "refunds.md", "object": "document", "title": "Refunds", "format": "markdown", "status": "created",
        "content_hash": refunds["content_hash"], "num_chars": refunds["num_chars"], "num_chunks": 1,
        "metadata": {"year": 2025, "draft": False, "owner": None, "x": 0.5}, "updated": refunds["updated"],
    }  # fmt: skip
    assert (note["title"], note["format"], note["num_chars"]) == ("Note", "text", 11)
    assert rag.ask("GET", "/collections/docs").json()["num_documents"] == 2


def test_one_document(rag: RagServer) -> None:
    answer = rag.ask("POST", "/docs/documents", json={"id": "a.txt", "text": "hello"})
    assert statuses(answer) == {"a.txt": "created"}
    assert text_of(rag, "a.txt") == "hello"


def test_the_same_again_changes_nothing(rag: RagServer) -> None:
    document = {"id": "a.txt", "text": "hello"}
    rag.add("docs", document)
    assert statuses(rag.add("docs", document)) == {"a.txt": "unchanged"}
    forced = rag.ask("POST", "/docs/documents", params={"force": "true"}, json=document)
    assert statuses(forced) == {"a.txt": "updated"}
    assert statuses(rag.add("docs", {**document, "metadata": {"year": 1}})) == {"a.txt": "updated"}


def test_clients_can_work_out_the_hash(rag: RagServer) -> None:
    rag.add("docs", {"id": "plain.txt", "text": "hello"}, {"id": "more.txt", "text": "hello", "metadata": {"a": 1}})
    more = Upload("more.txt", b"hello", TEXT, metadata={"a": 1})
    assert rag.documents("docs") == {
        "plain.txt": hashlib.sha256(b"hello").hexdigest(),
        "more.txt": content_hash_of(more),
    }


def test_a_bad_document_does_not_hurt_the_others(rag: RagServer) -> None:
    answer = rag.add("docs", {"id": "", "text": "no name"}, {"id": "good.txt", "text": "hello"})
    assert answer.status_code == 200
    bad, good = answer.json()["data"]
    assert good["status"] == "created"
    assert (bad["status"], bad["error"]["param"], bad["error"]["type"]) == ("failed", "id", "invalid_request_error")
    assert bad["error"]["message"].startswith("a document's id must be 1 to 512 printable characters")


def test_bad_documents_alone_are_an_error(rag: RagServer) -> None:
    answer = rag.add("docs", {"id": "", "text": "x"}, {"id": "a\nb", "text": "x"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("none of 2 documents was taken; the first, '': a document's id")
    assert [each["status"] for each in answer.json()["data"]] == ["failed", "failed"]


REFUSED: list[tuple[Any, str | None, str]] = [
    ({}, "id", "id is required: send id and text of a document, or several under documents"),
    ({"id": "a"}, "text", "text is required"),
    ({"documents": []}, "documents", "documents must not be empty"),
    ({"documents": [{"id": "a"}]}, "documents[0].text", "documents[0].text is required"),
    ({"documents": [{"id": "a", "text": "x"}], "id": "b"}, "id", "id must stand in one of the documents"),
    ({"id": 5, "text": "x"}, "id", "id must be a valid string, got 5"),
    ({"id": "a", "text": "x", "format": "pdf"}, "format", "format must be 'text', 'markdown' or 'html', got \"pdf\""),
    (
        {"id": "a", "text": "x", "metadata": {"tags": ["a"]}},
        "metadata.tags",
        "metadata.tags must be a string, a 64-bit number, a boolean or null, got an array of 1",
    ),
    ({"id": "a", "text": "x", "metadata": {"n": 2**63}}, "metadata.n", "metadata.n must be a string, a 64-bit"),
    ([], None, "the request body must be a JSON object, got an array of 0"),
]


@pytest.mark.parametrize(("body", "param", "message"), REFUSED)
def test_what_is_refused(rag: RagServer, body: Any, param: str | None, message: str) -> None:
    refused = rag.ask("POST", "/docs/documents", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert refused.json()["error"]["message"].startswith(message)
    assert rag.documents("docs") == {}


def test_what_is_no_number_in_json_is_no_metadata(rag: RagServer) -> None:
    """Python's JSON readers take NaN; Postgres has no place for it."""
    body = b'{"id": "a", "text": "x", "metadata": {"n": NaN}}'
    refused = rag.ask("POST", "/docs/documents", content=body, headers={"content-type": "application/json"})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("metadata.n must be a string, a 64-bit number")


def test_no_documents_where_no_path_would_lead(rag: RagServer) -> None:
    for method, path in (("POST", "/collections/documents"), ("PUT", "/collections/documents/a.txt")):
        refused = rag.ask(method, path, content=b"{}", headers={"content-type": "text/plain"})
        assert refused.status_code == 400
        assert "and not 'collections', got 'collections'" in refused.json()["error"]["message"]


# --- one document as it is


def put(rag: RagServer, path: str, content: bytes, content_type: str = "", **params: str) -> httpx.Response:
    headers = {"content-type": content_type} if content_type else {}
    return rag.ask("PUT", f"/docs/documents/{path}", content=content, headers=headers, params=params)


def test_put_replaces(rag: RagServer) -> None:
    first = put(rag, "guides/a.txt", b"first words", "text/plain")
    assert (first.status_code, first.json()["status"]) == (201, "created")
    second = put(rag, "guides/a.txt", b"other words", "text/plain; charset=UTF-8")
    assert (second.status_code, second.json()["status"]) == (200, "updated")
    assert put(rag, "guides/a.txt", b"other words").json()["status"] == "unchanged"
    assert text_of(rag, "guides/a.txt") == "other words"
    assert rag.ask("GET", "/collections/docs").json()["num_documents"] == 1


@pytest.mark.parametrize(
    ("document_id", "content_type", "expected"),
    [
        ("a", "text/markdown", "markdown"),
        ("a", "text/html", "html"),
        ("a", "text/plain", "text"),
        ("a.md", "application/octet-stream", "markdown"),
        ("a.html", "application/x-www-form-urlencoded", "html"),
        ("a.md", "", "markdown"),
        ("a", "", "text"),
    ],
)
def test_the_format_is_what_type_or_ending_say(
    rag: RagServer, document_id: str, content_type: str, expected: str
) -> None:
    assert put(rag, document_id, b"<p>hello there</p>", content_type).json()["format"] == expected


def test_title_and_metadata_of_a_body(rag: RagServer) -> None:
    answer = put(rag, "a.txt", b"hello", title="Greeting", metadata='{"year": 2025}')
    assert (answer.json()["title"], answer.json()["metadata"]) == ("Greeting", {"year": 2025})


@pytest.mark.parametrize("metadata", ["x", "[1]", '{"a": {}}', '{"a": NaN}'])
def test_bad_metadata(rag: RagServer, metadata: str) -> None:
    refused = put(rag, "a.txt", b"hello", metadata=metadata)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith("metadata")


def test_ids_with_all_kinds_of_characters(rag: RagServer) -> None:
    for path, document_id in (("a%20b.txt", "a b.txt"), ("%C3%A9/%3F%23.txt", "é/?#.txt"), ("a%2Fb.txt", "a/b.txt")):
        assert put(rag, path, b"hello").json()["id"] == document_id
        assert rag.ask("GET", f"/docs/documents/{path}").json()["id"] == document_id
        assert rag.ask("DELETE", f"/docs/documents/{path}").status_code == 200


@pytest.mark.parametrize("content_type", ["application/json", "application/x-ndjson", "multipart/form-data"])
def test_put_takes_the_document_itself(rag: RagServer, content_type: str) -> None:
    refused = put(rag, "a.txt", b"{}", content_type)
    assert refused.json()["error"]["message"].startswith("the body must be the document itself, got ")


def test_other_charsets_are_refused(rag: RagServer) -> None:
    refused = put(rag, "a.txt", b"hello", "text/plain; charset=latin-1")
    assert refused.json()["error"]["message"] == "documents must be UTF-8, got charset latin-1"


def test_a_broken_pdf(rag: RagServer) -> None:
    refused = put(rag, "a.pdf", PDF_HEAD, "application/pdf")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "content"
    assert rag.documents("docs") == {}


def test_post_of_one_document_needs_its_id(rag: RagServer) -> None:
    refused = rag.ask("POST", "/docs/documents", content=b"hello", headers={"content-type": "text/plain"})
    assert refused.json()["error"]["message"].startswith("id is required: a body of type text/plain is one document")
    taken = rag.ask("POST", "/docs/documents?id=a.txt", content=b"hello", headers={"content-type": "text/plain"})
    assert statuses(taken) == {"a.txt": "created"}


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


def test_lines_in_a_form(rag: RagServer) -> None:
    lines = b'{"id": "a", "text": "one"}\n{"id": "b", "text": "two"}\n'
    answer = rag.ask("POST", "/docs/documents", files=[("file", ("faq.jsonl", lines)), ("file", ("c.txt", b"three"))])
    assert statuses(answer) == {"a": "created", "b": "created", "c.txt": "created"}


def test_a_form_with_one_file(rag: RagServer) -> None:
    large = b"word" + b" " * (2 << 20) + b"word"
    answer = rag.ask("POST", "/docs/documents", files={"file": ("b.txt", large)}, data={"id": "x", "title": "T"})
    [taken] = answer.json()["data"]
    assert (taken["id"], taken["title"], taken["content_hash"]) == (
        "x",
        "T",
        content_hash_of(Upload("x", large, TEXT, "T")),
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
    """Other requests have their turn between them."""
    uploads = iter([Unreadable(f"line {number}", invalid("content", "bad")) for number in range(100)])
    batch = Batch(rag.library, "docs", "", False, "r")
    putting = asyncio.create_task(put_all(batch, uploads))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not putting.done()
    assert len(await putting) == 100


def test_a_form_needs_no_temporary_files(rag: RagServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    answer = rag.ask("POST", "/docs/documents", files={"file": ("b.txt", b"word" + b"\n" * (2 << 20))})
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


# --- what is there


def test_pages(rag: RagServer) -> None:
    rag.add("docs", *({"id": f"{number}.txt", "text": "x"} for number in range(5)))
    first = rag.ask("GET", "/docs/documents", params={"limit": 3}).json()
    assert [each["id"] for each in first["data"]] == ["0.txt", "1.txt", "2.txt"]
    assert (first["object"], first["has_more"]) == ("list", True)
    second = rag.ask("GET", "/docs/documents", params={"limit": 3, "after": "2.txt"}).json()
    assert [each["id"] for each in second["data"]] == ["3.txt", "4.txt"]
    assert second["has_more"] is False
    refused = rag.ask("GET", "/docs/documents", params={"limit": 0})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "limit must be greater than or equal to 1, got '0'"


def test_a_document_with_and_without_text(rag: RagServer) -> None:
    rag.add("docs", {"id": "a.md", "text": REFUNDS})
    whole = rag.ask("GET", "/docs/documents/a.md").json()
    assert "Money comes back in 30 days." in whole.pop("text")
    assert rag.ask("GET", "/docs/documents/a.md", params={"text": "false"}).json() == whole
    assert rag.ask("GET", "/docs/documents").json()["data"] == [whole]


def test_delete(rag: RagServer) -> None:
    rag.add("docs", {"id": "a.txt", "text": "money comes back"})
    gone = rag.ask("DELETE", "/docs/documents/a.txt")
    assert gone.json() == {"id": "a.txt", "object": "document", "deleted": True}
    assert rag.ask("POST", "/docs/search", json={"question": "money comes back"}).json()["data"] == []
    for method in ("GET", "DELETE"):
        missing = rag.ask(method, "/docs/documents/a.txt")
        assert missing.status_code == 404
        assert missing.json()["error"]["message"] == "collection 'docs' has no document 'a.txt'"


def test_what_has_an_owner(rag: RagServer) -> None:
    owner = {HEADER: "k"}
    assert rag.add("mine", {"id": "a.txt", "text": "x"}, headers=owner).status_code == 200
    assert rag.add("mine", {"id": "a.txt", "text": "y"}).status_code == 403
    for method in ("GET", "DELETE"):
        assert rag.ask(method, "/mine/documents/a.txt").status_code == 403
        assert rag.ask(method, "/mine/documents/a.txt", headers=owner).status_code == 200


def test_a_store_that_is_down_ends_the_request(rag: RagServer) -> None:
    rag.add("docs", {"id": "a.txt", "text": "x"})
    rag.store.is_down = True
    answer = rag.add("docs", {"id": "b.txt", "text": "x"}, {"id": "c.txt", "text": "x"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["message"] == "test store is down"


# --- limits


@pytest.fixture(scope="module")
def small() -> Iterator[RagServer]:
    with rag_server(ServeConfig(http=HttpOptions(is_strict=True, max_input_bytes=4096))) as server:
        yield server


def test_long_bodies_are_refused(small: RagServer) -> None:
    long = b"word " * 1000
    answers = [
        put(small, "a.txt", long),
        small.ask("POST", "/docs/documents", files={"file": ("a.txt", long)}),
        small.add("docs", {"id": "a", "text": long.decode()}),
    ]
    assert [answer.status_code for answer in answers] == [413, 413, 413]
    assert "--http-max-input-size" in answers[0].json()["error"]["message"]


def test_unknown_fields(rag: RagServer, small: RagServer) -> None:
    document = {"id": "a.txt", "text": "x", "colour": "red"}
    warned = rag.add("docs", document)
    assert warned.headers["x-sluice-warning"] == "ignored unknown fields: documents[0].colour"
    assert small.add("docs", document).status_code == 400
    form: dict[str, Any] = {"files": {"file": ("a.txt", b"x")}, "data": {"colour": "red"}}
    assert rag.ask("POST", "/docs/documents", **form).headers["x-sluice-warning"] == "ignored unknown fields: colour"
    assert small.ask("POST", "/docs/documents", **form).status_code == 400


def test_who_leaves_stops_what_has_not_begun(rag: RagServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each document is there whole or not at all."""
    going_on, begun = asyncio.Event(), threading.Event()
    put_document = rag.store.put_document

    async def slow(*arguments: Any) -> None:
        begun.set()
        await going_on.wait()
        await put_document(*arguments)

    monkeypatch.setattr(rag.store, "put_document", slow)
    body = json.dumps({"documents": [{"id": f"{number}.txt", "text": "x"} for number in range(50)]}).encode()
    head = (
        "POST /v1/rag/docs/documents HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    address = httpx.URL(rag.url)
    with socket.create_connection((address.host, address.port), PATIENCE_S) as connection:
        connection.sendall(head.encode() + body)
        assert begun.wait(PATIENCE_S)
    rag.run(_until_nothing_is_put(rag))
    rag.loop.call_soon_threadsafe(going_on.set)
    assert rag.documents("docs") == {}


async def _until_nothing_is_put(rag: RagServer) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while any("work" in repr(task.get_coro()) for task in asyncio.all_tasks()):
            await asyncio.sleep(0)
