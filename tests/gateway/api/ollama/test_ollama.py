"""Ollama's API as its own client sees it, and to the byte as HTTP carries it."""

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from sluice.gateway.api.ollama.schemas import OllamaChatRequest
from sluice.gateway.front.http.parsing import parse_body
from sluice.pipelines.text.types import ChatMessage, Conversation, TemplateOptions
from tests.gateway.api.test_translators import OF_OLLAMA, translated
from tests.gateway.front.http.live import MODEL, LiveServer
from tests.waiting import PATIENCE_S

CHAT, GENERATE = "/api/chat", "/api/generate"
SYSTEM, QUESTION = "Be brief.", "What is a block table?"
TURNS = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 24, "num_ctx": 8192}
BODY: dict[str, Any] = {"model": MODEL, "messages": TURNS, "options": GREEDY}
ASKED: dict[str, Any] = {"model": MODEL, "system": SYSTEM, "prompt": QUESTION, "options": GREEDY}


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[ollama.Client]:
    with ollama.Client(live.url, timeout=PATIENCE_S) as stock:
        yield stock


def prompt_ids(live: LiveServer, *turns: tuple[str, str], begins_answer: bool = True) -> list[int]:
    messages = tuple(ChatMessage(*turn) for turn in turns)
    return live.run(live.model.prepare(Conversation(messages, TemplateOptions(adds_generation_prompt=begins_answer))))


def asked_ids(live: LiveServer) -> list[int]:
    return prompt_ids(live, ("system", SYSTEM), ("user", QUESTION))


def expected(live: LiveServer) -> str:
    return live.echo(asked_ids(live), 24)


def check_end(live: LiveServer, end: ollama.ChatResponse | ollama.GenerateResponse) -> None:
    assert (end.model, end.done, end.done_reason) == (MODEL, True, "length")
    assert (end.prompt_eval_count, end.eval_count, end.load_duration) == (len(asked_ids(live)), 24, 0)
    assert end.total_duration and end.prompt_eval_duration and end.eval_duration
    assert end.prompt_eval_duration + end.eval_duration <= end.total_duration


def test_chat_whole_and_streamed_are_the_same(live: LiveServer, client: ollama.Client) -> None:
    whole = client.chat(MODEL, TURNS, options=GREEDY)
    *pieces, end = client.chat(f"{MODEL}", TURNS, options=GREEDY, stream=True)
    assert len(pieces) > 10 or not live.is_paced, "the tokens did not come one by one"
    assert whole.message.content == "".join(each.message.content or "" for each in pieces) == expected(live)
    assert {each.message.role for each in (*pieces, end)} == {"assistant"}
    assert not any(each.done for each in pieces)
    check_end(live, whole)
    check_end(live, end)


def test_generate_whole_and_streamed_are_the_same(live: LiveServer, client: ollama.Client) -> None:
    whole = client.generate(MODEL, QUESTION, system=SYSTEM, options=GREEDY)
    *pieces, end = client.generate(MODEL, QUESTION, system=SYSTEM, options=GREEDY, stream=True)
    assert whole.response == "".join(each.response or "" for each in pieces) == expected(live)
    assert whole.context == end.context
    check_end(live, whole)
    check_end(live, end)


def test_a_context_continues_the_conversation(live: LiveServer, client: ollama.Client) -> None:
    first = client.generate(MODEL, QUESTION, system=SYSTEM, options=GREEDY)
    turns = (("system", SYSTEM), ("user", QUESTION), ("assistant", expected(live)))
    assert first.context == prompt_ids(live, *turns, begins_answer=False)
    second = client.generate(MODEL, "And then?", context=first.context, options=GREEDY)
    ids = [*first.context, *prompt_ids(live, ("user", "And then?"))]
    assert second.response == live.echo(ids, 24)
    assert second.context is not None and list(second.context[: len(ids)]) == ids


def test_a_raw_prompt_is_used_as_it_is_and_has_no_context(live: LiveServer, client: ollama.Client) -> None:
    answer = client.generate(MODEL, QUESTION, raw=True, options=GREEDY)
    assert answer.response == live.echo(live.run(live.model.prepare(QUESTION)), 24)
    assert answer.context is None


def test_the_answer_goes_on_with_a_last_turn_of_the_assistant(live: LiveServer, client: ollama.Client) -> None:
    turns = (ChatMessage("user", QUESTION), ChatMessage("assistant", "It is"))
    options = TemplateOptions(adds_generation_prompt=False, continues_final_message=True)
    ids = live.run(live.model.prepare(Conversation(turns, options)))
    answer = client.chat(MODEL, [{"role": each.role, "content": each.content} for each in turns], options=GREEDY)
    assert answer.message.content == live.echo(ids, 24)


