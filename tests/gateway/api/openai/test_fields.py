"""Fields that leave the tokens alone: what is accepted, what the answer says of itself, and how its text is shown."""

from typing import Any

import openai
import pytest

from sluice.engine.config import EngineConfig, Speculation
from sluice.engine.types import GenerateRequest
from sluice.pipelines.text.model import TextModel
from tests.gateway.front.http.live import LiveServer, live_server
from tests.gateway.front.http.sse import events_of

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
MESSAGES: Any = [{"role": "user", "content": "What is a block table?"}]
CHAT: dict[str, Any] = {"model": "rill", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
TEXT: dict[str, Any] = {"model": "rill", "prompt": "What is a block table?", "max_tokens": 6, "temperature": 0}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture
def submitted(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> list[GenerateRequest]:
    """Requests that reach the engine."""
    requests: list[GenerateRequest] = []
    submit = live.engine.submit

    def record(request: GenerateRequest) -> Any:
        requests.append(request)
        return submit(request)

    monkeypatch.setattr(live.engine, "submit", record)
    return requests


def test_what_has_no_effect_is_named(live: LiveServer, strict_live: LiveServer) -> None:
    fields = CHAT | {"store": True, "verbosity": "low"}
    assert live.post(CHAT_PATH, fields).headers["x-sluice-warning"] == ("fields without effect here: store, verbosity")
    refused = strict_live.post(CHAT_PATH, fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "store")


@pytest.mark.parametrize(
    ("fields", "tier", "priority"),
    [
        ({}, None, 0),
        ({"service_tier": "auto"}, "default", 0),
        ({"service_tier": "priority"}, "priority", -1),
        ({"service_tier": "flex"}, "flex", 1),
        ({"service_tier": "flex", "priority": 0}, "flex", 0),
    ],
)
def test_a_service_tier_is_a_priority(
    live: LiveServer, submitted: list[GenerateRequest], fields: dict[str, Any], tier: str | None, priority: int
) -> None:
    assert live.post(CHAT_PATH, CHAT | fields).json().get("service_tier") == tier
    chunks = events_of(live.post(CHAT_PATH, CHAT | fields | STREAM).content)[:-1]
    assert {chunk.get("service_tier") for chunk in chunks} == {tier}
    assert {request.priority for request in submitted} == {priority}


def test_a_cache_key_chooses_the_version(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []
    find = live.server.plane.llm

    def record(name: str, key: str = "") -> TextModel:
        keys.append(key)
        return find(name, key)

    monkeypatch.setattr(live.server.plane, "llm", record)
    live.post(CHAT_PATH, CHAT | {"prompt_cache_key": "docs"})
    live.post(CHAT_PATH, CHAT | {"prompt_cache_key": "docs"}, headers={"x-sluice-sticky": "Ada"})
    assert keys == ["docs", "Ada"]


@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), (TEXT_PATH, TEXT)])
def test_usage_in_every_chunk(live: LiveServer, path: str, body: dict[str, Any]) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last, _ = events_of(live.post(path, body | options).content)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 6 and (len(set(counts)) > 3 or not live.is_paced)
    for chunk in (*chunks, last):
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"] > 0
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_token_ids_of_a_chat(live: LiveServer, client: openai.OpenAI) -> None:
    body = CHAT | {"n": 2, "extra_body": {"return_token_ids": True, "prompt_logprobs": 2}}
    whole = client.chat.completions.create(**body).model_dump()
    assert whole["usage"]["prompt_tokens"] == len(whole["prompt_token_ids"]) == len(whole["prompt_logprobs"])
    for choice in whole["choices"]:
        assert (
            live.model.tokenizer.decode(choice["token_ids"], skip_special_tokens=True) == choice["message"]["content"]
        )
        assert len(choice["token_ids"]) == 6
    first, *chunks = [chunk.model_dump() for chunk in client.chat.completions.create(**body, stream=True)]
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert_near(first["prompt_logprobs"], whole["prompt_logprobs"])
    assert not any("prompt_token_ids" in chunk for chunk in chunks)
    for choice in whole["choices"]:
        pieces = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
        assert [token_id for each in pieces for token_id in each["token_ids"]] == choice["token_ids"]


def assert_near(found: list[dict[str, Any] | None], expected: list[dict[str, Any] | None]) -> None:
    """Compare the log probabilities of a prompt. The choices may be computed in one step or in two, and products of
    another number of rows differ in the last bits on torch."""
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None, [*(ours or ())]) == (theirs is None, [*(theirs or ())])
        for token_id, entry in (ours or {}).items():
            other = (theirs or {})[token_id]
            assert entry | {"logprob": None} == other | {"logprob": None}
            assert entry["logprob"] == pytest.approx(other["logprob"], rel=1e-6)


