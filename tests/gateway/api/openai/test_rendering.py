"""Rendered, generated and derendered, an answer is the one that the route itself gives: whole and piece by piece."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.gateway.api.openai.test_tools import ARGUMENTS, CALL, OFF, TOOLS
from tests.gateway.front.http.live import LiveServer
from tests.gateway.front.http.sse import events_of

CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"
GENERATE = "/inference/v1/generate"
MESSAGES: Any = [{"role": "user", "content": "Light, please."}]
CALLED: Any = [
    *MESSAGES,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "set_light", "arguments": ARGUMENTS}}],
    },
    {"role": "tool", "tool_call_id": "1", "name": "set_light", "content": "done"},
]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
pytestmark = pytest.mark.usefixtures("random_answers")


def ok(live: LiveServer, path: str, body: Any) -> Any:
    answer = live.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def shown(answer: Any) -> Any:
    """Return an answer without ids and times, and without what the prefix cache had."""
    for choice in answer["choices"]:
        for call in choice.get("message", choice.get("delta", {})).get("tool_calls") or ():
            assert call.pop("id").startswith("call_")
    for name in ("id", "created", "system_fingerprint"):
        answer.pop(name, None)
    if answer.get("usage"):
        answer["usage"].pop("prompt_tokens_details")
    return answer


def joined(chunks: Sequence[Any]) -> Any:
    """Return what the deltas of a stream come to."""
    whole: dict[str, Any] = {}
    for choice in [each for chunk in chunks if chunk != "[DONE]" for each in chunk["choices"]]:
        for name, value in choice.get("delta", {"text": choice.get("text")}).items():
            if name == "tool_calls":
                for call in value:
                    call.pop("id", None)
                    function = whole.setdefault(name, {}).setdefault(call["index"], {"name": "", "arguments": ""})
                    for part, text in call["function"].items():
                        function[part] += text
            else:
                whole[name] = (whole.get(name) or "") + (value or "")
        for part, entries in (choice["logprobs"] or {}).items():
            whole.setdefault(f"logprobs.{part}", []).extend(entries or [])
        whole |= {name: choice[name] for name in ("finish_reason", "stop_reason") if choice.get(name) is not None}
    return whole


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]
CHATS: list[tuple[str, dict[str, Any]]] = [
    ("A plain answer.", {}),
    ("<think>\nwhy\n</think>\n\nso", {"logprobs": True, "top_logprobs": 3}),
    (f"<think>hm</think>One.\n{CALL}\n{OFF}", {"tools": TOOLS}),
    (f"{CALL}\n{OFF}", {"tools": TOOLS, "parallel_tool_calls": False, "tool_choice": "required"}),
    (OFF, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "all-off"}}}),
    ("One, two STOP three", {"stop": ["five", "STOP"], "logprobs": True}),
    ("One, two STOP three", {"stop": "STOP", "include_stop_str_in_output": True, "min_tokens": 3}),
    ("naïve 🙂 – …", {"max_tokens": 4, "return_token_ids": True}),
    ("", {"max_tokens": 30, "n": 3, "logit_bias": {"100": 4.5}, "bad_words": ["the"]}),
    ("", {"max_tokens": 60, "response_format": FORMAT, "chat_template_kwargs": {"opens": True}}),
    (
        "",
        {
            "max_tokens": 60,
            "response_format": FORMAT,
            "thinking_token_budget": 4,
            "chat_template_kwargs": {"opens": True},
        },
    ),
    ("", {"max_tokens": 60, "response_format": FORMAT, "reasoning_effort": "none"}),
    ("", {"max_tokens": 60, "tools": TOOLS, "response_format": {"type": "json_object"}}),
    ("", {"max_tokens": 60, "structured_outputs": {"choice": ["ja", "nein"]}, "include_reasoning": False}),
    ("", {"max_tokens": 60, "messages": CALLED}),
    (f"so {CALL} it", {"messages": CALLED}),
    ("A plain answer.", {"messages": [*IMAGE, {"role": "assistant", "content": "A lamp."}, *MESSAGES]}),
]


@pytest.mark.parametrize(("text", "fields"), CHATS)
def test_a_chat_in_three_steps_is_the_chat(chat_live: LiveServer, text: str, fields: dict[str, Any]) -> None:
    if text:
        chat_live.say(text)
    body = {"model": "rill", "messages": MESSAGES, "seed": 7, "max_tokens": 200, **fields}
    expected = ok(chat_live, CHAT, body)
    rendered = ok(chat_live, f"{CHAT}/render", body)
    generated = ok(chat_live, GENERATE, rendered)
    derendered = {"chat_request": body, "generate_response": generated, "prompt_token_ids": rendered["token_ids"]}
    found = ok(chat_live, f"{CHAT}/derender", derendered)
    assert found["usage"]["prompt_tokens_details"] == generated["usage"]["prompt_tokens_details"]
    assert shown(found) == shown(expected)
    if "n" in fields:
        return
    expected_deltas = joined(events_of(chat_live.post(CHAT, body | {"stream": True}).content))
    chunks, state = [], None
    for event in events_of(chat_live.post(GENERATE, rendered | {"stream": True}).content)[:-1]:
        sent = {"stream": True, "generate_chunk": event, "stream_state": state, **derendered}
        answer = ok(chat_live, f"{CHAT}/derender", sent)
        chunks.append(answer["chunk"])
        state = json.loads(json.dumps(answer["stream_state"]))
    assert len(chunks) > 1 and joined(chunks) == expected_deltas


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        ("Once", {"max_tokens": 8, "logprobs": 2, "n": 2}),
        (["Once", "Twice"], {"max_tokens": 5, "echo": True, "logprobs": 1}),
        ([5, 6, 7], {"stop": ["e"], "max_tokens": 30}),
        (["a", "b"], {"max_tokens": 5, "n": 2, "truncate_prompt_tokens": 1}),
    ],
)
def test_texts_in_three_steps_are_the_texts(live: LiveServer, prompt: Any, fields: dict[str, Any]) -> None:
    body = {"model": "rill", "prompt": prompt, "seed": 7, **fields}
    expected = ok(live, TEXTS, body)
    rendered = ok(live, f"{TEXTS}/render", body)
    generated = [ok(live, GENERATE, each) for each in rendered]
    derendered = {"completion_request": body, "generate_responses": generated}
    ids = [each["token_ids"] for each in rendered]
    assert shown(ok(live, f"{TEXTS}/derender", derendered | {"prompt_token_ids": ids})) == shown(expected)


def test_calls_of_earlier_turns_are_kept_out_of_the_answer_as_in_the_chat(chat_live: LiveServer) -> None:
    rendered = ok(chat_live, f"{CHAT}/render", {"model": "rill", "messages": CALLED, "max_tokens": 9})
    assert rendered["sampling_params"]["extra_args"] == {"called_functions": ["set_light"]}


def test_a_message_and_a_response_have_the_prompt_of_their_chat(chat_live: LiveServer) -> None:
    chat = ok(chat_live, f"{CHAT}/render", {"model": "rill", "messages": MESSAGES, "max_tokens": 9, "temperature": 0.5})
    message = {"model": "rill", "messages": MESSAGES, "max_tokens": 9, "temperature": 0.5}
    message |= {"stream": True, "stream_options": {"include_usage": True}}
    response = {"model": "rill", "input": "Light, please.", "max_output_tokens": 9, "temperature": 0.5}
    for path, body in (("/v1/messages/render", message), ("/v1/responses/render", response)):
        found = ok(chat_live, path, body)
        assert found | {"request_id": "", "stream": False} == chat | {"request_id": ""}


def test_tokens_come_with_their_text_counts_and_log_probabilities(live: LiveServer) -> None:
    body = {"model": "rill", "prompt": [100, 200, 300], "max_tokens": 6, "seed": 1, "logprobs": 2, "prompt_logprobs": 1}
    expected = ok(live, TEXTS, body | {"return_token_ids": True})
    sampling = {"max_tokens": 6, "seed": 1, "logprobs": 2, "prompt_logprobs": 1, "temperature": None}
    sent = {"token_ids": [100, 200, 300], "sampling_params": sampling, "request_id": "mine", "return_token_ids": True}
    found = ok(live, GENERATE, sent | {"output_mode": "text"})
    [choice], [other] = found["choices"], expected["choices"]
    assert (choice["text"], choice["token_ids"]) == (other["text"], other["token_ids"])
    assert [each["logprob"] for each in choice["logprobs"]["content"]] == other["logprobs"]["token_logprobs"]
    assert (found["request_id"], found["model"], found["output_mode"]) == ("mine", "rill", "text")
    assert found["prompt_logprobs"] == other["prompt_logprobs"] and found["prompt_token_ids"] == [100, 200, 300]
    assert found["usage"]["total_tokens"] == 9
    events = events_of(live.post(GENERATE, sent | {"stream": True, "stream_options": {"include_usage": True}}).content)
    *pieces, counts, done = events
    assert done == "[DONE]" and counts["choices"] == [] and counts["usage"]["completion_tokens"] == 6
    content = [each for piece in pieces for each in piece["choices"][0]["logprobs"]["content"]]
    ids = [each for piece in pieces for each in piece["choices"][0]["token_ids"]]
    assert ids == [each["token_id"] for each in content] == choice["token_ids"]
    assert all(each["top_logprobs"][0]["token_id"] == each["token_id"] for each in content)
    assert pieces[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("ended", "begins"), [(None, "<think>"), (True, "{")])
def test_a_grammar_holds_after_the_reasoning_unless_that_is_over(
    chat_live: LiveServer, ended: bool | None, begins: str
) -> None:
    sampling = {"structured_outputs": {"json": SCHEMA}, "max_tokens": 100, "logit_bias": {}, "seed": 1}
    ids = ok(chat_live, "/tokenize", {"model": "rill", "messages": MESSAGES})["tokens"]
    sent = {"token_ids": ids, "sampling_params": sampling, "output_mode": "text", "reasoning_ended": ended}
    texts = [ok(chat_live, GENERATE, _seeded(sent, seed))["choices"][0]["text"] for seed in range(12)]
    assert any(text.startswith(begins) for text in texts)
    assert all(text.startswith(("{", begins)) for text in texts)


def _seeded(sent: dict[str, Any], seed: int) -> dict[str, Any]:
    return sent | {"sampling_params": sent["sampling_params"] | {"seed": seed}}


IDS: dict[str, Any] = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2, "seed": 1}}
ANSWER = {"choices": [{"token_ids": [5, 6], "finish_reason": "length"}]}
ASKED = {"model": "rill", "messages": MESSAGES}


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (f"{CHAT}/render", {"model": "rill", "messages": IMAGE}, "messages[0].content[0].image_url", "not supported"),
        (f"{CHAT}/render", {"model": "rill", "messages": []}, "messages", "messages must not be empty"),
        (f"{CHAT}/render", {"model": "no", "messages": MESSAGES}, "model", "not found"),
        (f"{TEXTS}/render", {"model": "rill", "prompt": "x", "best_of": 2}, "best_of", "must be n"),
        (GENERATE, {"token_ids": [], "sampling_params": {}}, "token_ids", "must not be empty"),
        (GENERATE, {"token_ids": [5]}, "sampling_params", "sampling_params is required"),
        (GENERATE, {"token_ids": [-1], "sampling_params": {}}, "token_ids", "-1"),
        (GENERATE, IDS | {"features": {"mm_hashes": {}}}, "features", "features is not supported"),
        (GENERATE, IDS | {"sampling_params": {"top_p": 2}}, "sampling_params.top_p", "must be"),
        (GENERATE, IDS | {"sampling_params": {"n": 0}}, "sampling_params.n", "greater than or equal to 1"),
        (
            GENERATE,
            IDS | {"sampling_params": {"structured_outputs": {"regex": "("}}},
            "sampling_params.structured_outputs.regex",
            "regular",
        ),
        (GENERATE, IDS | {"sampling_params": {"max_tokens": 10**6}}, "sampling_params.max_tokens", "max_tokens"),
        (f"{CHAT}/derender", {"generate_response": ANSWER}, "chat_request", "chat_request is required with model"),
        (f"{CHAT}/derender", {"chat_request": ASKED}, "generate_response", "is required where stream is false"),
        (f"{CHAT}/derender", {"chat_request": ASKED, "stream": True}, "generate_chunk", "where stream is true"),
        (
            f"{CHAT}/derender",
            {"chat_request": ASKED, "generate_response": {"choices": [{"token_ids": [10**6]}]}},
            "generate_response.choices[0].token_ids[0]",
            "must be a token id from 0 to",
        ),
        (
            f"{CHAT}/derender",
            {"chat_request": ASKED, "generate_response": {"choices": []}},
            None,
            "one at least, got 0",
        ),
        (
            f"{TEXTS}/derender",
            {"generate_responses": [ANSWER], "prompt_tokens": [1, 2]},
            "prompt_tokens",
            "must have one for each of the 1 generate_responses, got 2",
        ),
        *(
            (
                f"{TEXTS}/derender",
                {"generate_responses": [ANSWER], "generate_chunk": ANSWER, "prompt_token_ids": [], "stream": is_chunk},
                "prompt_token_ids",
                "must have one for each of the 1 generate_responses, got 0",
            )
            for is_chunk in (False, True)
        ),
        (
            f"{TEXTS}/derender",
            {"generate_responses": [ANSWER], "prompt_tokens": [2**70]},
            "prompt_tokens[0]",
            "less than",
        ),
        (
            f"{TEXTS}/derender",
            {"generate_responses": [{**ANSWER, "created": 2**70}]},
            "generate_responses[0].created",
            "less than",
        ),
    ],
)
def test_what_cannot_be_done_is_said(
    chat_live: LiveServer, path: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    answer = chat_live.post(path, body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404) and words in error["message"], answer.text
    assert param in (None, error["param"]), error


def test_warnings_are_those_of_the_rendered_request(live: LiveServer) -> None:
    answer = live.post(f"{CHAT}/render", {"model": "rill", "messages": MESSAGES, "store": True, "unheard_of": 1})
    expected = "ignored unknown fields: unheard_of; fields without effect here: store"
    assert answer.headers["x-sluice-warning"] == expected


def test_what_a_prompt_is_rendered_without_is_named_once(chat_live: LiveServer) -> None:
    schema = {"type": "object", "if": {}, "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}] * 2
    body = {"model": "rill", "messages": [*IMAGE, *MESSAGES], "tools": tools, "max_tokens": 1}
    warnings = [chat_live.post(path, body).headers["x-sluice-warning"] for path in (CHAT, f"{CHAT}/render")]
    assert warnings[0] == warnings[1] and warnings[0].count("left out: ") == 2 and "uniqueItems" in warnings[0]


def test_tokens_alone_are_read_as_text_and_transfers_have_a_warning(live: LiveServer) -> None:
    answer = live.post(GENERATE, IDS | {"kv_transfer_params": {"do_remote_decode": True}})
    assert "without effect here: kv_transfer_params" in answer.headers["x-sluice-warning"]
    assert answer.json()["kv_transfer_params"] is None
    found = ok(live, f"{TEXTS}/derender", {"generate_responses": [answer.json()], "prompt_tokens": [2]})
    expected = ok(live, TEXTS, {"model": "rill", "prompt": [5, 6], "max_tokens": 2, "seed": 1})
    assert shown(found)["choices"] == shown(expected)["choices"] and found["usage"] == expected["usage"]
