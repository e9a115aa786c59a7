"""Tools and reasoning in chat completions, with the stock client: whole, streamed, and in OpenAI's earlier shape."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import msgspec
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessage

from sluice.engine.types import GrammarKind
from tests.gateway.front.http.live import LiveServer
from tests.gateway.front.http.sse import events_of
from tests.waiting import PATIENCE_S

PATH = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"room": {"enum": ["hall", "loft"]}, "level": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["room", "level"],
}
LIGHT = {"name": "set_light", "description": "Sets a light.", "parameters": SCHEMA}
TOOLS: Any = [{"type": "function", "function": LIGHT}, {"type": "function", "function": {"name": "all-off"}}]
MESSAGES: Any = [{"role": "user", "content": "Light, please."}]
CHAT: dict[str, Any] = {"model": "rill", "messages": MESSAGES, "max_tokens": 400, "seed": 1, "tools": TOOLS}
ARGUMENTS = '{"room": "hall", "level": 3}'
CALL = f'<tool_call>\n{{"name": "set_light", "arguments": {ARGUMENTS}}}\n</tool_call>'
OFF = '<tool_call>\n{"name": "all-off", "arguments": {}}\n</tool_call>'
pytestmark = pytest.mark.usefixtures("random_answers")


@pytest.fixture(scope="module")
def chat_client(chat_live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{chat_live.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as stock:
        yield stock


def streamed(client: openai.OpenAI, **fields: Any) -> ChatCompletion:
    with client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion()


def chunks(response: httpx.Response) -> list[Any]:
    *events, last = events_of(response.content)
    assert last == "[DONE]"
    return events


def call_of(answer: ChatCompletion) -> Any:
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    return call


def shown(message: ChatCompletionMessage) -> dict[str, Any]:
    """Return a message without the ids of its calls, which are random."""
    fields = message.model_dump(exclude_none=True)
    for call in fields.get("tool_calls", ()):
        assert call.pop("id").startswith("call_")
        for name in ("index", "parsed_arguments"):
            call.pop(name, None), call["function"].pop(name, None)
    fields.pop("parsed", None)
    return fields


@pytest.mark.parametrize(
    ("text", "message", "reason"),
    [
        ("A plain answer.", {"content": "A plain answer."}, "stop"),
        ("<think>\nwhy\n</think>\n\nso", {"content": "so", "reasoning": "why\n", "reasoning_content": "why\n"}, "stop"),
        (
            f"<think>hm</think>One.\n{CALL}\n{OFF}",
            {
                "content": "One.",
                "reasoning": "hm",
                "reasoning_content": "hm",
                "tool_calls": [
                    {"type": "function", "function": {"name": "set_light", "arguments": ARGUMENTS}},
                    {"type": "function", "function": {"name": "all-off", "arguments": "{}"}},
                ],
            },
            "tool_calls",
        ),
        (OFF, {"tool_calls": [{"type": "function", "function": {"name": "all-off", "arguments": "{}"}}]}, "tool_calls"),
    ],
)
def test_streamed_parts_are_those_of_the_whole_answer(
    chat_live: LiveServer, chat_client: openai.OpenAI, text: str, message: dict[str, Any], reason: str
) -> None:
    chat_live.say(text)
    whole = chat_client.chat.completions.create(**CHAT).choices[0]
    assert shown(whole.message) == {"role": "assistant", **message}
    assert whole.finish_reason == reason
    choice = streamed(chat_client, **CHAT).choices[0]
    assert shown(choice.message) == shown(whole.message)
    assert choice.finish_reason == reason


@pytest.mark.parametrize(
    ("limit", "count"), [(400, 6), (8, 4), (2, 0)], ids=["whole", "cut in the reasoning", "cut before it"]
)
def test_reasoning_tokens_are_counted(
    chat_live: LiveServer, chat_client: openai.OpenAI, limit: int, count: int
) -> None:
    chat_live.say("<think>because of this and that</think>so it is")
    body = CHAT | {"max_tokens": limit, "stop": ["no such text"]}
    chat_client.chat.completions.create(**body)  # from here on the prompt is in the prefix cache
    whole = chat_client.chat.completions.create(**body).usage
    last = list(chat_client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))[-1]
    assert last.usage == whole is not None and whole.completion_tokens_details is not None
    assert whole.completion_tokens_details.reasoning_tokens == count
    answer = chat_client.responses.create(model="rill", input="Why?", max_output_tokens=limit)
    assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens == count
    plain = chat_client.completions.create(model="rill", prompt="Why?", max_tokens=limit).usage
    assert plain is not None and plain.completion_tokens_details is not None
    assert plain.completion_tokens_details.reasoning_tokens == 0


def test_deltas_are_openais(chat_live: LiveServer) -> None:
    chat_live.say(CALL + "\n" + OFF)
    events = chunks(chat_live.post(PATH, CHAT | {"stream": True, "logprobs": True, "top_logprobs": 1}))
    choices = [event["choices"][0] for event in events]
    first, *rest = [choice["delta"] for choice in choices]
    assert first == {"role": "assistant", "content": None}
    calls = [call for delta in rest for call in delta.get("tool_calls", ())]
    assert [call.keys() for call in calls if "id" in call] == [{"index", "id", "type", "function"}] * 2
    starts = [call for call in calls if "id" in call]
    assert [call["function"] for call in starts] == [
        {"name": "set_light", "arguments": ""},
        {"name": "all-off", "arguments": ""},
    ]
    pieces = [call for call in calls if "id" not in call]
    assert all(call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"} for call in pieces)
    assert len(pieces) > 3 and "".join(call["function"]["arguments"] for call in pieces) == ARGUMENTS + "{}"
    assert rest[-1] == {} and choices[-1]["finish_reason"] == "tool_calls"
    tokens = [entry["token"] for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    assert "".join(tokens) == CALL + "\n" + OFF


def test_a_required_call_matches_its_schema(chat_client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "set_light"}}):
        fields = CHAT | {"tool_choice": choice, "parallel_tool_calls": False}
        fields["reasoning_effort"] = "none"
        for answer in (chat_client.chat.completions.create(**fields), streamed(chat_client, **fields)):
            call = call_of(answer)
            assert answer.choices[0].finish_reason == "tool_calls"
            if call.function.name == "set_light":
                jsonschema.validate(json.loads(call.function.arguments), SCHEMA | {"additionalProperties": False})
            else:
                assert (choice, call.function.name, call.function.arguments) == ("required", "all-off", "{}")


def test_allowed_tools_narrow_the_choice(chat_client: openai.OpenAI) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "all-off"}}]}
    fields = CHAT | {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}, "reasoning_effort": "none"}
    answer = chat_client.chat.completions.create(**fields)
    calls = answer.choices[0].message.tool_calls or []
    assert {call.function.name for call in calls if call.type == "function"} == {"all-off"}


def test_no_choice_leaves_the_tools_out(chat_live: LiveServer, chat_client: openai.OpenAI) -> None:
    chat_live.say("No. " + OFF)
    without = {name: value for name, value in CHAT.items() if name != "tools"}
    plain = chat_client.chat.completions.create(**without)
    answer = chat_client.chat.completions.create(**CHAT, tool_choice="none")
    assert answer.usage == plain.usage
    assert answer.choices[0].message == plain.choices[0].message
    assert answer.choices[0].message.content == "No. " + OFF


def test_functions_are_tools_of_an_earlier_time(chat_live: LiveServer, chat_client: openai.OpenAI) -> None:
    chat_live.say(CALL)
    fields = {name: value for name, value in CHAT.items() if name != "tools"} | {"functions": [LIGHT]}
    whole = chat_client.chat.completions.create(**fields)
    choice = whole.choices[0]
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    assert choice.message.function_call is not None and choice.message.function_call.name == "set_light"
    events = chunks(chat_live.post(PATH, fields | {"stream": True}))
    deltas = [event["choices"][0]["delta"].get("function_call", {}) for event in events]
    assert [delta["name"] for delta in deltas if "name" in delta] == ["set_light"]
    assert "".join(delta.get("arguments", "") for delta in deltas) == choice.message.function_call.arguments
    named = chat_client.chat.completions.create(**fields, function_call={"name": "set_light"}, reasoning_effort="none")
    assert named.choices[0].message.function_call is not None


def test_a_conversation_with_results_goes_on(chat_live: LiveServer, chat_client: openai.OpenAI) -> None:
    chat_live.say(f"<think>a</think>{CALL}")
    called = chat_client.chat.completions.create(**CHAT)
    chat_live.say("Done.")
    history = [
        *MESSAGES,
        called.choices[0].message,
        {"role": "tool", "tool_call_id": call_of(called).id, "content": "ok <|end|>"},
        {"role": "assistant", "content": None, "function_call": {"name": "all-off", "arguments": "{}"}},
        {"role": "function", "name": "all-off", "content": None},
    ]
    answer = chat_client.chat.completions.create(**CHAT | {"messages": history})
    assert answer.choices[0].message.content == "Done."


def test_the_tokens_of_a_prompt_with_tools_are_told(chat_live: LiveServer) -> None:
    turns = [*MESSAGES, *calling("assistant", ARGUMENTS), {"role": "tool", "tool_call_id": "a", "content": "ok"}]
    prompt = {"model": "rill", "messages": turns, "tools": TOOLS}
    chat_live.say("Done.")
    answer = chat_live.post(PATH, prompt | {"max_tokens": 20}).json()
    assert chat_live.post("/tokenize", prompt).json()["count"] == answer["usage"]["prompt_tokens"]


def test_reasoning_is_left_out_where_the_client_says_so(chat_live: LiveServer, chat_client: openai.OpenAI) -> None:
    chat_live.say("<think>hm</think>so")
    answer = chat_client.chat.completions.create(**CHAT, extra_body={"include_reasoning": False})
    assert shown(answer.choices[0].message) == {"role": "assistant", "content": "so"}
    opened = chat_live.post(PATH, CHAT | {"reasoning_effort": "high"})
    assert opened.status_code == 200 and "x-sluice-warning" not in opened.headers


@pytest.mark.parametrize("fields", [{"thinking_token_budget": 5}, {"reasoning_effort": "low", "max_tokens": 25}])
def test_a_required_call_follows_a_budget_that_is_spent(chat_live: LiveServer, fields: dict[str, Any]) -> None:
    body = CHAT | {"tool_choice": "required", "chat_template_kwargs": {"opens": True}} | fields
    answer = chat_live.post(PATH, body).json()
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5
    if "max_tokens" not in fields:
        assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] in ("set_light", "all-off")


def test_an_answer_cut_off_in_a_call_ends_by_its_length(chat_live: LiveServer) -> None:
    chat_live.say(CALL)
    choice = chat_live.post(PATH, CHAT | {"max_tokens": 25}).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert ARGUMENTS.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])
    fields = CHAT | {"max_tokens": 5, "reasoning_effort": "none"}
    cut = [chat_live.post(PATH, fields | {"tool_choice": choice}).json() for choice in ("auto", "required")]
    assert [answer["choices"][0]["message"]["content"] for answer in cut] == ["<tool_call", ""]


def test_a_call_that_was_cut_off_is_taken_as_history(chat_live: LiveServer) -> None:
    """As the server itself sent it."""
    chat_live.say(CALL)
    message = chat_live.post(PATH, CHAT | {"max_tokens": 25}).json()["choices"][0]["message"]
    chat_live.say("Done.")
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "no JSON"}
    for arguments in (message["tool_calls"][0]["function"]["arguments"], '{"room": "half a pair: \\ud83d"}'):
        message["tool_calls"][0]["function"]["arguments"] = arguments
        answer = chat_live.post(PATH, CHAT | {"messages": [*MESSAGES, message, result]})
        assert answer.json()["choices"][0]["message"]["content"] == "Done.", answer.text


def test_a_refusal_is_a_part_of_an_earlier_answer(chat_live: LiveServer) -> None:
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    said = {"role": "assistant", "content": "No."}
    counts = [
        chat_live.post("/tokenize", {"model": "rill", "messages": [*MESSAGES, each, *MESSAGES]}).json()["tokens"]
        for each in (refusal, said)
    ]
    assert counts[0] == counts[1]


def test_keywords_that_are_null_are_as_if_left_out(chat_live: LiveServer) -> None:
    schema = {**SCHEMA, "required": None, "description": None, "$defs": None}
    tools = [{"type": "function", "function": {**LIGHT, "parameters": schema}}]
    chat_live.say(CALL)
    answer = chat_live.post(PATH, CHAT | {"tools": tools, "tool_choice": "required"})
    assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "set_light", answer.text


def test_a_name_of_128_characters_is_called(chat_live: LiveServer) -> None:
    name = "mcp__" + "x" * 123
    tools = [{"type": "function", "function": {"name": name}}]
    chat_live.say(f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>')
    answer = chat_live.post(PATH, CHAT | {"tools": tools, "tool_choice": "required", "reasoning_effort": "none"})
    assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == name, answer.text


def test_several_choices_have_calls_of_their_own(chat_live: LiveServer) -> None:
    chat_live.say(CALL)
    answer = chat_live.post(PATH, CHAT | {"n": 2}).json()
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]}
    assert len(ids) == 2
    events = chunks(chat_live.post(PATH, CHAT | {"n": 2, "stream": True}))
    assert sorted(e["choices"][0]["index"] for e in events if e["choices"][0]["finish_reason"]) == [0, 1]


FUNCTION = {"name": "f"}


def calling(role: str, arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": role, "content": "", "tool_calls": [call]}]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "must be 'function'"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "is required"),
    ({"tools": TOOLS * 2049}, "tools", "at most 4096 elements"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters",
        "must be an object",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "array"}}}]},
        "tools",
        "the JSON schema of the tool f cannot be used: at #: type 'array'",
    ),
    ({"tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required'"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function", "is required"),
    (
        {"tool_choice": {"type": "function", "function": FUNCTION}},
        "tool_choice.function.name",
        'must be one of set_light, all-off, got "f"',
    ),
    (
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"function": FUNCTION}]},
            }
        },
        "tool_choice.allowed_tools.tools[0].function.name",
        "must be one of",
    ),
    ({"tools": None, "tool_choice": "required"}, "tool_choice", "send tools"),
    ({"functions": [LIGHT]}, "functions", "send tools"),
    ({"function_call": {"name": "f"}}, "function_call", "send functions"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function", "is required"),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "messages[0].content[0].input_audio",
        "is not supported: models take text",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": "", "tool_calls": [{"id": "a", "function": LIGHT | {"arguments": ""}}]}
            ]
        },
        "messages[0].tool_calls",
        "needs the role assistant, got user",
    ),
    (
        {"messages": calling("assistant", 5)},
        "messages[0].tool_calls[0].function.arguments",
        "must be an object, or the text of one, got 5",
    ),
    ({"guided_regex": "a+"}, "guided_regex", "the answer's text can be made to match json_schema or json_object"),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD)
def test_what_is_wrong_is_named(chat_live: LiveServer, fields: dict[str, Any], param: str, words: str) -> None:
    response = chat_live.post(PATH, CHAT | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and words in error["message"], error


RESULT = {"role": "tool", "content": "ok"}
CALL_ID = {"function": {"name": "set_light", "arguments": "{"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
SOUND = {"type": "input_audio", "input_audio": {}}
SAID = {"role": "assistant", "content": "Hm."}


def history(*turns: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*turns, *MESSAGES]}


def parts(role: str, *sent: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": "a"}, *sent]}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


ADAPTED: list[tuple[dict[str, Any], str]] = [
    (history({"role": "user", "content": None}), "messages[0].content null is read as no text"),
    (history({"role": "system", "content": []}), "messages[0].content [] is read as no text"),
    (history({**RESULT, "content": None}), "messages[0].tool_call_id is missing, so it is that of no call"),
    (
        history({"role": "assistant", "content": None, "tool_calls": [CALL_ID]}, RESULT),
        "messages[1].tool_call_id is missing, so it is the result of 'call_0_0'",
    ),
    (history({"role": "assistant", "content": None, "tool_calls": [{**CALL_ID, "id": 5}]}), ""),
    (history({"role": "assistant", "content": [], "tool_calls": []}, {"role": "assistant"}), ""),
    (history({**RESULT, "tool_call_id": "of no call"}, {"role": "function", "content": "x"}), ""),
    (
        history(parts("user", IMAGE), SAID),
        "[1].image_url is left out: model 'rill' takes text alone",
    ),
    (history(parts("tool", IMAGE)), "messages[0].content[1].image_url is left out: images need the role user"),
    (history(parts("user", SOUND), SAID), 'messages[0].content[1] is left out: its type is "input_audio"'),
    (history(parts("user", {"type": "new", "x": 1}), SAID), 'messages[0].content[1] is left out: its type is "new"'),
    (history(parts("user", {"type": "new", "text": "b"})), 'messages[0].content[1] has the type "new" and is read as'),
    (history(parts("assistant", {"type": "thinking", "thinking": "hm"})), ""),
    (history({**SAID, "audio": {"id": "a"}}), "ignored unknown fields: messages[0].audio"),
    ({"tools": [*TOOLS, named("a b")]}, 'tools[2].function.name "a b" is left out: a call needs 1 to 256 letters'),
    ({"tools": [*TOOLS, named("")]}, 'tools[2].function.name "" is left out'),
    ({"tools": TOOLS * 2}, 'tools[0].function.name "set_light" is left out: a later tool has the same name'),
    ({"functions": [LIGHT, LIGHT], "tools": None}, 'functions[0].name "set_light" is left out'),
    ({"tools": [named("mcp/über:a.b-c")]}, ""),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": True}}]}, ""),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        "type 'array', which is no object's, is not enforced at # in f",
    ),
]


@pytest.mark.parametrize(("fields", "words"), ADAPTED)
def test_what_is_odd_is_adapted_and_named(chat_live: LiveServer, fields: dict[str, Any], words: str) -> None:
    chat_live.say("Done.")
    response = chat_live.post(PATH, CHAT | fields)
    assert response.status_code == 200, response.text
    warning = response.headers.get("x-sluice-warning", "")
    assert words in warning if words else not warning


def test_a_thousand_tools_are_offered(chat_live: LiveServer) -> None:
    chat_live.say('<tool_call>\n{"name": "tool_999", "arguments": {"a": 1}}\n</tool_call>')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": f"tool_{i}", "parameters": schema}} for i in range(1000)]
    answer = chat_live.post(PATH, CHAT | {"tools": tools, "truncate_prompt_tokens": 100})
    assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "tool_999", answer.text


def test_what_calls_are_not_held_to_is_named(chat_live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = {"type": "object", "properties": {"to": {"type": "string", "format": "phone"}}}
    tools = [{"type": "function", "function": {"name": "dial", "parameters": parameters}}]
    chat_live.say("No.")
    warning = chat_live.post(PATH, CHAT | {"tools": tools}).headers["x-sluice-warning"]
    assert "format 'phone' is not enforced at #/properties/to in dial" in warning
    info = msgspec.structs.replace(chat_live.engine.info, grammar_kinds=(GrammarKind.JSON_SCHEMA,))
    monkeypatch.setattr(chat_live.engine, "_info", info)
    response = chat_live.post(PATH, CHAT)
    assert "echo does not hold calls to the schemas of tools" in response.headers["x-sluice-warning"]
    error = chat_live.post(PATH, CHAT | {"tool_choice": "required"}).json()["error"]
    assert error["param"] == "tool_choice" and "echo, which runs this model" in error["message"]


def test_a_model_without_tools_refuses_them(live: LiveServer) -> None:
    earlier = {"functions": [LIGHT], "tools": None}
    assert live.post(PATH, CHAT | earlier).json()["error"]["param"] == "functions"
    error = live.post(PATH, CHAT).json()["error"]
    assert error["param"] == "tools" and "no tool calls in a known format" in error["message"]
