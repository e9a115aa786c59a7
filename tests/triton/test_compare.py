"""The comparison separates differences that a client would notice from others."""

from base64 import b64encode
from dataclasses import replace

import pytest

from tests.triton.compare import Verdict, compare
from tests.triton.records import Exchange, Json

OUTPUTS = b'{"model_name":"m","outputs":[{"name":"A","data":[1.5]},{"name":"B","data":[2]}]}'
SWAPPED = b'{"model_name":"m","outputs":[{"name":"B","data":[2]},{"name":"A","data":[1.5]}]}'
BINARY = b'{"model_name":"m","outputs":[{"name":"A","parameters":{"binary_data_size":2}}]}'
LENGTH = ("Inference-Header-Content-Length", str(len(BINARY)))
STREAM = ("Content-Type", "text/event-stream; charset=utf-8")
MATCH, TEXT, DIFFERS = Verdict


def answered(status: int, body: bytes, *headers: tuple[str, str]) -> Json:
    return {"status": status, "headers": [list(pair) for pair in headers], "body_b64": b64encode(body).decode()}


PLAIN, BYTES = answered(200, OUTPUTS), answered(200, BINARY + b"ab", LENGTH)
REFUSED = answered(404, b'{"error":"not found"}')
EVENTS = answered(200, b'data: {"a":1}\n\ndata: {"a":2}\n\n', STREAM)


@pytest.mark.parametrize(
    ("want", "got", "expected"),
    [
        (PLAIN, PLAIN, MATCH),
        (PLAIN, answered(200, OUTPUTS.replace(b"1.5", b"1.50000001")), MATCH),
        (PLAIN, answered(200, OUTPUTS.replace(b"1.5", b"1.6")), DIFFERS),
        (PLAIN, answered(200, OUTPUTS.replace(b"[2]", b"[true]")), DIFFERS),
        (PLAIN, answered(200, OUTPUTS.replace(b'"B"', b'"C"')), DIFFERS),
        (PLAIN, answered(200, OUTPUTS[:-1] + b',"id":"1"}'), DIFFERS),
        (PLAIN, answered(400, OUTPUTS), DIFFERS),
        (PLAIN, answered(200, OUTPUTS[:-1]), DIFFERS),
        (PLAIN, answered(200, OUTPUTS, ("Content-Encoding", "gzip")), DIFFERS),
        (PLAIN, answered(200, OUTPUTS, ("Content-Type", "text/html")), DIFFERS),
        (PLAIN, answered(200, SWAPPED), TEXT),
        (BYTES, answered(200, BINARY + b"ac", LENGTH), DIFFERS),
        (BYTES, answered(200, BINARY + b"abc", LENGTH), DIFFERS),
        (BYTES, answered(200, BINARY), DIFFERS),
        (REFUSED, answered(404, b'{"error":"no such thing"}'), TEXT),
        (REFUSED, answered(404, b'{"error":""}'), DIFFERS),
        (REFUSED, answered(404, b"not found"), DIFFERS),
        (EVENTS, answered(200, b'data: {"a": 1}\n\ndata: {"a": 2}\n\n', STREAM), MATCH),
        (EVENTS, answered(200, b'data: {"a":1}\n\n', STREAM), DIFFERS),
        (EVENTS, answered(200, b'data: {"a":1}\n\ndata: {"a":3}\n\n', STREAM), DIFFERS),
    ],
)
def test_answers_over_http(want: Json, got: Json, expected: Verdict) -> None:
    assert compare(Exchange("http/x", "http", {}, response=want), got).verdict is expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [({"inference_count": "4"}, MATCH), ({"success": {"ns": "6"}}, MATCH), ({"name": "n"}, DIFFERS)],
)
def test_clock_readings_and_counters_of_statistics_are_not_compared(change: Json, expected: Verdict) -> None:
    row = {"name": "m", "inference_count": "3", "success": {"ns": "5"}}
    want, got = ({"code": "OK", "message": "", "response": {"model_stats": [each]}} for each in (row, row | change))
    assert compare(Exchange("grpc/x", "grpc", {}, "ModelStatistics", response=want), got).verdict is expected


def test_status_only_leaves_the_answer_out() -> None:
    want = {"code": "OK", "message": "", "response": {"ready": True}}
    exchange = Exchange("grpc/x", "grpc", {}, "ModelReady", status_only=True, response=want)
    assert compare(exchange, want | {"response": {}}).verdict is MATCH
    assert compare(replace(exchange, status_only=False), want | {"response": {}}).verdict is DIFFERS
    assert compare(exchange, {"code": "INTERNAL", "message": ""}).verdict is DIFFERS
