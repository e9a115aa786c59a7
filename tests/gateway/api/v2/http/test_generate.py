"""The generate extension over any model. Bodies and sentences are those of a recorded Triton 2.51."""

import gzip
from typing import Any

import pytest

from tests.gateway.api.v2.http.small_server import SmallServer
from tests.gateway.front.http.sse import events_of

ONCE, ECHO, REPEAT, TYPES = (f"/v2/models/{name}" for name in ("text_once", "params_echo", "text_repeat", "alltypes"))
WRONG_COUNT = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)
BOTH = pytest.mark.parametrize("route", ["generate", "generate_stream"])


def payload(body: bytes) -> Any:
    """Return the JSON of a response that has one, streamed or not."""
    (event,) = events_of(body if body.startswith(b"data: ") else b"data: " + body + b"\n\n")
    return event


class TestRequests:
    @BOTH
    @pytest.mark.parametrize(
        ("body", "text"),
        [
            ({"text_input": "hello"}, "HELLO {}"),
            ({"text_input": ["hello"]}, "HELLO {}"),
            ({"text_input": [["hello"]]}, "HELLO {}"),
            ({"text_input": ["a", "b"]}, ["A {}", "B {}"]),
            ({"text_input": "a", "x": 1.5, "y": True, "z": "s"}, 'A {"x": 1.5, "y": true, "z": "s"}'),
            ({"text_input": "a", "parameters": {"p": 1, "text": "x"}}, 'A {"p": 1, "text": "x"}'),
            ({"parameters": {"text_input": "a"}, "triton_x": 1}, 'A {"triton_x": 1}'),
            ({"text_input": '\u00e9\n"q" \u0001'}, '\u00e9\n"Q" \u0001 {}'),
        ],
    )
    def test_inputs_and_parameters(self, small: SmallServer, route: str, body: Any, text: Any) -> None:
        response = small.post(f"{ONCE}/{route}", body)
        assert response.status_code == 200
        head = {"model_name": "text_once", "model_version": "1"}
        assert payload(response.content) == head | {"text_output": text}

    def test_what_means_something_to_infer_is_a_parameter_here(self, small: SmallServer) -> None:
        body = {"INPUT0": 1, "timeout": 5, "priority": 1, "sequence_id": 4, "id": "abc"}
        answer = small.post(f"{ECHO}/generate", body, X_Fwd_User="bob").json()
        assert answer["id"] == "abc"
        assert '"id": "abc", "params": {"id": "abc", "priority": 1, "sequence_id": 4, "timeout": 5}' in answer["PARAMS"]
        assert '"timeout": 0' in answer["PARAMS"]

    def test_keys_are_in_alphabetical_order_and_single_elements_are_scalars(self, small: SmallServer) -> None:
        body = {
            "IN_FP32": [1.5, 0.1],
            "IN_BOOL": [True, False],
            "IN_INT64": 5,
            "IN_STRING": ["x", "y"],
            "IN_UINT8": [7],
        }
        assert small.post(f"{TYPES}/generate", body).content == (
            b'{"OUT_BOOL":[true,false],"OUT_FP32":[1.5,0.10000000149011612],"OUT_INT64":5,"OUT_STRING":["x","y"],'
            b'"OUT_UINT8":7,"model_name":"alltypes","model_version":"1"}'
        )

    def test_nan_empty_and_no_outputs(self, small: SmallServer) -> None:
        assert b'"OUT_FP32":[NaN,1.0]' in small.post(f"{TYPES}/generate", b'{"IN_FP32":[NaN,1]}').content
        assert b'"OUT_FP64":Infinity' in small.post(f"{TYPES}/generate", b'{"IN_FP64":Infinity}').content
        assert small.post(f"{TYPES}/generate", {"IN_FP32": []}).json()["OUT_FP32"] == []
        assert small.post(f"{TYPES}/generate", {}).json() == {"model_name": "alltypes", "model_version": "1"}

    @BOTH
    @pytest.mark.parametrize(
        ("path", "body", "status", "error"),
        [
            (ONCE, b"", 500, "failed to parse the request JSON buffer: The document is empty. at 0"),
            (ONCE, b"{", 500, "failed to parse the request JSON buffer: Missing a name for object member. at 1"),
            (ONCE, b"[]", 500, "attempt to get members for non-object"),
            (
                ONCE,
                {"text_input": 5},
                500,
                "Unable to parse JSON bytes array: attempt to access JSON non-string as string",
            ),
            (ONCE, {"id": 5}, 500, "Unable to parse 'id': attempt to access JSON non-string as string"),
            (
                ONCE,
                {"text_input": "a", "parameters": 5},
                500,
                "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object",
            ),
            (
                ONCE,
                {"text_input": "a", "parameters": {"x": [1]}},
                400,
                "Converting keyword: 'parameters': parameter 'x' has invalid type. It should be either 'int', 'bool', "
                "or 'string'.",
            ),
            (
                ONCE,
                {"text_input": "a", "parameters": {"text_input": "b"}},
                400,
                "Converting keyword: 'parameters': [request id: <id_unknown>] input 'text_input' already exists in "
                "request",
            ),
            (
                ONCE,
                {"text_input": "a", "max_tokens": 5.5},
                500,
                "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer",
            ),
            (ECHO, {"INPUT0": [1, 2]}, 400, "The schema can not convert input 'INPUT0' to tensor with proper shape"),
            (
                REPEAT,
                {"text_input": ["a", "b"]},
                400,
                "The schema can not convert input 'text_input' to tensor with proper shape",
            ),
            (
                REPEAT,
                {"text_input": ["a", 1]},
                500,
                "Unable to parse JSON bytes array: attempt to access JSON non-string as string",
            ),
            (ECHO, {"INPUT0": 2**40}, 400, "value 1099511627776 of input 'INPUT0' does not fit INT32"),
            (
                TYPES,
                {"IN_FP32": [[1, 2], [3, 4]]},
                500,
                "Unable to parse 'data': Shape does not match true shape of 'data' field",
            ),
            (
                TYPES,
                {"IN_FP16": 1.5},
                400,
                "receiving FP16 data via JSON is not supported. Please use the binary data format for input IN_FP16",
            ),
            (
                ONCE,
                {"other": "hello"},
                400,
                "[request id: <id_unknown>] expected number of inputs between 1 and 2 but got 0 inputs for model "
                "'text_once'. Got input(s) [], but missing required input(s) ['text_input']. Please provide all "
                "required input(s).",
            ),
        ],
    )
    def test_refusals_are_plain_json(
        self, small: SmallServer, route: str, path: str, body: Any, status: int, error: str
    ) -> None:
        response = small.post(f"{path}/{route}", body)
        assert (response.status_code, response.json()) == (status, {"error": error})
        assert response.headers["content-type"] == "application/json"

    @BOTH
    def test_is_not_compressed(self, small: SmallServer, route: str) -> None:
        body = gzip.compress(b'{"text_input":"a"}')
        response = small.post(f"{ONCE}/{route}", body, Content_Encoding="gzip")
        assert response.status_code == 400
        assert response.json() == {"error": "Unsupported content-encoding, only 'identity' is supported."}
        answer = small.post(f"{ONCE}/{route}", {"text_input": "a"}, Accept_Encoding="gzip")
        assert "content-encoding" not in answer.headers

    def test_a_large_request(self, small: SmallServer) -> None:
        text = "a" * (2 << 20)
        assert small.post(f"{ONCE}/generate", {"text_input": text}).json()["text_output"] == text.upper() + " {}"