def test_lines_are_streamed_by_default(live: LiveServer) -> None:
    response = live.post(CHAT, BODY)
    assert response.headers["content-type"] == "application/x-ndjson"
    *pieces, end = map(json.loads, response.text.splitlines())
    assert all(each.keys() == {"model", "created_at", "message", "done"} for each in pieces)
    assert end["message"] == {"role": "assistant", "content": ""}


def test_the_tag_latest_is_the_model(client: ollama.Client) -> None:
    assert client.generate(f"{MODEL}:latest", QUESTION, options=GREEDY).model == f"{MODEL}:latest"


@pytest.mark.parametrize("streams", [False, True])
def test_logprobs(live: LiveServer, streams: bool) -> None:
    response = live.post(CHAT, {**BODY, "logprobs": True, "top_logprobs": 2, "stream": streams})
    found = [entry for line in response.text.splitlines() for entry in json.loads(line).get("logprobs", ())]
    assert "".join(entry["token"] for entry in found) == expected(live)
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in found)


def test_options_are_the_engine_s_fields() -> None:
    options = {"repeat_penalty": 1.2, "top_k": -1, "seed": -1, "num_predict": -1, "min_p": 0.1, "num_thread": 4}
    sampling = sampled(**options, repeat_last_n=-1, mirostat=0)
    assert sampling == {"repetition_penalty": 1.2, "top_k": 0, "min_p": 0.1}


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        (CHAT, {"messages": [{"role": "none", "content": ""}]}, "messages[0].role must be 'system', 'user'"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "", "images": ["aGk="]}]},
            "messages[0].images[0] is not supported: model 'rill' takes text alone",
        ),
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function is required"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "has no tool calls in a known format"),
        (CHAT, {"think": True}, "think must be false, got true"),
        (CHAT, {"format": "xml"}, "format must be '' or 'json'"),
        (CHAT, {"format": 1}, "format must be 'json' or a JSON schema"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs needs logprobs"),
        (CHAT, {"options": {"mirostat": 1}}, "options.mirostat is not supported, got 1; leave it out or send 0"),
        (GENERATE, {"images": ["aGk="]}, "images[0] is not supported"),
        (GENERATE, {"template": "{{ .Prompt }}"}, "template is not supported"),
        (GENERATE, {"suffix": "}"}, "suffix must be left out"),
        (GENERATE, {"context": [10**6]}, "1000000"),
        (GENERATE, {"context": ["a"]}, "context"),
        (CHAT, {"tools": [{"type": "other", "function": {"name": "f"}}]}, "tools[0].type must be 'function'"),
        (GENERATE, {"options": []}, "options must be"),
    ],
)
def test_bad_input_is_refused_in_ollamas_shape(
    live: LiveServer, path: str, change: dict[str, Any], message: str
) -> None:
    response = live.post(path, {**(BODY if path == CHAT else ASKED), **change})
    assert response.status_code == 400
    [(key, text)] = response.json().items()
    assert key == "error" and message in text


def test_nothing_to_answer_says_that_the_model_is_loaded(client: ollama.Client) -> None:
    for answer in (client.generate(MODEL), client.chat(MODEL)):
        assert (answer.done, answer.done_reason) == (True, "load")


def test_models_are_listed_and_described(live: LiveServer, client: ollama.Client) -> None:
    [model] = client.list().models
    assert model.model == f"{MODEL}:latest"
    [running] = client.ps().models
    assert (running.digest, running.context_length) == (model.digest, live.model.max_model_len)
    shown = client.show(f"{MODEL}:latest")
    assert shown.capabilities == ["completion"]
    assert shown.modelinfo is not None
    family = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{family}.context_length"] == live.model.max_model_len
    assert live.get("/api/version").json()["version"]


def test_what_would_change_the_models_is_refused_with_what_to_do(live: LiveServer, client: ollama.Client) -> None:
    changes: list[Any] = [
        lambda: client.pull(MODEL),
        lambda: client.push(MODEL),
        lambda: client.create("other", from_=MODEL),
        lambda: client.copy(MODEL, "other"),
        lambda: client.delete(MODEL),
    ]
    for change in changes:
        with pytest.raises(ollama.ResponseError, match=r"this server .* no models: ") as caught:
            change()
        assert caught.value.status_code == 501
    assert live.request("HEAD", "/api/blobs/sha256:0").status_code == 501


