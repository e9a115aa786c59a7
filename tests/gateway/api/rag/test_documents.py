"""Documents in every form that a body can have, and the outcome of each."""

import asyncio
import hashlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sluice.gateway.front.restrictions import parse_restriction
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.http import HttpOptions
from sluice.pipelines.rag.types import DocumentFormat, Upload, hash_content
from tests.gateway.api.rag.parts import RagServer, rag_server, statuses, text_of
from tests.gateway.front.http.portless import connect_to
from tests.waiting import PATIENCE_S, until

TEXT = DocumentFormat.TEXT
REFUNDS = "# Refunds\n\nMoney comes back in 30 days.\n"


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
        "more.txt": hash_content(more),
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
    [("a", "text/html", "html"), ("a.md", "application/octet-stream", "markdown"), ("a", "", "text")],
)
def test_the_format_is_what_type_or_ending_say(
    rag: RagServer, document_id: str, content_type: str, expected: str
) -> None:
    assert put(rag, document_id, b"<p>hello there</p>", content_type).json()["format"] == expected


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


def test_the_charset_of_the_content_type_is_the_documents_encoding(rag: RagServer) -> None:
    put(rag, "a.txt", b"caf\xe9 \x93x\x94", "text/plain; charset=ISO-8859-1")
    put(rag, "a.html", b"<meta charset=gbk><p>caf\xc3\xa9", "text/html; charset=utf-8")
    assert (text_of(rag, "a.txt"), text_of(rag, "a.html")) == ("café “x”", "café")


def test_another_charset_makes_another_document_of_the_same_bytes(rag: RagServer) -> None:
    put(rag, "a.txt", b"\xe9", "text/plain; charset=iso-8859-1")
    assert put(rag, "a.txt", b"\xe9", "text/plain; charset=iso-8859-2").json()["status"] == "updated"
    assert put(rag, "a.txt", b"\xe9", "text/plain; charset=latin2").json()["status"] == "unchanged"


def test_charsets_that_are_no_encoding_are_refused(rag: RagServer) -> None:
    refused = put(rag, "a.txt", b"hello", "text/plain; charset=klingon")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "content-type")
    assert "charset klingon is no encoding that is read" in refused.json()["error"]["message"]


def test_text_in_another_encoding_is_refused_without_a_charset(rag: RagServer) -> None:
    refused = put(rag, "a.txt", b"caf\xe9", "text/plain").json()["error"]
    assert (refused["param"], "offset 3" in refused["message"]) == ("content", True)
    assert "name another encoding as charset in the content type" in refused["message"]


def test_json_has_no_encoding_but_its_own(rag: RagServer) -> None:
    page = {"id": "a.html", "text": "<meta charset=gbk><p>naïve 文字"}
    assert statuses(rag.add("docs", page)) == {"a.html": "created"}
    assert text_of(rag, "a.html") == "naïve 文字"
    headers = {"content-type": "application/json; charset=latin1"}
    refused = rag.ask("POST", "/docs/documents", content=b"{}", headers=headers).json()["error"]
    assert refused["message"] == "JSON must be UTF-8, got charset latin1"


def test_json_brings_the_text_of_a_pdf_under_its_name(rag: RagServer) -> None:
    assert statuses(rag.add("docs", {"id": "a.pdf", "text": "%PDF-1.4\nwords\n%%EOF"})) == {"a.pdf": "created"}


def test_post_of_one_document_needs_its_id(rag: RagServer) -> None:
    refused = rag.ask("POST", "/docs/documents", content=b"hello", headers={"content-type": "text/plain"})
    assert refused.json()["error"]["message"].startswith("id is required: a body of type text/plain is one document")
    taken = rag.ask("POST", "/docs/documents?id=a.txt", content=b"hello", headers={"content-type": "text/plain"})
    assert statuses(taken) == {"a.txt": "created"}


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


def test_documents_may_be_restricted_while_questions_are_not() -> None:
    config = ServeConfig(http=HttpOptions(restrictions=(parse_restriction("model-repository:admin=secret"),)))
    with rag_server(config) as server:
        assert server.add("docs", {"id": "a.txt", "text": "x"}).status_code == 403
        assert server.add("docs", {"id": "a.txt", "text": "x"}, headers={"admin": "secret"}).status_code == 200
        assert server.ask("POST", "/docs/search", json={"question": "x"}).status_code == 200


def test_a_disconnect_stops_what_has_not_begun(rag: RagServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each document is stored completely or not at all."""
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
    with connect_to(rag.path) as connection:
        connection.sendall(head.encode() + body)
        assert begun.wait(PATIENCE_S)
    rag.run(_until_nothing_is_put(rag))
    rag.loop.call_soon_threadsafe(going_on.set)
    assert rag.documents("docs") == {}


async def _until_nothing_is_put(rag: RagServer) -> None:
    await until(lambda: not any("work" in repr(task.get_coro()) for task in asyncio.all_tasks()))
