"""Tools, structured output and images: what bodies ask for, and which answers fail."""

import base64
import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sluice.load.answers import BUILTIN_SCHEMA, BUILTIN_TOOLS
from sluice.load.apis import ApiContext, make_api
from sluice.load.config import ApiKind, LoadConfigError, ToolUse, Workload
from sluice.load.stream import FailureKind
from sluice.load.workload import draw_images
from tests.load.scripted_server import Script, Wire, only_failure, run_against

GOOD = '{"category": "order", "is_urgent": true, "priority": 2, "labels": ["new"]}'
CHATS = (ApiKind.CHAT, ApiKind.RESPONSES, ApiKind.MESSAGES, ApiKind.OLLAMA_CHAT)


def chat(*deltas: dict[str, Any]) -> Script:
    async def script(wire: Wire) -> None:
        wire.start_stream()
        for delta in deltas:
            wire.event({"choices": [{"delta": delta, "finish_reason": None}]})
        wire.finish(3)

    return script


def structured() -> dict[str, Any]:
    return {"api": ApiKind.CHAT, "json_schema": BUILTIN_SCHEMA, "ignore_eos": False}


def test_an_answer_that_meets_the_schema_is_served() -> None:
    run = run_against(chat({"reasoning_content": "hm"}, {"content": GOOD[:20]}, {"content": GOOD[20:]}), **structured())
    assert run.summary.failures == {}
    assert run.summary.num_served == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD[:30], "truncated"),
        ("Sure!", "malformed"),
        (GOOD.replace("2", "9"), "$.priority: 9 is not one of"),
        ("{}", "required property"),
    ],
)
def test_other_answers_fail_with_the_place(text: str, said: str) -> None:
    failure = only_failure(chat({"content": text}), **structured())
    assert failure.kind is FailureKind.SCHEMA
    assert said in failure.detail


def call(place: int, name: str | None, arguments: str) -> dict[str, Any]:
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {"tool_calls": [{"index": place, "function": function}]}


def tools(choice: str = "auto") -> dict[str, Any]:
    return {"api": ApiKind.CHAT, "tool_use": ToolUse(BUILTIN_TOOLS, choice), "ignore_eos": False}


def test_calls_are_put_together_and_counted() -> None:
    deltas = (
        call(0, "get_weather", '{"city": "Li'),
        call(0, None, 'ma", "unit": "celsius"}'),
        call(1, "set_light", '{"room": "hall", "is_on": false}'),
    )
    run = run_against(chat(*deltas), **tools("required"))
    assert run.summary.failures == {}
    (result,) = run.results
    assert (result.num_tool_calls, len(result.event_times_s), run.summary.num_tool_calls) == (2, 3, 2)


@pytest.mark.parametrize(
    ("delta", "choice", "said"),
    [
        ({"content": "I cannot."}, "required", "no tool call, although the tool choice is required"),
        ({"content": "I cannot."}, "set_light", "no tool call, although the tool choice is set_light"),
        (call(0, "rm", "{}"), "auto", "a call of 'rm', which was not offered"),
        (call(0, "set_light", "{"), "auto", "arguments of set_light: Input data was truncated"),
        (call(0, "set_light", '{"room": "hall"}'), "auto", "'is_on' is a required property"),
    ],
)
def test_wrong_calls_fail(delta: dict[str, Any], choice: str, said: str) -> None:
    failure = only_failure(chat(delta), **tools(choice))
    assert failure.kind is FailureKind.TOOL_CALL
    assert said in failure.detail


def test_without_a_call_an_answer_must_meet_the_schema() -> None:
    both = tools() | {"json_schema": BUILTIN_SCHEMA}
    assert only_failure(chat({"content": "no"}), **both).kind is FailureKind.SCHEMA
    assert run_against(chat(call(0, "set_light", '{"room": "hall", "is_on": true}')), **both).summary.num_failed == 0


def body(kind: ApiKind, workload: Workload, context: ApiContext | None = None) -> dict[str, Any]:
    api = make_api(kind)
    return dict(json.loads(api.body("m", "hi", 5, workload, context or ApiContext())))


