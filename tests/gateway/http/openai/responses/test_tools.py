"""Tools and reasoning: what OpenAI's client sends and gets."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from engine.types import FinishReason
from pipelines.chat.registry import find_formats
from pipelines.text.types import ChatMessage, Conversation, TextDetail, TextEvent, TextRequest, ToolCall, ToolChoice
from tests.gateway.http.live import MODEL, LiveServer
from tests.gateway.http.openai.responses.test_create import PATH, events_of
from tests.pipelines.chat.chat_folder import HERMES_TEMPLATE, THINKING

SCHEMA = {"type": "object", "properties": {"room": {"type": "string"}}, "required": ["room"]}
TOOL: Any = {"type": "function", "name": "light", "description": "d", "parameters": SCHEMA, "strict": True}
OTHER: Any = {"type": "function", "name": "heat", "parameters": None, "strict": None}
SENT: dict[str, Any] = {"model": MODEL, "input": "Light up!", "tools": [TOOL, OTHER]}
ROOMS = ("hall", "attic")
CALL = '<tool_call>\n{"name": "light", "arguments": {"room": "%s"}}\n</tool_call>\n'
ANSWER = "<think>\nTwo lamps.</think>\n\nAt once.\n" + "".join(CALL % room for room in ROOMS)


class ScriptedModel:
    """Answers every request with one text, in pieces, and keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[TextRequest] = []
        self.pieces = [ANSWER[start : start + 3] for start in range(0, len(ANSWER), 3)]

    async def generate(self, model: object, request: TextRequest) -> AsyncIterator[TextEvent]:
        self.requests.append(request)
        for number, piece in enumerate(self.pieces, 1):
            end = FinishReason.STOP if number == len(self.pieces) else None
            detail = None if end is None else TextDetail(token_starts=range(0, len(ANSWER), 3))
            yield TextEvent(piece, 1, 9, number, end, detail=detail)

    @property
    def prompt(self) -> Conversation:
        sent = self.requests[-1].prompt
        assert isinstance(sent, Conversation)
        return sent


@pytest.fixture
def scripted(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedModel]:
    model = ScriptedModel()
    monkeypatch.setattr(live.service, "generate", model.generate)
    monkeypatch.setattr(live.model, "formats", find_formats(HERMES_TEMPLATE + THINKING))
    yield model


def check_output(output: list[Any]) -> None:
    reasoning, message, *calls = output
    assert [part.text for part in reasoning.content] == ["Two lamps."]
    assert (message.content[0].text, message.status) == ("At once.", "completed")
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("light", {"room": room}) for room in ROOMS]
    assert len({call.call_id for call in calls}) == 2


def test_streamed_is_what_is_not_streamed(scripted: ScriptedModel, client: openai.OpenAI) -> None:
    whole = client.responses.create(**SENT)
    check_output(whole.output)
    assert whole.usage is not None and whole.usage.output_tokens_details.reasoning_tokens == 4
    with client.responses.stream(**SENT) as stream:
        arguments = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    check_output(final.output)
    assert len(arguments) > 4
    assert [json.loads(text) for text in "".join(arguments).replace("}{", "}\n{").splitlines()] == [
        {"room": room} for room in ROOMS
    ]
    assert [tool.name for tool in final.tools if tool.type == "function"] == ["light", "heat"]


def test_events_have_openais_names_and_order(scripted: ScriptedModel, live: LiveServer) -> None:
    names = [name for name, _ in events_of(live.post(PATH, {**SENT, "stream": True}).text)]
    merged = [name for name, before in zip(names, [None, *names], strict=False) if name != before]
    item, part = "response.output_item", "response.content_part"
    call = ["response.function_call_arguments.delta", "response.function_call_arguments.done"]
    assert merged == [
        *("response.created", "response.in_progress"),
        *(f"{item}.added", f"{part}.added", "response.reasoning_text.delta", "response.reasoning_text.done"),
        *(f"{part}.done", f"{item}.done"),
        *(f"{item}.added", f"{part}.added", "response.output_text.delta", "response.output_text.done"),
        *(f"{part}.done", f"{item}.done"),
        *(f"{item}.added", *call, f"{item}.done") * 2,
        "response.completed",
    ]


@pytest.mark.parametrize("is_stored", [True, False])
def test_results_follow_their_calls(scripted: ScriptedModel, client: openai.OpenAI, is_stored: bool) -> None:
    first = client.responses.create(**SENT, store=is_stored)
    calls = [item for item in first.output if item.type == "function_call"]
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": f"{number} is on"}
        for number, call in enumerate(calls)
    ]
    if is_stored:
        client.responses.create(**{**SENT, "input": results}, previous_response_id=first.id)
    else:
        earlier: Any = [{"role": "user", "content": SENT["input"]}, *first.output]
        client.responses.create(**{**SENT, "input": [*earlier, *results]}, store=False)
    made = tuple(ToolCall(call.call_id, "light", call.arguments) for call in calls)
    assert scripted.prompt.messages == (
        ChatMessage("user", "Light up!"),
        ChatMessage("assistant", "At once.", reasoning="Two lamps.", tool_calls=made),
        *(ChatMessage("tool", f"{n} is on", tool_call_id=call.id, name="light") for n, call in enumerate(made)),
    )


@pytest.mark.parametrize(
    ("choice", "parsed", "shown"),
    [
        ("auto", ToolChoice(), ["light", "heat"]),
        ("none", ToolChoice(), []),
        ("required", ToolChoice(is_required=True), ["light", "heat"]),
        (
            {"type": "function", "name": "heat"},
            ToolChoice(is_required=True, is_parallel=False, names=("heat",)),
            ["light", "heat"],
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "heat"}]},
            ToolChoice(names=("heat",)),
            ["light", "heat"],
        ),
    ],
)
def test_the_choice_of_tools(
    scripted: ScriptedModel, client: openai.OpenAI, choice: Any, parsed: ToolChoice, shown: list[str]
) -> None:
    answer = client.responses.create(**SENT, tool_choice=choice)
    assert scripted.requests[-1].tool_choice == parsed
    assert [tool["function"]["name"] for tool in scripted.prompt.options.tools] == shown
    assert answer.model_dump(include={"tool_choice"}, exclude_none=True)["tool_choice"] == choice


def test_effort_and_verbosity_are_arguments_of_the_template(scripted: ScriptedModel, live: LiveServer) -> None:
    asked = {"reasoning": {"effort": "none", "summary": "auto"}, "text": {"verbosity": "low"}}
    response = live.post(PATH, {**SENT, **asked})
    assert scripted.prompt.options.arguments == {"enable_thinking": False, "thinking": False, "verbosity": "low"}
    assert "text.verbosity, reasoning.effort" in response.headers["x-sluice-warning"], "the template has neither"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "cool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [{"name": "cool"}]}}, "tool_choice.tools[0].name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ],
)
def test_bad_tools_are_refused(live: LiveServer, change: dict[str, Any], param: str) -> None:
    response = live.post(PATH, {**SENT, **change})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_a_model_without_a_format_of_calls_takes_no_tools(live: LiveServer) -> None:
    response = live.post(PATH, SENT)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
