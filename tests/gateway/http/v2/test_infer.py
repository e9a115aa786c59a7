"""POST …/infer. Answers and errors are those of a recorded Triton 2.51, except where a test's name says otherwise."""

import gzip
import json
import struct
import zlib
from typing import Any

import pytest

from gateway.options.config import ServeConfig
from gateway.options.http import HttpOptions
from serving.model import Model
from tests.gateway.http.v2.models import all_models
from tests.gateway.http.v2.small_server import SmallServer, small_server
from tests.gateway.v2.small_service import SmallService

IDENTITY, ADD_SUB, ECHO = "/v2/models/identity/infer", "/v2/models/add_sub/infer", "/v2/models/params_echo/infer"
STRINGS, TYPES, NEWEST = "/v2/models/identity_bytes/infer", "/v2/models/alltypes/infer", "/v2/models/versioned/infer"
LENGTH = "inference-header-content-length"


def one(**changes: Any) -> dict[str, Any]:
    """Infer on `identity` with one input."""
    return {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1.5]} | changes]}


def without(key: str, **changes: Any) -> dict[str, Any]:
    request = one(**changes)
    del request["inputs"][0][key]
    return request


def typed(datatype: str, *values: Any) -> dict[str, Any]:
    name = "STRING" if datatype == "BYTES" else datatype
    return {"inputs": [{"name": f"IN_{name}", "shape": [len(values)], "datatype": datatype, "data": list(values)}]}


def pair(**more: Any) -> dict[str, Any]:
    """Infer on `add_sub`."""
    inputs = [
        {"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]},
        {"name": "INPUT1", "shape": [1, 4], "datatype": "FP32", "data": [10, 20, 30, 40]},
    ]
    return {"inputs": inputs, **more}


def echoed(response: Any) -> Any:
    return json.loads(response.json()["outputs"][0]["data"][0])


class TestJson:
    def test_the_body_is_tritons_to_the_byte(self, small: SmallServer) -> None:
        response = small.post(IDENTITY, one(data=[[1.5]]) | {"id": "a"})
        assert response.headers["content-type"] == "application/json"
        assert response.content == (
            b'{"id":"a","model_name":"identity","model_version":"1","outputs":[{"name":"OUTPUT0","datatype":"FP32",'
            b'"shape":[1,1],"data":[1.5]}]}'
        )

    def test_outputs_come_in_the_models_order(self, small: SmallServer) -> None:
        wanted = [{"name": "OUTPUT1"}, {"name": "OUTPUT0"}]
        outputs = small.post(ADD_SUB, pair(outputs=wanted)).json()["outputs"]
        assert [(each["name"], each["data"]) for each in outputs] == [
            ("OUTPUT0", [11.0, 22.0, 33.0, 44.0]),
            ("OUTPUT1", [-9.0, -18.0, -27.0, -36.0]),
        ]
        assert [each["name"] for each in small.post(ADD_SUB, pair(outputs=wanted[:1])).json()["outputs"]] == ["OUTPUT1"]

    @pytest.mark.parametrize(
        ("datatype", "values", "expected"),
        [
            ("BOOL", [True, False], [True, False]),
            ("UINT8", [0, 255], [0, 255]),
            ("INT8", [-128, 127], [-128, 127]),
            ("UINT16", [65535], [65535]),
            ("INT16", [-32768], [-32768]),
            ("UINT32", [2**32 - 1], [2**32 - 1]),
            ("INT32", [-(2**31)], [-(2**31)]),
            ("UINT64", [2**64 - 1], [2**64 - 1]),
            ("INT64", [-(2**63), 2**63 - 1], [-(2**63), 2**63 - 1]),
            ("FP64", [0.1, 5e-324, 3], [0.1, 5e-324, 3.0]),
            ("FP32", [0.1, 16777217, 5e-324], [0.10000000149011612, 16777216.0, 0.0]),
            ("BYTES", ['é漢😀\n"q" \u0001', ""], ['é漢😀\n"q" \u0001', ""]),
        ],
    )
    def test_every_type(self, small: SmallServer, datatype: str, values: list[Any], expected: list[Any]) -> None:
        (output,) = small.post(TYPES, typed(datatype, *values)).json()["outputs"]
        assert output["datatype"] == datatype
        assert output["data"] == expected
        assert [type(value) for value in output["data"]] == [type(value) for value in expected]

    def test_long_tensors_are_as_short_ones(self, small: SmallServer) -> None:
        for datatype, values in (("FP32", [0.1] * 500), ("INT64", list(range(500))), ("BOOL", [True] * 500)):
            (output,) = small.post(TYPES, typed(datatype, *values)).json()["outputs"]
            short = small.post(TYPES, typed(datatype, values[0])).json()["outputs"][0]["data"]
            assert output["data"][0] == short[0]
            assert len(output["data"]) == 500

    @pytest.mark.parametrize("size", [3, 100])
    def test_nan_and_infinities_are_bare_words(self, small: SmallServer, size: int) -> None:
        data = ",".join(["NaN", "-Infinity", "Inf"] + ["0"] * (size - 3))
        body = f'{{"inputs":[{{"name":"IN_FP32","shape":[{size}],"datatype":"FP32","data":[{data}]}}]}}'
        assert b'"data":[NaN,-Infinity,Infinity' in small.post(TYPES, body.encode()).content
        assert b'"data":[Infinity]' in small.post(TYPES, typed("FP32", 1e39)).content

    def test_bytes_that_are_no_text_go_through(self, small: SmallServer) -> None:
        body = b'{"inputs":[{"name":"INPUT0","shape":[1,2],"datatype":"BYTES","data":["\xff\xfe\\u0000a","ok"]}]}'
        assert b'"data":["\xff\xfe\\u0000a","ok"]' in small.post(STRINGS, body).content

    @pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]], [[[1], [2]], [[3], [4]]], [1, [2, [3]], 4]])
    def test_data_may_be_nested_in_any_way(self, small: SmallServer, data: Any) -> None:
        response = small.post(IDENTITY, one(shape=[2, 2], data=data))
        assert response.json()["outputs"][0]["data"] == [1.0, 2.0, 3.0, 4.0]

    @pytest.mark.parametrize("data", [[], [1], 5])
    def test_an_empty_tensor_needs_no_data(self, small: SmallServer, data: Any) -> None:
        response = small.post(NEWEST, one(datatype="INT32", shape=[0], data=data))
        assert response.json()["outputs"][0] == {"name": "OUTPUT0", "datatype": "INT32", "shape": [0], "data": []}

    def test_versions(self, small: SmallServer) -> None:
        body = one(datatype="INT32", shape=[1], data=[7])
        assert small.post(NEWEST, body).json()["outputs"][0]["data"] == [207]
        assert small.post("/v2/models/versioned/versions/1/infer", body).json()["outputs"][0]["data"] == [107]


