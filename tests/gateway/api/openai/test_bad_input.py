"""Answers to bad input: status, shape, and a sentence that names the field, its value and the allowed ones."""

from typing import Any

import pytest

from tests.gateway.front.http.live import LiveServer

CHAT: dict[str, Any] = {"model": "rill", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"model": "rill", "prompt": "hi", "max_tokens": 2}

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
PATH = {"chat": "/v1/chat/completions", "text": "/v1/completions"}

REFUSED_CHAT: list[tuple[dict[str, Any], str, str]] = [
    # fields, param, message
    ({"model": 5}, "model", "model must be a valid string, got 5"),
    ({"messages": []}, "messages", "messages must not be empty"),
    ({"messages": ["hi"]}, "messages[0]", 'messages[0] must be an object, got "hi"'),
    (
        {"messages": [{"role": "user", "content": "a"}] * 10_001},
        "messages",
        "messages must have at most 10000 elements, got 10001",
    ),
    (
        {"messages": [{"role": "robot", "content": "hi"}]},
        "messages[0].role",
        "messages[0].role must be 'system', 'developer', 'user', 'assistant', 'tool' or 'function', got \"robot\"",
    ),
    (
        {"messages": [{"role": "user", "content": 5}]},
        "messages[0].content",
        'messages[0].content must be a string or an array of {"type": "text", "text": ...} parts, got 5',
    ),
    *(
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: {}}]}]},
            f"messages[0].content[1].{kind}",
            f"messages[0].content[1].{kind} is not supported: models take text, and some take images",
        )
        for kind in ("input_audio", "file")
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}]},
        "messages[0].content[1].image_url",
        "messages[0].content[1].image_url is not supported: model 'rill' takes text alone",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].image_url.url",
        "messages[0].content[0].image_url.url is required",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": ["image_url"]}]}]},
        "messages[0].content[0].type",
        "messages[0].content[0].type must be 'text', got an array of 1",
    ),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}]},
        "messages[0].tool_calls[0].function",
        "messages[0].tool_calls[0].function is required",
    ),
    ({"max_tokens": 1.5}, "max_tokens", "max_tokens must be a valid integer, got 1.5"),
    ({"max_tokens": 10**30}, "max_tokens", "this model's context is 1024 tokens"),
    (
        {"max_completion_tokens": 3},
        "max_completion_tokens",
        "max_completion_tokens (3) and max_tokens (2) are the same limit under a new and an old name; send one of them",
    ),
    ({"seed": -(2**63) - 1}, "seed", "seed must be greater than or equal to -9223372036854775808, got -92"),
    ({"seed": 2**64}, "seed", "seed must be between 0 and"),
    ({"stop": ""}, "stop", "stop[0] has 0 characters; from 1 to 1024 are allowed"),
    ({"stop": ["a", 5]}, "stop[1]", "stop[1] must be a valid string, got 5"),
    ({"stop_token_ids": [2**70]}, "stop_token_ids", f"stop_token_ids must be between 0 and 2147483647, got {2**70}"),
    ({"top_k": 2**70}, "top_k", f"top_k must be between 0 (off) and 2147483647, got {2**70}"),
    ({"early_stopping": "never"}, "early_stopping", 'early_stopping must be true, false or an integer, got "never"'),
    ({"stream": "yes"}, "stream", 'stream must be a valid boolean, got "yes"'),
    ({"stream_options": 5}, "stream_options", "stream_options must be an object, got 5"),
    ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs to be true, got 2 without it"),
    (
        {"logprobs": True, "top_logprobs": 21},
        "top_logprobs",
        "top_logprobs must be less than or equal to 20, got 21",
    ),
    ({"logit_bias": {"five": 1}}, "logit_bias", "the keys of logit_bias must be token ids, got 'five'"),
    ({"bad_words": ["a", " "]}, "bad_words", "bad_words[1] must have from 1 to 1024 characters, and not spaces alone"),
    ({"chat_template": "x"}, "chat_template", "chat_template is not allowed in requests to this server"),
    ({"chat_template": "x" * 65537}, "chat_template", "chat_template must have at most 65536 characters, got 65537"),
    ({"documents": [{"text": "a"}]}, "documents", "the chat template has no place for them, got 1"),
    ({"documents": ["a"]}, "documents[0]", 'documents[0] must be an object, got "a"'),
    (
        {"chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs.messages",
        "chat_template_kwargs.messages is not allowed: the server sets that variable itself",
    ),
    ({"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs.eos_token", "the server sets that variable"),
    (
        {"chat_template_kwargs": {f"a{number}": 1 for number in range(65)}},
        "chat_template_kwargs",
        "chat_template_kwargs must have at most 64 elements, got 65",
    ),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "continue_final_message and add_generation_prompt are both true",
    ),
    ({"prediction": {"type": "content"}}, "prediction.content", "prediction.content is required"),
    ({"prediction": {"type": "diff", "content": "x"}}, "prediction.type", "prediction.type must be 'content'"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or at least 1, got 0"),
    ({"best_of": 2}, "best_of", "best_of is not supported, got 2; leave it out or send 1"),
    ({"use_beam_search": True}, "use_beam_search", "a beam width of 1"),
    ({"beam_width": 4}, "beam_width", "beam_width must be 1, got 4: the most that this server decodes with"),
    (
        {"response_format": {"type": "xml"}},
        "response_format.type",
        "response_format.type must be 'text', 'json_object', 'json_schema' or 'structural_tag', got \"xml\"",
    ),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "response_format.json_schema is required where response_format.type is json_schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "response_format.json_schema.schema is required",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}},
        "response_format.json_schema.schema",
        "response_format.json_schema.schema must be an object, got an array of 0",
    ),
    ({"guided_json": 5}, "guided_json", "guided_json must be a JSON schema, as an object or as text, got 5"),
    ({"guided_choice": []}, "guided_choice", "guided_choice must not be empty"),
    (
        {"response_format": {"type": "json_object"}, "guided_regex": "a+"},
        "guided_regex",
        "guided_regex and response_format both say what the answer must match; send one of them",
    ),
    (
        {"structured_outputs": {"choice": ["a"], "json": {}}},
        "structured_outputs.choice",
        "structured_outputs.choice and structured_outputs.json both say what the answer must match",
    ),
    (
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
        "structured_outputs.disable_any_whitespace",
        "structured_outputs.disable_any_whitespace is of JSON, which nothing in the request asks for; leave it out",
    ),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}},
        "structured_outputs.disable_any_whitespace",
        "and structured_outputs.whitespace_pattern both say what white space JSON has; send one of them",
    ),
    *(
        (
            {"guided_json": {}, "guided_whitespace_pattern": pattern},
            "guided_whitespace_pattern",
            r"must be a regular expression of spaces, \t, \r and \n alone, got",
        )
        for pattern in ("x", "[^x]", ".", "[(]", "{}", "(", "[ ", "**", "\\S")
    ),
    ({"structural_tag": {"format": {"type": "x"}}}, "structural_tag", "the structural tag cannot be used: Invalid"),
    (
        {"structured_outputs": {"structural_tag": "x"}},
        "structured_outputs.structural_tag",
        "the structural tag cannot be used: JSON is malformed",
    ),
    (
        {"response_format": {"type": "structural_tag", "structures": []}},
        "response_format",
        "the structural tag must have a format, or structures and triggers",
    ),
    ({"guided_regex": "a+", "ignore_eos": True}, "ignore_eos", "ignore_eos must be false"),
    (
        {"service_tier": "gold"},
        "service_tier",
        "'auto', 'default', 'flex', 'priority', 'fast', 'ultrafast' or 'scale', got \"gold\"",
    ),
]

