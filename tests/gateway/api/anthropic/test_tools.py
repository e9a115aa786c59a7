"""Tool uses and thinking as Anthropic's own client sees them, whole and streamed."""

import json
from base64 import b64encode
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from tests.gateway.front.http.live import MODEL, LiveServer
from tests.pipelines.rag.documents.pdf_writer import Pdf
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    import anthropic

PATH = "/v1/messages"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"room": {"enum": ["hall", "loft"]}, "level": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["room", "level"],
}
TOOLS: Any = [
    {"name": "set_light", "description": "Sets a light.", "input_schema": SCHEMA},
    {"name": "all_off", "input_schema": {"type": "object", "properties": {}}},
]
TURNS: Any = [{"role": "user", "content": "Light, please."}]
BODY: dict[str, Any] = {"model": MODEL, "messages": TURNS, "max_tokens": 400, "tools": TOOLS}
INPUT = {"room": "hall", "level": 3}
CALL = f'<tool_call>\n{{"name": "set_light", "arguments": {json.dumps(INPUT)}}}\n</tool_call>'
OFF = '<tool_call>\n{"name": "all_off", "arguments": {}}\n</tool_call>'
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "a"}
ANSWER = f"<think>hm</think>One.\n{CALL}\n{OFF}"
pytestmark = pytest.mark.usefixtures("random_answers")


@pytest.fixture(scope="module")
def client(chat_live: LiveServer) -> "Iterator[anthropic.Anthropic]":
    import anthropic  # takes seconds, which this file's worker alone is to spend

    with anthropic.Anthropic(base_url=chat_live.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as stock:
        yield stock


def shown(message: "anthropic.types.Message") -> list[dict[str, Any]]:
    """Return the blocks without the ids of tool uses, which are random."""
    blocks = [block.model_dump(exclude_none=True) for block in message.content]
    return [{name: value for name, value in block.items() if name not in ("id", "caller")} for block in blocks]


def streamed(client: "anthropic.Anthropic", **fields: Any) -> "anthropic.types.Message":
    with client.messages.stream(**fields) as stream:
        return stream.get_final_message()


def test_streamed_blocks_are_those_of_the_whole_answer(chat_live: LiveServer, client: "anthropic.Anthropic") -> None:
    chat_live.say(ANSWER)
    whole = client.messages.create(**BODY)
    thinking, *rest = shown(whole)
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "hm") and thinking["signature"]
    assert rest == [
        {"type": "text", "text": "One."},
        {"type": "tool_use", "name": "set_light", "input": INPUT},
        {"type": "tool_use", "name": "all_off", "input": {}},
    ]
    assert whole.stop_reason == "tool_use"
    final = streamed(client, **BODY)
    assert (shown(final), final.stop_reason) == (shown(whole), "tool_use")
    chat_live.say("A plain answer.")
    assert shown(client.messages.create(**BODY)) == shown(streamed(client, **BODY))


def test_events_have_anthropics_names_and_order(chat_live: LiveServer) -> None:
    chat_live.say(ANSWER)
    lines = chat_live.post(PATH, {**BODY, "stream": True}).text.strip().split("\n\n")
    events = [json.loads(each.split("\n")[1].removeprefix("data: ")) for each in lines]
    kinds = [
        (event["type"], event.get("index"), event.get("content_block", event.get("delta", {})).get("type"))
        for event in events
    ]
    assert list(dict.fromkeys(kinds)) == [
        ("message_start", None, None),
        ("content_block_start", 0, "thinking"),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, "text"),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, "tool_use"),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("content_block_start", 3, "tool_use"),
        ("content_block_delta", 3, "input_json_delta"),
        ("content_block_stop", 3, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "set_light"}])
def test_a_required_use_matches_its_schema(client: "anthropic.Anthropic", choice: Any) -> None:
    fields = {**BODY, "tool_choice": {"disable_parallel_tool_use": True, **choice}, "thinking": {"type": "disabled"}}
    for message in (client.messages.create(**fields), streamed(client, **fields)):
        [block] = shown(message)
        assert (block["type"], message.stop_reason) == ("tool_use", "tool_use")
        if block["name"] == "set_light":
            jsonschema.validate(block["input"], SCHEMA)
        else:
            assert choice["type"] == "any"


