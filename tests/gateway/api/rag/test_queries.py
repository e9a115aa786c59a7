"""Queries and searches: the requests that reach the pipeline, and the shape of answers."""

import json
from typing import Any

import httpx
import pytest

from sluice.engine.types import FinishReason
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.text.citations import Citation, EncodingProgress, Source
from sluice.pipelines.text.types import OWNER_KEY_HEADER, ChatMessage, Conversation, Retrieval, TextDetail, TextEvent
from tests.gateway.api.rag.parts import RagServer
from tests.gateway.front.http.portless import connect_to
from tests.waiting import PATIENCE_S

SOURCE = Source(id=1, document="a.md", title="A", heading="Refunds", start=5, end=40, score=0.5, text="in 30 days")
DROPPED = Source(document="b.md", start=0, end=9, score=0.25, metadata={"year": 2025}, text="not kept")
FOUND = {
    "sources": [
        {"id": 1, "document": "a.md", "title": "A", "heading": "Refunds", "start": 5, "end": 40, "score": 0.5,
         "text": "in 30 days"},
    ],
    "dropped": [
        {"document": "b.md", "start": 0, "end": 9, "score": 0.25, "metadata": {"year": 2025}, "text": "not kept"},
    ],
}  # fmt: skip
CITED = {"citations": [{"source": 1, "start": 0, "end": 7, "by": "marker"}]}
ENDING = {
    "finish_reason": "stop",
    "usage": {
        "prompt_tokens": 50, "completion_tokens": 2, "total_tokens": 52, "prompt_tokens_details": {"cached_tokens": 32},
    },
}  # fmt: skip


def script() -> list[TextEvent | Exception]:
    """Return a pipeline's events: sources, two texts, the end."""
    found = Retrieval((SOURCE,), (DROPPED,))
    cited = Retrieval((SOURCE,), (DROPPED,), (Citation(source=1, start=0, end=7, by="marker"),))
    return [
        TextEvent("", 0, 0, 0, detail=TextDetail(retrieval=found)),
        TextEvent("30 days\u2028", 1, 0, 0),
        TextEvent('"[1]"', 1, 0, 0),
        TextEvent("", 0, 50, 2, FinishReason.STOP, cached_tokens=32, detail=TextDetail(retrieval=cited)),
    ]


def named_events(body: bytes) -> list[tuple[str, Any]]:
    """Return (name, payload) of every event. Fails for a frame of another form."""
    *frames, rest = body.split(b"\n\n")
    assert rest == b""
    return [_named(frame) for frame in frames]


def _named(frame: bytes) -> tuple[str, Any]:
    if frame == b"data: [DONE]":
        return "done", None
    name, data = frame.split(b"\n")
    assert name.startswith(b"event: ")
    assert data.startswith(b"data: ")
    return name.removeprefix(b"event: ").decode(), json.loads(data.removeprefix(b"data: "))