REFUSED_TEXT: list[tuple[dict[str, Any], str, str]] = [
    (
        {"prompt": None},
        "prompt",
        "prompt must be a string, an array of strings, an array of token ids or an array of arrays",
    ),
    ({"prompt": 5}, "prompt", "or an array of arrays of token ids, got 5"),
    ({"prompt": []}, "prompt", "prompt must not be empty"),
    ({"prompt": [[]]}, "prompt[0]", "prompt[0] must not be empty"),
    ({"prompt": [1, "a"]}, "prompt[1]", 'prompt[1] must be a valid integer, got "a"'),
    ({"prompt": ["a", 1]}, "prompt[1]", "prompt[1] must be a valid string, got 1"),
    ({"prompt": [[1], "a"]}, "prompt[1]", 'prompt[1] must be a valid array, got "a"'),
    ({"prompt": ["a"] * 513}, "prompt", "prompt must have at most 512 elements, got 513"),
    ({"prompt": [5] * (2**20 + 1)}, "prompt", "prompt must have at most 1048576 elements, got 1048577"),
    ({"prompt": [-1]}, "prompt", "token ids of the prompt must be between 0 and 4095, got -1"),
    ({"prompt": [-1], "echo": True}, "prompt", "token ids of the prompt must be between 0 and 4095, got -1"),
    ({"prompt": [10**30]}, "prompt", "token ids of the prompt must be between 0 and 4095, got 1000"),
    (
        {"suffix": "end"},
        "suffix",
        "the model's tokenizer has no tokens to fill in a middle with",
    ),
    ({"suffix": "end", "echo": True}, "suffix", "suffix must be left out with echo"),
    ({"suffix": "end", "prompt": [5]}, "suffix", "suffix needs a prompt of text, got token ids"),
    ({"best_of": 2, "n": 3}, "best_of", "best_of must be at least n (3), got 2"),
    ({"prompt": ["a"] * 5, "n": 128}, "n", "n is 128 and there are 5 prompts; at most 512 sequences"),
    ({"top_logprobs": 1}, "top_logprobs", "top_logprobs is not supported, got 1; leave it out or send 0"),
]