def test_each_api_has_its_own_form_of_tools() -> None:
    asked = Workload(tool_use=ToolUse(BUILTIN_TOOLS, "set_light"))
    bodies = {kind: body(kind, asked) for kind in CHATS}
    named = {"type": "function", "function": {"name": "set_light"}}
    assert bodies[ApiKind.CHAT]["tool_choice"] == named
    assert bodies[ApiKind.CHAT]["tools"][0] == {"type": "function", "function": BUILTIN_TOOLS[0]}
    assert bodies[ApiKind.OLLAMA_CHAT]["tools"] == bodies[ApiKind.CHAT]["tools"]
    assert bodies[ApiKind.RESPONSES]["tool_choice"] == {"type": "function", "name": "set_light"}
    assert bodies[ApiKind.RESPONSES]["tools"][0]["name"] == "get_weather"
    assert bodies[ApiKind.MESSAGES]["tool_choice"] == {"type": "tool", "name": "set_light"}
    assert bodies[ApiKind.MESSAGES]["tools"][1]["input_schema"] == BUILTIN_TOOLS[1]["parameters"]
    required = body(ApiKind.MESSAGES, Workload(tool_use=ToolUse(BUILTIN_TOOLS, "required")))
    assert required["tool_choice"] == {"type": "any"}


def test_each_api_has_its_own_place_for_the_schema() -> None:
    asked = Workload(json_schema=BUILTIN_SCHEMA)
    assert body(ApiKind.CHAT, asked)["response_format"]["json_schema"]["schema"] == BUILTIN_SCHEMA
    assert body(ApiKind.RESPONSES, asked)["text"]["format"]["schema"] == BUILTIN_SCHEMA
    assert body(ApiKind.MESSAGES, asked)["output_config"]["format"]["schema"] == BUILTIN_SCHEMA
    assert body(ApiKind.OLLAMA_CHAT, asked)["format"] == BUILTIN_SCHEMA


def test_images_are_pngs_of_the_size_and_none_is_like_another() -> None:
    images = draw_images(np.random.default_rng(0), 2, (50, 33))
    assert images == draw_images(np.random.default_rng(0), 2, (50, 33))
    assert len(set(images)) == 2
    for each in images:
        with Image.open(io.BytesIO(base64.b64decode(each))) as opened:
            assert (opened.format, opened.size) == ("PNG", (50, 33))


def test_each_api_has_its_own_form_of_images() -> None:
    bodies = {kind: body(kind, Workload(), ApiContext(images=("QUJD",))) for kind in CHATS}
    assert bodies[ApiKind.CHAT]["messages"][0]["content"][0]["image_url"]["url"] == "data:image/png;base64,QUJD"
    assert bodies[ApiKind.RESPONSES]["input"][0]["content"][0]["image_url"] == "data:image/png;base64,QUJD"
    assert bodies[ApiKind.MESSAGES]["messages"][0]["content"][0]["source"]["data"] == "QUJD"
    assert bodies[ApiKind.OLLAMA_CHAT]["messages"] == [{"role": "user", "content": "hi", "images": ["QUJD"]}]


def test_a_choice_of_no_tool_is_refused() -> None:
    with pytest.raises(LoadConfigError, match="write auto, required, none or the name of one: get_weather, set_light"):
        ToolUse(BUILTIN_TOOLS, "shut_down")


ADDED = {"type": "response.output_item.added", "output_index": 1, "item": {"type": "function_call", "name": "f"}}
DELTA = {"type": "response.function_call_arguments.delta", "output_index": 1, "delta": "{}"}
STARTED = {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "name": "f"}}
BLOCK_DELTA = {"type": "content_block_delta", "index": 1, "delta": {"partial_json": "{}"}}
WHOLE_CALL = {"message": {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}}


@pytest.mark.parametrize(
    ("api", "events", "arguments"),
    [
        (ApiKind.RESPONSES, [ADDED, DELTA], [("f", ""), (None, "{}")]),
        (ApiKind.MESSAGES, [STARTED, BLOCK_DELTA], [("f", ""), (None, "{}")]),
        (ApiKind.OLLAMA_CHAT, [WHOLE_CALL], [("f", '{"a": 1}')]),
    ],
)
def test_calls_of_other_apis(api: ApiKind, events: list[object], arguments: list[tuple[str | None, str]]) -> None:
    reader = make_api(api)
    reader.keeps_answers = True
    parts = [part for event in events for part in reader.parse(json.dumps(event).encode()).calls]
    assert [(part.name, part.arguments) for part in parts] == arguments
    assert len({part.place for part in parts}) == 1
