"""The generate extension over an LLM. Shapes, statuses and Triton's sentences are those recorded from Triton 2.51."""

import json
import subprocess
from typing import Any

import pytest

from gateway.http.v2.long_document import MAX_TEXT_CHARS
from tests.gateway.http.live import LiveServer, live_server
from tests.gateway.http.sse import events_of
from tests.waiting import PATIENCE_S

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

    def test_keys_are_in_alphabetical_order(self, live: LiveServer) -> None:
        counts = {"return_num_input_tokens": True, "return_num_output_tokens": True}
        answer = live.post(WHOLE, {"id": "g1", "text_input": "hello", "max_tokens": 3} | counts).json()
        assert list(answer) == sorted(answer)
        assert answer["id"] == "g1"
        assert answer["num_output_tokens"] == 3
        assert answer["num_input_tokens"] == len(live.run(live.model.prepare("hello")))

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

    @pytest.mark.parametrize("name", ["stop_words", "stop"])
    def test_stop_words_end_the_text(self, live: LiveServer, name: str) -> None:
        text = echo(live, "hello", 16)
        word = text[15:18]
        for given in (word, [word], ["", word, "never seen"]):
            answer = live.post(WHOLE, {"text_input": "hello", name: given}).json()
            assert answer["text_output"] == text[: text.index(word)]
            assert answer["finish_reason"] == "stop"

    @pytest.mark.parametrize("fields", [{"temperature": 1.5}, {"top_k": 50}, {"top_p": 0.99}, {"min_p": 0.01}])
    @pytest.mark.parametrize("seed", ["seed", "random_seed"])
    def test_samples_where_a_sampling_field_is_given(self, live: LiveServer, fields: dict[str, Any], seed: str) -> None:
        def text(number: int) -> Any:
            return live.post(WHOLE, {"text_input": "hello", seed: number} | fields).json()["text_output"]

        assert text(1) == text(1)
        assert len({text(number) for number in range(4)}) > 1

    def test_bad_words_do_not_come(self, live: LiveServer) -> None:
        word = echo(live, "hello", 1)
        body = {"text_input": "hello", "max_tokens": 1}
        assert live.post(WHOLE, body).json()["text_output"] == word
        assert live.post(WHOLE, body | {"bad_words": ["", word]}).json()["text_output"] != word

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

    def test_top_k_1_is_greedy(self, live: LiveServer) -> None:
        answer = live.post(WHOLE, {"text_input": "hello", "top_k": 1}).json()
        assert answer["text_output"] == echo(live, "hello", 16)

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

    def test_streams_where_it_is_not_told(self, live: LiveServer) -> None:
        assert len(events_of(live.post(STREAM, {"text_input": "hello"}).content)) >= (9 if live.is_paced else 1)

    def test_without_stream_is_one_event(self, live: LiveServer) -> None:
        body = {"text_input": "hello", "stream": False}
        [event] = events_of(live.post(STREAM, body).content)
        assert event == live.post(WHOLE, body).json()

    def test_curl_reads_it(self, live: LiveServer) -> None:
        body = json.dumps({"text_input": 'é漢😀\n"q" \u0001', "max_tokens": 5})
        command = ["curl", "-sS", "-N", "--max-time", "20", live.url + STREAM, "-d", body]
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=True)
        text = "".join(event["text_output"] for event in events_of(done.stdout))
        assert text == echo(live, 'é漢😀\n"q" \u0001', 5)

    def test_a_client_that_leaves_frees_its_blocks_within_a_step(self, live: LiveServer) -> None:
        live.runner.hold_after(3)
        body = {"text_input": "hello", "max_tokens": 500, "ignore_eos": True}
        with live.client.stream("POST", STREAM, json=body) as response:
            next(response.iter_raw())
        live.wait_idle()
        num_runs = live.runner.num_runs
        live.runner.release()
        assert live.blocks_used_after_step() == 0
        assert live.runner.num_runs - num_runs <= 2

    @pytest.mark.parametrize("path", [WHOLE, STREAM])
    def test_a_client_that_leaves_before_the_first_byte_frees_its_blocks(self, live: LiveServer, path: str) -> None:
        live.runner.hold_after(0)
        with live.send(path, {"text_input": "hello", "max_tokens": 500, "ignore_eos": True}):
            live.runner.wait_held()
            assert live.service.num_open == 1
        live.wait_idle()
        live.runner.release()
        assert live.blocks_used_after_step() == 0

    def test_a_failure_in_the_middle_is_the_last_event(self) -> None:
        with live_server() as live:
            live.runner.hold_after(3)
            with live.client.stream("POST", STREAM, json={"text_input": "hello"}) as response:
                chunks = response.iter_raw()
                content = next(chunks)
                live.runner.error = RuntimeError("the kernel broke")
                live.runner.release()
                content += b"".join(chunks)
        *_, before, last = events_of(content)
        assert "finish_reason" not in before
        assert last.keys() == {"error"}
        assert b"Traceback" not in content


