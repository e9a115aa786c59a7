"""POST …/infer where Sluice goes on from the real Triton: its limits, its headers, and what Triton does worse.

All else is in the recorded answers: tests/gateway/api/v2/test_recorded.py.
"""

import gc
import gzip
import json
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.http import HttpOptions
from sluice.serving.job import InferJob
from sluice.serving.request import InferResponse
from tests.gateway.api.v2.grpc.parts import EchoModel
from tests.gateway.api.v2.http.models import ADD_SUB, ECHO, IDENTITY, STRINGS, TYPES, all_models, one, pair, typed
from tests.gateway.api.v2.http.small_server import SmallServer, small_server
from tests.gateway.api.v2.small_service import SmallService

LENGTH = "inference-header-content-length"
LIMIT_BYTES = 1000
BODY = json.dumps(one()).encode()
INT32 = {"shape": [1], "datatype": "INT32", "data": [1]}


@pytest.fixture(scope="module")
def narrow() -> Iterator[SmallServer]:
    config = ServeConfig(http=HttpOptions(max_input_bytes=LIMIT_BYTES))
    with small_server(SmallService(*all_models()), config) as running:
        yield running


def nested(depth: int) -> Any:
    """Return a number in `depth` arrays."""
    return [nested(depth - 1)] if depth else 1


TOO_DEEP = "JSON nesting depth exceeds maximum allowed limit (100)"
DUPLICATE = "[request id: <id_unknown>] output 'OUTPUT0' already exists in request"
NO_UINT = "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-integer"
BIG = "invalid shape for input 'INPUT0': shape [{}] causes total element count to exceed maximum size of {}"
REFUSED: list[tuple[str, Any, int, str]] = [
    (IDENTITY, b"[" * 100_000, 400, TOO_DEEP),
    (IDENTITY, one(data=nested(100)), 400, TOO_DEEP),
    (IDENTITY, one(data=[1, nested(99)]), 400, TOO_DEEP),
    (IDENTITY, one(data=nested(99)) | {"outputs": [{"name": "OUTPUT0"}] * 2}, 400, DUPLICATE),
    (IDENTITY, one(shape=[2**62, 4]), 400, BIG.format(f"{2**62},4", 2**63 - 1)),
    (
        IDENTITY,
        one(shape=[4, 2**60 - 1]),
        400,
        f"byte size overflow for input 'INPUT0': element count ({2**62 - 4}) * data type size (4) exceeds maximum "
        f"allowed size ({2**63 - 1})",
    ),
    (TYPES, typed("UINT8", 256), 400, "value 256 of input 'IN_UINT8' does not fit UINT8"),
    (TYPES, typed("INT32", -(2**31) - 1), 400, "value -2147483649 of input 'IN_INT32' does not fit INT32"),
    (TYPES, typed("UINT8", 1, -1), 500, NO_UINT),
    (TYPES, typed("UINT64", 2**64), 500, NO_UINT),
    (
        TYPES,
        typed("FP64", 10**400),
        500,
        "failed to parse the request JSON buffer: Number too big to be stored in double.",
    ),
    (
        STRINGS,
        one(datatype="BYTES", shape=[1, 2], data=["a"]),
        400,
        "[request id: <id_unknown>] expected 2 string elements for inference input 'INPUT0' for model "
        "'identity_bytes', got 1",
    ),
    (
        STRINGS,
        one(datatype="BYTES", data=["a"]) | {"outputs": [{"name": "OUTPUT0", "parameters": {"classification": 1}}]},
        400,
        "class result not available for output due to unsupported type 'BYTES'",
    ),
]


@pytest.mark.parametrize(("path", "body", "status", "error"), REFUSED)
def test_refuses(small: SmallServer, path: str, body: Any, status: int, error: str) -> None:
    response = small.post(path, body)
    assert (response.status_code, response.json()) == (status, {"error": error})