def test_a_conversation_with_results_goes_on(chat_live: LiveServer, client: "anthropic.Anthropic") -> None:
    chat_live.say(ANSWER)
    used = client.messages.create(**BODY)
    ids = [block.id for block in used.content if block.type == "tool_use"]
    results: Any = [
        {"type": "tool_result", "tool_use_id": ids[0], "content": [{"type": "text", "text": "bright"}]},
        {"type": "tool_result", "tool_use_id": ids[1], "is_error": True},
        {"type": "text", "text": "And now?"},
    ]
    turns = [*TURNS, {"role": "assistant", "content": used.content}, {"role": "user", "content": results}]
    chat_live.say("Done.")
    answer = client.messages.create(**{**BODY, "messages": turns})
    assert shown(answer) == [{"type": "text", "text": "Done."}]
    count = client.messages.count_tokens(model=MODEL, messages=turns, tools=TOOLS).input_tokens
    assert count == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert count > client.messages.count_tokens(model=MODEL, messages=turns).input_tokens


@pytest.mark.parametrize("value", ["99999999999999999999", "1e999", "[" * 250 + "]" * 250])
def test_an_input_is_what_the_model_wrote(chat_live: LiveServer, value: str) -> None:
    """Also with a number or a depth that not every reader of JSON has."""
    chat_live.say(f'<tool_call>\n{{"name": "put", "arguments": {{"value": {value}}}}}\n</tool_call>')
    schema = {"type": "object", "properties": {"value": {}}}
    body = {**BODY, "max_tokens": 700, "tools": [{"name": "put", "input_schema": schema}]}
    answer = chat_live.post(PATH, body)
    assert answer.status_code == 200 and f'"input":{{"value": {value}}}' in answer.text, answer.text
    function = {"type": "function", "function": {"name": "put", "parameters": schema}}
    body = {"model": MODEL, "messages": TURNS, "tools": [function], "options": {"num_predict": 700}}
    for is_streamed in (False, True):
        answer = chat_live.post("/api/chat", {**body, "stream": is_streamed})
        assert answer.status_code == 200 and f'"arguments":{{"value": {value}}}' in answer.text, answer.text


def test_there_may_be_hundreds_of_tools(chat_live: LiveServer, client: "anthropic.Anthropic") -> None:
    chat_live.say("Done.")
    tools = [{"name": f"f{number}", "input_schema": {"type": "object"}, "defer_loading": True} for number in range(300)]
    counted = client.messages.count_tokens(model=MODEL, messages=TURNS, tools=TOOLS + tools)
    assert counted.input_tokens > 300 * 10
    answer = chat_live.post(PATH, {**BODY, "tools": TOOLS + tools, "tool_choice": {"type": "none"}})
    assert answer.json()["content"] == [{"type": "text", "text": "Done."}], answer.text


def test_a_pdf_is_counted_as_it_is_answered(chat_live: LiveServer) -> None:
    chat_live.say("Done.")
    source = {
        "type": "base64",
        "media_type": "application/pdf",
        "data": b64encode(Pdf([["Hello." * 9]]).to_bytes()).decode(),
    }
    turns = [{"role": "user", "content": [{"type": "document", "source": source}]}]
    answer = chat_live.post(PATH, {**BODY, "messages": turns})
    assert answer.status_code == 200 and "x-sluice-warning" not in answer.headers, answer.text
    bodies = [{"model": MODEL, "tools": TOOLS, "messages": each} for each in (turns, TURNS)]
    counted, shorter = [chat_live.post(PATH + "/count_tokens", each).json()["input_tokens"] for each in bodies]
    assert counted == used(answer.json()["usage"]) > shorter


def used(usage: dict[str, int]) -> int:
    """Return the number of the prompt's tokens."""
    return usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]


def test_thoughts_that_cannot_be_bounded_are_as_long_as_the_model_likes(chat_live: LiveServer) -> None:
    chat_live.say("<think>hm</think>Done.")
    answer = chat_live.post(PATH, {**BODY, "thinking": {"type": "enabled", "budget_tokens": 1}, "max_tokens": 400})
    assert [block["type"] for block in answer.json()["content"]] == ["thinking", "text"], answer.text


def test_no_tool_may_be_used(chat_live: LiveServer, client: "anthropic.Anthropic") -> None:
    chat_live.say("<think>hm</think>" + OFF)
    answer = client.messages.create(**BODY, tool_choice={"type": "none"}, thinking={"type": "adaptive"})
    assert [block["type"] for block in shown(answer)] == ["thinking", "text"]


def test_an_input_that_was_cut_off_has_what_came(chat_live: LiveServer, client: "anthropic.Anthropic") -> None:
    chat_live.say(CALL)
    answer = client.messages.create(**{**BODY, "max_tokens": 26})
    assert answer.stop_reason == "max_tokens"
    [block] = answer.content
    assert block.type == "tool_use" and isinstance(block.input, dict)


