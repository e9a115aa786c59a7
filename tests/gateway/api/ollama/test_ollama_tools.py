"""Tools and thinking as Ollama's own client sees them."""

from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from tests.gateway.front.http.live import MODEL, LiveServer
from tests.waiting import PATIENCE_S

LIGHT: dict[str, Any] = {
    "name": "set_light",
    "description": "Sets a light.",
    "parameters": {"type": "object", "properties": {"room": {"type": "string"}}, "required": ["room"]},
}
TOOLS: Any = [{"type": "function", "function": LIGHT}, {"type": "function", "function": {"name": "all_off"}}]
TURNS: Any = [{"role": "user", "content": "Light, please."}]
CALL = '<tool_call>\n{"name": "set_light", "arguments": {"room": "hall"}}\n</tool_call>'
OFF = '<tool_call>\n{"name": "all_off", "arguments": {}}\n</tool_call>'
CUT_OFF = CALL[:-20]
OPTIONS = {"num_predict": 200, "seed": 1}
pytestmark = pytest.mark.usefixtures("random_answers")


@pytest.fixture(scope="module")
def client(chat_live: LiveServer) -> Iterator[ollama.Client]:
    with ollama.Client(chat_live.url, timeout=PATIENCE_S) as stock:
        yield stock


@pytest.mark.parametrize(
    ("text", "content", "thinking", "calls"),
    [
        ("A plain answer.", "A plain answer.", "", []),
        ("<think>\nwhy\n</think>\n\nso", "so", "why\n", []),
        (f"<think>hm</think>One.\n{CALL}\n{OFF}", "One.", "hm", [("set_light", {"room": "hall"}), ("all_off", {})]),
        (OFF, "", "", [("all_off", {})]),
        (CUT_OFF, "", "", []),
    ],
)
def test_streamed_parts_are_those_of_the_whole_answer(
    chat_live: LiveServer, client: ollama.Client, text: str, content: str, thinking: str, calls: list[Any]
) -> None:
    chat_live.say(text)
    whole = client.chat(MODEL, TURNS, tools=TOOLS, options=OPTIONS)
    pieces = list(client.chat(MODEL, TURNS, tools=TOOLS, options=OPTIONS, stream=True))
    found = [call.function for piece in pieces for call in piece.message.tool_calls or ()]
    assert [call.function for call in whole.message.tool_calls or ()] == found
    assert [(call.name, call.arguments) for call in found] == calls
    assert whole.message.content == "".join(piece.message.content or "" for piece in pieces) == content
    assert (whole.message.thinking or "") == "".join(piece.message.thinking or "" for piece in pieces) == thinking
    reason = "length" if text == CUT_OFF else "stop"
    assert (whole.done_reason, pieces[-1].done_reason) == (reason, reason)


def test_a_conversation_with_results_goes_on(chat_live: LiveServer, client: ollama.Client) -> None:
    chat_live.say(f"<think>a</think>{CALL}\n{OFF}")
    called = client.chat(MODEL, TURNS, tools=TOOLS, options=OPTIONS).message
    chat_live.say("Done.")
    for names in (("all_off", "set_light"), ("", "")):
        results: Any = [{"role": "tool", "content": "ok", **({"tool_name": name} if name else {})} for name in names]
        answer = client.chat(MODEL, [*TURNS, called, *results], tools=TOOLS, options=OPTIONS)
        assert answer.message.content == "Done."


def test_thinking_of_a_prompt_stays_out_of_its_text_and_context(chat_live: LiveServer, client: ollama.Client) -> None:
    chat_live.say("<think>hm</think>so")
    found = client.generate(MODEL, "Why?", options=OPTIONS, think=True)
    assert (found.response, found.thinking) == ("so", "hm")
    text = chat_live.model.tokenizer.decode(list(found.context or ()), skip_special_tokens=False)
    assert text == "<|user|>Why?<|end|><|assistant|>so<|end|>"
    hidden = client.generate(MODEL, "Why?", options=OPTIONS, think=False)
    assert hidden.thinking is None


def test_the_model_says_what_it_can(chat_live: LiveServer, client: ollama.Client) -> None:
    shown = client.show(MODEL)
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.template == chat_live.model.tokenizer.chat_template


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {
                "messages": [
                    {"role": "user", "content": "", "tool_calls": [{"function": {"name": "x", "arguments": {}}}]}
                ]
            },
            "messages[0].tool_calls needs the role assistant, got user",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": 5}}]}]},
            "messages[0].tool_calls[0].function.arguments must be an object, or the text of one, got 5",
        ),
    ],
)
def test_bad_tools_and_turns_are_refused(chat_live: LiveServer, change: dict[str, Any], message: str) -> None:
    response = chat_live.post("/api/chat", {"model": MODEL, "messages": TURNS, **change})
    assert response.status_code == 400
    assert message in response.json()["error"]


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        ({"role": "tool", "content": "x"}, "adapted: messages[1] follows no call of which it may be the result"),
        ({"role": "user", "content": None}, "adapted: messages[1].content null is read as no text"),
    ],
)
def test_odd_turns_are_adapted_and_named(chat_live: LiveServer, turn: dict[str, Any], words: str) -> None:
    chat_live.say("Done.")
    response = chat_live.post("/api/chat", {"model": MODEL, "stream": False, "messages": [*TURNS, turn]})
    assert response.status_code == 200 and response.headers["x-sluice-warning"] == words, response.text