def test_the_body_is_tritons_to_the_byte(small: SmallServer) -> None:
    assert small.post(IDENTITY, one(data=[[1.5]]) | {"id": "a"}).content == (
        b'{"id":"a","model_name":"identity","model_version":"1","outputs":[{"name":"OUTPUT0","datatype":"FP32",'
        b'"shape":[1,1],"data":[1.5]}]}'
    )


@pytest.mark.parametrize("size", [3, 500])
def test_long_tensors_are_as_short_ones(small: SmallServer, size: int) -> None:
    """Some way is faster from so many elements on."""
    for datatype, value, text in (
        ("FP32", "NaN", "NaN"),
        ("FP32", "-Infinity", "-Infinity"),
        ("FP32", "1e39", "Infinity"),
        ("FP32", "0.1", "0.10000000149011612"),
        ("INT64", str(-(2**63)), str(-(2**63))),
        ("BOOL", "true", "true"),
    ):
        tensor = f'"name":"IN_{datatype}","shape":[{size}],"datatype":"{datatype}","data":[{",".join([value] * size)}]'
        answer = small.post(TYPES, b'{"inputs":[{%s}]}' % tensor.encode())
        assert b'"data":[%s]' % ",".join([text] * size).encode() in answer.content


@pytest.mark.parametrize("size", [4, 20_000])
def test_sizes_on_both_sides_of_what_is_copied(small: SmallServer, size: int) -> None:
    inputs = [{"name": "IN_UINT8", "shape": [size], "datatype": "UINT8", "parameters": {"binary_data_size": size}}]
    text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}})
    response = small.post(TYPES, text.encode() + bytes(size), Inference_Header_Content_Length=str(len(text)))
    assert response.content[int(response.headers[LENGTH]) :] == bytes(size)


def test_bytes_that_are_no_text_go_through(small: SmallServer) -> None:
    body = b'{"inputs":[{"name":"INPUT0","shape":[1,2],"datatype":"BYTES","data":["\xff\xfe\\u0000a\\n","ok"]}]}'
    assert b'"data":["\xff\xfe\\u0000a\\n","ok"]' in small.post(STRINGS, body).content


def test_a_long_raw_request(small: SmallServer) -> None:
    """A thread makes its tensor."""
    values = struct.pack("<i", 1) * (1 << 20)
    answer = small.post("/v2/models/versioned/infer", values, Inference_Header_Content_Length="0")
    assert answer.content[int(answer.headers[LENGTH]) :] == struct.pack("<i", 201) * (1 << 20)


def test_long_bodies_may_be_compressed(small: SmallServer) -> None:
    values = [index * 0.001 for index in range(200_000)]
    body = gzip.compress(json.dumps(typed("FP64", *values)).encode(), 1)
    answer = small.post(TYPES, body, Content_Encoding="gzip", Accept_Encoding="gzip")
    assert answer.headers["content-encoding"] == "gzip" and answer.json()["outputs"][0]["data"] == values
    short = gzip.compress(BODY.ljust(1 << 20))
    assert small.post(IDENTITY, short, Content_Encoding="gzip").json()["outputs"][0]["data"] == [1.5]


@pytest.mark.parametrize(
    ("accept", "used"),
    [("deflate;q=0.5, gzip;q=0.1", "deflate"), ("gzip, deflate", "gzip"), ("identity, gzip", None), ("gzip;q=x", None)],
)
def test_how_answers_are_compressed(small: SmallServer, accept: str, used: str | None) -> None:
    assert small.post(IDENTITY, one(), Accept_Encoding=accept).headers.get("content-encoding") == used


# --- limits ---


def in_pieces(body: bytes, size: int) -> Iterator[bytes]:
    """Yield a body in chunks, for Transfer-Encoding: chunked."""
    for start in range(0, len(body), size):
        yield body[start : start + size]


def test_a_body_of_just_the_limit(narrow: SmallServer) -> None:
    body = BODY.ljust(LIMIT_BYTES)
    for content in (body, in_pieces(body, 7)):
        assert narrow.client.post(IDENTITY, content=content).json()["outputs"][0]["data"] == [1.5]


