from typing import Any

import pytest

from sluice.pipelines.text.types import OWNER_KEY_HEADER
from tests.gateway.api.rag.parts import DIM, RagServer


def test_a_collection_comes_and_goes(rag: RagServer) -> None:
    made = rag.ask("POST", "/collections", json={"name": "docs", "encoder": "other_encoder"})
    assert made.status_code == 201
    expected = {
        "name": "docs", "object": "collection", "encoder": "other_encoder", "dim": DIM, "num_documents": 0,
        "num_chunks": 0, "created": made.json()["created"], "is_protected": False,
    }  # fmt: skip
    assert made.json() == expected
    assert rag.ask("GET", "/collections").json() == {"object": "list", "data": [expected]}
    assert rag.ask("GET", "/collections/docs").json() == expected
    gone = rag.ask("DELETE", "/collections/docs")
    assert gone.json() == {"name": "docs", "object": "collection", "deleted": True}
    missing = rag.ask("GET", "/collections/docs")
    assert missing.status_code == 404
    assert missing.json()["error"]["param"] == "collection"


def test_the_default_encoder(rag: RagServer) -> None:
    assert rag.ask("POST", "/collections", json={"name": "docs"}).json()["encoder"] == "query_encoder"
    again = rag.ask("POST", "/collections", json={"name": "docs"})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "already_exists")


def test_a_key_makes_an_owner(rag: RagServer) -> None:
    owner = {OWNER_KEY_HEADER: "secret-1"}
    made = rag.ask("POST", "/collections", json={"name": "mine"}, headers=owner)
    assert made.json()["is_protected"] is True
    assert "secret-1" not in made.text
    assert [each["name"] for each in rag.ask("GET", "/collections").json()["data"]] == ["mine"]
    document = {"id": "a.txt", "text": "x"}
    rag.add("mine", document, headers=owner)
    routes: list[tuple[str, str, Any]] = [
        *(("GET", "/collections/mine", None), ("GET", "/mine/documents", None), ("POST", "/mine/documents", document)),
        *(("POST", "/mine/search", {"question": "x"}), ("GET", "/mine/documents/a.txt", None)),
        *(("DELETE", "/mine/documents/a.txt", None), ("DELETE", "/collections/mine", None)),
    ]
    for method, path, body in routes:
        refused = rag.ask(method, path, json=body)
        assert refused.status_code == 403
        assert "send its key in the header x-sluice-collection-key" in refused.json()["error"]["message"]
        assert rag.ask(method, path, json=body, headers={OWNER_KEY_HEADER: "wrong"}).status_code == 403
        assert rag.ask(method, path, json=body, headers=owner).status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "name", "name is required"),
        ({"name": 5}, "name", "name must be a valid string, got 5"),
        ({"name": "a b"}, "collection", "collection must be 1 to 63 letters, digits"),
        ({"name": "collections"}, "collection", "and not 'collections', got 'collections'"),
        ({"name": "docs", "encoder": 1}, "encoder", "encoder must be a valid string, got 1"),
    ],
)
def test_what_is_refused(rag: RagServer, body: object, param: str, message: str) -> None:
    refused = rag.ask("POST", "/collections", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert message in refused.json()["error"]["message"]
    assert rag.ask("GET", "/collections").json()["data"] == []


@pytest.mark.parametrize("key", [b"x" * 257, "sch\u00f6n".encode(), b"a\tb"])
def test_a_key_that_not_every_protocol_carries(rag: RagServer, key: bytes) -> None:
    for method, path, body in (("POST", "/collections", b'{"name": "own"}'), ("PUT", "/own/documents/a.txt", b"text")):
        refused = rag.ask(method, path, content=body, headers={OWNER_KEY_HEADER.encode(): key})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("an owner key must be at most 256 printable ASCII")
        assert "xxx" not in refused.text
    assert rag.ask("GET", "/collections").json()["data"] == []


def test_a_store_that_is_down(rag: RagServer) -> None:
    rag.store.is_down = True
    answer = rag.ask("GET", "/collections")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"] == {
        "message": "test store is down",
        "type": "service_unavailable_error",
        "param": None,
        "code": "service_unavailable",
    }