def test_clients_raise_their_own_errors(live: LiveServer, client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="'nobody' not found") as caught:
        client.chat("nobody", TURNS)
    assert caught.value.status_code == 404
    assert live.get(CHAT).json() == {"error": f"method GET is not allowed for {CHAT}"}
    with pytest.raises(ollama.ResponseError, match="has no embeddings"):
        client.embed(MODEL, "text")


def sampled(**options: Any) -> dict[str, Any]:
    return dict(translated(*OF_OLLAMA, {"model": "m", "options": options})[0].sampling)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"repeat_last_n": 64}, {}),
        ({"repeat_last_n": 0, "repeat_penalty": 1.1, "presence_penalty": 1, "frequency_penalty": 1}, {}),
        ({"repeat_last_n": -1, "repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"top_p": 0}, {"top_k": 1}),
        ({"top_p": 0, "top_k": 40}, {"top_k": 1}),
        ({"top_p": 1.5, "min_p": 2, "temperature": -1}, {"top_p": 1.0, "min_p": 1.0, "temperature": 0.0}),
        ({"temperature": 3.5}, {"temperature": 2.0}),
    ],
)
def test_options_out_of_range_have_the_nearest_value(options: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sampled(**options) == expected


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"repeat_last_n": 64, "repeat_penalty": 1.0}, ""),
        ({"repeat_last_n": 0, "repeat_penalty": 1.1}, ""),
        ({"repeat_last_n": 64, "repeat_penalty": 1.1}, "options.repeat_last_n"),
        ({"temperature": 3}, "options.temperature"),
    ],
)
def test_a_value_that_does_not_count_is_named(live: LiveServer, options: dict[str, Any], named: str) -> None:
    response = live.post(CHAT, {**BODY, "stream": False, "options": {"num_predict": 2, **options}})
    assert response.status_code == 200
    assert response.headers.get("x-sluice-warning", "").removeprefix("fields without effect here: ") == named


@pytest.mark.parametrize("num_predict", [10**6, 0, -2])
def test_an_answer_ends_where_the_context_does(live: LiveServer, num_predict: int) -> None:
    options = {"num_predict": num_predict, "temperature": 0}
    answer = live.post(CHAT, {**BODY, "stream": False, "options": options}).json()
    assert answer["done_reason"] == "length"
    assert answer["prompt_eval_count"] + answer["eval_count"] >= live.model.max_model_len


@pytest.mark.parametrize("keep_alive", [0, 0.0, "0", "0s", "0h0m0s", "0.0ms"])
@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_a_wish_to_unload_is_answered_as_ollama_does(live: LiveServer, path: str, keep_alive: Any) -> None:
    response = live.post(path, {"model": MODEL, "keep_alive": keep_alive})
    assert (response.status_code, response.json()["done_reason"]) == (200, "unload")
    assert response.headers["x-sluice-warning"] == "fields without effect here: keep_alive"


@pytest.mark.parametrize("keep_alive", [None, 1, -1, "5m", "0h1s", False])
def test_other_times_to_stay_load_the_model(live: LiveServer, keep_alive: Any) -> None:
    assert live.post(CHAT, {"model": MODEL, "keep_alive": keep_alive}).json()["done_reason"] == "load"


def test_an_empty_context_is_none(live: LiveServer) -> None:
    asked = {**ASKED, "stream": False}
    with_one, without = (live.post(GENERATE, each).json() for each in ({**asked, "context": []}, asked))
    assert with_one["context"] == without["context"] and with_one["response"] == without["response"]


def test_a_beginning_may_end_with_white_space(live: LiveServer, client: ollama.Client) -> None:
    begun = "A block table is \n"
    turns = [*TURNS, {"role": "assistant", "content": begun}]
    told = tuple(ChatMessage(each["role"], each["content"]) for each in turns)
    options = TemplateOptions(adds_generation_prompt=False, continues_final_message=True)
    sent = live.run(live.model.prepare(Conversation(told, options)))
    assert live.model.tokenizer.decode(sent, skip_special_tokens=True).endswith(begun)
    answer = client.chat(MODEL, turns, options={**GREEDY, "num_predict": 4})
    assert (answer.prompt_eval_count, answer.message.content) == (len(sent), live.echo(sent, 4))


def test_a_tool_without_a_type_is_a_function() -> None:
    body = {"model": "m", "tools": [{"function": {"name": "f"}}]}
    fields, _ = parse_body(OllamaChatRequest, json.dumps(body).encode(), True)
    assert fields.tools is not None and fields.tools[0].model_dump(exclude_none=True)["type"] == "function"
