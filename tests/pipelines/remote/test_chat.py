"""Requests to a chat API, and its answers."""

import json
from typing import Any

import pytest

from sluice.engine.types import FinishReason
from sluice.errors import ErrorCode
from sluice.record.spans import parse_traceparent
from tests.pipelines.llm.calls import Record
from tests.pipelines.remote.models import USER, Load, ask, refusal, stream
from tests.pipelines.remote.remote_api import RemoteApi, chunk, replying, streaming, usage, whole
from tests.recordings import find_span, recorded


async def test_a_whole_answer(api: RemoteApi, load: Load) -> None:
    api.answer = replying(whole("good day"))
    model = await load(model="gpt-x")
    answer = await ask(
        model, {"messages": USER, "max_tokens": 9, "temperature": 0.7, "stop": ["a", "b"], "seed": 2**63}
    )
    assert answer == {
        "text_output": "good day",
        "finish_reason": "stop",
        "num_input_tokens": 7,
        "num_output_tokens": 3,
    }
    [exchange] = api.exchanges
    assert exchange.path == "/v1/chat/completions"
    assert exchange.body == {
        "model": "gpt-x",
        "messages": [{"role": "user", "content": "hello"}],
        "max_completion_tokens": 9,
        "temperature": 0.7,
        "stop": ["a", "b"],
        "seed": 2**63,
    }


async def test_a_stream(api: RemoteApi, load: Load) -> None:
    api.answer = streaming(chunk(""), chunk("good "), chunk("day"), chunk(None, "length"), usage(11, 2, cached=8))
    answers = await stream(await load(), {"messages": USER})
    assert answers == [
        {"text_output": "good "},
        {"text_output": "day"},
        {
            "text_output": "",
            "finish_reason": "length",
            "num_input_tokens": 11,
            "num_output_tokens": 2,
            "num_cached_tokens": 8,
        },
    ]
    assert api.bodies[0]["stream"] is True
    assert api.bodies[0]["stream_options"] == {"include_usage": True}


async def test_a_plain_text_is_a_conversation_of_one_turn(api: RemoteApi, load: Load) -> None:
    api.answer = replying(whole("x"))
    await ask(await load(), {"text_input": "hello"})
    assert api.bodies[0]["messages"] == json.loads(USER)


async def test_a_completion(api: RemoteApi, load: Load) -> None:
    def piece(text: str, reason: str | None = None) -> dict[str, Any]:
        return {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}

    model = await load(endpoint="completions")
    api.answer = streaming(piece("a"), piece("b", "stop"), usage(1, 2))
    assert [each["text_output"] for each in await stream(model, {"text_input": "hello", "max_tokens": 2})] == [
        "a",
        "b",
        "",
    ]
    assert api.exchanges[0].path == "/v1/completions"
    assert api.bodies[0]["prompt"] == "hello"
    assert api.bodies[0]["max_tokens"] == 2
    assert "messages" not in model.spec.inputs


async def test_parameters_are_fields_too(api: RemoteApi, load: Load) -> None:
    api.answer = replying(whole("x"))
    given: dict[str, Any] = {"max_tokens": 5, "top_p": 0.5, "collection": "docs", "history": "[]"}
    await ask(await load(), {"messages": USER, "sampling_config": '{"presence_penalty": 1}'}, parameters=given)
    assert api.bodies[0]["max_completion_tokens"] == 5
    assert api.bodies[0]["top_p"] == 0.5
    assert api.bodies[0]["presence_penalty"] == 1
    assert not {"collection", "history"} & api.bodies[0].keys()


async def test_streaming_as_a_parameter(api: RemoteApi, load: Load) -> None:
    api.answer = streaming(chunk("a"), chunk("b", "stop"))
    answers = await stream(await load(include_usage="false"), {"messages": USER}, parameters={"stream": True})
    assert [each["text_output"] for each in answers] == ["a", "b", ""]
    assert "num_input_tokens" not in answers[-1], "the API told no counts"
    assert "stream_options" not in api.bodies[0]


async def test_rows_of_a_batch_are_requests_of_their_own(api: RemoteApi, load: Load) -> None:
    async def answer(exchange: Any) -> None:
        await exchange.reply(whole(exchange.body["messages"][0]["content"].upper()))

    api.answer = answer
    model = await load("max_batch_size: 4")
    assert (await ask(model, {"text_input": ["a", "b", "c"]}))["text_output"] == ["A", "B", "C"]
    assert len(api.exchanges) == 3


