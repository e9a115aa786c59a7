"""The bundled pipeline as its users have it: documents in, questions over every protocol, faults."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tritonclient.grpc
import tritonclient.http

from sluice.cli.rag.command import command
from tests.server_process import ServerProcess, running_bundled

FACTS = {
    "pumps.md": "# Pumps\n\nThe Zantavor pump must be oiled every 40 days. The Zantavor pump is painted green.\n",
    "office.md": "# Office\n\nThe report printer is in room 12.\n\nThe backup server runs every night at 02:30.\n",
    "people.md": "# People\n\nThe harbour office is led by Miriam Oake.\n",
}
QUESTION = "Where is the report printer?"
ANSWER = "The report printer is in room 12."


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("rag")
    with running_bundled(folder / "log", "--rag-store", str(folder / "rag.sqlite")) as server:
        server.wait_ready()
        with server.client() as client:
            for name, text in FACTS.items():
                answer = client.put(
                    f"/v1/rag/docs/documents/{name}", content=text, headers={"content-type": "text/markdown"}
                )
                assert answer.status_code == 201, answer.text
        yield server


def sse(text: str) -> list[tuple[str, Any]]:
    """Return (event, data) of each event; the data "[DONE]" stays text."""
    events = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        events.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return events


def test_a_query_streams_sources_then_tokens_then_usage(bundled: ServerProcess) -> None:
    with bundled.client() as client:
        answer = client.post("/v1/rag/docs/query", json={"question": QUESTION, "stream": True})
    events = sse(answer.text)
    names = [name for name, _ in events]
    assert names[0] == "sources"
    assert names[-1] == "" and events[-1][1] == "[DONE]"
    assert names[-2] == "usage"
    assert "".join(data["text"] for name, data in events if name == "token") == ANSWER
    [first] = [each for each in events[0][1]["sources"] if each["id"] == 1]
    assert first["document"] == "office.md"
    [usage] = [data for name, data in events if name == "usage"]
    assert usage["usage"]["completion_tokens"] > 0
    [cited] = [data for name, data in events if name == "citations"]
    assert {each["source"] for each in cited["citations"]} == {1}


def test_chat_completions_answer_with_sources_and_citations(bundled: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{bundled.base_url}/v1", api_key="unused")
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with client:
        assert "rag_pipeline" in [model.id for model in client.models.list()]
        whole = client.chat.completions.create(model="rag_pipeline", messages=messages)
        assert whole.choices[0].message.content == ANSWER
        assert whole.model_extra is not None and whole.model_extra["sources"][0]["document"] == "office.md"
        assert whole.usage is not None and whole.usage.completion_tokens > 0
        text, sources = "", None
        for chunk in client.chat.completions.create(model="rag_pipeline", messages=messages, stream=True):
            sources = sources or (chunk.model_extra or {}).get("sources")
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == ANSWER
    assert sources is not None and sources[0]["document"] == "office.md"


def test_v2_infer_over_http_and_grpc(bundled: ServerProcess) -> None:
    for module, url in (
        (tritonclient.http, bundled.base_url.removeprefix("http://")),
        (tritonclient.grpc, bundled.grpc_address),
    ):
        client = module.InferenceServerClient(url)
        query = module.InferInput("query", [1, 1], "BYTES")
        query.set_data_from_numpy(np.array([[QUESTION.encode()]], dtype=object))
        result = client.infer("rag_pipeline", [query], parameters={"max_tokens": 64})
        assert result.as_numpy("response").ravel()[0].decode() == ANSWER
        assert json.loads(result.as_numpy("sources").ravel()[0])["document"] == "office.md"
        client.close()


def test_generate_and_generate_stream(bundled: ServerProcess) -> None:
    with bundled.client() as client:
        body = {"query": QUESTION, "max_tokens": 64}
        whole = client.post("/v2/models/rag_pipeline/generate", json=body)
        assert whole.status_code == 200, whole.text
        assert whole.json()["response"] == ANSWER
        events = [data for _, data in sse(client.post("/v2/models/rag_pipeline/generate_stream", json=body).text)]
    assert "sources" in events[0] and "response" not in events[0]
    assert "".join(event.get("response", "") for event in events) == ANSWER


def test_the_command_line_ingests_and_asks(
    bundled: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> int:
        return command([*arguments, "--url", bundled.base_url, "--collection", "ferries"])

    (tmp_path / "ferry.md").write_text("# Ferry\n\nThe Oake ferry carries 34 cars.\n")
    assert run("ingest", str(tmp_path)) == 0
    capsys.readouterr()
    assert run("query", "How many cars does the Oake ferry carry?") == 0
    asked = capsys.readouterr().out
    assert "34 cars" in asked and "ferry.md" in asked


def test_model_stream_infer_gives_sources_first(bundled: ServerProcess) -> None:
    answers: list[Any] = []
    with tritonclient.grpc.InferenceServerClient(bundled.grpc_address) as client:
        client.start_stream(lambda result, error: answers.append((result, error)))
        query = tritonclient.grpc.InferInput("query", [1, 1], "BYTES")
        query.set_data_from_numpy(np.array([[QUESTION.encode()]], dtype=object))
        client.async_stream_infer("rag_pipeline", [query], parameters={"max_tokens": 64, "stream": True})
        client.stop_stream()
    assert not any(error for _, error in answers)
    assert answers[0][0].as_numpy("sources") is not None
    texts = [result.as_numpy("response") for result, _ in answers]
    assert b"".join(text.ravel()[0] for text in texts if text is not None).decode() == ANSWER
