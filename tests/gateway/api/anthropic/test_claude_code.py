"""Sessions as Claude Code has them: its first request, the turns that follow, and what it must be told."""

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from sluice.engine.config import EngineConfig
from tests.gateway.api.anthropic.test_tools import used
from tests.gateway.front.http.live import LiveServer, live_server
from tests.paths import DATA, RILL_TOKENIZER
from tests.pipelines.chat.chat_folder import HERMES_TEMPLATE, THINKING, write_chat_folder
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    import anthropic

PATH = "/v1/messages?beta=true"
CONTEXT = 16_384
FIRST, LATER = [json.loads((DATA / "agents" / f"claude_code_{name}.json").read_text()) for name in ("first", "later")]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("Read", {"file_path": "/home/user/project/notes.txt"}),
    ("Write", {"file_path": "/home/user/project/answer.txt", "content": "42\n"}),
    ("Bash", {"command": "cat answer.txt", "timeout": 1000}),
]


@pytest.fixture(scope="module")
def agent_live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose model reasons, calls tools and has room for a session."""
    folder = write_chat_folder(RILL_TOKENIZER, tmp_path_factory.mktemp("agent") / "1", HERMES_TEMPLATE + THINKING)
    engine = EngineConfig(model_path=str(folder), max_num_batched_tokens=CONTEXT)
    with live_server(engine_config=engine, checkpoint=folder, num_blocks=1024, max_model_len=CONTEXT) as running:
        running.runner.script = []
        yield running


@pytest.fixture(scope="module")
def client(agent_live: LiveServer) -> "Iterator[anthropic.Anthropic]":
    import anthropic  # takes seconds, which this file's worker alone is to spend

    with anthropic.Anthropic(base_url=agent_live.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as stock:
        yield stock


Ask = Callable[[dict[str, Any]], dict[str, Any]]
"""Sends a request, and returns the whole answer."""


@pytest.fixture(params=["stock client", "events"])
def ask(request: pytest.FixtureRequest, agent_live: LiveServer, client: "anthropic.Anthropic") -> Ask:
    def by_client(body: dict[str, Any]) -> dict[str, Any]:
        sent = {name: value for name, value in body.items() if name != "stream"}
        with client.beta.messages.stream(**sent, extra_headers=FIRST["headers"]) as stream:
            message = stream.get_final_message()
        return message.model_dump(mode="json", exclude_none=True)

    def by_events(body: dict[str, Any]) -> dict[str, Any]:
        answer = agent_live.post(PATH, body, headers=FIRST["headers"])
        assert answer.status_code == 200, answer.text
        return collected(answer)

    return by_client if request.param == "stock client" else by_events


def collected(answer: httpx.Response) -> dict[str, Any]:
    """Return the message that a stream's events make."""
    message: dict[str, Any] = {}
    text = ""
    for frame in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            text = ""
        elif event["type"] == "content_block_delta":
            [(name, more)] = [(key, value) for key, value in event["delta"].items() if key != "type"]
            block = message["content"][event["index"]]
            if name == "partial_json":
                text += more
                block["input"] = json.loads(text) if text.endswith("}") and text.count("{") == text.count("}") else {}
            else:
                block[name] += more
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    return message


def test_a_session_of_three_calls(agent_live: LiveServer, ask: Ask) -> None:
    body, before = json.loads(json.dumps(FIRST["body"])), 0
    for number, (name, arguments) in enumerate(CALLS):
        call = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        agent_live.say(f"<think>call {number}</think>Next.\n{call}")
        body["system"][0]["text"] = f"x-anthropic-billing-header: cc_version=2.1.{number}; cch=0f{number};"
        answer = ask(body)
        blocks = answer["content"]
        assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
        assert (answer["stop_reason"], blocks[2]["name"], blocks[2]["input"]) == ("tool_use", name, arguments)
        assert answer["usage"]["cache_read_input_tokens"] > before - 64, "the line of billing is in the prompt"
        before = used(answer["usage"])
        counted = {name: body[name] for name in ("model", "messages", "system", "tools", "thinking", "output_config")}
        assert agent_live.post("/v1/messages/count_tokens", counted).json()["input_tokens"] == before
        result = {"type": "tool_result", "tool_use_id": blocks[2]["id"], "content": [{"type": "text", "text": "ok"}]}
        body["messages"] += [
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [result]},
            {"role": "system", "content": f"<total_tokens>{9000 - number} tokens left</total_tokens>"},
        ]
    agent_live.say("<think>hm</think>Done.")
    answer = ask(body)
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    assert (answer["content"][1]["text"], answer["stop_reason"]) == ("Done.", "end_turn")


def test_what_a_long_session_has_is_taken_and_named_where_the_model_does_not_get_it(agent_live: LiveServer) -> None:
    agent_live.say("<think>hm</think>Done.")
    body = LATER["body"]
    answer = agent_live.post(PATH, body, headers=LATER["headers"])
    assert [block["type"] for block in answer.json()["content"]] == ["thinking", "text"], answer.text
    left_out = answer.headers["x-sluice-warning"].removeprefix("fields without effect here: ").split(", ")
    assert left_out == [
        "messages[5].content[2] (server_tool_use)",
        "messages[6].content[0].content[0] (image)",
        "tools[4] (web_search_20250305)",
        "tools[5] (tool_search_tool_regex_20251119)",
    ]
    counted = {name: body[name] for name in ("model", "messages", "system", "tools", "thinking", "output_config")}
    count = agent_live.post("/v1/messages/count_tokens", counted).json()["input_tokens"]
    assert count == used(answer.json()["usage"])