SIZE = "request JSON size of {} bytes exceeds the maximum allowed input size of "
RAW = "Raw input has a byte_size ({} bytes) that exceeds the maximum allowed value of "
UNPACKED = "Decompressed data size exceeds the maximum allowed value of "
OVER = bytes(LIMIT_BYTES + 1)


@pytest.mark.parametrize("path", [IDENTITY, "/v2/models/text_once/generate", "/v2/repository/index", "/v2/logging"])
@pytest.mark.parametrize("is_chunked", [True, False])
def test_a_body_over_the_limit(narrow: SmallServer, path: str, is_chunked: bool) -> None:
    response = narrow.client.post(path, content=in_pieces(OVER, 100) if is_chunked else OVER)
    size = f"more than {LIMIT_BYTES}" if is_chunked else str(LIMIT_BYTES + 1)
    advice = f"{LIMIT_BYTES} bytes. Use --http-max-input-size to increase the limit."
    assert (response.status_code, response.json()) == (400, {"error": SIZE.format(size) + advice})
    assert response.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("body", "headers", "error"),
    [
        (OVER, {"Inference_Header_Content_Length": "0"}, RAW.format(LIMIT_BYTES + 1)),
        (gzip.compress(bytes(1 << 19)), {"Content_Encoding": "gzip"}, UNPACKED),
    ],
    ids=["raw", "a bomb"],
)
def test_what_is_over_the_limit_is_named(narrow: SmallServer, body: bytes, headers: dict[str, str], error: str) -> None:
    response = narrow.post(IDENTITY, body, **headers)
    assert response.status_code == 400 and response.json()["error"].startswith(error)
    assert narrow.post(IDENTITY, one()).status_code == 200


# --- headers ---


def test_ours_say_how_a_request_is_treated(small: SmallServer) -> None:
    body = one(**INT32) | {"parameters": {"timeout": 7}}
    told = small.post(ECHO, body, x_sluice_timeout_ms="20", X_Fwd_User="bob", x_fwd_b="", x_other="z")
    seen = json.loads(told.json()["outputs"][0]["data"][0])
    assert (seen["timeout"], seen["params"]) == (20_000, {"X-Fwd-User": "bob", "x-fwd-b": ""})
    assert json.loads(small.post(ECHO, body).json()["outputs"][0]["data"][0])["timeout"] == 7
    assert small.post(ECHO, body, x_sluice_priority="high").status_code == 400


def test_ours_reach_the_model() -> None:
    model = EchoModel()
    ours = {"tenant": "ada", "priority": "2", "timeout-ms": "1500", "queue-timeout-ms": "250"}
    with small_server(SmallService(model)) as small:
        small.post("/v2/models/echo/infer", one(**INT32), **{f"x-sluice-{name}": each for name, each in ours.items()})
    request = model.jobs[0].request
    assert (request.tenant, request.priority) == ("ada", 2)
    assert (request.timeout_us, request.queue_timeout_us) == (1_500_000, 250_000)


# --- what stays behind ---


class RefusingModel(EchoModel):
    def _start(self, job: InferJob) -> None:
        job.respond(InferResponse(error=SluiceError(ErrorCode.UNAVAILABLE, "not now")))


@pytest.mark.usefixtures("without_garbage_collection")
def test_a_refused_request_leaves_nothing_behind() -> None:
    """Nothing that only the garbage collector could free."""

    def num_jobs() -> int:
        return sum(type(each) is InferJob for each in gc.get_objects())

    before = num_jobs()
    with small_server(SmallService(RefusingModel("echo"))) as server:
        for _ in range(20):
            assert server.post("/v2/models/echo/infer", one(**INT32)).status_code == 503
        assert num_jobs() - before <= 1


def test_classes_in_binary(small: SmallServer) -> None:
    wanted = [{"name": "OUTPUT0", "parameters": {"classification": 1, "binary_data": True}}]
    answer = small.post(ADD_SUB, pair(outputs=wanted)).content
    assert answer.endswith(struct.pack("<I", 17) + b"44.000000:3:three")