def query(rag: RagServer, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    return rag.ask("POST", "/docs/query", json={"question": "how?", **fields}, headers=headers)


def test_a_whole_answer(rag: RagServer) -> None:
    rag.pipeline.events[:] = script()
    answer = query(rag, {"x-request-id": "r1"})
    assert answer.headers["content-type"] == "application/json"
    head = {"id": "rag-r1", "object": "rag.answer", "model": "rag_pipeline", "collection": "docs"}
    assert answer.json() == {**head, "answer": '30 days\u2028"[1]"', **FOUND, **CITED, **ENDING}


def test_a_streamed_answer(rag: RagServer) -> None:
    rag.pipeline.events[:] = script()
    answer = query(rag, {"x-request-id": "r2"}, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    head = {"id": "rag-r2", "object": "rag.answer", "model": "rag_pipeline", "collection": "docs"}
    assert named_events(answer.content) == [
        ("sources", {**head, **FOUND}),
        ("token", {"text": "30 days\u2028"}),
        ("token", {"text": '"[1]"'}),
        ("citations", CITED),
        ("usage", ENDING),
        ("done", None),
    ]


def test_sources_come_before_the_first_text_is_there(rag: RagServer) -> None:
    rag.pipeline.may_continue.clear()
    found, *others = script()
    rag.pipeline.events[:] = [found, TextEvent("x", 1, 0, 0), *others]
    with rag.client.stream("POST", "/v1/rag/docs/query", json={"question": "how?", "stream": True}) as answer:
        pieces = answer.iter_raw()
        seen = b""
        while b"event: token" not in seen:
            seen += next(pieces)
        assert seen.startswith(b"event: sources")
        rag.loop.call_soon_threadsafe(rag.pipeline.may_continue.set)
        assert named_events(seen + b"".join(pieces))[-1] == ("done", None)


def test_a_pipeline_without_sources(rag: RagServer) -> None:
    rag.pipeline.events[:] = [TextEvent("x", 1, 0, 0), TextEvent("", 0, 0, 0, FinishReason.LENGTH)]
    events = named_events(query(rag, stream=True).content)
    assert [name for name, _ in events] == ["sources", "token", "citations", "usage", "done"]
    assert events[0][1]["sources"] == []


def test_what_reaches_the_pipeline(rag: RagServer) -> None:
    rag.pipeline.events[:] = script()
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text", "text": "yes?"}]}]
    fields: dict[str, Any] = {
        "top_k": 7, "mode": "bm25", "filter": {"year": {"gte": 2025}}, "history": turns, "max_tokens": 9,
        "temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "seed": 3, "presence_penalty": 0.1, "frequency_penalty": 0.2,
        "repetition_penalty": 1.1, "stop": "END", "priority": 4, "cache_salt": "s",
    }  # fmt: skip
    assert query(rag, {OWNER_KEY_HEADER: "secret", "x-sluice-tenant": "t1"}, **fields).status_code == 200
    [asked] = rag.pipeline.requests
    asked_turns = (ChatMessage("user", "hi"), ChatMessage("assistant", "yes?"), ChatMessage("user", "how?"))
    assert asked.prompt == Conversation(asked_turns)
    assert asked.parameters == {
        "collection": "docs", "top_k": 7, "mode": "bm25", "filter": '{"year":{"gte":2025}}',
        "collection_key": "secret",
    }  # fmt: skip
    sampling = asked.sampling
    assert sampling == {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 3,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
    }
    assert (asked.stop, asked.priority, asked.tenant, asked.cache_salt) == (("END",), 4, "t1", "s")


def test_what_is_not_said_is_left_to_the_pipeline(rag: RagServer) -> None:
    rag.pipeline.events[:] = script()
    query(rag)
    assert rag.pipeline.requests[0].parameters == {"collection": "docs"}
    assert "max_tokens" not in rag.pipeline.requests[0].sampling


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        ("plain_llm", "is no pipeline that answers questions; those that do"),
        ("nowhere", "does not serve; pipelines that answer questions"),
    ],
)
def test_a_model_that_is_no_pipeline(rag: RagServer, model: str, fault: str) -> None:
    answer = query(rag, model=model)
    assert answer.status_code == 404
    assert answer.json()["error"] == {
        "message": f"model '{model}' {fault}: rag_pipeline",
        "type": "invalid_request_error", "param": "model", "code": "model_not_found",
    }  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_event_is_a_plain_error(rag: RagServer, stream: bool) -> None:
    rag.pipeline.events[:] = [SluiceError(ErrorCode.UNAVAILABLE, "model 'retriever': store is down", retry_after_s=3)]
    answer = query(rag, stream=stream)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
    assert answer.json()["error"]["message"] == "model 'retriever': store is down"


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_names_the_clients_field(rag: RagServer, stream: bool) -> None:
    rag.pipeline.events[:] = [SluiceError(ErrorCode.INVALID, "input 'query' is empty", param="query")]
    answer = query(rag, stream=stream)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "question")


def test_a_failure_later_is_the_last_event(rag: RagServer) -> None:
    rag.pipeline.events[:] = [*script()[:2], SluiceError(ErrorCode.INTERNAL, "model 'rill': gone")]
    events = named_events(query(rag, stream=True).content)
    assert [name for name, _ in events] == ["sources", "token", "error"]
    assert events[-1][1]["error"]["message"] == "model 'rill': gone"


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_cancels(rag: RagServer, stream: bool) -> None:
    rag.pipeline.may_continue.clear()
    rag.pipeline.events[:] = script()
    content = json.dumps({"question": "how?", "stream": stream}).encode()
    head = f"POST /v1/rag/docs/query HTTP/1.1\r\nhost: test\r\ncontent-length: {len(content)}\r\n\r\n"
    with connect_to(rag.path) as connection:
        connection.sendall(head.encode() + content)
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert rag.pipeline.was_closed.wait(PATIENCE_S)


