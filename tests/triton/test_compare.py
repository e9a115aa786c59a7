"""The comparison separates differences that a client would notice from others."""

from base64 import b64encode
from dataclasses import replace
from typing import Any

import pytest

from tests.triton.compare import Verdict, compare
from tests.triton.exam.questions import questions
from tests.triton.records import Exchange, Json, read_exchanges
from tests.triton.replay import EXCHANGES

OUTPUTS = b'{"model_name":"m","outputs":[{"name":"A","data":[1.5]},{"name":"B","data":[2]}]}'


def answered(status: int, body: bytes, *headers: tuple[str, str]) -> Json:
    return {"status": status, "headers": [list(pair) for pair in headers], "body_b64": b64encode(body).decode()}


def verdict(want: Json, got: Json) -> Verdict:
    return compare(Exchange("http/x", "http", {}, response=want), got).verdict


def test_every_recorded_answer_matches_itself() -> None:
    for exchange in read_exchanges(EXCHANGES):
        assert exchange.response is not None
        assert compare(exchange, exchange.response).verdict is Verdict.MATCH, exchange.name


def test_every_question_is_recorded_in_order() -> None:
    recorded = [replace(exchange, response=None) for exchange in read_exchanges(EXCHANGES)]
    assert recorded == list(questions())


def test_every_record_is_read_and_written_without_loss() -> None:
    for exchange in read_exchanges(EXCHANGES):
        assert Exchange.from_json(exchange.to_json()) == exchange


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (answered(200, OUTPUTS), Verdict.MATCH),
        (answered(200, OUTPUTS.replace(b"1.5", b"1.50000001")), Verdict.MATCH),
        (answered(200, OUTPUTS.replace(b"1.5", b"1.6")), Verdict.DIFFERS),
        (answered(200, OUTPUTS.replace(b"[2]", b"[true]")), Verdict.DIFFERS),
        (answered(200, OUTPUTS.replace(b'"B"', b'"C"')), Verdict.DIFFERS),
        (answered(200, OUTPUTS[:-1] + b',"id":"1"}'), Verdict.DIFFERS),
        (answered(400, OUTPUTS), Verdict.DIFFERS),
        (answered(200, OUTPUTS[:-1]), Verdict.DIFFERS),
        (answered(200, OUTPUTS, ("Content-Encoding", "gzip")), Verdict.DIFFERS),
        (answered(200, OUTPUTS, ("Content-Type", "text/html")), Verdict.DIFFERS),
    ],
)
def test_answers(got: Json, expected: Verdict) -> None:
    assert verdict(answered(200, OUTPUTS), got) is expected


def test_order_of_outputs_is_a_matter_of_text() -> None:
    swapped = b'{"model_name":"m","outputs":[{"name":"B","data":[2]},{"name":"A","data":[1.5]}]}'
    assert verdict(answered(200, OUTPUTS), answered(200, swapped)) is Verdict.TEXT


def test_binary_outputs_are_compared_with_their_own_bytes() -> None:
    header = b'{"model_name":"m","outputs":[{"name":"A","parameters":{"binary_data_size":2}}]}'
    length = ("Inference-Header-Content-Length", str(len(header)))
    want = answered(200, header + b"ab", length)
    assert verdict(want, answered(200, header + b"ab", length)) is Verdict.MATCH
    assert verdict(want, answered(200, header + b"ac", length)) is Verdict.DIFFERS
    assert verdict(want, answered(200, header + b"abc", length)) is Verdict.DIFFERS
    assert verdict(want, answered(200, header)) is Verdict.DIFFERS


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (b'{"error":"no such thing"}', Verdict.TEXT),
        (b'{"error":""}', Verdict.DIFFERS),
        (b'{"message":"not found"}', Verdict.DIFFERS),
        (b"not found", Verdict.DIFFERS),
    ],
)
def test_wording_of_errors(got: bytes, expected: Verdict) -> None:
    assert verdict(answered(404, b'{"error":"not found"}'), answered(404, got)) is expected


def test_events_are_counted_and_compared() -> None:
    stream = ("Content-Type", "text/event-stream; charset=utf-8")
    want = answered(200, b'data: {"a":1}\n\ndata: {"a":2}\n\n', stream)
    assert verdict(want, answered(200, b'data: {"a": 1}\n\ndata: {"a": 2}\n\n', stream)) is Verdict.MATCH
    assert verdict(want, answered(200, b'data: {"a":1}\n\n', stream)) is Verdict.DIFFERS
    assert verdict(want, answered(200, b'data: {"a":1}\n\ndata: {"a":3}\n\n', stream)) is Verdict.DIFFERS


def test_clock_readings_and_counters_of_statistics_are_not_compared() -> None:
    want: dict[str, Any] = {"model_stats": [{"name": "m", "inference_count": "3", "success": {"ns": "5"}}]}
    exchange = Exchange("grpc/x", "grpc", {}, "ModelStatistics", response=_grpc(want))
    other = {"model_stats": [{"name": "m", "inference_count": "4", "success": {"ns": "6"}}]}
    renamed = {"model_stats": [{"name": "n", "inference_count": "3", "success": {"ns": "5"}}]}
    assert compare(exchange, _grpc(other)).verdict is Verdict.MATCH
    assert compare(exchange, _grpc(renamed)).verdict is Verdict.DIFFERS


def test_status_only_leaves_the_answer_out() -> None:
    exchange = Exchange("grpc/x", "grpc", {}, "ModelReady", status_only=True, response=_grpc({"ready": True}))
    assert compare(exchange, _grpc({})).verdict is Verdict.MATCH
    assert compare(replace(exchange, status_only=False), _grpc({})).verdict is Verdict.DIFFERS
    assert compare(exchange, {"code": "INTERNAL", "message": ""}).verdict is Verdict.DIFFERS


def _grpc(response: Json) -> Json:
    return {"code": "OK", "message": "", "response": response}
