"""Answers of the cache are those of the model, whole and streamed, with the bundled model in a real server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from tests.gateway.answering import joined
from tests.gateway.front.http.sse import events_of
from tests.server_process import ServerProcess, running_bundled

ROUTES = {
    "kept": {"targets": [{"model": "rill"}], "cache": True},
    "vectors": {"targets": [{"model": "sentence_encoder"}], "cache": True},
}
QUESTION = [{"role": "user", "content": "What is a KV cache?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"word": {"enum": ["cache", "block"]}}, "required": ["word"]},
    },
}
SCHEMA = {"type": "object", "properties": {"is_short": {"type": "boolean"}}, "required": ["is_short"]}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "choices": {"n": 2, "temperature": 1, "seed": 7},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "tools": {"tools": [TOOL], "tool_choice": "required"},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "stop": {"stop": [" is"]},
    "ids": {"return_token_ids": True},
    "usage": {"stream_options": {"include_usage": True}},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("kept")
    (folder / "routes.yaml").write_text(yaml.safe_dump({"routes": ROUTES}))
    flags = ("--routes", str(folder / "routes.yaml"), "--cache-config", "local,size=50000000")
    with running_bundled(folder / "log", *flags, "--state-path", str(folder / "state")) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() as opened:
        yield opened


def ask(client: httpx.Client, model: str, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    prompt = {"messages": QUESTION} if path.endswith("chat/completions") else {"prompt": "A KV cache is"}
    body = {"model": model, **prompt, "max_tokens": 24, "temperature": 0, **fields}
    answer = client.post(path, json=body, headers={"x-request-id": "same"})
    assert answer.status_code == 200, answer.text
    return answer


def content_of(answer: httpx.Response) -> Any:
    """Return all that an answer says but for when and by whom, with the pieces of streamed texts joined."""
    if answer.headers["content-type"] != "application/json":
        return [_without_head(each) for each in joined(events_of(answer.content))]
    return _without_head(answer.json())


def _without_head(fields: Any) -> Any:
    """Leave out the head, the random ids of calls, and how much of the prompt an engine had before."""
    if not isinstance(fields, dict):
        return fields
    text = json.dumps({name: value for name, value in fields.items() if name not in ("model", "system_fingerprint")})
    kept = json.loads(text)
    kept.pop("created", None)
    for choice in kept.get("choices", ()):
        for call in (choice.get("message") or choice.get("delta") or {}).get("tool_calls") or ():
            call.pop("id", None)
    if kept.get("usage"):
        kept["usage"]["prompt_tokens_details"]["cached_tokens"] = 0
    return kept


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_kept_answer_is_the_model_s(client: httpx.Client, variant: str, path: str) -> None:
    fields = dict(VARIANTS[variant])
    options = fields.pop("stream_options", None)
    if path == "/v1/completions":
        if "tools" in fields:
            pytest.skip("completions call no tools")
        if fields.pop("top_logprobs", None):
            fields["logprobs"] = 3
    streamed = {**fields, "stream": True, **({"stream_options": options} if options else {})}
    fresh = ask(client, "rill", path, **fields)
    fresh_stream = ask(client, "rill", path, **streamed)
    first, second = (ask(client, "kept", path, **fields) for _ in range(2))
    stream = ask(client, "kept", path, **streamed)
    assert [each.headers["x-sluice-cache"] for each in (first, second, stream)][1:] == ["hit", "hit"]
    assert content_of(first) == content_of(second) == content_of(fresh)
    if "tools" in fields:
        assert fresh.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look_up"
        assert _tool_arguments(stream) == _tool_arguments(fresh_stream)
    elif fields.keys().isdisjoint(("n", "return_token_ids")):
        assert content_of(stream) == content_of(fresh_stream)
    else:
        assert _texts(stream) == _texts(fresh_stream)
        assert _token_ids(stream) == _token_ids(fresh_stream)


def _tool_arguments(answer: httpx.Response) -> str:
    deltas = [each["choices"][0]["delta"] for each in events_of(answer.content) if isinstance(each, dict)]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    return "".join(call.get("name") or "" for call in calls) + "".join(call.get("arguments") or "" for call in calls)


def _texts(answer: httpx.Response) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events_of(answer.content):
        for choice in event["choices"] if isinstance(event, dict) else ():
            piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + (piece or "")
    return texts


def _token_ids(answer: httpx.Response) -> list[int]:
    choices = [choice for event in events_of(answer.content) if isinstance(event, dict) for choice in event["choices"]]
    return [token_id for choice in choices for token_id in choice.get("token_ids") or ()]


def test_a_streamed_answer_is_kept_for_a_whole_one(client: httpx.Client) -> None:
    fields: dict[str, Any] = {"max_tokens": 11}
    streamed = ask(client, "kept", stream=True, **fields)
    whole = ask(client, "kept", **fields)
    assert (streamed.headers["x-sluice-cache"], whole.headers["x-sluice-cache"]) == ("miss", "hit")
    assert _texts(streamed)[0] == whole.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("fields", [{"temperature": 1}, {"temperature": 0.5, "seed": None}])
def test_what_chance_decides_is_not_kept(client: httpx.Client, fields: dict[str, Any]) -> None:
    for _ in range(2):
        assert "x-sluice-cache" not in ask(client, "kept", **fields).headers


CHANGES: list[dict[str, Any]] = [
    {"max_tokens": 23},
    {"stop": ["x"]},
    {"temperature": 1, "seed": 5},
    {"temperature": 1, "seed": 6},
    {"logit_bias": {"5": 1}},
    {"messages": [{"role": "user", "content": "What is a KV cache? "}]},
    {"messages": [{"role": "system", "content": "Be short."}, *QUESTION]},
    {"cache_salt": "mine"},
    {"tools": [TOOL], "tool_choice": "auto"},
    {"frequency_penalty": 0.5},
]


def test_what_changes_an_answer_changes_its_key(client: httpx.Client) -> None:
    ask(client, "kept", max_tokens=25)
    for each in CHANGES:
        assert ask(client, "kept", **{"max_tokens": 25, **each}).headers["x-sluice-cache"] == "miss", each
    assert ask(client, "kept", max_tokens=25, user="somebody").headers["x-sluice-cache"] == "hit"


def test_protocols_share_answers(client: httpx.Client) -> None:
    chat = ask(client, "kept", max_tokens=19)
    body = {"model": "kept", "input": "What is a KV cache?", "max_output_tokens": 19, "temperature": 0, "store": False}
    answer = client.post("/v1/responses", json=body)
    assert answer.headers["x-sluice-cache"] == "hit"
    assert answer.json()["output"][0]["content"][0]["text"] == chat.json()["choices"][0]["message"]["content"]


def test_vectors_are_kept(client: httpx.Client) -> None:
    def embed(**fields: Any) -> httpx.Response:
        return client.post("/v1/embeddings", json={"model": "vectors", "input": ["one", "two"], **fields})

    direct = client.post("/v1/embeddings", json={"model": "sentence_encoder", "input": ["one", "two"]}).json()
    answers = [embed() for _ in range(2)]
    assert [each.headers["x-sluice-cache"] for each in answers] == ["miss", "hit"]
    assert answers[0].json() == answers[1].json() == {**direct, "model": "vectors"}
    assert embed(encoding_format="base64").headers["x-sluice-cache"] == "hit"
    assert embed(input=["two", "one"]).headers["x-sluice-cache"] == "miss"
    assert embed(input_type="query").headers["x-sluice-cache"] == "miss"


def test_stock_clients_read_kept_answers(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none") as stock:
        question: Any = {"model": "kept", "messages": QUESTION, "max_tokens": 17, "temperature": 0}
        whole = [stock.chat.completions.create(**question) for _ in range(2)]
        assert whole[0].choices == whole[1].choices
        pieces = stock.chat.completions.create(**question, stream=True)
        text = "".join(each.choices[0].delta.content or "" for each in pieces)
        assert text == whole[0].choices[0].message.content
