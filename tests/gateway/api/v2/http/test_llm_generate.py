"""The generate extension over an LLM. Shapes, statuses and Triton's sentences are those recorded from Triton 2.51."""

from typing import Any

import pytest

from sluice.gateway.api.v2.http.json_document import MAX_TEXT_CHARS
from tests.gateway.front.http.live import LiveServer
from tests.gateway.front.http.sse import events_of

MODEL = "/v2/models/rill"
WHOLE, STREAM = f"{MODEL}/generate", f"{MODEL}/generate_stream"
HEAD = {"model_name": "rill", "model_version": "1"}


def echo(live: LiveServer, text: str, num_tokens: int) -> str:
    return live.echo(live.run(live.model.prepare(text)), num_tokens)


class TestWhole:
    def test_is_greedy_and_16_tokens_unless_told_otherwise(self, live: LiveServer) -> None:
        response = live.post(WHOLE, {"text_input": "hello", "ignore_eos": True})
        assert response.headers["content-type"] == "application/json"
        assert response.json() == HEAD | {"finish_reason": "length", "text_output": echo(live, "hello", 16)}

    @pytest.mark.parametrize("path", [WHOLE, f"{MODEL}/versions/1/generate"])
    def test_inputs_stand_at_top_level_or_in_parameters(self, live: LiveServer, path: str) -> None:
        expected = echo(live, "hello", 5)
        for body in (
            {"text_input": "hello", "max_tokens": 5},
            {"text_input": "hello", "parameters": {"max_tokens": 5}},
            {"text_input": ["hello"], "max_tokens": [5]},
            {"text_input": [["hello"]], "max_tokens": 5, "parameters": {}},
            {"text_input": "hello", "max_tokens": 5, "stream": False, "stop_words": "", "bad_words": ""},
            {"text_input": "hello", "max_tokens": 5, "priority": 1, "p": "x", "q": 2.5, "r": True},
        ):
            assert live.post(path, body).json()["text_output"] == expected, body

    def test_log_probabilities_come_with_the_end(self, live: LiveServer) -> None:
        body = {"text_input": "hello", "max_tokens": 5, "return_log_probs": True}
        answer = live.post(WHOLE, body).json()
        *pieces, last = events_of(live.post(STREAM, body).content)
        assert len(answer["output_log_probs"]) == 5
        assert answer["cum_log_probs"] == pytest.approx(sum(answer["output_log_probs"]))
        assert {name: last[name] for name in ("cum_log_probs", "output_log_probs")} == {
            name: answer[name] for name in ("cum_log_probs", "output_log_probs")
        }
        assert all("output_log_probs" not in event for event in pieces)

    def test_a_timeout_in_microseconds_ends_the_request(self, live: LiveServer) -> None:
        live.runner.hold_after(2)
        try:
            body = {"text_input": "hello", "max_tokens": 900, "ignore_eos": True, "timeout": 50_000}
            response = live.post(WHOLE, body)
        finally:
            live.runner.release()
        assert response.status_code == 504
        assert "0.05 s" in response.json()["error"]

    @pytest.mark.parametrize("name", ["stream", "streaming"])
    def test_does_not_stream(self, live: LiveServer, name: str) -> None:
        response = live.post(WHOLE, {"text_input": "hello", name: True})
        assert response.status_code == 400
        assert response.json() == {
            "error": "generate expects model to produce exactly 1 response, use generate stream for model that "
            "generates various number of responses"
        }


class TestStream:
    def test_sends_an_event_for_each_piece(self, live: LiveServer) -> None:
        response = live.post(STREAM, {"id": "g2", "text_input": "hello", "max_tokens": 16, "stream": True})
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        *pieces, last = events_of(response.content)
        assert "".join(event["text_output"] for event in [*pieces, last]) == echo(live, "hello", 16)
        assert len(pieces) > 8 or not live.is_paced, "the tokens did not come one by one"
        for event in pieces:
            assert event == HEAD | {"id": "g2", "text_output": event["text_output"]}
            assert list(event) == sorted(event)
        assert last == HEAD | {"id": "g2", "finish_reason": "length", "text_output": last["text_output"]}
        assert b"[DONE]" not in response.content

    def test_without_stream_is_one_event(self, live: LiveServer) -> None:
        body = {"text_input": "hello", "stream": False}
        [event] = events_of(live.post(STREAM, body).content)
        assert event == live.post(WHOLE, body).json()


UNPARSED = "Unable to parse 'data': attempt to access JSON "
REFUSED: list[tuple[Any, int, str]] = [
    # body, status, error: the first recorded, the others ours
    (b"[" * 3000, 400, "JSON nesting depth exceeds maximum allowed limit (100)"),
    (b'{"text_input": "\xff"}', 400, ""),
    ({"text_input": "a", "max_tokens": True}, 500, f"{UNPARSED}non-signed-integer as signed-integer"),
    ({"text_input": "a", "seed": -1}, 500, f"{UNPARSED}non-unsigned-integer as unsigned-integer"),
    ({"text_input": "a", "temperature": "1.5"}, 500, f"{UNPARSED}non-number as double"),
    ({"text_input": "a", "stream": 1}, 500, f"{UNPARSED}non-boolean as boolean"),
    ({"text_input": "a", "opt": {"a": 1}}, 400, "parameter 'opt' has invalid type. It should be either 'int', 'bool',"),
    ({"text_input": ["hello", "you"]}, 400, "The schema can not convert input 'text_input' to tensor with proper"),
    ({"text_input": "a " * 3000}, 400, "the prompt has "),
    ({"text_input": "a", "timeout": -1}, 400, "parameter 'timeout' must be a whole number of microseconds from 0"),
]


@pytest.mark.parametrize(("body", "status", "error"), REFUSED)
def test_refuses(live: LiveServer, body: Any, status: int, error: str) -> None:
    response = live.post(WHOLE, body)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.json().keys() == {"error"}
    assert response.json()["error"].startswith(error)


def test_a_body_over_the_limit_is_refused(strict_live: LiveServer) -> None:
    response = strict_live.post(WHOLE, {"text_input": "a" * 5000})
    assert response.status_code == 400
    assert "exceeds the maximum allowed input size" in response.json()["error"]


@pytest.mark.parametrize("path", [WHOLE, f"{MODEL}/infer"])
def test_a_text_that_no_context_takes_is_refused_before_it_is_joined(live: LiveServer, path: str) -> None:
    text = "x" * (MAX_TEXT_CHARS + 1)
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": [text]}
    response = live.post(path, {"text_input": text} if path == WHOLE else {"inputs": [tensor]})
    assert response.status_code == 400
    assert f"a string of more than {MAX_TEXT_CHARS} characters" in response.json()["error"]
