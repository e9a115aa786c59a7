"""Refusals of POST …/infer, in Triton's words."""

from typing import Any

import pytest

from serving.model import Model
from tests.gateway.http.v2.infer_requests import IDENTITY, NEWEST, STRINGS, TYPES, one, typed, without
from tests.gateway.http.v2.small_server import SmallServer, small_server
from tests.gateway.v2.small_service import SmallService

SOURCES = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. But"
)
DUPLICATE = "[request id: <id_unknown>] output 'OUTPUT0' already exists in request"
TOO_DEEP = "JSON nesting depth exceeds maximum allowed limit (100)"
TOO_FEW = "Failed to parse 'data' field: shape does not match true shape"
MISFIT = "Unable to parse 'data': Shape does not match true shape of 'data' field"
NO_UINT = "attempt to access JSON non-unsigned-integer as unsigned-integer"
NO_INT = "attempt to access JSON non-signed-integer as signed-integer"
NO_STRING = "attempt to access JSON non-string as string"
NO_BOOLEAN = "attempt to access JSON non-boolean as boolean"


def nested(depth: int) -> Any:
    """Return a number in `depth` arrays."""
    return [nested(depth - 1)] if depth else 1


PARSE = "failed to parse the request JSON buffer: "

REFUSED: list[tuple[str, Any, int, str]] = [
    # what is no JSON
    (IDENTITY, b'{"inputs": [', 500, PARSE + "Invalid value. at 12"),
    (IDENTITY, b'{"a"', 500, PARSE + "Missing a colon after a name of object member. at 4"),
    (IDENTITY, b'{"a":"\x01"}', 500, PARSE + "Invalid escape character in string. at 6"),
    (IDENTITY, b'{"a":"\xff}', 500, PARSE + "Missing a closing quotation mark in string. at 8"),
    (IDENTITY, b'{"a":1e999}', 500, PARSE + "Number too big to be stored in double. at 5"),
    (IDENTITY, b"[1]]", 500, PARSE + "The document root must not be followed by other values. at 3"),
    (IDENTITY, b"[" * 100_000, 400, TOO_DEEP),
    (IDENTITY, b'{"a":"\\ud83d"}', 500, PARSE + "The surrogate pair in string is invalid. at 6"),
    # what has the wrong form
    (IDENTITY, b'"x"', 500, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
    (IDENTITY, {"inputs": {}}, 500, "Unable to parse 'inputs': attempt to access JSON non-array as array"),
    (IDENTITY, {"inputs": [5]}, 400, SOURCES + " no field is set"),
    (IDENTITY, without("data"), 400, SOURCES + " no field is set"),
    (IDENTITY, one(parameters={"binary_data_size": 4}), 400, SOURCES + " set 'data' 'binary_data_size'"),
    (IDENTITY, without("name"), 500, "Unable to parse 'name': attempt to access non-existing object member 'name'"),
    (IDENTITY, one(datatype=5), 500, "Unable to parse 'datatype': " + NO_STRING),
    (IDENTITY, one(shape=4), 500, "Unable to parse 'shape': attempt to access JSON non-array as array"),
    (IDENTITY, one(shape=[1, -1]), 500, "Unable to parse 'shape': " + NO_UINT),
    (IDENTITY, one() | {"id": 5}, 500, "Unable to parse 'id': " + NO_STRING),
    (IDENTITY, one() | {"parameters": 5}, 500, "failed to get request params.: attempt to get members for non-object"),
    (IDENTITY, one() | {"outputs": {}}, 500, "Unable to parse 'outputs': attempt to access JSON non-array as array"),
    (IDENTITY, one() | {"outputs": [{"name": 5}]}, 500, "Unable to parse 'name': " + NO_STRING),
    # parameters
    (IDENTITY, one() | {"parameters": {"sequence_id": -1}}, 500, "Unable to parse 'sequence_id': " + NO_STRING),
    (IDENTITY, one() | {"parameters": {"sequence_start": 1}}, 500, "Unable to parse 'sequence_start': " + NO_BOOLEAN),
    (IDENTITY, one() | {"parameters": {"timeout": "5"}}, 500, "Unable to parse 'timeout': " + NO_UINT),
    (
        IDENTITY,
        one() | {"parameters": {"o": [1]}},
        400,
        "parameter 'o' has invalid type. It should be either 'int', 'bool', or 'string'.",
    ),
    (
        IDENTITY,
        one() | {"parameters": {"triton_x": 1}},
        400,
        "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
    ),
    # data
    (IDENTITY, one(data=5), 500, "Unable to parse 'data': attempt to access JSON non-array as array"),
    (IDENTITY, one(data=[1, 2]), 500, MISFIT),
    (IDENTITY, one(data=nested(100)), 400, TOO_DEEP),
    (IDENTITY, one(data=[1, nested(99)]), 400, TOO_DEEP),
    (IDENTITY, one(data=nested(99)) | {"outputs": [{"name": "OUTPUT0"}] * 2}, 400, DUPLICATE),
    (IDENTITY, one(shape=[2, 1]), 500, TOO_FEW),
    (
        IDENTITY,
        one(shape=[2**62, 4]),
        400,
        f"invalid shape for input 'INPUT0': shape [{2**62},4] causes total element count to exceed maximum size of "
        f"{2**63 - 1}",
    ),
    (NEWEST, one(datatype="INT32", shape=[2], data=[1, 2, "a"]), 500, MISFIT),
    (NEWEST, one(datatype="INT32", shape=[2], data=[1, "a"]), 500, "Unable to parse 'data': " + NO_INT),
    (TYPES, typed("FP64", True), 500, "Unable to parse 'data': attempt to access JSON non-number as double"),
    (TYPES, typed("FP32", "1.5"), 500, "Unable to parse 'data': attempt to access JSON non-number as double"),
    (TYPES, typed("FP32", None), 500, "Unable to parse 'data': attempt to access JSON non-number as double"),
    (TYPES, typed("BOOL", 1), 500, "Unable to parse 'data': " + NO_BOOLEAN),
    (TYPES, typed("INT8", 1.0), 500, "Unable to parse 'data': " + NO_INT),
    (TYPES, typed("INT64", 2**63), 500, "Unable to parse 'data': " + NO_INT),
    (TYPES, typed("UINT8", -1), 500, "Unable to parse 'data': " + NO_UINT),
    (TYPES, typed("UINT64", 2**64), 500, "Unable to parse 'data': " + NO_UINT),
    (TYPES, typed("BYTES", 5), 500, "Unable to parse JSON bytes array: " + NO_STRING),
    (IDENTITY, one(datatype="XYZ"), 400, "invalid datatype for input INPUT0"),
    (
        IDENTITY,
        one(datatype="FP16"),
        400,
        "receiving FP16 data via JSON is not supported. Please use the binary data format for input INPUT0",
    ),
    # ours: Triton lets integers wrap
    (TYPES, typed("UINT8", 256), 400, "value 256 of input 'IN_UINT8' does not fit UINT8"),
    (TYPES, typed("INT32", -(2**31) - 1), 400, "value -2147483649 of input 'IN_INT32' does not fit INT32"),
    # outputs
    (
        IDENTITY,
        one() | {"outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": 1}}]},
        500,
        "Unable to parse 'binary_data': " + NO_BOOLEAN,
    ),
    (
        IDENTITY,
        one() | {"outputs": [{"name": "OUTPUT0", "parameters": {"classification": "a"}}]},
        500,
        "Unable to set 'classification': " + NO_UINT,
    ),
    # what does not fit the model
    (
        IDENTITY,
        {"inputs": one()["inputs"] * 2},
        400,
        "[request id: <id_unknown>] input 'INPUT0' already exists in request",
    ),
    (IDENTITY, one(name="NOPE"), 400, "unexpected inference input 'NOPE' for model 'identity'"),
    (IDENTITY, one() | {"outputs": [{"name": "NOPE"}]}, 400, "unexpected inference output 'NOPE' for model 'identity'"),
    (
        STRINGS,
        one(datatype="BYTES", shape=[1, 2], data=["a"]),
        400,
        "[request id: <id_unknown>] expected 2 string elements for inference input 'INPUT0' for model "
        "'identity_bytes', got 1",
    ),
    ("/v2/models/nope/infer", b"", 404, "Request for unknown model: 'nope' is not found"),
    (
        "/v2/models/identity/versions/9/infer",
        one(),
        404,
        "Request for unknown model: 'identity' version 9 is not found",
    ),
    (
        "/v2/models/text_repeat/infer",
        b"x",
        501,
        "HTTP end point doesn't support models with decoupled transaction policy",
    ),
]