async def test_vllm_has_more(api: RemoteApi, load: Load) -> None:
    api.answer = replying(whole("x"))
    model = await load(dialect="vllm")
    fields = {"messages": USER, "max_tokens": 4, "top_k": 3, "repetition_penalty": 1.0, "cache_salt": "s"}
    guided = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a+"}
    await ask(model, fields | guided)
    sent = api.bodies[0]
    assert sent["max_tokens"] == 4
    assert sent["top_k"] == 3
    assert sent["cache_salt"] == "s"
    assert sent["structured_outputs"] == {"regex": "a+"}
    assert "repetition_penalty" not in sent, "1.0 asks for nothing"


@pytest.mark.parametrize(
    ("field", "value"),
    [("top_k", 3), ("min_p", 0.1), ("repetition_penalty", 1.2), ("bad_words", "no"), ("min_tokens", 2)],
)
async def test_what_would_change_the_answer_is_refused(api: RemoteApi, load: Load, field: str, value: Any) -> None:
    error = await refusal(await load(), {"messages": USER}, parameters={field: value})
    assert error.code is ErrorCode.INVALID
    assert error.param == field
    assert field in error.message and "dialect" in error.message
    assert not api.exchanges


@pytest.mark.parametrize(("field", "value"), [("top_k", 0), ("min_p", 0.0), ("repetition_penalty", 1.0), ("n", 1)])
async def test_what_asks_for_nothing_is_left_out(api: RemoteApi, load: Load, field: str, value: Any) -> None:
    api.answer = replying(whole("x"))
    await ask(await load(), {"messages": USER}, parameters={field: value})
    assert api.bodies[0].keys() == {"model", "messages"}


async def test_guided_decoding_to_json(api: RemoteApi, load: Load) -> None:
    api.answer = replying(whole("{}"))
    model = await load()
    guide = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": '{"type": "object"}'}
    await ask(model, {"messages": USER, "sampling_config": json.dumps(guide)})
    form = api.bodies[0]["response_format"]
    assert form["type"] == "json_schema"
    assert form["json_schema"]["schema"] == {"type": "object"}
    error = await refusal(
        model, {"messages": USER, "guided_decoding_guide_type": "regex", "guided_decoding_guide": "a"}
    )
    assert error.param == "guided_decoding_guide_type"


@pytest.mark.parametrize(
    "messages", ["hello", "[]", "{}", '[{"content": "x"}]', '[{"role": "user", "content": 5}]', "[5]"]
)
async def test_messages_that_are_none(load: Load, messages: str) -> None:
    error = await refusal(await load(), {"messages": messages})
    assert error.code is ErrorCode.INVALID
    assert error.param == "messages"


async def test_one_of_the_prompts_is_needed(load: Load) -> None:
    model = await load()
    assert (await refusal(model, {"max_tokens": 3})).param == "messages"
    assert (await refusal(model, {"messages": USER, "text_input": "x"})).param == "messages"


async def test_the_configuration_adds_fields_and_headers(api: RemoteApi, load: Load) -> None:
    api.answer = replying(whole("x"))
    model = await load(
        extra_body='{"reasoning_effort": "low", "temperature": 0.1}', headers='{"x-team": "search"}', project="p"
    )
    await ask(model, {"messages": USER, "temperature": 0.9})
    assert api.bodies[0]["reasoning_effort"] == "low"
    assert api.bodies[0]["temperature"] == 0.9, "what the request says counts"
    assert api.exchanges[0].headers["x-team"] == "search"
    assert api.exchanges[0].headers["openai-project"] == "p"


async def test_a_model_that_declines(api: RemoteApi, load: Load) -> None:
    api.answer = replying(whole(None, refusal="I cannot help with that."))
    assert (await ask(await load(), {"messages": USER}))["text_output"] == "I cannot help with that."


async def test_it_is_measured(api: RemoteApi, load: Load, records: list[Record]) -> None:
    api.answer = streaming(chunk("a"), chunk("b", "stop"), usage(4, 2))
    model = await load()
    await stream(model, {"messages": USER})
    [record] = records
    assert record.is_closed
    assert [event.text for event in record.events] == ["a", "b", ""]
    assert sum(event.num_tokens for event in record.events) == 2
    assert record.events[-1].prompt_tokens == 4
    assert record.events[-1].finish_reason is FinishReason.STOP
    assert model.statistics.infer.success.count == 1
    assert model.statistics.count_pending() == 0


async def test_the_trace_goes_on_in_the_remote_server(api: RemoteApi, load: Load) -> None:
    api.answer = replying(whole("x"))
    model = await load()
    await ask(model, {"text_input": "hello"})
    with recorded() as recording:
        await ask(model, {"text_input": "hello"})
    untraced, traced = (each.headers.get("traceparent") for each in api.exchanges)
    assert untraced is None
    assert traced is not None
    assert parse_traceparent(traced) == (
        recording.trace_id,
        find_span(recording, f"infer {model.name}").span_id,
        True,
        "",
    )
