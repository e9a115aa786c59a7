"""What agents send: requests of Codex CLI, tools that are built into clients, and items of every type."""

import copy
import gzip
import json
from collections.abc import Callable
from typing import Any, get_args

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseInputItem, ResponseStreamEvent
from pydantic import TypeAdapter

from sluice.engine.types import FinishReason
from sluice.gateway.api.openai.responses.history import read_history
from sluice.gateway.api.openai.responses.items import ItemIds, seal_text, store_item, unseal_text
from sluice.gateway.api.openai.responses.schemas import PromptFields
from sluice.gateway.api.openai.responses.tools import declared_tools, tools_without_effect
from sluice.pipelines.text.types import ChatMessage, ToolChoice
from tests.gateway.api.openai.responses.test_create import PATH, events_of
from tests.gateway.api.openai.responses.test_tools import (
    CUSTOM,
    OTHER,
    SENT,
    TOOL,
    ScriptedModel,
    calling,
    scripted,
)
from tests.gateway.front.http.live import MODEL, LiveServer
from tests.paths import DATA

__all__ = ["scripted"]
CODEX = json.loads((DATA / "agents" / "codex_request.json").read_text())
SESSION = json.loads((DATA / "agents" / "codex_session.json").read_text())
FOUND = next(item for item in SESSION if item["type"] == "tool_search_output")
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
PATCH = "*** Begin Patch\n*** Add File: a\n+b\n*** End Patch\n"


def stream(live: LiveServer, body: dict[str, Any]) -> dict[str, Any]:
    """Return the response that a stream ends with. Its events are OpenAI's, and add up to it."""
    answer = live.post(PATH, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    events = [data for _, data in events_of(answer.text)]
    for number, event in enumerate(events):
        assert EVENT.validate_python(event).type == event["type"] and event["sequence_number"] == number
    added, done = [
        [
            (event["output_index"], event["item"]["id"])
            for event in events
            if event["type"] == f"response.output_item.{end}"
        ]
        for end in ("added", "done")
    ]
    last: dict[str, Any] = events[-1]["response"]
    assert added == done == [(number, item["id"]) for number, item in enumerate(last["output"])]
    assert [event["item"] for event in events if event["type"].endswith("item.done")] == last["output"]
    return last


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in output]