class TestBinary:
    def test_in_and_out(self, small: SmallServer) -> None:
        raw = struct.pack("<2f", 1.5, 2.5)
        inputs = [{"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}]
        text = json.dumps({"inputs": inputs, "outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]})
        response = small.post(IDENTITY, text.encode() + raw, Inference_Header_Content_Length=str(len(text)))
        assert response.headers["content-type"] == "application/octet-stream"
        length = int(response.headers[LENGTH])
        (output,) = json.loads(response.content[:length])["outputs"]
        assert output == {
            "name": "OUTPUT0",
            "datatype": "FP32",
            "shape": [1, 2],
            "parameters": {"binary_data_size": 8},
        }
        assert response.content[length:] == raw

    @pytest.mark.parametrize("size", [4, 20000])
    def test_sizes_on_both_sides_of_what_is_copied(self, small: SmallServer, size: int) -> None:
        inputs = [{"name": "IN_UINT8", "shape": [size], "datatype": "UINT8", "parameters": {"binary_data_size": size}}]
        text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}})
        response = small.post(TYPES, text.encode() + bytes(size), Inference_Header_Content_Length=str(len(text)))
        assert response.content[int(response.headers[LENGTH]) :] == bytes(size)

    def test_an_output_that_is_named_is_json_whatever_the_others_are(self, small: SmallServer) -> None:
        named = pair(parameters={"binary_data_output": True}, outputs=[{"name": "OUTPUT0"}])
        assert LENGTH not in small.post(ADD_SUB, named).headers
        assert LENGTH in small.post(ADD_SUB, pair(parameters={"binary_data_output": True})).headers

    def test_half_precision_in_binary(self, small: SmallServer) -> None:
        inputs = [{"name": "IN_FP16", "shape": [1], "datatype": "FP16", "parameters": {"binary_data_size": 2}}]
        text = json.dumps({"inputs": inputs}).encode()
        refused = small.post(TYPES, text + b"\0\x3c", Inference_Header_Content_Length=str(len(text)))
        assert refused.status_code == 400
        assert refused.json()["error"].startswith("sending FP16 data via JSON is not supported. Please use the binary")
        text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        response = small.post(TYPES, text + b"\0\x3c", Inference_Header_Content_Length=str(len(text)))
        assert response.content.endswith(b"\0\x3c")

    @pytest.mark.parametrize(
        ("path", "body", "tail"),
        [
            (NEWEST, b"\1\0\0\0\2\0\0\0", b"\xc9\0\0\0\xca\0\0\0"),
            ("/v2/models/error_model/infer", b"OK", b"\2\0\0\0OK"),
        ],
    )
    def test_a_raw_request(self, small: SmallServer, path: str, body: bytes, tail: bytes) -> None:
        response = small.post(path, body, Inference_Header_Content_Length="0")
        assert response.status_code == 200
        assert response.content[int(response.headers[LENGTH]) :] == tail

    @pytest.mark.parametrize(
        ("path", "body", "error"),
        [
            (
                ADD_SUB,
                b"1234",
                "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'add_sub' ",
            ),
            (
                IDENTITY,
                b"1234",
                "The shape of the raw input 'INPUT0' can not be deduced because there are more than one ",
            ),
            (
                NEWEST,
                b"12345",
                "input byte size mismatch for input 'raw_input' for model 'versioned'. Expected 4, got 5",
            ),
            (IDENTITY, b"", "The shape of the raw input 'INPUT0' can not be deduced because there are more than one "),
        ],
    )
    def test_a_raw_request_that_cannot_be_read(self, small: SmallServer, path: str, body: bytes, error: str) -> None:
        response = small.post(path, body, Inference_Header_Content_Length="0")
        assert response.status_code == 400
        assert response.json()["error"].startswith("[request id: <id_unknown>] " + error)

    @pytest.mark.parametrize(
        ("binary", "length", "error"),
        [
            (b"\0\0\x80?1", 0, "unexpected additional input data for model 'identity'"),
            (b"\0\0\x80", 0, "unexpected size for input 'INPUT0', expecting 1 additional bytes for model 'identity'"),
            (b"\0\0\x80?", 99, "inference header size should be in range (0, 112), got: 207"),
            (b"\0\0\x80?", -113, "inference header size should be in range (0, 112), got: -5"),
        ],
    )
    def test_lengths_that_do_not_fit(self, small: SmallServer, binary: bytes, length: int, error: str) -> None:
        text = json.dumps(without("data", parameters={"binary_data_size": 4})).encode()
        assert len(text) == 108
        response = small.post(IDENTITY, text + binary, Inference_Header_Content_Length=str(len(text) + length))
        assert (response.status_code, response.json()) == (400, {"error": error})


class TestParameters:
    def test_meanings(self, small: SmallServer) -> None:
        own = {"a": 1, "b": "x", "c": True, "d": 1.5, "e": 2**63, "": 2}
        meant = {"sequence_id": 5, "sequence_start": True, "sequence_end": True, "timeout": 7, "priority": 2}
        told = echoed(
            small.post(ECHO, one(shape=[1], datatype="INT32", data=[1]) | {"parameters": own | meant, "id": "i"})
        )
        assert told["params"] == own | {"e": float(2**63)}
        assert (told["corr"], told["flags"], told["timeout"], told["id"]) == (5, 3, 7, "i")

    def test_a_sequence_may_have_a_name(self, small: SmallServer) -> None:
        body = one(shape=[1], datatype="INT32", data=[1]) | {"parameters": {"sequence_id": "abc"}}
        assert echoed(small.post(ECHO, body))["corr"] == "abc"

    def test_headers_that_the_operator_lets_through(self, small: SmallServer) -> None:
        told = echoed(small.post(ECHO, one(shape=[1], datatype="INT32", data=[1]), X_Fwd_User="bob", x_other="z"))
        assert told["params"] == {"X-Fwd-User": "bob"}

    def test_scheduling_headers_win(self, small: SmallServer) -> None:
        body = one(shape=[1], datatype="INT32", data=[1]) | {"parameters": {"timeout": 7}}
        assert echoed(small.post(ECHO, body, x_sluice_timeout_ms="20"))["timeout"] == 20_000
        assert small.post(ECHO, body, x_sluice_priority="high").status_code == 400


class TestClasses:
    def test_with_labels_and_without(self, small: SmallServer) -> None:
        wanted = [{"name": f"OUTPUT{index}", "parameters": {"classification": 2}} for index in range(2)]
        outputs = small.post(ADD_SUB, pair(outputs=wanted)).json()["outputs"]
        assert [(each["datatype"], each["shape"]) for each in outputs] == [("BYTES", [1, 2])] * 2
        assert outputs[0]["data"] == ["44.000000:3:three", "33.000000:2:two"]
        assert outputs[1]["data"] == ["-9.000000:0", "-18.000000:1"]

    def test_in_binary(self, small: SmallServer) -> None:
        wanted = [{"name": "OUTPUT0", "parameters": {"classification": 1, "binary_data": True}}]
        assert small.post(ADD_SUB, pair(outputs=wanted)).content.endswith(b"\x11\0\0\x0044.000000:3:three")

    def test_text_has_no_classes(self, small: SmallServer) -> None:
        """The real server crashes on this request."""
        body = one(datatype="BYTES", data=["a"]) | {
            "outputs": [{"name": "OUTPUT0", "parameters": {"classification": 1}}]
        }
        assert small.post(STRINGS, body).status_code == 400


class TestCompression:
    @pytest.mark.parametrize("encoding", ["gzip", "deflate", "identity"])
    def test_of_requests(self, small: SmallServer, encoding: str) -> None:
        body = json.dumps(one()).encode()
        packed = {"gzip": gzip.compress(body), "deflate": zlib.compress(body), "identity": body}[encoding]
        response = small.post(IDENTITY, packed, Content_Encoding=encoding)
        assert response.json()["outputs"][0]["data"] == [1.5]

    def test_a_large_request(self, small: SmallServer) -> None:
        values = [index * 0.001 for index in range(200_000)]
        body = gzip.compress(json.dumps(typed("FP64", *values)).encode(), 1)
        assert len(body) > 256 << 10
        assert small.post(TYPES, body, Content_Encoding="gzip").json()["outputs"][0]["data"] == values

    @pytest.mark.parametrize(
        ("accept", "used"),
        [
            ("gzip", "gzip"),
            ("deflate", "deflate"),
            ("deflate;q=0.5, gzip;q=0.1", "deflate"),
            ("gzip, deflate", "gzip"),
            ("identity, gzip", None),
            ("br", None),
            ("gzip;q=x", None),
            ("gzip;q=0", None),
        ],
    )
    def test_of_responses(self, small: SmallServer, accept: str, used: str | None) -> None:
        response = small.post(IDENTITY, one(), Accept_Encoding=accept)
        assert response.headers.get("content-encoding") == used
        assert response.json()["outputs"][0]["data"] == [1.5]

    def test_a_large_response(self, small: SmallServer) -> None:
        response = small.post(TYPES, typed("FP64", *[0.25] * 50_000), Accept_Encoding="gzip")
        assert response.headers["content-encoding"] == "gzip"
        assert len(response.json()["outputs"][0]["data"]) == 50_000

    def test_a_bomb_is_refused_by_the_input_limit(self) -> None:
        config = ServeConfig(http=HttpOptions(max_input_bytes=10_000))
        with small_server(SmallService(*all_models()), config) as small:
            bomb = gzip.compress(bytes(8 << 20))
            assert len(bomb) < 10_000
            for body, encoding in ((bomb, "gzip"), (bytes(10_001), "identity")):
                response = small.post(IDENTITY, body, Content_Encoding=encoding)
                assert response.status_code == 400
                assert "bytes exceeds the maximum allowed input size of 10000 bytes" in response.json()["error"]
            assert small.post(IDENTITY, one()).status_code == 200

    @pytest.mark.parametrize(
        ("body", "encoding", "status", "error"),
        [
            (b"", "gzip", 400, "nothing to be decompressed"),
            (b"no gzip", "gzip", 400, "the request's body cannot be decompressed: "),
            (b"{}", "br", 501, "Unsupported compression type"),
            (b"{}", "GZIP", 501, "Unsupported compression type"),
        ],
    )
    def test_what_cannot_be_decompressed(
        self, small: SmallServer, body: bytes, encoding: str, status: int, error: str
    ) -> None:
        response = small.post(IDENTITY, body, Content_Encoding=encoding)
        assert response.status_code == status
        assert response.json()["error"].startswith(error)
        assert response.headers.get("accept-encoding") == ("gzip, deflate" if status == 501 else None)


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
