"""POST …/infer. Answers and errors are those of a recorded Triton 2.51, except where a test's name says otherwise."""

import gzip
import json
import struct
import zlib
from typing import Any

import pytest

from gateway.options.config import ServeConfig
from gateway.options.http import HttpOptions
from tests.gateway.http.v2.infer_requests import (
    ADD_SUB,
    ECHO,
    IDENTITY,
    NEWEST,
    STRINGS,
    TYPES,
    one,
    pair,
    typed,
    without,
)
from tests.gateway.http.v2.models import all_models
from tests.gateway.http.v2.small_server import SmallServer, small_server
from tests.gateway.v2.small_service import SmallService

LENGTH = "inference-header-content-length"


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
            for body, encoding, error in (
                (bomb, "gzip", "Decompressed data size exceeds the maximum allowed value of 10000 bytes. Use --http-"),
                (bytes(10_001), "identity", "request JSON size of 10001 bytes exceeds the maximum allowed input size"),
            ):
                response = small.post(IDENTITY, body, Content_Encoding=encoding)
                assert response.status_code == 400
                assert response.json()["error"].startswith(error)
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