class TestWhole:
    @pytest.mark.parametrize("code", ["NOT_FOUND", "INTERNAL", "UNAVAILABLE", "UNSUPPORTED"])
    def test_a_models_error_is_400_whatever_it_says(self, small: SmallServer, code: str) -> None:
        response = small.post("/v2/models/error_model/generate", {"CODE": code})
        assert (response.status_code, response.json()) == (400, {"error": f"failed as {code}"})

    @BOTH
    def test_an_output_that_json_cannot_carry(self, small: SmallServer, route: str) -> None:
        response = small.post(f"/v2/models/half/{route}", {"INPUT0": 1.5})
        assert response.status_code == 400
        assert payload(response.content)["error"].startswith("sending FP16 data via JSON is not supported.")

    @pytest.mark.parametrize(
        ("text", "count", "status"), [("a b", 0, 200), ("a b", 2, 200), ("a ERR", 2, 200), ("ERR b", 2, 400)]
    )
    def test_other_than_one_response(self, small: SmallServer, text: str, count: int, status: int) -> None:
        response = small.post(f"{REPEAT}/generate", {"text_input": text, "max_tokens": count})
        assert (response.status_code, response.json()) == (status, {"error": WRONG_COUNT})

    def test_exactly_one_response(self, small: SmallServer) -> None:
        answer = small.post(f"{REPEAT}/generate", {"text_input": "a b", "max_tokens": 1, "id": "g2"}).json()
        assert list(answer.items()) == [
            ("id", "g2"),
            ("index", 0),
            ("model_name", "text_repeat"),
            ("model_version", "1"),
            ("text_output", "a"),
        ]
        failed = small.post(f"{REPEAT}/generate", {"text_input": "ERR", "max_tokens": 1})
        assert (failed.status_code, failed.json()) == (400, {"error": "asked to fail"})


class TestStream:
    def stream(self, small: SmallServer, text: str, count: int) -> tuple[int, list[Any]]:
        response = small.post(f"{REPEAT}/generate_stream", {"text_input": text, "max_tokens": count})
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return response.status_code, events_of(response.content)

    def test_an_event_for_each_response(self, small: SmallServer) -> None:
        status, events = self.stream(small, "a b c", 3)
        assert status == 200
        head = {"model_name": "text_repeat", "model_version": "1"}
        assert events == [{"index": i, **head, "text_output": word} for i, word in enumerate("abc")]

    def test_each_event_is_a_chunk(self, small: SmallServer) -> None:
        body = {"text_input": "a b c", "max_tokens": 3}
        request = small.client.build_request("POST", f"{REPEAT}/generate_stream", json=body)
        response = small.client.send(request, stream=True)
        assert response.headers["transfer-encoding"] == "chunked"
        assert len(events_of(response.read())) == 3

    def test_an_error_in_the_middle_is_an_event_and_the_stream_goes_on(self, small: SmallServer) -> None:
        status, events = self.stream(small, "a ERR c", 3)
        assert status == 200
        assert [event.get("text_output", event.get("error")) for event in events] == ["a", "asked to fail", "c"]

    def test_an_error_first_decides_the_status(self, small: SmallServer) -> None:
        status, events = self.stream(small, "ERR b", 2)
        assert status == 400
        assert events[0] == {"error": "asked to fail"}
        assert events[1]["text_output"] == "b"

    def test_no_responses_are_an_empty_body(self, small: SmallServer) -> None:
        assert self.stream(small, "a", 0) == (200, [])

    def test_many_events(self, small: SmallServer) -> None:
        _, events = self.stream(small, "a b c", 2000)
        assert [event["index"] for event in events] == list(range(2000))