CASES = [("chat", CHAT | fields, param, message) for fields, param, message in REFUSED_CHAT]
CASES += [("text", TEXT | fields, param, message) for fields, param, message in REFUSED_TEXT]


@pytest.mark.parametrize(
    ("route", "body", "param", "message"), CASES, ids=[f"{case[0]}-{case[3][:40]}" for case in CASES]
)
def test_refuses(live: LiveServer, route: str, body: dict[str, Any], param: str, message: str) -> None:
    response = live.post(PATH[route], body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert message in error["message"]
    assert error.keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("route", "fields", "param", "said"),
    [
        ("chat", {"max_completion_tokens": 5000}, "max_completion_tokens", "max_completion_tokens is 5000"),
        ("chat", {"max_tokens": 5000}, "max_tokens", "max_tokens is 5000"),
        ("chat", {"max_completion_tokens": 3, "min_tokens": 5}, "min_tokens", "max_completion_tokens (3)"),
        ("chat", {"min_tokens": 5000}, "min_tokens", "and the default max_tokens ("),
        ("text", {"min_tokens": 17}, "min_tokens", "and the default max_tokens (16)"),
        ("text", {"max_tokens": 5000}, "max_tokens", "max_tokens is 5000"),
        ("v2", {"request_output_len": 5000}, None, "request_output_len is 5000"),
        ("v2", {"request_output_len": 0}, None, "request_output_len must be 1 or more, got 0"),
        ("v2", {"max_tokens": 5000}, None, "max_tokens is 5000"),
        ("v2", {"min_length": 17}, None, "and the default max_tokens (16)"),
    ],
)
def test_an_error_about_the_longest_output_names_what_was_sent_or_a_default(
    live: LiveServer, route: str, fields: dict[str, Any], param: str | None, said: str
) -> None:
    body = {"text_input": "hi"} if route == "v2" else {"chat": CHAT, "text": TEXT}[route]
    refused = live.post((PATH | {"v2": "/v2/models/rill/generate"})[route], without_limit(body) | fields)
    error = refused.json()["error"]
    message = error if route == "v2" else error["message"]
    assert refused.status_code == 400 and said in message, message
    assert route == "v2" or error["param"] == param
    if param == "max_completion_tokens" or "request_output_len" in fields:
        assert "max_tokens" not in message.replace("max_completion_tokens", "")


def without_limit(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "max_tokens"}