def test_echo_alone_has_no_token_of_its_own(live: LiveServer) -> None:
    fields = {"prompt": [5, 6], "max_tokens": 0, "echo": True, "return_token_ids": True}
    [choice] = live.post(TEXT_PATH, TEXT | fields).json()["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6], [])


def test_log_probabilities_may_name_tokens_by_id(live: LiveServer) -> None:
    fields = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    [choice] = live.post(TEXT_PATH, TEXT | fields | {"logprobs": 2}).json()["choices"]
    names = [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    assert all(name in top for name, top in zip(names, choice["logprobs"]["top_logprobs"], strict=True))
    [choice] = live.post(CHAT_PATH, CHAT | fields | {"logprobs": True, "top_logprobs": 2}).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [each["token"] for each in content] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert "".join(bytes(each["bytes"]).decode() for each in content) == choice["message"]["content"]
    assert all(top["token"].startswith("token_id:") for each in content for top in each["top_logprobs"])


@pytest.mark.parametrize("stream", [False, True])
def test_what_ended_the_text_and_special_tokens_may_show(live: LiveServer, stream: bool) -> None:
    plain = live.post(TEXT_PATH, TEXT | {"return_token_ids": True}).json()["choices"][0]
    stop = plain["text"][4:7]
    fields: dict[str, Any] = {"stop": stop, "include_stop_str_in_output": True}
    assert text_of(live, fields, stream) == plain["text"][:7]
    [end] = ends = plain["token_ids"][2:3]
    fields = {"stop_token_ids": ends, "include_stop_str_in_output": True}
    up_to_end = plain["token_ids"][: plain["token_ids"].index(end) + 1]
    assert text_of(live, fields, stream) == live.model.tokenizer.decode(up_to_end, skip_special_tokens=True)
    end = live.model.tokenizer.eos_token_id
    assert end is not None
    fields = {"logit_bias": {str(end): 100}, "ignore_eos": True, "max_tokens": 2, "skip_special_tokens": False}
    assert text_of(live, fields, stream) == live.model.tokenizer.decode([end, end], skip_special_tokens=False)
    assert text_of(live, fields | {"skip_special_tokens": True}, stream) == ""


def text_of(live: LiveServer, fields: dict[str, Any], stream: bool) -> str:
    response = live.post(TEXT_PATH, TEXT | fields | {"stream": stream})
    chunks = events_of(response.content)[:-1] if stream else [response.json()]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@pytest.mark.stand_in
def test_a_prediction_changes_no_token_and_is_counted(live: LiveServer) -> None:
    plain = live.post(CHAT_PATH, CHAT | {"max_tokens": 40}).json()
    answer = plain["choices"][0]["message"]["content"]
    parts = [{"type": "text", "text": answer}]
    lookup = EngineConfig(model_path="none", speculation=Speculation.NGRAM)
    with live_server(engine_config=lookup) as drafting:
        for content in (answer, parts):
            body = CHAT | {"max_tokens": 40, "prediction": {"type": "content", "content": content}}
            found = drafting.post(CHAT_PATH, body).json()
            assert found["choices"] == plain["choices"]
            details = found["usage"]["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] > 10
            usage = events_of(drafting.post(CHAT_PATH, body | STREAM).content)[-2]["usage"]
            assert usage["completion_tokens_details"] == details
    ignored = live.post(CHAT_PATH, body).json()
    assert ignored["choices"] == plain["choices"]
    assert ignored["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0


def test_whole_numbers_may_have_a_fraction_of_zero(live: LiveServer) -> None:
    sent = {"max_tokens": 6.0, "n": 1.0, "seed": 5.0, "top_k": 4.0, "temperature": 1}
    answers = [live.post(CHAT_PATH, CHAT | fields).json() for fields in (sent, {k: int(v) for k, v in sent.items()})]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["completion_tokens"] == 6


def test_token_ids_of_texts(client: openai.OpenAI) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    extra = {"return_token_ids": True, "prompt_logprobs": 1}
    body = {"model": "rill", "prompt": prompts, "max_tokens": 4, "temperature": 0, "extra_body": extra}
    whole = client.completions.create(**body).model_dump()["choices"]  # type: ignore[call-overload]
    assert [choice["prompt_token_ids"] for choice in whole] == prompts
    assert [[len(choice["token_ids"]), len(choice["prompt_logprobs"])] for choice in whole] == [[4, 3], [4, 2]]
    streamed = client.completions.create(**body, stream=True)  # type: ignore[call-overload]
    chunks = [chunk.model_dump()["choices"][0] for chunk in streamed]
    for choice in whole:
        pieces = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        for name in ("prompt_token_ids", "prompt_logprobs"):
            assert [each[name] for each in pieces if name in each] == [choice[name]]
        assert [token_id for each in pieces for token_id in each["token_ids"]] == choice["token_ids"]
