"""Responses as OpenAI's own client sees them, and to the byte as HTTP carries them."""

import json
from functools import partial
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from sluice.engine.types import FinishReason
from sluice.pipelines.text.stream import Generate, give
from sluice.pipelines.text.types import ChatMessage, Conversation, TextEvent
from tests.gateway.front.http.live import MODEL, LiveServer

PATH = "/v1/responses"
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
RULES, QUESTION = "Be brief.", "What is a block table?"
SENT: dict[str, Any] = {
    "model": MODEL,
    "instructions": RULES,
    "input": QUESTION,
    "max_output_tokens": 24,
    "temperature": 0,
}


def prompt_ids(live: LiveServer, *turns: tuple[str, str]) -> list[int]:
    return live.run(live.model.prepare(Conversation(tuple(ChatMessage(*turn) for turn in turns))))


def expected(live: LiveServer) -> str:
    return live.echo(prompt_ids(live, ("system", RULES), ("user", QUESTION)), 24)


def events_of(body: str) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, data) of every event, each of which is two lines."""
    pairs = [frame.split("\n") for frame in body.removesuffix("\n\n").split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]


def test_whole(live: LiveServer, client: openai.OpenAI) -> None:
    answer = client.responses.create(**SENT, metadata={"job": "7"}, user="me", service_tier="flex")
    assert answer.output_text == expected(live)
    assert (answer.status, answer.service_tier, answer.metadata) == ("incomplete", "flex", {"job": "7"})
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None and answer.usage.output_tokens == 24
    assert answer.usage.input_tokens == len(prompt_ids(live, ("system", RULES), ("user", QUESTION)))
    assert client.responses.retrieve(answer.id) == answer


def test_streamed_is_what_is_not_streamed(live: LiveServer, client: openai.OpenAI) -> None:
    end = expected(live)[-3:]
    settings: Any = {**SENT, "extra_body": {"stop": end}}
    with client.responses.stream(**settings) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert len(deltas) > 10 or not live.is_paced, "the tokens did not come one by one"
    assert "".join(deltas) == final.output_text == client.responses.create(**settings).output_text
    assert final.status == "completed" and expected(live).startswith(final.output_text)


def test_events_have_openais_names_and_order(live: LiveServer) -> None:
    events = events_of(live.post(PATH, {**SENT, "stream": True}).text)
    names = [name for name, _ in events]
    assert [data["type"] for _, data in events] == names
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(names[4:-4]) == {"response.output_text.delta"}
    assert names[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    last = events[-1][1]["response"]
    assert last["output"] == [events[-2][1]["item"]]
    assert {data["item_id"] for _, data in events[3:-2]} == {last["output"][0]["id"]}


class Answer(BaseModel):
    """The form of an answer."""

    blocks: int


def answer_in_one(*_: Any) -> Generate:
    return partial(give, event=TextEvent('{"blocks": 3}', 1, 1, 1, FinishReason.STOP))


def test_parse(live: LiveServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.server.plane, "generate", answer_in_one)
    parsed = client.responses.parse(**SENT, text_format=Answer)
    assert parsed.output_parsed == Answer(blocks=3)


def test_items_are_turns(live: LiveServer, client: openai.OpenAI) -> None:
    items: Any = [
        {"role": "user", "content": "Hello"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "Hi"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "How "}, {"type": "input_text", "text": "so?"}]},
    ]
    answer = client.responses.create(model=MODEL, input=items, max_output_tokens=8, temperature=0)
    ids = prompt_ids(live, ("user", "Hello"), ("assistant", "Hi"), ("user", "How so?"))
    assert answer.output_text == live.echo(ids, 8)
    assert client.responses.input_tokens.count(model=MODEL, input=items).input_tokens == len(ids)
    listed = list(client.responses.input_items.list(answer.id, order="asc", limit=3))
    assert [(item.type, item.id) for item in listed][1:3] == [("reasoning", "rs_1"), ("message", "msg_1")]
    assert len(listed) == 4, "the client did not follow the pages"


def test_what_is_too_long_loses_its_oldest_turns(live: LiveServer, client: openai.OpenAI) -> None:
    turns: Any = [{"role": "user", "content": f"turn {number} " * 20} for number in range(40)]
    rules = {"role": "developer", "content": RULES}
    sent: Any = {"model": MODEL, "max_output_tokens": 8, "temperature": 0, "input": [rules, *turns]}
    with pytest.raises(openai.BadRequestError, match="context"):
        client.responses.create(**sent)
    answer = client.responses.create(**sent, truncation="auto")
    assert answer.usage is not None
    limit = live.model.max_model_len
    kept = next(n for n in range(40) if len(_ids_of(live, [rules, *turns[n:]])) + 8 <= limit)
    assert answer.usage.input_tokens == len(_ids_of(live, [rules, *turns[kept:]]))


def _ids_of(live: LiveServer, turns: list[dict[str, str]]) -> list[int]:
    return prompt_ids(live, *[(turn["role"], turn["content"]) for turn in turns])


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"input": None}, "input", "input must not be empty"),
        ({"input": 3}, "input", "input must be a string or an array of items, got 3"),
        ({"input": [{"type": 5}]}, "input[0]", "must be an object with a type, such as message"),
        ({"input": [{"type": "x_call", "size": 10**30}]}, "input[0]", "cannot be repeated in the answer"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "must be 'system', 'developer'"),
        (
            {"input": [{"role": "user", "content": [IMAGE]}]},
            "input[0].content[0].image_url",
            "input[0].content[0].image_url is not supported: model 'rill' takes text alone",
        ),
        ({"input": [{"role": "system", "content": [IMAGE]}]}, "input[0].content[0].image_url", "needs the role user"),
        (
            {"input": [{"role": "user", "content": [IMAGE]}], "truncation": "auto"},
            "input[0].content[0].image_url",
            "is not supported: model 'rill' takes text alone",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": ["x"]}]},
            "input[0].output[0]",
            "must be an object with a type, such as input_text",
        ),
        ({"tools": [{"name": "x"}]}, "tools[0]", "must be an object with a type, such as function"),
        ({"max_tokens": 1}, "max_tokens", "send max_output_tokens"),
        ({"use_beam_search": True}, "use_beam_search", "unless it is false"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "keeps no prompt templates"),
        ({"background": True, "store": False}, "background", "must be false where store is false"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "is required"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"maximum": 10**30}}}},
            "text",
            "cannot be repeated in the answer",
        ),
        ({"metadata": {"k": "v" * 513}}, "metadata.k", "at most 512 characters"),
        ({"previous_response_id": "resp_x", "conversation": "conv_x"}, "previous_response_id", "send one of them"),
    ],
)
def test_bad_input_is_refused(live: LiveServer, change: dict[str, Any], param: str, message: str) -> None:
    response = live.post(PATH, {**SENT, **change})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert message in error["message"]


def test_a_failure_in_the_middle_is_a_failed_response(live: LiveServer, client: openai.OpenAI) -> None:
    live.runner.hold_after(3)
    try:
        events = iter(client.responses.create(**SENT, stream=True))
        first = [next(events).type for _ in range(5)]
        live.runner.error = RuntimeError("a broken step")
        live.runner.release()
        last = list(events)[-1]
    finally:
        live.runner.error = None
        live.runner.release()
    assert first[-1] == "response.output_text.delta" and last.type == "response.failed"
    assert last.response.error is not None and last.response.error.code == "server_error"
    assert client.responses.retrieve(last.response.id).status == "failed"