TYPE_ERRORS: list[tuple[Any, int, str]] = [
    # body, status, error: all recorded, but for the model's name and what a JSON library says of bad JSON
    (b"", 500, "failed to parse the request JSON buffer: The document is empty. at 0"),
    (b'{"inputs": [', 500, "failed to parse the request JSON buffer: "),
    (b"[" * 3000, 400, "JSON nesting depth exceeds maximum allowed limit (100)"),
    (b"[]", 500, "attempt to get members for non-object"),
    ({"text_input": 5}, 500, "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
    ({"text_input": None}, 500, "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
    (
        {"text_input": "a", "max_tokens": 5.5},
        500,
        "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer",
    ),
    (
        {"text_input": "a", "max_tokens": True},
        500,
        "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer",
    ),
    (
        {"text_input": "a", "seed": -1},
        500,
        "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-integer",
    ),
    (
        {"text_input": "a", "temperature": "1.5"},
        500,
        "Unable to parse 'data': attempt to access JSON non-number as double",
    ),
    ({"text_input": "a", "stream": 1}, 500, "Unable to parse 'data': attempt to access JSON non-boolean as boolean"),
    ({"text_input": "a", "id": 5}, 500, "Unable to parse 'id': attempt to access JSON non-string as string"),
]

REFUSED: list[tuple[Any, int, str]] = [
    (
        {"text_input": "a", "opt": {"a": 1}},
        400,
        "parameter 'opt' has invalid type. It should be either 'int', 'bool', or 'string'.",
    ),
    (
        {"text_input": "a", "opt": ["a"]},
        400,
        "parameter 'opt' has invalid type. It should be either 'int', 'bool', or 'string'.",
    ),
    (
        {"text_input": "a", "opt": None},
        400,
        "parameter 'opt' has invalid type. It should be either 'int', 'bool', or 'string'.",
    ),
    (
        {"text_input": ["hello", "you"]},
        400,
        "The schema can not convert input 'text_input' to tensor with proper shape",
    ),
    ({"text_input": []}, 400, "The schema can not convert input 'text_input' to tensor with proper shape"),
    # ours
    ({"text_input": "a", "max_tokens": 0}, 400, "max_tokens must be 1 or more, got 0"),
    ({"text_input": "a", "max_tokens": 2**31}, 400, "value 2147483648 of input 'max_tokens' does not fit INT32"),
    ({"text_input": "a", "max_tokens": 5000}, 400, "the prompt has 1 tokens and max_tokens is 5000, together 5001;"),
    ({"text_input": "a " * 3000}, 400, "the prompt has "),
    ({"text_input": "a", "temperature": 3}, 400, "temperature must be between 0 and 2, got 3"),
    ({"text_input": "a", "top_p": 1e39}, 400, "top_p must be greater than 0 and at most 1, got inf"),
    ({"text_input": "a", "top_k": -1}, 400, "top_k must be between 0 (off) and 2147483647, got -1"),
    ({"text_input": "a", "stop_words": ["a"] * 65}, 400, "stop has 65 strings; at most 64 are allowed"),
    (
        {"text_input": "a", "max_tokens": 5, "parameters": {"max_tokens": 6}},
        400,
        "Converting keyword: 'parameters': [request id: <id_unknown>] input 'max_tokens' already exists in request",
    ),
    ({"text_input": "a", "seed": 5, "random_seed": 6}, 400, "input 'seed' is given twice, with different values"),
    ({"text_input": "a", "bad_words": [" "]}, 400, "bad_words[0] must have from 1 to 1024 characters"),
    (
        {"text_input": "a", "beam_width": 2},
        400,
        "input 'beam_width' must be 1, the most that this model decodes with, got 2",
    ),
    ({"text_input": "a", "typical_p": 0}, 400, "typical_p must be greater than 0 and at most 1, got 0"),
    (
        {"text_input": "a", "guided_decoding_guide": "a+"},
        400,
        "input 'guided_decoding_guide_type' is needed with 'guided_decoding_guide': one of json, json_schema, regex",
    ),
    (
        {"text_input": "a", "guided_decoding_guide_type": "xml", "guided_decoding_guide": "a+"},
        400,
        "input 'guided_decoding_guide_type' must be one of json, json_schema, regex, ebnf_grammar, got 'xml'",
    ),
    (
        {"text_input": "a", "guided_decoding_guide_type": "regex"},
        400,
        "input 'guided_decoding_guide' is needed where 'guided_decoding_guide_type' is regex",
    ),
    ({"text_input": "a", "priority": 2**31}, 400, "parameter 'priority' must be a 32-bit integer (lower runs earlier)"),
    ({"text_input": "a", "timeout": -1}, 400, "parameter 'timeout' must be a whole number of microseconds from 0"),
    ({"text_input": "a", "cache_salt": 5}, 500, "Unable to parse JSON bytes array: "),
    ({"text_input": "a", "cache_salt": "x" * 257}, 400, "cache_salt must be a string of at most 256 characters"),
]


@pytest.mark.parametrize("path", [WHOLE, STREAM], ids=["generate", "generate_stream"])
@pytest.mark.parametrize(("body", "status", "error"), TYPE_ERRORS + REFUSED)
def test_refuses(live: LiveServer, path: str, body: Any, status: int, error: str) -> None:
    response = live.post(path, body)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.json().keys() == {"error"}
    assert response.json()["error"].startswith(error)


@pytest.mark.parametrize("path", [WHOLE, STREAM], ids=["generate", "generate_stream"])
@pytest.mark.parametrize("body", [{"other": "hello"}, {"id": "g3", "max_tokens": 5}])
def test_refuses_what_lacks_the_prompt(live: LiveServer, path: str, body: dict[str, Any]) -> None:
    response = live.post(path, body)
    assert response.status_code == 400
    assert "text_input" in response.json()["error"]


def test_text_that_is_no_unicode_is_refused(live: LiveServer) -> None:
    assert live.post(WHOLE, b'{"text_input": "\xff"}').status_code == 400


def test_a_body_over_the_limit_is_refused(strict_live: LiveServer) -> None:
    response = strict_live.post(WHOLE, {"text_input": "a" * 5000})
    assert response.status_code == 400
    assert "exceeds the maximum allowed input size" in response.json()["error"]


def test_while_the_model_loads(loading_live: LiveServer) -> None:
    response = loading_live.post(WHOLE, {"text_input": "a"})
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("path", [WHOLE, f"{MODEL}/infer"])
def test_a_text_that_no_context_takes_is_refused_before_it_is_joined(live: LiveServer, path: str) -> None:
    text = "x" * (MAX_TEXT_CHARS + 1)
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": [text]}
    response = live.post(path, {"text_input": text} if path == WHOLE else {"inputs": [tensor]})
    assert response.status_code == 400
    assert f"a string of more than {MAX_TEXT_CHARS} characters" in response.json()["error"]
