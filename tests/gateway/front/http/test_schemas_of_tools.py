"""Schemas of tools of which a grammar keeps to a part, over every protocol; and long lists of tools."""

import asyncio
import threading
from typing import Any

import pytest

from sluice.gateway.api import tools as long_schemas
from sluice.gateway.api.openai.schemas import ChatCompletionRequest
from sluice.gateway.api.tools import parse_with_schemas
from sluice.pipelines.chat.formats import parse_tools
from sluice.pipelines.text.types import Conversation, TemplateOptions, TextRequest
from tests.gateway.front.http.live import LiveServer

PARAMETERS = {
    "type": "object",
    "properties": {
        "to": {"type": "string", "pattern": r"^(?!\.)[a-z.]+$"},
        "ids": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    },
    "if": {"required": ["to"]},
    "then": {"required": ["ids"]},
}
FUNCTION: dict[str, Any] = {"name": "send", "parameters": PARAMETERS}
TURNS = [{"role": "user", "content": "x"}]
TOOLS = [{"type": "function", "function": FUNCTION}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS, "max_tokens": 4, "tools": TOOLS},
    "/v1/responses": {
        "input": "x",
        "max_output_tokens": 16,
        "tools": [{"type": "function", "strict": None, **FUNCTION}],
    },
    "/v1/messages": {"messages": TURNS, "max_tokens": 4, "tools": [{"name": "send", "input_schema": PARAMETERS}]},
    "/api/chat": {"messages": TURNS, "stream": False, "options": {"num_predict": 4}, "tools": TOOLS},
}


@pytest.mark.parametrize("path", BODIES)
def test_what_calls_are_not_held_to_is_named_in_every_protocol(chat_live: LiveServer, path: str) -> None:
    chat_live.runner.script = []
    response = chat_live.post(path, {"model": "rill", **BODIES[path]})
    assert response.status_code == 200, response.text
    warning = response.headers["x-sluice-warning"]
    for words in ("if is not enforced at # in send", "look-around in the pattern", "uniqueItems is not enforced"):
        assert words in warning


def test_a_strict_tool_of_which_a_grammar_keeps_to_a_part_is_refused(chat_live: LiveServer) -> None:
    tools = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    response = chat_live.post(
        "/v1/chat/completions", {"model": "rill", **BODIES["/v1/chat/completions"], "tools": tools}
    )
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "tools"
    assert "the JSON schema of the tool send cannot be used: at #" in error["message"]


def many_tools(num_tools: int) -> list[dict[str, Any]]:
    members = {f"p{number}": {"type": "string"} for number in range(50)}
    schemas = [{"type": "object", "properties": members | {f"q{index}": {}}} for index in range(num_tools)]
    return [
        {"type": "function", "function": {"name": f"f{index}", "parameters": schema}}
        for index, schema in enumerate(schemas)
    ]


def test_a_long_list_of_tools_is_rewritten_aside_and_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tools, threads, pauses = many_tools(128), [], []
    fields = ChatCompletionRequest.model_validate({"model": "m", "messages": TURNS, "tools": tools})
    monkeypatch.setattr(long_schemas, "breathe", lambda: pauses.append(threading.current_thread().name))

    def parse() -> TextRequest:
        threads.append(threading.current_thread().name)
        return TextRequest(request_id="", prompt=Conversation((), TemplateOptions(tools=tuple(tools))))

    asyncio.run(parse_with_schemas(fields, parse, lambda parsed: parsed))
    assert threads[0].startswith("long-work") and pauses == threads * len(tools)


def test_a_short_list_of_tools_is_parsed_at_once() -> None:
    fields = ChatCompletionRequest.model_validate({"model": "m", "messages": TURNS, "tools": TOOLS})
    request = TextRequest(request_id="", prompt="")
    found = asyncio.run(parse_with_schemas(fields, lambda: (request, threading.current_thread()), lambda each: each[0]))
    assert found[1] is threading.main_thread()


def test_tools_that_come_again_are_not_rewritten_again() -> None:
    first, again = parse_tools(many_tools(3)), parse_tools(many_tools(3))
    assert all(one.parameters is other.parameters for one, other in zip(first, again, strict=True))
