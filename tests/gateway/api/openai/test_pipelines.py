"""Ensembles with a language model at their end, in OpenAI's API, with the stock client."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.telemetry.metrics import GatewayMetrics
from sluice.pipelines.llm.model import LlmModel
from sluice.pipelines.text.citations import Source, cite, encode_source, to_json_objects
from sluice.pipelines.text.tensor_model import encode_messages
from sluice.pipelines.text.types import OWNER_KEY_HEADER, ChatMessage, Conversation
from sluice.serving.backends.ensemble.backend import EnsembleModel
from sluice.serving.tensors.tensor import Array
from tests.gateway.front.http.live import LiveServer, live_server
from tests.serving.backends.builders import Lookup
from tests.serving.backends.ensemble.parts import FunctionModel, config_of, load
from tests.waiting import PATIENCE_S

SOURCE = Source(id=1, document="guide", start=0, end=24, score=0.5, text="Tensors have a shape each")
QUESTION = "What is a tensor?"
CHAT: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": QUESTION},
]
LOOK = """
    name: "look" backend: "test" max_batch_size: 4
    input { name: "query" data_type: TYPE_STRING dims: 1 }
    output { name: "sources" data_type: TYPE_STRING dims: -1 }
    output { name: "messages" data_type: TYPE_STRING dims: 1 }
"""
PIPELINE = """
    name: "pipeline" platform: "ensemble" max_batch_size: 4
    input { name: "query" data_type: TYPE_STRING dims: 1 }
    output { name: "response" data_type: TYPE_STRING dims: 1 }
    output { name: "sources" data_type: TYPE_STRING dims: -1 }
    output { name: "finish_reason" data_type: TYPE_STRING dims: 1 }
    output { name: "num_input_tokens" data_type: TYPE_INT32 dims: 1 }
    output { name: "num_output_tokens" data_type: TYPE_INT32 dims: 1 }
    output { name: "num_cached_tokens" data_type: TYPE_INT32 dims: 1 }
    parameters { key: "step_parameters.look" value { string_value: "collection, top_k, filter, mode, collection_key" } }
    ensemble_scheduling {
      step {
        model_name: "look" model_version: -1 input_map { key: "query" value: "query" }
        output_map { key: "sources" value: "sources" } output_map { key: "messages" value: "messages" }
      }
      step {
        model_name: "rill" model_version: -1 input_map { key: "messages" value: "messages" }
        output_map { key: "text_output" value: "response" }
        output_map { key: "finish_reason" value: "finish_reason" }
        output_map { key: "num_input_tokens" value: "num_input_tokens" }
        output_map { key: "num_output_tokens" value: "num_output_tokens" }
        output_map { key: "num_cached_tokens" value: "num_cached_tokens" }
      }
    }
"""
SAYS = """
    name: "says" backend: "test"
    input { name: "text_input" data_type: TYPE_STRING dims: 1 }
    output { name: "text_output" data_type: TYPE_STRING dims: 1 }
"""


def conversation(query: str) -> tuple[ChatMessage, ...]:
    return (ChatMessage("user", f"{SOURCE.text}. {query}"),)


def _look(query: Array) -> dict[str, Array]:
    asked = query.ravel()[0].decode()
    if asked == "empty":
        raise SluiceError(ErrorCode.INVALID, "input 'query' is empty", param="query")
    if asked == "too many":
        raise SluiceError(ErrorCode.INVALID, "parameter 'top_k' must be an integer from 1 to 100", param="top_k")
    if asked == "broken":
        raise SluiceError(ErrorCode.UNAVAILABLE, "the store of documents cannot be reached")
    messages = encode_messages(conversation(asked))
    return {
        "sources": np.array([[encode_source(SOURCE), b""]], object),
        "messages": np.array([[messages]], object),
    }


class Pipelines:
    """A server with a pipeline, and the pipeline's retrieving step."""

    def __init__(self, live: LiveServer, look: FunctionModel) -> None:
        self.live = live
        self.look = look
        self.client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)

    def expected(self, num_tokens: int, query: str = QUESTION) -> str:
        prompt = self.live.run(self.live.model.prepare(Conversation(conversation(query))))
        return self.live.echo(prompt, num_tokens)

    @property
    def asked(self) -> dict[str, Any]:
        """Parameters of the last request to the retrieving step."""
        return dict(self.look.requests[-1].parameters)