@pytest.mark.parametrize(("path", "body", "status", "error"), REFUSED)
def test_refuses(small: SmallServer, path: str, body: Any, status: int, error: str) -> None:
    response = small.post(path, body)
    assert (response.status_code, response.json()) == (status, {"error": error})
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("NOT_FOUND", 404),
        ("INTERNAL", 500),
        ("INVALID_ARG", 400),
        ("UNAVAILABLE", 503),
        ("UNSUPPORTED", 501),
        ("UNKNOWN", 400),
        ("ALREADY_EXISTS", 400),
        ("CANCELLED", 400),
        ("OVERLOADED", 429),
        ("DEADLINE", 504),
    ],
)
def test_a_models_error(small: SmallServer, code: str, status: int) -> None:
    body = {"inputs": [{"name": "CODE", "shape": [1], "datatype": "BYTES", "data": [code]}]}
    response = small.post("/v2/models/error_model/infer", body)
    assert (response.status_code, response.json()) == (status, {"error": f"failed as {code}"})


def test_what_is_not_expected_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(SmallService):
        def find(self, name: str, version: int = -1) -> Model:
            raise ZeroDivisionError("secret")

    with small_server(Broken()) as small:
        response = small.post(IDENTITY, one())
    assert response.status_code == 500
    assert "secret" not in response.text
    assert "ZeroDivisionError" in caplog.text