SYSTEM: Any = {"role": "system", "content": "12000 tokens left."}


@pytest.mark.parametrize(
    "turns",
    [
        [*TURNS, SYSTEM],
        [*TURNS, {"role": "assistant", "content": "Hm."}, SYSTEM, *TURNS],
        [*TURNS, {"role": "system", "content": [{"type": "text", "text": "12000 tokens left."}]}, *TURNS],
    ],
)
def test_the_system_may_speak_among_the_turns(chat_live: LiveServer, turns: list[Any]) -> None:
    chat_live.say("Done.")
    answer = chat_live.post(PATH, {**BODY, "messages": turns}).json()
    assert answer["content"] == [{"type": "text", "text": "Done."}]
    counted = chat_live.post(PATH + "/count_tokens", {"model": MODEL, "messages": turns, "tools": TOOLS}).json()
    assert counted["input_tokens"] == answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]
    said = [turn | {"content": "12000 tokens left."} if turn["role"] == "system" else turn for turn in turns]
    rendered = chat_live.post("/tokenize", {"model": MODEL, "messages": said, "tools": []}).json()
    plain = chat_live.post(PATH + "/count_tokens", {"model": MODEL, "messages": turns}).json()
    assert plain["input_tokens"] == rendered["count"]


SEARCH: Any = {"type": "web_search_20250305", "name": "web_search"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tools": [*TOOLS, SEARCH]}, "fields without effect here: tools[2] (web_search_20250305)"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "of_next_year"}, TURNS[0] | {"type": "text", "text": "x"}]}
                ]
            },
            "messages[0].content[0] (of_next_year)",
        ),
        (
            {"messages": [*TURNS, {"role": "system", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]},
            "messages[1].content[0] (tool_use)",
        ),
        (
            {"messages": [{"role": "user", "content": [RESULT | {"content": [IMAGE]}]}]},
            "messages[0].content[0].content[0] (image)",
        ),
        ({"mcp_servers": [{"type": "url"}]}, "ignored unknown fields: mcp_servers"),
    ],
)
def test_what_the_model_does_not_get_is_named(chat_live: LiveServer, change: dict[str, Any], words: str) -> None:
    chat_live.say("Done.")
    answer = chat_live.post(PATH, {**BODY, **change})
    assert answer.status_code == 200 and words in answer.headers["x-sluice-warning"], answer.text


@pytest.mark.parametrize(
    "said",
    [
        [],
        [{"type": "text", "text": ""}],
        [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "redacted_thinking", "data": "x"}],
        [{"type": "tool_use", "id": "a", "name": "set_light", "input": {"room": "ha"}}],
        [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "One. "},
            {"type": "tool_use", "id": "a", "name": "gone", "input": {}, "caller": {"type": "direct"}},
        ],
    ],
)
def test_what_the_assistant_said_is_taken_back(chat_live: LiveServer, said: list[Any]) -> None:
    chat_live.say("Done.")
    turns = [*TURNS, {"role": "assistant", "content": said}, *TURNS, {"role": "user", "content": [RESULT]}]
    answer = chat_live.post(PATH, {**BODY, "messages": turns})
    assert answer.status_code == 200 and "x-sluice-warning" not in answer.headers, answer.text
    counted = chat_live.post(PATH + "/count_tokens", {"model": MODEL, "messages": turns, "tools": TOOLS}).json()
    assert counted["input_tokens"] == used(answer.json()["usage"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"tools": [*TOOLS, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
            "tool_choice.name must be a tool that the client runs: 'web_search' of the type",
        ),
        (
            {"tools": [SEARCH], "tool_choice": {"type": "any"}},
            "tool_choice.type must be 'none' or 'auto' without tools",
        ),
        ({"tools": [{"type": 1}]}, "tools[0] must be a tool, an object whose type is a string"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is required"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, 'tool_choice.name must be one of set_light, all_off, got "x"'),
        ({"tools": [], "tool_choice": {"type": "any"}}, "tool_choice.type must be 'none' or 'auto' without tools"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
            "messages[0].content[0].type may be 'tool_use' only where the role is assistant",
        ),
        (
            {"tools": [{"name": "f", "strict": True, "input_schema": {"properties": {"a": {"type": "x"}}}}]},
            "the JSON schema of the tool f cannot be used: at #/properties/a",
        ),
    ],
)
def test_what_is_wrong_is_named(chat_live: LiveServer, change: dict[str, Any], words: str) -> None:
    response = chat_live.post(PATH, {**BODY, **change})
    assert response.status_code == 400 and words in response.json()["error"]["message"], response.text