@contextmanager
def serving() -> Iterator[Pipelines]:
    with live_server() as live:
        look = FunctionModel(config_of(LOOK), _look)
        says = FunctionModel(config_of(SAYS), lambda text_input: {"text_output": text_input})

        async def add() -> None:
            rill = live.server.plane.repository.find("rill")
            assert isinstance(rill, LlmModel)
            pipeline = await load(config_of(PIPELINE), Lookup(look, rill))
            assert isinstance(pipeline, EnsembleModel)
            for model in (look, pipeline, says):
                live.server.plane.repository.add(model)

        live.run(add())
        pipelines = Pipelines(live, look)
        with pipelines.client:
            yield pipelines


@pytest.fixture(scope="module")
def it() -> Iterator[Pipelines]:
    with serving() as pipelines:
        yield pipelines


def test_the_list_has_everything_that_can_be_asked(it: Pipelines) -> None:
    listed = {model.id: model for model in it.client.models.list().data}
    assert list(listed) == ["rill", "says", "pipeline"], "language models first, then pipelines, each by name"
    assert "max_model_len" not in it.live.get("/v1/models/pipeline").json()
    assert it.client.models.retrieve("pipeline").created == listed["pipeline"].created
    with pytest.raises(openai.NotFoundError, match=r"model 'look' not found; available: .*pipeline"):
        it.client.models.retrieve("look")


def test_a_whole_answer_has_sources_and_citations(it: Pipelines) -> None:
    answer = it.client.chat.completions.create(model="pipeline", messages=CHAT, max_tokens=8)
    text = it.expected(8)
    body = answer.model_dump()
    assert answer.choices[0].message.content == text
    assert answer.choices[0].finish_reason == "length"
    assert body["sources"] == to_json_objects([SOURCE])
    assert body["choices"][0]["citations"] == to_json_objects(cite(text, [SOURCE]))
    prompt = it.live.run(it.live.model.prepare(Conversation(conversation(QUESTION))))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 8)
    assert json.loads(it.asked["history"]) == CHAT[:-1]


