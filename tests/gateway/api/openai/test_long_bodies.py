"""Bodies of megabytes: the same answers and refusals as short ones, and bounds on what takes long to check."""

import json
from typing import Any

import pytest

from sluice.gateway.front.http.json_pieces import INLINE_BYTES
from tests.gateway.api.openai.test_bad_input import CHAT, PATH, TEXT
from tests.gateway.front.http.live import LiveServer

LONG = {"user": "x," * (1 << 20)}
"""A field that is not used, and that makes a body arrive in many pieces."""
GREEDY = {"temperature": 0}
MESSAGE = CHAT["messages"][0]
PART = {"type": "text", "text": "x"}


def refusal(live: LiveServer, route: str, body: dict[str, Any] | bytes) -> dict[str, Any]:
    response = live.post(PATH[route], body)
    assert response.status_code == 400
    error: dict[str, Any] = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(("route", "body"), [("chat", CHAT), ("text", TEXT)])
def test_a_long_body_has_the_answer_of_a_short_one(live: LiveServer, route: str, body: dict[str, Any]) -> None:
    short, long = (live.post(PATH[route], each).json()["choices"] for each in (body | GREEDY, body | GREEDY | LONG))
    assert short == long


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperature": "hot"}, "temperature", 'temperature must be a valid number, got "hot"'),
        ({"messages": [MESSAGE, {"content": "a"}]}, "messages[1].role", "messages[1].role is required"),
        ({"audio": {}}, "audio", "audio is not supported, got an object; leave it out"),
        ({"seed": True}, "seed", "seed must be a valid integer, got true"),
    ],
)
def test_a_field_of_a_long_body_is_refused_as_in_a_short_one(
    live: LiveServer, fields: dict[str, Any], param: str, message: str
) -> None:
    for body in (CHAT | fields, CHAT | LONG | fields):
        error = refusal(live, "chat", body)
        assert (error["param"], error["message"]) == (param, message)


def test_unknown_fields_of_a_long_body_are_named(live: LiveServer) -> None:
    response = live.post(PATH["chat"], CHAT | LONG | {"colour": "red"})
    assert response.headers["x-sluice-warning"] == "ignored unknown fields: colour"


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("chat", CHAT | {"messages": [{}] * 140_000}, "has more than 131072 members, objects and arrays"),
        ("chat", CHAT | {"messages": [{**MESSAGE, "content": [PART] * 140_000}]}, "has more than 131072 strings"),
        ("chat", CHAT | {f"u{number}": 1 for number in range(140_000)}, "has more than 131072 members"),
        ("chat", CHAT | {f"u{number:030}": 1 for number in range(1100)}, "has 1103 fields; at most 1024 are read"),
        ("text", TEXT | {"logit_bias": {str(number): 1 for number in range(140_000)}}, "has more than 131072 members"),
        ("text", TEXT | {"stop": ["ab"] * 140_000}, "has more than 131072 strings"),
        ("text", TEXT | {"u": [1] * 1_200_000}, "has more than 1114112 values"),
        ("text", TEXT | {"prompt": "x" * (17 << 20)}, "has a string of more than 16777216 characters"),
    ],
)
def test_a_body_has_bounds(live: LiveServer, route: str, body: dict[str, Any], message: str) -> None:
    assert len(json.dumps(body)) > INLINE_BYTES
    assert f"the request body {message}" in refusal(live, route, body)["message"]


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "bad_words"])
@pytest.mark.parametrize("more", [{}, LONG])
def test_a_list_has_at_most_so_many_elements(live: LiveServer, name: str, more: dict[str, Any]) -> None:
    error = refusal(live, "text", TEXT | more | {name: [5 if name == "stop_token_ids" else "ab"] * 4097})
    assert (error["param"], error["message"]) == (name, f"{name} must have at most 4096 elements, got 4097")


@pytest.mark.parametrize(("wrong", "shown"), [("5", '"5"'), (5.5, "5.5"), (True, "true")])
def test_one_wrong_token_id_among_many_is_named(live: LiveServer, wrong: Any, shown: str) -> None:
    error = refusal(live, "text", TEXT | {"prompt": [5] * 40_000 + [wrong]})
    assert error["message"] == f"prompt[40000] must be a valid integer, got {shown}"


@pytest.mark.parametrize(("route", "field"), [("text", "prompt"), ("chat", "messages")])
def test_a_prompt_of_megabytes_is_too_long_for_the_context(live: LiveServer, route: str, field: str) -> None:
    text = "a b " * (1 << 19)
    prompt = {"prompt": text} if route == "text" else {"messages": [{**MESSAGE, "content": text}]}
    error = refusal(live, route, {"model": "rill", **prompt})
    assert error["param"] == field
    assert "more tokens than this model's context" in error["message"]
