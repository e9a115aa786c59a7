"""Every field that constrains the answer, on a real model; and the names that errors use."""

import json
import re
from typing import Any

import openai
import pytest

from tests.server_process import ServerProcess
from tests.waiting import PATIENCE_S

SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["s", "m"]}, "count": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["size", "count"],
    "additionalProperties": False,
}
MESSAGES: Any = [{"role": "user", "content": "hi"}]
CLOSABLE = {"type": "object", "properties": {}}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<n>",
        "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}},
        "end": "</n>",
    },
}
GRAMMAR = 'root ::= "<" [xy]+ ">"'


def ask(server: ServerProcess, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    prompt = {"prompt": "hi"} if path == "/v1/completions" else {"messages": MESSAGES}
    body = {"model": server.model, "max_tokens": 60, "temperature": 1.0, "seed": 3, **prompt, **fields}
    with server.client() as client:
        return client.post(path, json=body).json()


def content(server: ServerProcess, **fields: Any) -> str:
    answer = ask(server, **fields)
    assert "choices" in answer, answer
    return str(answer["choices"][0]["message"]["content"])


def test_the_stock_client_s_response_format(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", timeout=PATIENCE_S) as client:
        answer = client.chat.completions.create(
            model=server.model,
            messages=MESSAGES,
            max_tokens=60,
            response_format={"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA, "strict": True}},
        )
    order = json.loads(answer.choices[0].message.content or "")
    assert order.keys() == {"size", "count"}
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_json": json.dumps({"enum": [17]})}, "17"),
        ({"guided_json": {"enum": [17]}}, "17"),
        ({"structured_outputs": {"regex": "[a-c]{3}"}}, "[a-c]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"json": {"enum": ["é\n"]}}}, r'"é\\n"'),
        ({"structured_outputs": {"json": CLOSABLE, "disable_additional_properties": True}}, r"\{\}"),
        ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, "<n>[12]</n>"),
        ({"response_format": TAG}, "<n>[12]</n>"),
        ({"structural_tag": TAG}, "<n>[12]</n>"),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, r'\{"size":"[sm]","count":\d\}'),
        (
            {"guided_json": SCHEMA, "structured_outputs": {"whitespace_pattern": "[\n]"}},
            r'\{\n?"size"\n?:\n?"[sm]"\n?,\n?"count"\n?:\n?\d\n?\}',
        ),
        ({"structured_outputs": {}, "response_format": {"type": "text"}, "guided_choice": ["a"]}, "a"),
    ],
)
def test_the_answer_matches(server: ServerProcess, fields: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, content(server, **fields))


@pytest.mark.parametrize("fields", [{"guided_grammar": GRAMMAR}, {"structured_outputs": {"grammar": GRAMMAR}}])
def test_the_answer_follows_the_grammar_as_far_as_it_goes(server: ServerProcess, fields: dict[str, Any]) -> None:
    assert re.fullmatch("<[xy]+>?", content(server, **fields))


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_the_answer_is_an_object(server: ServerProcess, fields: dict[str, Any]) -> None:
    assert content(server, **fields).startswith("{")


def test_completions_take_them_too(server: ServerProcess) -> None:
    answer = ask(server, "/v1/completions", guided_choice=["left", "right"], n=3)
    assert {choice["text"] for choice in answer["choices"]} <= {"left", "right"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_grammar": "root ::= nothing"}, "guided_grammar"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_the_client_s_name_for_it(
    server: ServerProcess, fields: dict[str, Any], param: str, stream: bool
) -> None:
    error = ask(server, stream=stream, **fields)["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    ("kind", "guide", "pattern"),
    [("regex", "[xy]{4}", "[xy]{4}"), ("json_schema", '{"enum": [5]}', "5"), ("json", "", r"\{.*")],
)
def test_triton_s_guided_decoding_inputs(server: ServerProcess, kind: str, guide: str, pattern: str) -> None:
    body = {"text_input": "hi", "guided_decoding_guide_type": kind, "guided_decoding_guide": guide}
    with server.client() as client:
        answer = client.post(f"/v2/models/{server.model}/generate", json=body).json()
    assert re.fullmatch(pattern, answer["text_output"], re.DOTALL)


def test_what_of_a_schema_is_not_enforced_stands_in_a_header(server: ServerProcess) -> None:
    tel = {"type": "string", "format": "telephone", "maxLength": 3}
    schema = {
        "type": "object",
        "properties": {"t": tel, "o": {"oneOf": [tel, {"enum": ["a"]}]}},
        "required": ["t", "o"],
    }
    response_format = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}},
    }
    body = {"model": server.model, "messages": MESSAGES, "max_tokens": 60, "response_format": response_format}
    with server.client() as client:
        for is_streamed in (False, True):
            answer = client.post("/v1/chat/completions", json=body | {"stream": is_streamed, "colour": "red"})
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-sluice-warning"] == (
                "ignored unknown fields: colour; relaxed in the JSON schema: "
                "format 'telephone' is not enforced at #/properties/t, oneOf is taken as anyOf at #/properties/o, "
                "format 'telephone' is not enforced at #/properties/o/oneOf/0"
            )
        plain = client.post("/v1/chat/completions", json=body | {"response_format": {"type": "json_object"}})
        assert "x-sluice-warning" not in plain.headers


def test_a_strict_schema_of_which_a_grammar_keeps_to_a_part_is_refused(server: ServerProcess) -> None:
    body = {"model": server.model, "messages": MESSAGES, "max_tokens": 4}
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    sent = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with server.client() as client:
        taken = client.post("/v1/chat/completions", json=body | {"response_format": sent})
        sent["json_schema"] |= {"strict": True}  # type: ignore[operator]
        refused = client.post("/v1/chat/completions", json=body | {"response_format": sent})
    assert taken.headers["x-sluice-warning"].endswith("uniqueItems is not enforced at #/properties/a")
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "response_format.json_schema.schema"
    assert "at #/properties/a: uniqueItems is not enforced, as strict asks" in error["message"]