def as_codex_keeps(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item of an answer as Codex sends it back: without its id, and without reasoning that it can read."""
    return {
        name: value for name, value in item.items() if name != "id" and (item["type"], name) != ("reasoning", "content")
    }


def ask_raw(live: LiveServer, client: openai.OpenAI, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = live.post(PATH, body, headers=CODEX["headers"])
    assert answer.status_code == 200, answer.text
    output: list[dict[str, Any]] = events_of(answer.text)[-1][1]["response"]["output"]
    return output


def ask_stock(live: LiveServer, client: openai.OpenAI, body: dict[str, Any]) -> list[dict[str, Any]]:
    known = {name: value for name, value in body.items() if name != "client_metadata"}
    more = {name: value for name, value in body.items() if name not in known}
    *_, last = client.responses.create(**known, extra_body=more, extra_headers=CODEX["headers"])
    assert last.type == "response.completed"
    return [item.model_dump(mode="json", exclude_unset=True) for item in last.response.output]


def with_tools_as_an_item(body: dict[str, Any]) -> dict[str, Any]:
    """Return a request as Codex sends it for models with its mode for code: the tools are an item."""
    tools = {"type": "additional_tools", "role": "developer", "tools": body["tools"]}
    return {**{name: value for name, value in body.items() if name != "tools"}, "input": [tools, *body["input"]]}


@pytest.mark.parametrize("ask", [ask_raw, ask_stock])
@pytest.mark.parametrize("form", [copy.deepcopy, with_tools_as_an_item])
def test_codex_works_through_three_turns_of_calls(
    scripted: ScriptedModel,
    live: LiveServer,
    client: openai.OpenAI,
    ask: Callable[..., list[dict[str, Any]]],
    form: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    body = form(copy.deepcopy(CODEX["body"]))
    texts = ["<think>\nLook first.</think>\n\nI look.\n", *"".join(calling("exec_command", {"cmd": "rg greet"}))]
    steps = [
        (texts, "function_call", {"type": "function_call_output", "output": "main.py"}),
        (
            calling("apply_patch", {"input": PATCH}),
            "custom_tool_call",
            {"type": "custom_tool_call_output", "output": "ok"},
        ),
        (calling("tool_search", {"query": "calendar"}), "tool_search_call", FOUND),
    ]
    for pieces, kind, result in steps:
        scripted.pieces = pieces
        output = ask(live, client, body)
        assert output[-1]["type"] == kind
        body["input"] += [*map(as_codex_keeps, output), {**result, "call_id": output[-1]["call_id"]}]
    scripted.pieces = calling("mcp__calendar__create_event", {"title": "Release"})
    [call] = stream(live, body)["output"]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "create_event", "mcp__calendar")
    assert [tool["function"]["name"] for tool in scripted.prompt.options.tools] == [
        *("exec_command", "write_stdin", "update_plan", "apply_patch", "view_image", "tool_search"),
        *("mcp__files__read_file", "mcp__files__list_folder", "mcp__calendar__create_event"),
    ]
    turns = scripted.prompt.messages[-6:]
    assert [turn.role for turn in turns] == ["assistant", "tool"] * 3
    assert (turns[0].reasoning, turns[0].content) == ("Look first.", "I look.")
    assert [json.loads(turn.tool_calls[0].arguments) for turn in turns[::2]] == [
        {"cmd": "rg greet"},
        {"input": PATCH},
        {"query": "calendar"},
    ]
    assert "create_event" in turns[-1].content


def test_what_codex_sends_and_this_server_has_not_is_named(scripted: ScriptedModel, live: LiveServer) -> None:
    answer = live.post(PATH, CODEX["body"], headers=CODEX["headers"])
    warning = answer.headers["x-sluice-warning"]
    for place in ("tools[3].format", "tools[4] (web_search)", "tools[7] (image_generation)"):
        assert place in warning
    assert "client_metadata" not in warning and "input" not in warning


def test_a_session_of_codex_is_read_but_for_what_has_no_text(scripted: ScriptedModel, live: LiveServer) -> None:
    answer = live.post(PATH, {**CODEX["body"], "input": SESSION, "stream": False})
    assert answer.status_code == 200, answer.text
    assert Response.model_validate(answer.json()).tools
    turns = [(turn.role, turn.content, [call.name for call in turn.tool_calls]) for turn in scripted.prompt.messages]
    assert turns[4:] == [
        ("assistant", "I will look for its uses first.", ["exec_command", "mcp__files__list_folder"]),
        ("tool", SESSION[7]["output"], []),
        ("tool", "main.py", []),
        ("assistant", "", ["apply_patch"]),
        ("tool", SESSION[10]["output"], []),
        ("assistant", "", ["local_shell"]),
        ("tool", "ok", []),
        ("assistant", "", ["view_image"]),
        ("tool", "[image]", []),
        ("assistant", "", ["tool_search"]),
        ("tool", turns[14][1], []),
        ("assistant", "", ["exec_command"]),
        ("tool", SESSION[20]["output"], []),
        ("user", "Looks good.", []),
        ("assistant", "Renamed.", []),
        ("developer", "<collaboration_mode>default</collaboration_mode>", []),
        ("user", "Thanks. Now commit it.", []),
    ]
    warning = answer.headers["x-sluice-warning"]
    assert "input[14].output (image), input[15] (web_search_call), input[16] (image_generation_call)" in warning
    assert "unknown" not in warning


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_a_compressed_request_of_codex_is_read_or_refused_by_name(
    scripted: ScriptedModel, live: LiveServer, encoding: str
) -> None:
    packed = gzip.compress(json.dumps({**CODEX["body"], "stream": False}).encode())
    answer = live.post(PATH, packed, headers={**CODEX["headers"], "content-encoding": encoding})
    assert answer.status_code == (200 if encoding == "gzip" else 415), answer.text
    assert encoding == "gzip" or "gzip" in answer.headers["accept-encoding"]


def test_models_are_listed_for_a_version_of_a_client(live: LiveServer) -> None:
    answer = live.get("/v1/models?client_version=0.98.0", headers=CODEX["headers"])
    assert answer.status_code == 200 and [model["id"] for model in answer.json()["data"]] == [MODEL]


LOCAL = {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 5, "user": None, "working_directory": "/a"}
EDIT = {"type": "create_file", "path": "a", "diff": "+b"}
LINES = {"commands": ["ls", "pwd"], "timeout_ms": None, "max_output_length": 9}
SEARCH = {"type": "tool_search", "execution": "client"}
CLIENT_CALLS: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (
        {"type": "local_shell"},
        {"command": ["ls", "-l"], "working_directory": "/a", "timeout_ms": 5},
        {"type": "local_shell_call", "action": LOCAL},
    ),
    (
        {"type": "shell", "environment": {"type": "local"}},
        {"commands": ["ls", "pwd"], "max_output_length": 9},
        {"type": "shell_call", "action": LINES, "environment": {"type": "local"}},
    ),
    ({"type": "apply_patch"}, EDIT, {"type": "apply_patch_call", "operation": EDIT}),
    (SEARCH, {"query": "q"}, {"type": "tool_search_call", "execution": "client", "arguments": {"query": "q"}}),
]
OUTPUTS: dict[str, dict[str, Any]] = {
    "local_shell_call": {"type": "local_shell_call_output", "output": "done"},
    "shell_call": {
        "type": "shell_call_output",
        "output": [{"stdout": "done", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
    },
    "apply_patch_call": {"type": "apply_patch_call_output", "status": "completed", "output": "done"},
    "tool_search_call": {"type": "tool_search_output", "tools": [{**OTHER, "name": "done"}]},
}


@pytest.mark.parametrize(("tool", "arguments", "item"), CLIENT_CALLS, ids=[each[0]["type"] for each in CLIENT_CALLS])
def test_a_tool_of_the_client_is_called_by_an_item_of_its_own(
    scripted: ScriptedModel, live: LiveServer, client: openai.OpenAI, tool: Any, arguments: Any, item: Any
) -> None:
    scripted.pieces = calling(tool["type"], arguments)
    body: dict[str, Any] = {"model": MODEL, "input": "x", "tools": [TOOL, tool], "store": False}
    response = stream(live, body)
    whole = client.responses.create(**body)
    assert response["tools"] == [TOOL, tool]
    assert without_ids(response["output"]) == [{"status": "completed", **item}]
    assert without_ids([each.model_dump(mode="json", exclude_unset=True) for each in whole.output]) == without_ids(
        response["output"]
    )
    [call] = response["output"]
    result = {**OUTPUTS[item["type"]], "call_id": call["call_id"]}
    answer = live.post(PATH, {**body, "input": [{"role": "user", "content": "x"}, call, result]})
    assert answer.status_code == 200 and "without effect" not in answer.headers.get("x-sluice-warning", ""), answer.text
    _, called, returned = scripted.prompt.messages
    assert json.loads(called.tool_calls[0].arguments) == arguments and called.tool_calls[0].name == tool["type"]
    assert (returned.role, returned.name) == ("tool", tool["type"]) and "done" in returned.content


CALLS_OF_ALL_KINDS = st.sampled_from(
    [
        ("light", {"room": "hall"}),
        ("mcp__fs__heat", {}),
        ("apply_patch", {"input": PATCH}),
        ("local_shell", {"command": ["ls"]}),
        ("shell", {"commands": ["ls", "pwd"]}),
        ("tool_search", {"query": "ä😀"}),
        ("unheard_of", {"a": 1}),
    ]
)
TOOLS_OF_ALL_KINDS: list[Any] = [
    *(TOOL, CUSTOM, {"type": "namespace", "name": "mcp__fs", "description": "d", "tools": [OTHER]}),
    *({"type": "local_shell"}, {"type": "shell"}, SEARCH),
]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text("ab<\n ", max_size=9),
    st.text("cd{\n ", max_size=9),
    st.lists(CALLS_OF_ALL_KINDS, max_size=3),
    st.integers(0, 9),
    st.integers(1, 40),
    st.booleans(),
)
def test_any_answer_is_streamed_as_it_is_whole(
    scripted: ScriptedModel, live: LiveServer, thought: str, said: str, calls: Any, cut: int, size: int, seals: bool
) -> None:
    text = f"<think>\n{thought}</think>\n\n{said}" + "".join("".join(calling(*call)) for call in calls)
    text = text[: len(text) - cut] or "x"
    scripted.pieces = [text[start : start + size] for start in range(0, len(text), size)]
    body = {"model": MODEL, "input": "x", "tools": TOOLS_OF_ALL_KINDS, "store": False}
    body["include"] = ["reasoning.encrypted_content"] if seals else []
    whole = live.post(PATH, body).json()
    assert without_ids(stream(live, body)["output"]) == without_ids(whole["output"])
    assert Response.model_validate(whole).tools and whole["tools"] == TOOLS_OF_ALL_KINDS


@pytest.mark.parametrize(("tool", "arguments", "item"), CLIENT_CALLS, ids=[each[0]["type"] for each in CLIENT_CALLS])
def test_a_call_of_a_client_that_was_cut_off_runs_nothing(
    scripted: ScriptedModel, live: LiveServer, tool: Any, arguments: Any, item: Any
) -> None:
    scripted.pieces, scripted.end = calling(tool["type"], arguments)[:-8], FinishReason.LENGTH
    [call] = stream(live, {"model": MODEL, "input": "x", "tools": [tool]})["output"]
    assert call["type"] == item["type"] and call["status"] in ("incomplete", "in_progress")
    assert not any(word in json.dumps(call) for word in ('"ls"', '"pwd"', "+b", '"query"'))


@pytest.mark.parametrize(
    "tool",
    [
        *({"type": kind} for kind in ("web_search", "web_search_preview", "image_generation", "computer_use_preview")),
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "file_search", "vector_store_ids": ["v"]},
        {"type": "mcp", "server_label": "s", "server_url": "http://s"},
        {"type": "tool_search"},
        {"type": "shell", "environment": {"type": "container_auto"}},
        {"type": "of_next_year", "size": 3},
    ],
    ids=lambda tool: tool["type"],
)
def test_a_tool_of_a_server_is_echoed_and_named(
    scripted: ScriptedModel, live: LiveServer, tool: dict[str, Any]
) -> None:
    answer = live.post(PATH, {**SENT, "tools": [TOOL, tool]})
    assert answer.headers["x-sluice-warning"] == f"fields without effect here: tools[1] ({tool['type']})"
    assert answer.json()["tools"] == [TOOL, tool]
    assert len(scripted.prompt.options.tools) == 1
    chosen = {"type": "allowed_tools", "mode": "auto", "tools": [tool, {"type": "function", "name": "light"}]}
    answer = live.post(PATH, {**SENT, "tools": [TOOL, tool], "tool_choice": chosen})
    assert f"tool_choice.tools[0] ({tool['type']})" in answer.headers["x-sluice-warning"]
    assert scripted.requests[-1].tool_choice == ToolChoice(names=("light",))


def test_a_function_takes_the_place_of_a_built_in_tool_of_its_name(scripted: ScriptedModel, live: LiveServer) -> None:
    body = {**SENT, "tools": [{**OTHER, "name": "shell"}, {"type": "shell"}]}
    assert "tools[1] (shell)" in live.post(PATH, body).headers["x-sluice-warning"]
    scripted.pieces = calling("shell", {})
    [call] = stream(live, body)["output"]
    assert call["type"] == "function_call"


def test_a_built_in_tool_may_be_chosen(scripted: ScriptedModel, live: LiveServer) -> None:
    body = {**SENT, "tools": [TOOL, {"type": "apply_patch"}], "tool_choice": {"type": "apply_patch"}}
    assert live.post(PATH, body).status_code == 200
    assert scripted.requests[-1].tool_choice == ToolChoice(True, False, ("apply_patch",))


def test_a_thousand_tools_are_taken(scripted: ScriptedModel, live: LiveServer) -> None:
    tools = [{**TOOL, "name": f"light_{number}", "strict": False} for number in range(1000)]
    assert live.post(PATH, {**SENT, "tools": tools}).status_code == 200
    assert len(scripted.prompt.options.tools) == 1000


def test_what_is_no_tool_among_those_that_a_search_found_is_left_out() -> None:
    odd = [
        {"type": "function"},
        {"type": "function", "name": "a b"},
        5,
        {"type": "web_search"},
        {**OTHER, "name": "ok"},
    ]
    item = {"type": "tool_search_output", "call_id": "c", "tools": odd}
    assert list(declared_tools(PromptFields.model_validate({}), [item])) == ["ok"]


def test_a_namespace_may_be_allowed(scripted: ScriptedModel, live: LiveServer) -> None:
    space = {"type": "namespace", "name": "mcp__fs", "tools": [OTHER]}
    chosen = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "mcp__fs"}]}
    assert live.post(PATH, {**SENT, "tools": [TOOL, space], "tool_choice": chosen}).status_code == 200
    assert scripted.requests[-1].tool_choice == ToolChoice(True, names=("mcp__fs__heat",))


@pytest.mark.parametrize(
    ("definition", "pattern"), [("a+|b", {"pattern": "^(?:a+|b)$"}), ("(", {}), ("", {}), ("a" * 5000, {})]
)
def test_a_custom_tools_input_is_held_to_a_regular_expression(definition: str, pattern: dict[str, str]) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": definition}
    fields = PromptFields.model_validate({"tools": [{"type": "custom", "name": "c", "format": form}]})
    declared = declared_tools(fields)
    assert declared["c"].function["parameters"]["properties"]["input"] == {"type": "string", **pattern}
    assert tools_without_effect(fields, declared) == ([] if pattern else ["tools[0].format"])


def test_reasoning_comes_back_from_what_the_client_kept(scripted: ScriptedModel, client: openai.OpenAI) -> None:
    sent: Any = {**SENT, "store": False, "include": ["reasoning.encrypted_content"]}
    reasoning, *rest = client.responses.create(**sent).output
    assert reasoning.type == "reasoning" and reasoning.encrypted_content
    kept: Any = {"type": "reasoning", "summary": [], "encrypted_content": reasoning.encrypted_content}
    client.responses.create(**{**sent, "input": [{"role": "user", "content": "x"}, kept, *rest]})
    assert scripted.prompt.messages[1].reasoning == "Two lamps."


@given(st.text(), st.text())
def test_what_is_sealed_is_read_again_and_nothing_else(text: str, other: str) -> None:
    assert unseal_text("reasoning", seal_text("reasoning", text)) == text
    assert unseal_text("compaction", seal_text("reasoning", text)) is None
    assert unseal_text("reasoning", other) is None


def messages_of(*items: dict[str, Any]) -> tuple[list[ChatMessage], list[str]]:
    fields = PromptFields.model_validate({"input": list(items)})
    ids = ItemIds("m")
    assert isinstance(fields.input, list)
    return read_history([store_item(item, ids, "input") for item in fields.input])


CALLED = {"type": "mcp_call", "id": "m", "server_label": "s", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("item", "texts", "left_out"),
    [
        ({**CALLED, "output": "found"}, ["", "found"], []),
        ({**CALLED, "error": {"message": "no"}}, ["", '{"message": "no"}'], []),
        (CALLED, [], ["input[0] (mcp_call)"]),
        (
            {"type": "code_interpreter_call", "id": "c", "code": "1", "outputs": [{"type": "logs", "logs": "1"}]},
            ["", "1"],
            [],
        ),
        ({"type": "file_search_call", "id": "f", "queries": ["q"], "results": [{"text": "hit"}]}, ["", "hit"], []),
        ({"type": "computer_call_output", "call_id": "c", "output": {"image_url": "data:,"}}, ["[image]", None], []),
        ({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}, ["[input_file]"], []),
        ({"type": "function_call_output", "call_id": "c", "output": ""}, [""], []),
        ({"type": "program_output", "call_id": "c", "result": "5"}, ["5"], []),
        ({"type": "web_search_call", "id": "w", "status": "completed"}, [], ["input[0] (web_search_call)"]),
        ({"type": "compaction", "encrypted_content": "gAAAA"}, [], ["input[0] (compaction)"]),
        ({"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}, [], []),
        ({"type": "of_next_year", "role": "developer", "content": [{"text": "hi"}]}, ["hi"], []),
        ({"type": "of_next_year", "size": 10}, [], ["input[0] (of_next_year)"]),
    ],
)
def test_an_item_is_read_as_its_text_or_named(item: Any, texts: list[str | None], left_out: list[str]) -> None:
    messages, named = messages_of(item)
    assert [text if text is None else turn.content for turn, text in zip(messages, texts, strict=True)] == texts
    assert named == left_out


def test_a_result_may_name_the_item_of_its_call() -> None:
    call = {"type": "local_shell_call", "id": "lsh_1", "call_id": "c", "action": {"command": ["ls"]}}
    [_, result], _ = messages_of(call, {"type": "local_shell_call_output", "id": "lsh_1", "output": "a"})
    assert (result.tool_call_id, result.name, result.content) == ("c", "local_shell", "a")


def test_images_that_tools_returned_follow_all_results_as_the_users() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
    results = [
        {"type": "function_call_output", "call_id": name, "output": [{"type": "input_text", "text": name}, image]}
        for name in "ab"
    ]
    messages, _ = messages_of(*results, {"role": "assistant", "content": "Seen."})
    assert [(turn.role, turn.content) for turn in messages[:2]] == [("tool", "a[image]"), ("tool", "b[image]")]
    assert messages[2].role == "user" and len(messages[2].parts) == 3
    assert messages[3] == ChatMessage("assistant", "Seen.")


TYPED = ("message", "function_call", "custom_tool_call", "reasoning", "item_reference")
KINDS = {
    kind
    for model in get_args(get_args(ResponseInputItem)[0])
    for kind in get_args(model.model_fields["type"].annotation)
    if isinstance(kind, str) and kind.removesuffix("_output") not in TYPED
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["text", "type", "a"]), inner, max_size=3)
    ),
    max_leaves=5,
)
NAMES = ("action", "arguments", "call_id", "code", "content", "error", "id", "name", "operation", "output", "outputs")
ODD_ITEMS = st.fixed_dictionaries(
    {"type": st.sampled_from(sorted(KINDS | {"x_call", "x_output"}))},
    optional=dict.fromkeys(
        [*NAMES, "queries", "results", "server_label", "tools", "encrypted_content", "role"], VALUES
    ),
)


@given(st.lists(ODD_ITEMS, max_size=4))
def test_items_of_other_types_are_never_refused(items: list[dict[str, Any]]) -> None:
    messages_of(*items)
    fields = PromptFields.model_validate({"input": items})
    assert isinstance(fields.input, list)
    declared_tools(fields, [store_item(item, ItemIds("m"), "input") for item in fields.input])


def test_a_cut_off_call_is_taken_back(live: LiveServer) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "light", "arguments": '{"room": "ha'}
    result = {"type": "function_call_output", "call_id": "c", "output": "cut off"}
    body = {"model": MODEL, "input": [{"role": "user", "content": "x"}, call, result], "max_output_tokens": 2}
    assert live.post(PATH, body).status_code == 200


def test_a_prompt_that_is_too_long_has_a_code(live: LiveServer) -> None:
    answer: httpx.Response = live.post(PATH, {"model": MODEL, "input": "word " * 9000, "truncation": "disabled"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_long_turn_of_calls_loses_its_oldest_ones(live: LiveServer) -> None:
    def step(number: int) -> list[dict[str, Any]]:
        name = f"call_{number}"
        called = {"type": "function_call", "call_id": name, "name": "light", "arguments": "{}"}
        return [called, {"type": "function_call_output", "call_id": name, "output": f"lamp {number} " * 20}]

    steps = [item for number in range(60) for item in step(number)]
    body = {"model": MODEL, "input": [{"role": "user", "content": "x"}, *steps], "max_output_tokens": 4}
    assert live.post(PATH, body).status_code == 400
    answer = live.post(PATH, {**body, "truncation": "auto"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["input_tokens"] > live.model.max_model_len // 2