def test_answers_are_counted(rag: RagServer) -> None:
    rag.pipeline.events[:] = script()
    query(rag)
    registry = rag.server.metrics.registry
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    assert any(sample.labels.get("protocol") == "rag" and sample.value for sample in samples)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"question": None}, "question", "question must be a valid string, got null"),
    ({"question": ""}, "question", "question must not be empty"),
    ({"top_k": 0}, "top_k", "top_k must be greater than or equal to 1, got 0"),
    ({"top_k": 101}, "top_k", "top_k must be less than or equal to 100, got 101"),
    ({"mode": "words"}, "mode", "mode must be 'vector', 'bm25' or 'hybrid', got \"words\""),
    ({"filter": "x"}, "filter", 'filter must be an object, got "x"'),
    ({"filter": {"year": {"near": 1}}}, "filter", ""),
]


@pytest.mark.parametrize("route", ["query", "search"])
@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_what_is_refused(rag: RagServer, route: str, fields: dict[str, Any], param: str, message: str) -> None:
    rag.add("docs", {"id": "a.txt", "text": "x"})
    refused = rag.ask("POST", f"/docs/{route}", json={"question": "how?", **fields})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert refused.json()["error"]["message"].startswith(message)


def test_search(rag: RagServer) -> None:
    rag.add(
        "docs",
        {"id": "refunds.md", "text": "# Refunds\n\nMoney comes back in 30 days.", "metadata": {"year": 2025}},
        {"id": "cats.txt", "text": "Cats sleep most of the day.", "metadata": {"year": 2020}},
    )
    found = rag.ask("POST", "/docs/search", json={"question": "money comes back", "top_k": 1})
    assert found.json()["object"] == "list"
    [source] = found.json()["data"]
    assert source["document"] == "refunds.md"
    assert "Money comes back" in source["text"]
    assert source["metadata"] == {"year": 2025}
    old = rag.ask("POST", "/docs/search", json={"question": "money comes back", "filter": {"year": {"lt": 2025}}})
    assert {each["document"] for each in old.json()["data"]} <= {"cats.txt"}


def test_docs_describe_the_routes(rag: RagServer) -> None:
    paths = rag.client.get("/openapi.json").json()["paths"]
    body = paths["/v1/rag/{collection}/query"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"question", "top_k", "filter", "model", "stream"} <= body["properties"].keys()
    added = paths["/v1/rag/{collection}/documents"]["post"]["requestBody"]["content"]
    assert {"application/json", "multipart/form-data", "application/pdf", "text/markdown"} <= added.keys()
    assert {"get", "put", "delete"} <= paths["/v1/rag/{collection}/documents/{document_id}"].keys()
    assert {"get", "post"} <= paths["/v1/rag/collections"].keys()


def test_answers_say_how_much_of_the_collection_is_encoded(rag: RagServer) -> None:
    found = Retrieval((SOURCE,), encoding=EncodingProgress("docs", 12, 610))
    rag.pipeline.events[:] = [
        TextEvent("", 0, 0, 0, detail=TextDetail(retrieval=found)),
        TextEvent("no", 1, 50, 1, FinishReason.STOP, detail=TextDetail(retrieval=found)),
    ]
    progress = {"collection": "docs", "num_encoded": 12, "num_chunks": 610}
    assert query(rag).json()["encoding"] == progress
    [(name, first), *_] = named_events(query(rag, stream=True).content)
    assert (name, first["encoding"]) == ("sources", progress)
    chat = {"model": "rag_pipeline", "messages": [{"role": "user", "content": "how?"}]}
    assert rag.client.post("/v1/chat/completions", json=chat).json()["encoding"] == progress
    assert (
        b'"encoding":{"collection":"docs"'
        in rag.client.post("/v1/chat/completions", json={**chat, "stream": True}).content
    )


def test_a_search_says_how_much_is_encoded(rag: RagServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def progress(collection: str) -> EncodingProgress:
        return EncodingProgress(collection, 12, 610)

    rag.add("docs", {"id": "a", "text": "one two"})
    assert "encoding" not in rag.ask("POST", "/docs/search", json={"question": "two"}).json()
    monkeypatch.setattr(rag.library, "encoding_progress", progress)
    found = rag.ask("POST", "/docs/search", json={"question": "two"}).json()
    assert found["encoding"] == {"collection": "docs", "num_encoded": 12, "num_chunks": 610}
