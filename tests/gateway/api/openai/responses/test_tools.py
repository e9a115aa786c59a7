"""Tools and reasoning: what OpenAI's client sends and gets."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from sluice.engine.client.stream import Consumer
from sluice.engine.types import FinishReason
from sluice.gateway.api.openai.responses.schemas import CreateResponseRequest, ResponseTool
from sluice.gateway.api.openai.responses.tools import declared_tools
from sluice.pipelines.chat.registry import find_formats
from sluice.pipelines.text.stream import Generate, give, sent_prompt
from sluice.pipelines.text.types import (
    ChatMessage,
    Conversation,
    TextDetail,
    TextEvent,
    TextRequest,
    ToolCall,
    ToolChoice,
)
from tests.gateway.api.openai.responses.test_create import PATH, events_of
from tests.gateway.front.http.live import MODEL, LiveServer
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
        self.end = FinishReason.STOP

    def generate(self, model: object, request: TextRequest) -> Generate:
        self.requests.append(request)
        return self._push

    async def _push(self, consumer: Consumer[TextEvent]) -> None:
        for number, piece in enumerate(self.pieces, 1):
            end = self.end if number == len(self.pieces) else None
            detail = None if end is None else TextDetail(token_starts=range(0, len(ANSWER), 3))
            await give(consumer, TextEvent(piece, 1, 9, number, end, detail=detail))

    @property
    def prompt(self) -> Conversation:
        sent = sent_prompt(self.requests[-1].prompt)
        assert isinstance(sent, Conversation)
        return sent


@pytest.fixture
def scripted(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedModel]:
    model = ScriptedModel()
    monkeypatch.setattr(live.server.plane, "generate", model.generate)
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
    assert response.headers["x-sluice-warning"].endswith("here: text.verbosity"), "the server ends the reasoning itself"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": 5}]}, "tools[0]"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "namespace"}]}]}, "tools[0].tools[0]"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [OTHER] * 4096}, OTHER]}, "tools"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
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


PATCH = '*** Begin "Patch"\n+ \\ ä 😀\t\x7f'
CUSTOM: Any = {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": {"type": "text"}}
SPACE: Any = {"type": "namespace", "name": "mcp__fs", "description": "Files.", "tools": [TOOL, CUSTOM]}


def calling(name: str, arguments: object) -> list[str]:
    text = f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    return [text[start : start + 3] for start in range(0, len(text), 3)]


def test_a_custom_tool_is_called_with_its_input(scripted: ScriptedModel, client: openai.OpenAI) -> None:
    scripted.pieces = calling("apply_patch", {"input": PATCH})
    [call] = client.responses.create(model=MODEL, input="x", tools=[TOOL, CUSTOM]).output
    assert call.type == "custom_tool_call" and (call.name, call.input) == ("apply_patch", PATCH)
    [_, shown] = scripted.prompt.options.tools
    assert shown["function"]["name"] == "apply_patch" and shown["function"]["parameters"]["required"] == ["input"]
    with client.responses.stream(model=MODEL, input="x", tools=[CUSTOM]) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    [done] = [event.input for event in events if event.type == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done == PATCH and len(deltas) > 4


def test_the_input_of_a_call_that_was_cut_off_has_what_came(scripted: ScriptedModel, client: openai.OpenAI) -> None:
    scripted.pieces = calling("apply_patch", {"input": PATCH})[:30]
    [call] = client.responses.create(model=MODEL, input="x", tools=[CUSTOM]).output
    assert call.type == "custom_tool_call" and call.input and PATCH.startswith(call.input)


def test_other_arguments_of_a_custom_tool_are_its_input(scripted: ScriptedModel, client: openai.OpenAI) -> None:
    scripted.pieces = calling("apply_patch", {"patch": "a"})
    [call] = client.responses.create(model=MODEL, input="x", tools=[CUSTOM]).output
    assert call.type == "custom_tool_call" and json.loads(call.input) == {"patch": "a"}


def test_tools_of_a_namespace_are_called_by_their_own_names(scripted: ScriptedModel, client: openai.OpenAI) -> None:
    scripted.pieces = calling("mcp__fs__light", {"room": "hall"}) + calling("light", {"room": "attic"})
    scripted.pieces += calling("mcp__fs__apply_patch", {"input": PATCH})
    first, second, third = client.responses.create(model=MODEL, input="x", tools=[TOOL, SPACE]).output
    assert first.type == second.type == "function_call" and third.type == "custom_tool_call"
    assert [(each.name, each.namespace) for each in (first, second, third)] == [
        ("light", "mcp__fs"),
        ("light", None),
        ("apply_patch", "mcp__fs"),
    ]


@pytest.mark.parametrize("is_stored", [True, False])
def test_calls_of_custom_tools_and_namespaces_are_history(
    scripted: ScriptedModel, client: openai.OpenAI, is_stored: bool
) -> None:
    scripted.pieces = calling("mcp__fs__light", {"room": "hall"}) + calling("mcp__fs__apply_patch", {"input": PATCH})
    first = client.responses.create(model=MODEL, input="x", tools=[SPACE], store=is_stored)
    light, patch = first.output
    assert light.type == "function_call" and patch.type == "custom_tool_call"
    results: Any = [
        {"type": "function_call_output", "call_id": light.call_id, "output": "on"},
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "done"},
    ]
    if is_stored:
        client.responses.create(model=MODEL, input=results, tools=[SPACE], previous_response_id=first.id)
    else:
        earlier: Any = [{"role": "user", "content": "x"}, *first.output]
        client.responses.create(model=MODEL, input=[*earlier, *results], tools=[SPACE], store=False)
    _, called, *returned = scripted.prompt.messages
    assert [(call.name, json.loads(call.arguments)) for call in called.tool_calls] == [
        ("mcp__fs__light", {"room": "hall"}),
        ("mcp__fs__apply_patch", {"input": PATCH}),
    ]
    assert [(turn.content, turn.name) for turn in returned] == [
        ("on", "mcp__fs__light"),
        ("done", "mcp__fs__apply_patch"),
    ]


def test_a_custom_tool_may_be_chosen(scripted: ScriptedModel, live: LiveServer) -> None:
    choice = {"type": "custom", "name": "apply_patch"}
    assert live.post(PATH, {**SENT, "tools": [SPACE], "tool_choice": choice}).status_code == 200
    assert scripted.requests[-1].tool_choice == ToolChoice(True, False, ("mcp__fs__apply_patch",))


def test_tools_that_are_not_the_clients_are_left_out_and_named(scripted: ScriptedModel, live: LiveServer) -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
    others = [{"type": "web_search", "search_context_size": "low"}, {"type": "mcp", "server_label": "s"}]
    response = live.post(PATH, {**SENT, "tools": [TOOL, *others, {**CUSTOM, "format": grammar}]})
    assert [tool["function"]["name"] for tool in scripted.prompt.options.tools] == ["light", "apply_patch"]
    warning = response.headers["x-sluice-warning"]
    assert warning == ("fields without effect here: tools[1] (web_search), tools[2] (mcp), tools[3].format"), warning
    assert "start: /a+/" in scripted.prompt.options.tools[1]["function"]["description"]


def test_tools_of_others_alone_ask_for_no_calls(live: LiveServer) -> None:
    response = live.post(PATH, {**SENT, "tools": [{"type": "web_search"}], "max_output_tokens": 2})
    assert response.status_code == 200, response.text


def test_the_schemas_of_tools_are_taken_as_they_are() -> None:
    fields = CreateResponseRequest.model_validate(SENT)
    light, heat = declared_tools(fields).values()
    sent = (fields.tools or [])[0]
    assert isinstance(sent, ResponseTool) and light.function["parameters"] is sent.parameters
    assert light.function == {name: TOOL[name] for name in ("name", "description", "parameters", "strict")}
    assert heat.function == {name: OTHER[name] for name in ("name", "parameters", "strict")}