def test_a_stream_tells_its_sources_before_the_first_text(it: Pipelines) -> None:
    chunks = list(
        it.client.chat.completions.create(
            model="pipeline",
            messages=CHAT,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = it.expected(8)
    *pieces, usage = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == text
    with_sources = [index for index, chunk in enumerate(pieces) if "sources" in chunk.model_dump()]
    first_text = next(index for index, chunk in enumerate(pieces) if chunk.choices[0].delta.content)
    assert len(with_sources) == 1
    assert with_sources[0] < first_text
    assert pieces[with_sources[0]].model_dump()["sources"] == to_json_objects([SOURCE])
    last = pieces[-1].choices[0]
    assert last.finish_reason == "length"
    assert last.model_dump()["citations"] == to_json_objects(cite(text, [SOURCE]))
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 8


def test_the_first_chunks_go_out_before_the_first_token(it: Pipelines) -> None:
    it.live.runner.hold_after(0)
    try:
        with it.client.chat.completions.create(model="pipeline", messages=CHAT, max_tokens=4, stream=True) as stream:
            opening, sources = next(stream), next(stream)
            assert opening.choices[0].delta.role == "assistant"
            assert sources.model_dump()["sources"] == to_json_objects([SOURCE])
            it.live.runner.release()
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == it.expected(4)
    finally:
        it.live.runner.release()


def test_a_client_that_leaves_cancels_every_step(it: Pipelines) -> None:
    it.live.runner.hold_after(4)
    try:
        with it.client.chat.completions.create(
            model="pipeline",
            messages=CHAT,
            max_tokens=500,
            stream=True,
        ) as stream:
            next(stream)
        it.live.runner.release()
        it.live.wait_idle()
    finally:
        it.live.runner.release()
    assert it.live.server.plane.num_open == 0
    assert it.live.blocks_used_after_step() <= 1


def test_completions_ask_with_their_prompt(it: Pipelines) -> None:
    answer = it.client.completions.create(model="pipeline", prompt=["one?", "two?"], max_tokens=4)
    assert [choice.text for choice in answer.choices] == [it.expected(4, "one?"), it.expected(4, "two?")]
    assert [choice["sources"] for choice in answer.model_dump()["choices"]] == [to_json_objects([SOURCE])] * 2
    single = it.client.completions.create(model="pipeline", prompt="one?", max_tokens=4)
    assert single.model_dump()["sources"] == to_json_objects([SOURCE])
    pieces = it.client.completions.create(model="pipeline", prompt="one?", max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == it.expected(4, "one?")


def test_a_model_that_counts_nothing_has_no_usage(it: Pipelines) -> None:
    answer = it.client.chat.completions.create(model="says", messages=CHAT)
    assert answer.choices[0].message.content == QUESTION
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is None
    assert "sources" not in answer.model_dump()


RAG = {"collection": "manual", "top_k": 3, "mode": "bm25", "filter": {"year": {"gte": 2025}}}


def test_the_field_rag_and_the_owner_s_key_reach_the_step_that_looks_things_up(it: Pipelines) -> None:
    it.client.chat.completions.create(
        model="pipeline",
        messages=CHAT[-1:],
        max_tokens=2,
        extra_body={"rag": RAG, "cache_salt": "ada"},
        extra_headers={OWNER_KEY_HEADER: "secret"},
    )
    asked = it.asked
    assert json.loads(asked.pop("filter")) == RAG["filter"]
    assert asked.items() >= {"collection": "manual", "top_k": 3, "mode": "bm25", "collection_key": "secret"}.items()
    assert asked["cache_salt"] == "ada"
    assert "history" not in asked


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": QUESTION, "max_tokens": 2}),
        ("/v1/messages", {"messages": CHAT[-1:], "max_tokens": 2}),
        ("/v1/responses", {"input": QUESTION, "max_output_tokens": 2}),
        ("/api/chat", {"messages": CHAT[-1:], "options": {"num_predict": 2}, "stream": False}),
    ],
)
def test_the_owner_s_key_reaches_it_from_every_protocol(it: Pipelines, path: str, body: dict[str, Any]) -> None:
    response = it.live.post(path, {"model": "pipeline", **body}, headers={OWNER_KEY_HEADER: path})
    assert response.status_code == 200, response.text
    assert it.asked["collection_key"] == path


@pytest.mark.parametrize(
    ("model", "body", "param", "words"),
    [
        ("rill", {"rag": RAG}, "rag", "model 'rill' is a language model alone"),
        ("says", {"rag": RAG}, "rag", "model 'says' is a language model alone"),
        ("pipeline", {"rag": {"mode": "best"}}, "rag.mode", "'vector', 'bm25' or 'hybrid'"),
        ("pipeline", {"rag": {"filter": {"year": {"near": 5}}}}, "rag.filter", "near"),
        ("pipeline", {"logprobs": True}, "logprobs", "logprobs is not passed on by model 'pipeline'"),
        ("pipeline", {"return_token_ids": True}, "return_token_ids", "return_token_ids is not passed on"),
        ("pipeline", {"skip_special_tokens": False}, "skip_special_tokens", "is not passed on by model 'pipeline'"),
        ("pipeline", {"truncate_prompt_tokens": 9}, "truncate_prompt_tokens", "is not passed on by model 'pipeline'"),
        ("pipeline", {"allowed_token_ids": [9]}, "allowed_token_ids", "is not passed on by model 'pipeline'"),
        ("pipeline", {"add_generation_prompt": False}, "add_generation_prompt", "is not passed on by model"),
        ("pipeline", {"continue_final_message": True}, "continue_final_message", "is not passed on by model"),
        ("pipeline", {"documents": [{"text": "x"}]}, "documents", "documents is not passed on by model 'pipeline'"),
        ("pipeline", {"response_format": {"type": "structural_tag"}}, "response_format", "is not passed on"),
        ("pipeline", {"logit_bias": {"1": 5}}, "logit_bias", "logit_bias is not passed on by model 'pipeline'"),
        ("pipeline", {"guided_choice": ["a"]}, "guided_choice", "is not passed on by model 'pipeline'"),
        ("pipeline", {"messages": CHAT[:-1]}, "messages", "so the last message must be the user's"),
    ],
)
def test_refuses_by_the_client_s_name(it: Pipelines, model: str, body: dict[str, Any], param: str, words: str) -> None:
    answer = it.live.post("/v1/chat/completions", {"model": model, "messages": CHAT} | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"]


def test_an_error_of_the_step_that_looks_things_up_has_the_client_s_name(it: Pipelines) -> None:
    messages = [{"role": "user", "content": "too many"}]
    answer = it.live.post("/v1/chat/completions", {"model": "pipeline", "messages": messages, "rag": {"top_k": 500}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "rag.top_k")


def test_sampling_is_checked_before_any_step_runs(it: Pipelines) -> None:
    num_asked = len(it.look.requests)
    refused = it.live.post("/v1/chat/completions", {"model": "pipeline", "messages": CHAT, "temperature": 5})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("temperature must be between 0 and 2, got 5.0")
    assert len(it.look.requests) == num_asked


def test_an_error_about_the_question_names_what_the_client_sent(it: Pipelines) -> None:
    asked = {"messages": [{"role": "user", "content": "empty"}]}
    chat = it.live.post("/v1/chat/completions", {"model": "pipeline"} | asked)
    assert (chat.status_code, chat.json()["error"]["param"]) == (400, "messages")
    completion = it.live.post("/v1/completions", {"model": "pipeline", "prompt": "empty"})
    assert (completion.status_code, completion.json()["error"]["param"]) == (400, "prompt")


def test_what_the_language_model_refuses_comes_after_the_sources_in_a_stream(it: Pipelines) -> None:
    body = {"model": "pipeline", "messages": CHAT, "max_tokens": 10**6}
    refused = it.live.post("/v1/chat/completions", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    with pytest.raises(
        openai.APIError, match=r"in ensemble 'pipeline', the prompt has .* so max_tokens may be at most"
    ):
        list(it.client.chat.completions.create(**body, stream=True))  # type: ignore[call-overload]


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_is_down_is_503_with_its_name_and_the_language_model_keeps_serving(
    it: Pipelines, stream: bool
) -> None:
    body = {"model": "pipeline", "messages": [{"role": "user", "content": "broken"}], "stream": stream}
    answer = it.live.post("/v1/chat/completions", body)
    assert answer.status_code == 503
    expected = "in ensemble 'pipeline', model 'look': the store of documents cannot be reached"
    assert answer.json()["error"]["message"] == expected
    body = {"model": "rill", "messages": CHAT, "max_tokens": 2}
    assert it.live.post("/v1/chat/completions", body).status_code == 200


def test_each_request_is_counted_once_as_the_language_model_s(it: Pipelines) -> None:
    def counts() -> dict[str, float]:
        metrics: GatewayMetrics = it.live.server.metrics
        labels = {"protocol": "openai_chat", "outcome": "ok"}
        values = {
            name: metrics.registry.get_sample_value("sluice_requests_total", {"model": name, **labels})
            for name in ("rill", "pipeline")
        }
        return {name: value or 0.0 for name, value in values.items()}

    before = counts()
    it.client.chat.completions.create(model="pipeline", messages=CHAT, max_tokens=2)
    assert counts() == {"rill": before["rill"] + 1, "pipeline": 0.0}


def test_v2_answers_in_one_response_unless_it_is_asked_to_stream(it: Pipelines) -> None:
    tensor = {"name": "query", "datatype": "BYTES", "shape": [1, 1], "data": ["one?"]}
    body = {"inputs": [tensor], "parameters": {"max_tokens": 4}}
    answer = it.live.post("/v2/models/pipeline/infer", body).json()
    outputs = {each["name"]: each["data"] for each in answer["outputs"]}
    assert outputs["response"] == [it.expected(4, "one?")]
    assert json.loads(outputs["sources"][0]) == to_json_objects([SOURCE])[0]
    body["parameters"] = {"max_tokens": 4, "stream": True}
    assert "decoupled" in it.live.post("/v2/models/pipeline/infer", body).json()["error"]


def test_generate_and_generate_stream(it: Pipelines) -> None:
    body = {"query": "one?", "max_tokens": 4}
    answer = it.live.post("/v2/models/pipeline/generate", body).json()
    assert answer["response"] == it.expected(4, "one?")
    lines = it.live.post("/v2/models/pipeline/generate_stream", body).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "sources" in events[0]
    assert "response" not in events[0]
    assert "".join(event["response"] for event in events[1:]) == it.expected(4, "one?")
    assert events[-1]["finish_reason"] == "length"