def test_refuses_to_stream_what_is_known_only_at_the_end(live: LiveServer) -> None:
    response = live.post(PATH["text"], TEXT | {"stream": True, "best_of": 2})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")
    assert "best_of must equal n (1) in a stream, got 2" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the request body is not valid JSON: EOF while parsing a value at line 1 column 0"),
        (b'{"model": "rill",\n "prompt" 5}', "the request body is not valid JSON: expected `:` at line 2 column 11"),
        (b'{"model": "rill"} x', "the request body is not valid JSON: trailing characters at line 1 column 19"),
        (b"\xff\xfe", "the request body is not valid JSON: expected value at line 1 column 1"),
        (b'{"model": "\xff"}', "the request body is not valid JSON: invalid unicode code point at line 1 column 12"),
        (b'{"model": "\\ud800"}', "the request body is not valid JSON:"),
        (b"[" * 100_000, "the request body is not valid JSON: recursion limit exceeded"),
        (b"[]", "the request body must be a JSON object, got an array of 0"),
        (b"null", "the request body must be a JSON object, got null"),
        (b'"hi"', 'the request body must be a JSON object, got "hi"'),
        (b"{}", "model is required"),
    ],
)
def test_refuses_what_is_no_request(live: LiveServer, body: bytes, message: str) -> None:
    response = live.post(PATH["chat"], body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_refuses_numbers_that_are_none(live: LiveServer, number: bytes) -> None:
    response = live.post(PATH["text"], b'{"model": "rill", "prompt": "a", "temperature": ' + number + b"}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "temperature"
    assert "temperature must be a finite number" in response.json()["error"]["message"]


def test_a_content_type_that_is_not_json_is_tolerated(live: LiveServer) -> None:
    response = live.request(
        "POST", PATH["text"], content=b'{"model": "rill", "prompt": "a"}', headers={"content-type": "text/plain"}
    )
    assert response.status_code == 200


def test_a_body_over_the_limit_is_refused(strict_live: LiveServer) -> None:
    response = strict_live.post(PATH["text"], TEXT | {"prompt": "a" * 5000})
    assert response.status_code == 413
    assert "--http-max-input-size" in response.json()["error"]["message"]


class TestUnknownFields:
    def test_are_named_in_a_header(self, live: LiveServer) -> None:
        messages = [{"role": "user", "content": "hi", "x": 1}]
        response = live.post(PATH["chat"], CHAT | {"messages": messages, "foo": 1, "métier\r\n": 2})
        assert response.status_code == 200
        assert response.headers["x-sluice-warning"] == (r"ignored unknown fields: foo, m\xe9tier\r\n, messages[0].x")

    def test_are_counted_where_there_are_many(self, live: LiveServer) -> None:
        response = live.post(PATH["text"], TEXT | {f"f{number}": 1 for number in range(12)})
        assert response.headers["x-sluice-warning"].endswith("f8, f9 and 2 more")

    def test_leave_room_for_the_other_headers(self, live: LiveServer) -> None:
        response = live.post(PATH["text"], TEXT | {"\N{GRINNING FACE}" * 60 + str(number): 1 for number in range(12)})
        assert response.headers["x-sluice-warning"].endswith(" and 11 more")
        assert len(response.headers["x-sluice-warning"]) < 1100

    def test_that_are_null_were_not_given(self, live: LiveServer) -> None:
        response = live.post(PATH["chat"], CHAT | {"foo": None, "n": None, "tools": None, "logprobs": None})
        assert response.status_code == 200
        assert "x-sluice-warning" not in response.headers

    def test_are_refused_by_a_strict_server(self, strict_live: LiveServer) -> None:
        response = strict_live.post(PATH["text"], TEXT | {"foo": 1})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "foo"
        assert response.json()["error"]["message"].startswith("unknown field foo")

    def test_without_effect_are_named_by_their_path_alone(self, strict_live: LiveServer) -> None:
        body = {"model": "rill", "input": "hi", "tools": [{"type": "web_search"}]}
        error = strict_live.post("/v1/responses", body).json()["error"]
        assert error["param"] == "tools[0]" and "tools[0] (web_search) has no effect" in error["message"]

    def test_known_fields_pass_a_strict_server(self, strict_live: LiveServer) -> None:
        known = {"user": "ada", "n": 1, "echo": False, "logit_bias": {}, "best_of": 1, "top_k": -1}
        assert strict_live.post(PATH["text"], TEXT | known).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/nope", 404),
        ("POST", "/tokenizer", 404),
        ("GET", "/v1", 404),
        ("POST", "/health", 405),
        ("DELETE", "/", 405),
        ("GET", "/v2x/health/live", 404),
    ],
)
def test_routes_that_are_not_there_answer_in_openai_s_shape(
    live: LiveServer, method: str, path: str, status: int
) -> None:
    response = live.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert path in error["message"] and error["type"] == "invalid_request_error"
    assert error["code"] == ("unknown_url" if status == 404 else "method_not_supported")
    assert ("allow" in response.headers) == (status == 405)


def test_an_unexpected_failure_says_nothing_of_our_inside(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str, key: str) -> None:
        raise RuntimeError("secret of the house")

    monkeypatch.setattr(live.server.plane, "llm", fail)
    response = live.post(PATH["chat"], CHAT, headers={"x-request-id": "find-me"})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "find-me" in response.json()["error"]["message"]
    assert "secret" not in response.text
    assert "secret of the house" in caplog.text
